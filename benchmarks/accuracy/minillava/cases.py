"""The cases of the paper's tables: controls, base policies with and without residual, ablations.

Knows nothing about models but N. The residual is that of the shipped state ``autoprune``, put on
each base policy; nothing of it is tuned to the policy. Its ablations, the sweep of q_e and what a
search found on this model are shipped states too (``benchmarks.zoo`` has them).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from pydantic import JsonValue

from benchmarks.accuracy.records import Arm, Case
from benchmarks.zoo.states import FOUND
from vllm_autoprune.errors import AutopruneError, ConfigError, Problem
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.executor.materialize import materialize
from vllm_autoprune.tpdsl.states.load import load_state
from vllm_autoprune.tpdsl.states.state import PruningState

Family = Literal["random", "policies", "found", "components", "quota"]
FAMILIES: tuple[Family, ...] = get_args(Family)
"""What can be measured beside the full model; all of it by default."""

BUDGETS = (64, 32, 16, 8, 4)
QUOTAS = (0, 1, 4)
"""Of the sweep 0, 1, 2, 4: two is AutoPrune itself, which is measured anyway."""

SOURCE = "autoprune"
_COMPONENTS = {
    "ablation-without-anchoring": "w/o reference anchoring",
    "ablation-without-fusion": "w/o multi-score fusion",
    "ablation-without-diversity": "w/o diversity selection",
}


def cases(tokens: int, budgets: Sequence[int], families: Sequence[Family]) -> list[Case]:
    """Every case, the full model first; raises :class:`ConfigError` for a budget not below N."""
    wrong = [budget for budget in budgets if not 0 < budget < tokens]
    if wrong:
        what, fix = f"are not within 1..{tokens - 1}", f"an image has N = {tokens} tokens"
        said = " ".join(map(str, wrong))
        raise ConfigError("eval", [Problem(f"--budgets {said}", what, fix)])
    found = [Case(name="full", arm="full", label="full", asked={"enabled": False})]
    for budget in budgets:
        if "random" in families:
            found.append(_random(budget))
        if "policies" in families:
            for policy in BASE_POLICIES:
                found += _policy(policy, budget)
        elif {"found", "components", "quota"} & set(families):
            found += _policy(load_state(SOURCE).base_policy.name, budget)
        if "found" in families:
            found += _found(budget)
        if "components" in families:
            found += _components(budget)
        if "quota" in families:
            found += _quotas(budget)
    return found


def residual_on(policy: str) -> PruningState:
    """The shipped state's residual on another base policy."""
    source = load_state(SOURCE)
    if policy == source.base_policy.name:
        return source
    data = json.loads(source.dumps())
    data |= {"name": f"{SOURCE}-on-{policy}", "base_policy": {"name": policy, "params": {}}}
    return load_state(data | {"provenance": {}})


def _random(budget: int) -> Case:
    asked: dict[str, JsonValue] = {"keep": "random", "budget": budget}
    return Case(
        name=f"random@{budget}", arm="random", label="random keep", budget=budget, asked=asked
    )


def _policy(policy: str, budget: int) -> Iterator[Case]:
    alone = f"{policy}@{budget}"
    yield _pruned(alone, "base", policy, load_state(policy), budget)
    name = f"{policy}+{SOURCE}@{budget}"
    yield _pruned(name, "autoprune", f"{policy} + AutoPrune", residual_on(policy), budget, alone)


def _found(budget: int) -> Iterator[Case]:
    for name in FOUND:
        state = load_state(name)
        policy = state.base_policy.name
        label = f"{policy} + what a search found"
        yield _pruned(f"{name}@{budget}", "found", label, state, budget, f"{policy}@{budget}")


def _components(budget: int) -> Iterator[Case]:
    for shipped, label in _COMPONENTS.items():
        state = load_state(shipped)
        base = f"{state.base_policy.name}@{budget}"
        yield _pruned(f"{shipped}@{budget}", "component", label, state, budget, base)


def _quotas(budget: int) -> Iterator[Case]:
    for quota in QUOTAS:
        state = load_state(f"ablation-quota-{quota}")
        base = f"{state.base_policy.name}@{budget}"
        yield _pruned(f"quota-{quota}@{budget}", "quota", f"q_e = {quota}", state, budget, base)


def _pruned(
    name: str, arm: Arm, label: str, state: PruningState, budget: int, base: str = ""
) -> Case:
    refused, quota = "", None
    try:
        quota = materialize(state, budget).quota
    except AutopruneError as error:
        refused = str(error)
    return Case(
        name=name,
        arm=arm,
        label=label,
        budget=budget,
        base=base,
        quota=quota,
        digest=state.digest,
        asked={
            "policy": state.model_dump(mode="json", exclude={"provenance"}),
            "budget": budget,
        },
        refused=refused,
    )
