"""Cases of eval: what each state is compared with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_autoprune import PruningState, load_state
from vllm_autoprune.errors import StateError
from vllm_autoprune.evaluation.cases import build_cases


def test_each_state_is_compared_with_its_base_policy(tmp_path: Path) -> None:
    states = ["autoprune", "ablation-quota-4", "visionzip"]
    cases = {case.name: case for case in build_cases(states, [8, 16])}
    per_budget = ("random", "resized", "norm", "cdpruner", *states)
    assert list(cases) == [
        "full",
        *(f"{name}@{k}" for k in (8, 16) for name in per_budget),
    ]
    (said,) = (
        case for case in build_cases(["norm"], ["12.5%"]) if case.label == "norm"
    )
    assert (said.name, said.budget, said.pruning["budget"]) == (
        "norm@12.5%",
        "12.5%",
        "12.5%",
    )
    for name, kind, base in (
        ("autoprune@8", "autoprune", "cdpruner@8"),
        ("ablation-quota-4@8", "found", "cdpruner@8"),
        ("visionzip@8", "found", ""),
    ):
        case = cases[name]
        assert (case.arm, case.base, case.refused) == (kind, base, "")
    # A base policy that is named too has a verdict of its own, in either order.
    for names in (["cen_divprune", "minillava"], ["minillava", "cen_divprune"]):
        cases = {case.name: case for case in build_cases(names, [8])}
        assert cases["cen_divprune@8"].arm == cases["minillava@8"].arm == "found"
        bases = (cases["cen_divprune@8"].base, cases["minillava@8"].base)
        assert bases == ("", "cen_divprune@8")
    arms = {case.label: case.arm for case in build_cases(["all"], [8])}
    assert (arms["norm"], arms["divprune"]) == ("norm", "base"), "a control remains one"
    # The base policy alone has the parameters of the state; a budget that it forbids is refused.
    data = load_state("autoprune").model_dump(mode="json")
    data["base_policy"] = {"name": "fastv", "params": {"layer": 3}}
    data["budget"] |= {"limit": 64}
    (tmp_path / "state.json").write_text(json.dumps(data))
    cases = {
        case.name: case
        for case in build_cases([str(tmp_path / "state.json")], [8, 128])
    }
    alone = cases["fastv@8"].pruning["state"]
    assert isinstance(alone, dict) and alone["base_policy"] == data["base_policy"]
    assert "limit" in cases["autoprune@128"].refused and not cases["fastv@128"].refused


def test_cells_are_dropped_alone_and_before_each_state() -> None:
    cases = {
        case.name: case
        for case in build_cases(["cen_divprune"], ["1/8"], ["flat", "none"])
    }
    added = [name for name in cases if "cells" in name]
    alone = "all but flat cells"
    before = "cen_divprune of all but flat cells@1/8"
    assert added == [alone, "norm of all but flat cells@1/8", before]
    assert (cases[alone].arm, cases[alone].pruning["budget"]) == ("full", "100%")
    assert cases[before].base == "cen_divprune@1/8"
    for name in (alone, before):
        state = PruningState.model_validate(cases[name].pruning["state"])
        assert str(state.cells) == "flat" and state.digest != cases["norm@1/8"].digest
    with pytest.raises(StateError, match=r"--cells: 'flatt' is no rule"):
        build_cases(["norm"], ["1/8"], ["flatt"])


def test_cases_of_videos_have_rules_for_frames_and_fewer_frames_as_control() -> None:
    budgets = ["1/4", "tokens_per_frame:16"]
    cases = {
        case.name: case
        for case in build_cases(["vcast", "divprune"], budgets, frames=30)
    }
    per_budget = ("random", "resized", "norm", "vcast", "divprune")
    # Of how many frames 16 a frame are all tokens is not known.
    assert list(cases) == [
        "full",
        *(f"{name}@1/4" for name in per_budget),
        *(f"{name}@tokens_per_frame:16" for name in per_budget if name != "resized"),
    ]
    fewer = cases["resized@1/4"]
    assert fewer.pruning == {"enabled": False} and fewer.label == "fewer frames"
    assert fewer.frames == 8
    assert {case.frames for case in cases.values() if case != fewer} == {30}
    for name, budget in (
        ("vcast", "curvature"),
        ("divprune", "uniform"),
        ("random", "uniform"),
    ):
        pruning = cases[f"{name}@1/4"].pruning
        state = PruningState.model_validate(pruning["state"])
        assert state.frames is not None and state.frames.budget == budget
        assert pruning["video_budget"] == "1/4" and "budget" not in pruning
        assert (pruning.get("keep") == "random") == (name == "random")
    assert not any(case.refused for case in cases.values())


def test_budgets_of_videos_come_by_their_number_of_tokens() -> None:
    """The largest last: of 30 frames of 576 tokens these are 4,320, 200 and 3,840."""
    budgets = ["1/4", "200", "tokens_per_frame:128"]
    cases = build_cases(["vcast"], budgets, frames=30)
    largest = [case.budget_order[0] for case in cases if case.label == "vcast"]
    assert largest == [4320, 200, 3840]


def test_without_frames_states_are_as_in_older_evaluations() -> None:
    """So that these can be resumed."""
    cases = {case.label: case for case in build_cases(["all"], [8])}
    state = cases["autoprune-on-evs"].pruning["state"]
    assert PruningState.model_validate(state).frames is None


def test_policies_of_one_name_are_cases_of_their_own(tmp_path: Path) -> None:
    states = []
    for place, (name, layer) in enumerate(
        (("a", 3), ("b", 4), ("b", 5), ("random", 3))
    ):
        data = load_state("autoprune").model_dump(mode="json") | {"name": name}
        data["base_policy"] = {"name": "fastv", "params": {"layer": layer}}
        states.append(tmp_path / f"{place}.json")
        states[-1].write_text(json.dumps(data))
    cases = {case.name: case for case in build_cases([*map(str, states), "fastv"], [8])}
    pruned = {name: case.base for name, case in cases.items() if case.arm == "found"}
    assert pruned.pop("a@8") == "fastv-of-a@8" and pruned.pop("b@8") == "fastv-of-b@8"
    assert pruned.pop("fastv@8") == "" and cases["random@8"].arm == "random"
    assert sorted(name[:-14] for name in pruned) == ["b-", "random-"]
    for case in cases.values():
        if case.base:
            alone = cases[case.base].pruning["state"]
            state = case.pruning["state"]
            assert isinstance(alone, dict) and isinstance(state, dict)
            assert alone["base_policy"] == state["base_policy"]
