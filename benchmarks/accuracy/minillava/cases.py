"""The cases of the paper's tables: controls, base policies with and without residual, quotas.

The residual of the shipped state ``autoprune`` is applied to each base policy without tuning. The
values of q_e and the search result are shipped states too (``benchmarks.policies``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, get_args

from benchmarks.policies import QUOTAS, SEARCH_RESULTS
from benchmarks.yardsticks.minillava import EQUAL_POLICIES
from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.journal import Case
from vllm_autoprune.evaluation.run import (
    FULL,
    SOURCE,
    prune_case,
    random_case,
    residual_on,
    resized_case,
)
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import load_state

Family = Literal["random", "resized", "policies", "found", "quota"]
FAMILIES: tuple[Family, ...] = get_args(Family)
"""Families of cases that can be measured beside the full model; by default all of them."""

BUDGETS = (64, 32, 16, 8, 4)


def build_cases(tokens: int, budgets: Sequence[int], families: Sequence[Family]) -> list[Case]:
    """All cases, the full model first; raises :class:`ConfigError` for budgets outside 1..N-1."""
    wrong = [budget for budget in budgets if not 0 < budget < tokens]
    if wrong:
        what, fix = f"are not within 1..{tokens - 1}", f"an image has N = {tokens} tokens"
        values = " ".join(map(str, wrong))
        raise ConfigError("eval", [Problem(f"--budgets {values}", what, fix)])
    return [FULL, *(case for budget in budgets for case in _cases_at(budget, families))]


def _cases_at(budget: int, families: Sequence[Family]) -> Iterator[Case]:
    """The cases of one K, in the order of the tables."""
    for family, build in _BUILDERS.items():
        if family in families:
            yield from build(budget)
        elif family == "policies" and {"found", "quota"} & set(families):
            # The other families are compared with the shipped state and its base policy.
            yield from _policy_cases(load_state(SOURCE).base_policy.name, budget)


def _base_policy_cases(budget: int) -> Iterator[Case]:
    for policy in BASE_POLICIES:
        if policy not in EQUAL_POLICIES:
            yield from _policy_cases(policy, budget)


def _policy_cases(policy: str, budget: int) -> Iterator[Case]:
    base = f"{policy}@{budget}"
    yield prune_case(base, "base", policy, load_state(policy), budget)
    name = f"{policy}+{SOURCE}@{budget}"
    yield prune_case(name, "autoprune", f"{policy} + AutoPrune", residual_on(policy), budget, base)


def _search_cases(budget: int) -> Iterator[Case]:
    for name, model in SEARCH_RESULTS.items():
        if model != "mini-LLaVA":
            continue
        state = load_state(name)
        policy = state.base_policy.name
        core = "" if state.core is None else ", with a core"
        label = f"{policy} + what a search found{core}"
        yield prune_case(f"{name}@{budget}", "found", label, state, budget, f"{policy}@{budget}")


def _quota_cases(budget: int) -> Iterator[Case]:
    for quota in (quota for quota in QUOTAS if quota <= budget):
        state = load_state(f"ablation-quota-{quota}")
        base = f"{state.base_policy.name}@{budget}"
        yield prune_case(f"quota-{quota}@{budget}", "quota", f"q_e = {quota}", state, budget, base)


_BUILDERS: Mapping[Family, Callable[[int], Iterable[Case]]] = {
    "random": lambda budget: [random_case(budget)],
    "resized": lambda budget: [resized_case(budget)],
    "policies": _base_policy_cases,
    "found": _search_cases,
    "quota": _quota_cases,
}
"""The cases of one K of each family."""
