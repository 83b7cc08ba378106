"""Cases and questions of a suite on one's own data."""

from __future__ import annotations

from vllm_autoprune import load_state
from vllm_autoprune.evaluation.run import build_cases


def test_each_state_is_compared_with_its_base_policy() -> None:
    states = [load_state(name) for name in ("autoprune", "ablation-quota-4", "visionzip")]
    cases = {case.name: case for case in build_cases(states, [8, 16])}
    per_budget = ("random", "resized", "cdpruner", "autoprune", "ablation-quota-4", "visionzip")
    assert set(cases) == {"full", *(f"{name}@{k}" for name in per_budget for k in (8, 16))}
    assert cases["autoprune@8"].base == cases["ablation-quota-4@8"].base == "cdpruner@8"
    assert cases["visionzip@8"].base == "" and cases["visionzip@8"].arm == "base"
    assert cases["cdpruner@8"].quota == 0 and cases["autoprune@8"].quota == 2
    assert not any(case.refused for case in cases.values())


def test_the_base_policy_alone_has_the_parameters_of_the_state() -> None:
    data = load_state("autoprune").model_dump(mode="json")
    data["base_policy"] = {"name": "fastv", "params": {"layer": 3}}
    cases = {case.name: case for case in build_cases([load_state(data)], [8])}
    state = cases["fastv@8"].pruning["state"]
    assert isinstance(state, dict)
    assert state["base_policy"] == {"name": "fastv", "params": {"layer": 3}}


def test_a_budget_that_a_state_forbids_is_a_refused_case() -> None:
    data = load_state("autoprune").model_dump(mode="json")
    data["budget"] |= {"limit": 64}
    cases = {case.name: case for case in build_cases([load_state(data)], [128])}
    assert "limit" in cases["autoprune@128"].refused and not cases["cdpruner@128"].refused
