"""The cases of the table: full, controls, base policies and states, each at several budgets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Literal

from torch import Tensor

from benchmarks.zoo.states import SEARCH_RESULTS, SOURCE
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import load_state, shipped_states
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import Need

Control = Literal["full", "resized", "random", "oracle"]
FULL: Final = "full"
RESIZED: Final = "resized"
RANDOM: Final = "random"
ORACLE: Final = "oracle"

STATES = ("norm", SOURCE, "instruction-free", "shared-core", *SEARCH_RESULTS)
"""Shipped states that are measured beside every base policy alone."""

BEFORE: Final = "@merger_in"
"""Behind the name of a case: the state ranks tokens by what enters the patch merger."""

_WITHOUT_FEATURES = ("mmtok", "scope", "prunesid", "holov")
"""Base policies that read encoder tokens anyway, or attention alone: the same before the merger."""


@dataclass(frozen=True)
class Budget:
    """K as a share of N, and its name in tables."""

    label: str
    share: Fraction

    def tokens(self, count: int) -> int:
        """K of an image of N tokens, rounded down."""
        return max(1, int(self.share * count))


ALL_TOKENS = Budget("all", Fraction(1))


@dataclass(frozen=True)
class Case:
    """One way to choose tokens, at one budget: a control, a state, or given indices ``(M, K)``.

    ``base`` is the base policy that a state refines, or the case that ranks after the merger where
    this one ranks before it: the one it is compared with.
    """

    name: str
    budget: Budget
    control: Control | None = None
    state: PruningState | None = None
    base: str = ""
    kept: Tensor | None = None

    @property
    def key(self) -> str:
        """Identifies what is measured: name, budget, and the state's digest."""
        digest = "" if self.state is None else f" {self.state.digest[:12]}"
        return f"{self.name} {self.budget.label}{digest}"

    @property
    def reads_question(self) -> bool | None:
        """Whether the question changes what is kept; None where that has no meaning."""
        if self.state is None:
            return None
        return materialize(self.state, max(16, self.state.budget.range()[1])).reads_instruction


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
