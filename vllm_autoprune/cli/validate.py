"""Validation of one state as a plain record: problems, or the verdicts of its safety check.

Knows nothing about printing.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_autoprune.errors import BudgetError, StateError
from vllm_autoprune.tpdsl.executor.check import safety_check
from vllm_autoprune.tpdsl.executor.materialize import materialize
from vllm_autoprune.tpdsl.states.load import load_state


@dataclass(frozen=True, slots=True)
class Validation:
    """Outcome for one state.

    ``problems`` are (where, what, fix); ``verdicts`` are (name, ok, detail).
    """

    source: str
    valid: bool
    budget: int | None
    digest: str | None
    problems: tuple[tuple[str, str, str], ...]
    verdicts: tuple[tuple[str, bool, str], ...]


def validate(source: str, budget: int | None = None) -> Validation:
    """Load, materialize and safety-check a state; bad states are reported, never raised."""
    try:
        state = load_state(source)
        policy = materialize(state, budget)
    except (StateError, BudgetError) as error:
        problems = tuple((p.where, p.what, p.fix) for p in error.problems)
        return Validation(source, False, budget, None, problems, ())
    record = safety_check(policy)
    verdicts = tuple((v.name, v.ok, v.detail) for v in record.verdicts)
    return Validation(source, record.valid, policy.budget, state.digest, (), verdicts)
