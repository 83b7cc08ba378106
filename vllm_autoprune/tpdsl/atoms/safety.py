"""Safety checks: the atoms that a state lists, and the record of the verdicts on a state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from vllm_autoprune.tpdsl.registry import AtomCall, OneOf, atom

SafetyCall = Annotated[AtomCall, OneOf("safety_checks", bare=True)]

VERDICTS = ("exact_count", "valid_indices", "finite_scores", "shapes", "determinism")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One of the five verdicts, with the observed values."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class SafetyRecord:
    """d_alpha: the result of SafetyCheck (section "Materialize" of the paper)."""

    verdicts: tuple[Verdict, ...]

    @property
    def valid(self) -> bool:
        """Whether every verdict is positive."""
        return all(verdict.ok for verdict in self.verdicts)

    def failures(self) -> tuple[Verdict, ...]:
        """The negative verdicts."""
        return tuple(verdict for verdict in self.verdicts if not verdict.ok)


class DeterminismCall(AtomCall):
    """Parameters of deterministic."""

    repeats: int = Field(2, ge=2, le=5, description="number of runs that are compared")


_ALWAYS = "Always checked, listed or not: "

for _name, _call, _doc in (
    (
        "preserve_budget",
        AtomCall,
        f"{_ALWAYS}K unique indices, r_min reference tokens, q_e exchanges.",
    ),
    (
        "no_shape_change",
        AtomCall,
        f"{_ALWAYS}finite scores, K x D finite rows of the input's dtype.",
    ),
    (
        "deterministic",
        DeterminismCall,
        f"{_ALWAYS}runs give the same bits; listing it sets their number.",
    ),
    (
        "fallback_to_selection",
        AtomCall,
        "If the state fails its safety check, serve the base policy's selection instead.",
    ),
):
    # These atoms are read, never run: safety_check gives all verdicts, whatever a state lists.
    atom("safety_checks", _call, name=_name, doc=_doc)(lambda call: call)
