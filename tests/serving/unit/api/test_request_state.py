from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.tpdsl.samples import edited, sample, state
from vllm_autoprune import PruningPolicy, RequestError, SafetyRecord, load_state
from vllm_autoprune.serving.api.request_state import MAX_STATE_CHARACTERS, load_request_state
from vllm_autoprune.serving.shared import state_safety
from vllm_autoprune.tpdsl.atoms.safety import Verdict
from vllm_autoprune.tpdsl.executor import check


def refused(policy: Any) -> str:
    with pytest.raises(RequestError) as caught:
        load_request_state(policy)
    for problem in caught.value.problems:
        assert problem.where.startswith("mm_processor_kwargs/autoprune/state")
        assert problem.what and problem.fix
    assert len(str(caught.value)) < 10_000
    return str(caught.value)


def test_a_shipped_name_and_a_whole_state() -> None:
    assert load_request_state("visionzip").digest == load_state("visionzip").digest
    assert load_request_state(sample()).digest == state().digest


def test_a_name_is_never_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(sample()))
    monkeypatch.chdir(tmp_path)
    for name in (str(file), "mine.json", "mine", "../policies/autoprune.json", "/etc/passwd", "~"):
        assert "ships with this server" in refused(name)


def test_a_name_is_never_the_text_of_a_state() -> None:
    assert "ships with this server" in refused(json.dumps(sample()))


@pytest.mark.parametrize("name", ["", "visionzi", "VISIONZIP", "x" * 1_000_000, "\0", "\ud800"])
def test_an_unknown_name(name: str) -> None:
    assert "ships with this server" in refused(name)


def test_a_state_with_mistakes_is_pointed_at() -> None:
    said = refused(
        edited(sample(), {"/scoring/fusion/atom": "no", "/constraints/selector/q_e": -1})
    )
    assert "state/scoring/fusion/atom" in said
    assert "state/constraints/selector/q_e" in said


def test_a_state_of_many_megabytes_is_not_even_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(text: str) -> object:
        raise AssertionError("parsed")

    monkeypatch.setattr("vllm_autoprune.serving.api.request_state.load_state", never)
    huge = edited(sample(), {"/provenance": {"notes": "n" * 10_000_000}})
    assert str(MAX_STATE_CHARACTERS) in refused(huge)


def test_invalid_values_of_every_type() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"a": deep}
    for junk in ({}, {"a": 1}, deep, {"schema": float("nan")}, {"x": object()}, {1: {2: 3}}):
        refused(junk)


def test_a_state_that_violates_the_guarantees(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is served as its base policy, or refused where it says so; either way by its digest."""

    def broken(policy: PruningPolicy) -> SafetyRecord:
        return SafetyRecord((Verdict("shapes", False, "made to fail"),))

    monkeypatch.setattr(f"{state_safety.__name__}.safety_check", broken)
    falling = edited(sample(), {"/constraints/selector/q_e": 7})
    loaded = load_request_state(falling)
    assert loaded.digest == state({"/constraints/selector/q_e": 7}).without_exchange().digest
    strict = edited(falling, {"/safety": ["preserve_budget"]})
    assert "made to fail" in refused(strict)


def test_clients_cannot_fill_the_log_with_unsafe_states(
    monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    def broken(policy: PruningPolicy) -> SafetyRecord:
        return SafetyRecord((Verdict("shapes", False, "made to fail"),))

    monkeypatch.setattr(f"{state_safety.__name__}.safety_check", broken)
    monkeypatch.setattr(state_safety, "_warnings", itertools.count(1))
    for quota in range(20, 20 + 2 * state_safety.MAX_WARNINGS):
        load_request_state(edited(sample(), {"/constraints/selector/q_e": quota}))
    lines = [record.getMessage() for record in logged.records]
    assert len(lines) == state_safety.MAX_WARNINGS
    assert ["not logged" in line for line in lines] == [False] * (len(lines) - 1) + [True]


def test_a_state_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = check.safety_check

    def noted(policy: PruningPolicy) -> SafetyRecord:
        asked.append(policy.state.digest)
        return real(policy)

    monkeypatch.setattr(f"{state_safety.__name__}.safety_check", noted)
    one = edited(sample(), {"/constraints/selector/q_e": 6})
    for name in ("a", "b", "c"):
        load_request_state(edited(one, {"/name": name}))
    assert asked == [state({"/constraints/selector/q_e": 6}).digest]


def dear() -> Any:
    """What the language allows and no server should run for a client."""
    signal = {"atom": "cluster_centroid_representativeness", "clusters": 64, "weight": 0.5}
    prior = {"atom": "external_policy", "policy": "divprune"}
    source = {"atom": "diversity_pool_builder", "pool_ratio": 8.0}
    pool = {"atom": "multi_source_pool_builder", "pool_ratio": 8.0, "sources": [source] * 8}
    return edited(
        sample(),
        {
            "/scoring/signals": [signal] * 32,
            "/source/priors": [prior] * 8,
            "/constraints/pool": [pool] * 8,
        },
    )


def test_a_costly_state_is_refused_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(policy: PruningPolicy) -> SafetyRecord:
        raise AssertionError("it was run")

    monkeypatch.setattr(f"{state_safety.__name__}.safety_check", never)
    said = refused(dear())
    assert "ms of one CPU core" in said and "may take 200" in said
    assert "8 x external_policy" in said and "32 x cluster_centroid_repre" in said
    assert "--autoprune-request-cost" in said


def test_the_bound_can_be_raised_and_lowered() -> None:
    load_request_state(edited(sample(), {"/constraints/selector/q_e": 5}), cost=100.0)
    with pytest.raises(RequestError, match="may take 20"):
        load_request_state(edited(sample(), {"/constraints/selector/q_e": 5}), cost=20.0)


def test_a_state_that_fails_its_check_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def broken(policy: PruningPolicy) -> SafetyRecord:
        asked.append(policy.state.digest)
        return SafetyRecord((Verdict("shapes", False, "made to fail"),))

    monkeypatch.setattr(f"{state_safety.__name__}.safety_check", broken)
    strict = edited(sample(), {"/constraints/selector/q_e": 9, "/safety": ["preserve_budget"]})
    for _ in range(3):
        assert "made to fail" in refused(strict)
    assert len(asked) == 1
