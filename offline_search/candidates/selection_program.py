"""A candidate in free code: a program that selects tokens, instead of a state of the language."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from vllm_autoprune.tpdsl.states.state import PruningState


@dataclass(frozen=True, slots=True)
class SelectionProgram:
    """Python code with a function ``select(features, signals, K)`` that returns K indices."""

    code: str

    @property
    def digest(self) -> str:
        """SHA-256 of the code, which identifies the candidate as a state's digest does."""
        return hashlib.sha256(self.code.encode()).hexdigest()


Candidate = PruningState | SelectionProgram
"""What a search evaluates: a state, or a program that selects tokens."""
