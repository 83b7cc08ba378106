"""Suite: questions, cases, and how the ones are asked of the others.

Knows nothing about what is made of answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from benchmarks.accuracy.journal import Contents, Journal
from benchmarks.accuracy.progress import Progress
from benchmarks.accuracy.records import Case, Opened


class Suite(Protocol):
    """One set of questions on one model, to be answered in several ways."""

    @property
    def opened(self) -> Opened:
        """What is measured."""

    @property
    def cases(self) -> Sequence[Case]:
        """Every way to serve; the one whose arm is ``full`` is always among them."""

    def plan(self) -> Sequence[str]:
        """What will be run, as lines for people; nothing is started."""

    def measure(self, journal: Journal, progress: Progress) -> None:
        """Put into the journal what it lacks.

        Raises :class:`EvaluationError` where it cannot go on, :class:`ConfigError` where it cannot
        begin; what was answered until then is in the journal.
        """

    def objections(self, contents: Contents) -> Sequence[str]:
        """What speaks against believing complete answers, beyond what holds for every suite."""
