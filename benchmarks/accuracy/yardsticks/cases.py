"""The cases of the table: full, controls, base policies and states, each at several budgets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks.policies import SEARCH_RESULTS, SOURCE
from benchmarks.yardsticks.yardstick import (
    ALL_TOKENS,
    FULL,
    ORACLE,
    RANDOM,
    RESIZED,
    Budget,
    Case,
)
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import load_state, shipped_states
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.tokens import Need

STATES = ("norm", SOURCE, "instruction-free", "shared-core", *SEARCH_RESULTS)
"""Shipped states that are measured beside every base policy alone."""

BEFORE: Final = "@merger_in"
"""Behind the name of a case: the state ranks tokens by what enters the patch merger."""

_WITHOUT_FEATURES = ("mmtok", "scope", "prunesid", "holov")
"""Base policies that read encoder tokens anyway, or attention alone: the same before the merger."""


def build_cases(
    budgets: Sequence[Budget], available: frozenset[Need], names: Sequence[str] = ()
) -> list[Case]:
    """Every case whose inputs a yardstick has, the full model first; or the named ones of them.

    A name may also be that of any other shipped state, such as an ablation.
    The full model and the resize control are always among them. Where a yardstick has a patch
    merger, every base policy and state that reads features also ranks before it.
    """
    wanted = {*names, FULL, RESIZED}
    cases = [Case(FULL, ALL_TOKENS, FULL)]
    for budget in budgets:
        cases += [Case(RESIZED, budget, RESIZED), Case(RANDOM, budget, RANDOM)]
        cases.append(Case(ORACLE, budget, ORACLE))
        cases += _state_cases(budget, available, names)
    return [case for case in cases if not names or case.name in wanted]


def _state_cases(
    budget: Budget, available: frozenset[Need], names: Sequence[str]
) -> Iterator[Case]:
    others = [one for one in names if one in shipped_states() and one not in STATES]
    for name in dict.fromkeys((*BASE_POLICIES, *STATES, *others)):
        state = load_state(name)
        if materialize(state, 16).needs <= available:
            base = "" if name in BASE_POLICIES else state.base_policy.name
            yield Case(name, budget, state=state, base=base)
            before = state.model_copy(update={"rank_at": "merger_in"})
            if name not in _WITHOUT_FEATURES and materialize(before, 16).needs <= available:
                yield Case(f"{name}{BEFORE}", budget, state=before, base=name)
