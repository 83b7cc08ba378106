"""Two states side by side: every field that differs, and whether behaviour does.

Knows nothing about what the fields mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_autoprune.tpdsl.executor.transfer import state_document
from vllm_autoprune.tpdsl.states.differences import Change, list_changes
from vllm_autoprune.tpdsl.states.state import PruningState


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs between two states; equal digests mean that both behave alike."""

    digests: tuple[str, str]
    changes: tuple[Change, ...]

    @property
    def same_behaviour(self) -> bool:
        """True where only names and provenance may differ."""
        return self.digests[0] == self.digests[1]


def compare(first: PruningState, second: PruningState) -> Comparison:
    """Differences field by field, defaults written out on both sides."""
    found = list_changes(state_document(first), state_document(second))
    return Comparison((first.digest, second.digest), found)
