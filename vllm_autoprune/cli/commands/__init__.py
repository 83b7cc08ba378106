"""The sub-commands of `vllm-autoprune`, one file each, listed in ``cli.main``.

Modules that are slow to import are imported when a command runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """A sub-command: help text, arguments, and ``run``, which returns the exit status."""

    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    epilog: str = ""
