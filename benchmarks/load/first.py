"""The client ahead of the server, where both share a machine: else it wakes up late to its stamps.

Knows nothing about load.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

NICE = -10
"""About nine times the weight of a process that nobody has asked for."""

_SESSION = Path("/proc/self/autogroup")


def come_first() -> None:
    """Run before other processes from now on; as before where the system does not let us.

    For ``preexec_fn`` of a process in a session of its own. In real time (``sched(7)``) a client
    that is due takes a core at once; it sleeps most of its time, and the kernel leaves others a
    twentieth of any second whatever it does. Where that is refused, Linux weighs sessions against
    each other, and nice values within them. Either needs root.
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


def priority() -> str:
    """``real time``, or the nice values of this process and, where there are such, its session.

    A process that is in no session's group, as under many containers, reads an empty file.
    """
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_RR:
        return "real time"
    own = f"nice {os.getpriority(os.PRIO_PROCESS, 0)}"
    try:
        group = _SESSION.read_text().split()
    except OSError:
        return own
    return f"{own}, session {group[-1]}" if group else own
