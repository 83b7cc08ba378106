"""Resident memory of a server: all processes of its group, read from /proc.

Knows nothing about what the processes do.
"""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")
MIB = 1 << 20


def group_of(stat: str) -> int:
    """The process group in a line of ``/proc/PID/stat``; names may hold spaces and brackets."""
    _, _, rest = stat.rpartition(")")
    return int(rest.split()[2])


def resident_bytes(statm: str, page: int) -> int:
    """Resident bytes in a line of ``/proc/PID/statm``."""
    return int(statm.split()[1]) * page


def resident_of_group(group: int, proc: Path = PROC) -> dict[int, int]:
    """Resident bytes of every process of a group, by process id; pages shared count in each."""
    page, found = os.sysconf("SC_PAGE_SIZE"), {}
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if group_of((folder / "stat").read_text()) == group:
                found[int(folder.name)] = resident_bytes((folder / "statm").read_text(), page)
        except (OSError, IndexError):  # it ended meanwhile
            continue
    return found
