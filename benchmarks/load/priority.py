"""Scheduling priority of the load client: a server on the same machine must not delay it."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

NICE = -10
"""About nine times the CPU weight of a process of default priority."""

_SESSION = Path("/proc/self/autogroup")


def raise_priority() -> None:
    """Raise the scheduling priority of this process, so that its time stamps are not delayed.

    Used as ``preexec_fn`` of a process in a session of its own. With real-time scheduling
    (``sched(7)``) the client gets a core as soon as it is due; it sleeps most of the time, and the
    kernel reserves a twentieth of each second for other processes. Where that is refused, the nice
    values of the process and its session are lowered. Both need root; else nothing changes.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
            return
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    if _SESSION.exists():
        with contextlib.suppress(OSError):
            _SESSION.write_text(str(NICE))


def describe_priority() -> str:
    """``real time``, or the nice values of this process and, if known, of its session."""
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_RR:
        return "real time"
    own = f"nice {os.getpriority(os.PRIO_PROCESS, 0)}"
    try:
        group = _SESSION.read_text().split()
    except OSError:
        return own
    return f"{own}, session {group[-1]}" if group else own
