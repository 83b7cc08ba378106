"""The client ahead of the server, where both share a machine: else it wakes up late to its stamps.

Knows nothing about load.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

NICE = -10
"""About nine times the weight of a process that nobody has asked for."""

_SESSION = Path("/proc/self/autogroup")


def come_first() -> None:
    """Run before other processes from now on; as before where the system does not let us.

    For ``preexec_fn`` of a process in a session of its own. Linux weighs sessions against each
    other, and nice values within them (``sched(7)``, "The autogroup feature"); both need root.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    if _SESSION.exists():
        with contextlib.suppress(OSError):
            _SESSION.write_text(str(NICE))


def priority() -> str:
    """The nice values of this process and, where there are such, of its session.

    A process that is in no session's group, as under many containers, reads an empty file.
    """
    own = f"nice {os.getpriority(os.PRIO_PROCESS, 0)}"
    try:
        group = _SESSION.read_text().split()
    except OSError:
        return own
    return f"{own}, session {group[-1]}" if group else own
