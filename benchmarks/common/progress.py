"""Progress of long commands: bars on a terminal, plain lines elsewhere, all on stderr."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as Bars

Advance = Callable[[], None]

_BEGIN = time.monotonic()
_STDERR = Console(stderr=True)


class Progress(Protocol):
    """Shows the stages of a command, one after the other."""

    def stage(
        self, name: str, total: int | None = None
    ) -> contextlib.AbstractContextManager[Advance]:
        """A stage of ``total`` steps, or of unknown length; yields what to call after each."""


class BarProgress:
    """A bar for each stage; finished ones stay."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextlib.contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Advance]:
        """Show a stage as a bar until the block ends."""
        columns = [SpinnerColumn(), TextColumn(f"{name:<34}"), BarColumn(bar_width=28)]
        counted = [MofNCompleteColumn()] if total is not None else []
        with Bars(*columns, *counted, TimeElapsedColumn(), console=self._console) as bars:
            task = bars.add_task(name, total=total)
            yield lambda: bars.advance(task)
            # A stage of unknown length is shown full once it is over.
            bars.update(task, total=total or 1, completed=total or 1)


class LineProgress:
    """One line when a stage begins, one at each quarter of a counted stage, one at its end."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextlib.contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Advance]:
        """Print when a stage begins, at each quarter of it, and at its end."""
        start, steps = time.monotonic(), 0
        self._print(f"{name} ...")

        def advance() -> None:
            nonlocal steps
            steps += 1
            if total and steps < total and steps * 4 // total > (steps - 1) * 4 // total:
                self._print(f"{name}: {steps} of {total}")

        yield advance
        self._print(f"{name}: done, {time.monotonic() - start:.0f} s")

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def log_progress(line: str) -> None:
    """Print one line with the seconds since the start of this process."""
    _STDERR.print(
        f"[{time.monotonic() - _BEGIN:6.1f} s] {line}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def create_progress(console: Console = _STDERR) -> Progress:
    """Bars where the console is a terminal, lines otherwise."""
    return BarProgress(console) if console.is_terminal else LineProgress(console)
