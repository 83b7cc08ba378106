"""States of requests and of servers: loading, safety check, encoding between processes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.serving.unit.samples import refusal, served, vllm_config
from tests.tpdsl.samples import edited, sample, state
from vllm_autoprune import (
    PruningPolicy,
    RequestError,
    SafetyRecord,
    StateError,
    load_state,
)
from vllm_autoprune.serving import served_state as served_module
from vllm_autoprune.serving.api.choices import MAX_STATE_CHARACTERS, load_request_state
from vllm_autoprune.serving.plan import decode_state, encode_state
from vllm_autoprune.serving.startup import resolve_settings
from vllm_autoprune.tpdsl.atoms.safety import Verdict
from vllm_autoprune.tpdsl.loading import shipped_states
from vllm_autoprune.tpdsl.state import PruningState


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


def test_a_state_with_mistakes_is_pointed_at() -> None:
    said = refused(
        edited(sample(), {"/scoring/fusion/atom": "no", "/constraints/selector/q_e": -1})
    )
    assert "state/scoring/fusion/atom" in said
    assert "state/constraints/selector/q_e" in said


def test_a_state_of_many_megabytes_is_not_even_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(text: str) -> object:
        raise AssertionError("parsed")

    monkeypatch.setattr("vllm_autoprune.serving.api.choices.load_state", never)
    huge = edited(sample(), {"/provenance": {"notes": "n" * 10_000_000}})
    assert str(MAX_STATE_CHARACTERS) in refused(huge)


def test_invalid_values_of_every_type() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"a": deep}
    for junk in ({}, {"a": 1}, deep, {"schema": float("nan")}, {"x": object()}, {1: {2: 3}}):
        refused(junk)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make every state fail its safety check; the digests of those that were checked."""
    checked: list[str] = []

    def fail(policy: PruningPolicy) -> SafetyRecord:
        checked.append(policy.state.digest)
        return SafetyRecord((Verdict("shapes", False, "made to fail"),))

    monkeypatch.setattr(served_module, "safety_check", fail)
    monkeypatch.setattr(served_module, "_warnings", itertools.count(1))
    return checked


def test_a_state_that_violates_the_guarantees(
    broken: list[str], logged: pytest.LogCaptureFixture
) -> None:
    """It is served as its base policy, or refused where it says so; either way by its digest.

    By requests and at start-up alike, and it is checked once.
    """
    falling = edited(sample(), {"/constraints/selector/q_e": 7})
    strict = edited(falling, {"/safety": ["preserve_budget"]})
    expected = state({"/constraints/selector/q_e": 7}).without_exchange().digest
    for _ in range(3):
        assert load_request_state(falling).digest == expected
        assert "made to fail" in refused(strict)
    assert len(broken) == 2
    at_start = resolve_settings({"state": falling}, vllm_config())
    assert (at_start.state.digest, at_start.policy().refines) == (expected, False)
    assert all(record.levelname == "WARNING" for record in logged.records)
    assert "made to fail" in logged.messages[-1]
    (problem,) = refusal({"state": strict})
    assert problem.where == "state#/safety" and "made to fail" in problem.what
    assert "fallback_to_selection" in problem.fix


def test_clients_cannot_fill_the_log_with_unsafe_states(
    broken: list[str], logged: pytest.LogCaptureFixture
) -> None:
    for quota in range(20, 20 + 2 * served_module.MAX_WARNINGS):
        load_request_state(edited(sample(), {"/constraints/selector/q_e": quota}))
    lines = [record.getMessage() for record in logged.records]
    assert len(lines) == served_module.MAX_WARNINGS
    assert ["not logged" in line for line in lines] == [False] * (len(lines) - 1) + [True]


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

    monkeypatch.setattr(f"{served_module.__name__}.safety_check", never)
    said = refused(dear())
    assert "ms of one CPU core" in said and "may take 200" in said
    assert "8 x external_policy" in said and "32 x cluster_centroid_repre" in said
    assert "--autoprune-request-cost" in said


def test_the_bound_can_be_raised_and_lowered() -> None:
    load_request_state(edited(sample(), {"/constraints/selector/q_e": 5}), cost=100.0)
    with pytest.raises(RequestError, match="may take 20"):
        load_request_state(edited(sample(), {"/constraints/selector/q_e": 5}), cost=20.0)


# ---- encoded states ----


@pytest.mark.parametrize("name", shipped_states())
def test_decoded_state_has_the_same_digest(name: str) -> None:
    sent = load_state(name)
    assert decode_state(encode_state(sent)).digest == sent.digest


def test_name_and_provenance_are_not_encoded() -> None:
    other = edited(sample(), {"/name": "other", "/provenance": {"notes": "n" * 50_000}})
    assert encode_state(PruningState.model_validate(other)) == encode_state(state())
    assert encode_state(state({"/constraints/selector/q_e": 3})) != encode_state(state())


def test_more_than_the_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    encode_state.cache_clear()  # other tests may have encoded this state
    monkeypatch.setattr("vllm_autoprune.serving.plan.MAX_ENCODED_BYTES", 100)
    with pytest.raises(StateError, match="100") as caught:
        encode_state(state({"/constraints/selector/q_e": 5}))
    assert caught.value.problems[0].fix


# ---- the safety check at start-up ----


def test_a_state_is_checked_at_its_own_budget_up_to_the_largest_quota(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[int] = []

    def noted(policy: PruningPolicy) -> SafetyRecord:
        checked.append(policy.budget)
        return SafetyRecord(())

    monkeypatch.setattr("vllm_autoprune.serving.served_state.safety_check", noted)
    for budget in (16, 320, 4096):
        resolve_settings({"state": "autoprune", "budget": budget}, vllm_config())
    large = {"/budget/atom": "fixed_budget@512", "/constraints/selector/r_min": 512}
    data = edited(sample(), large)
    resolve_settings({"state": data, "budget": 4096}, vllm_config())
    assert checked == [16, 320, 640, 640]


# ---- served states ----


def test_needs_are_those_of_every_budget_a_request_may_ask_for() -> None:
    """r_min = K leaves nothing to exchange at the default budget, but at a larger one."""
    fixed = served({"/base_policy": {"name": "divprune"}, "/constraints/selector/r_min": 8})
    assert fixed.policy().needs == frozenset()
    assert fixed.needs == fixed.policy(16).needs == {"cls_attention", "instruction"}
