"""What a sub-command is: its help, its arguments, and what it runs.

Knows nothing about any of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """One sub-command. ``run`` returns the exit status: 0 all is well, 1 something is not."""

    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    epilog: str = ""
