"""Evaluator: answers the examples of a split with the tokens that a state keeps.

Knows nothing about models or servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from offline_search.answers import Answers
from offline_search.examples import Dataset
from offline_search.records import Split
from vllm_autoprune.errors import SearchError
from vllm_autoprune.tpdsl.states.state import PruningState
from vllm_autoprune.tpdsl.tokens import VisualTokens


class EvaluationFailed(SearchError):
    """A state could not be measured; the message says why. Never a wrong answer."""


@dataclass(frozen=True, slots=True)
class Job:
    """Examples ``start`` to ``stop`` of a split, asked with K tokens as a state keeps them.

    Without a state: with all tokens.
    """

    state: PruningState | None
    budget: int
    split: Split
    start: int
    stop: int


class Evaluator(Protocol):
    """Measures states on one model and data; jobs may run at once and share what they can."""

    @property
    def name(self) -> str:
        """Model and data, so that two searches on the same of both have the same name."""

    @property
    def dataset(self) -> Dataset:
        """The examples that are asked."""

    def probes(self) -> Sequence[VisualTokens]:
        """A few images of the search split as the model sees them; none where nobody can tell."""

    async def prepare(self) -> None:
        """Look whether everything is there; raises :class:`ConfigError` where it is not."""

    async def evaluate(self, job: Job) -> Answers:
        """The answers to a job, in its order; raises :class:`EvaluationFailed`."""

    async def close(self) -> None:
        """Let go of connections."""
