"""The core of a state: loading, JSON Schema, digest, size."""

from __future__ import annotations

import pickle

import pytest

from tests.tpdsl.executor.cores import (
    CORES,
    QUESTION_FREE,
    accepts,
    with_core,
)
from tests.tpdsl.samples import (
    fixed,
    refused_with,
    state,
)
from vllm_autoprune import (
    BudgetError,
    load_state,
    materialize,
)
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES


def test_a_core_survives_json_and_pickling() -> None:
    split = with_core(CORES["cover"])
    again = pickle.loads(pickle.dumps(split))
    assert again == split == load_state(split.dumps())
    assert again.digest == split.digest != state().digest
    assert '"core"' not in state().dumps()


def test_null_is_no_core() -> None:
    assert state({"/core": None}).digest == state().digest


def test_states_with_another_share_have_the_same_core() -> None:
    one, other, third = (
        with_core({"share": share, "cover": cover}).core
        for share, cover in ((0.5, 0.0), (0.75, 0.0), (0.5, 0.5))
    )
    assert one is not None and other is not None and third is not None
    assert one.digest == other.digest != third.digest


@pytest.mark.parametrize("base", sorted(set(BASE_POLICIES) - set(QUESTION_FREE)))
def test_a_core_policy_that_reads_the_question_is_refused(base: str) -> None:
    ((where, what),) = refused_with({"/core": {"share": 0.5, "policy": {"name": base}}})
    assert where == "/core/policy/name" and base in what
    assert "reads the question" in what
    assert not accepts({"share": 0.5, "policy": {"name": base}})


@pytest.mark.parametrize(
    "core",
    [{}, {"share": 0}, {"share": 1.1}, {"share": 0.5, "cover": 1}, {"share": 0.5, "size": 8}],
)
def test_schema_and_loader_refuse_the_same(core: dict[str, object]) -> None:
    assert refused_with({"/core": core})[0][0].startswith("/core")
    assert not accepts(core)


def test_a_misspelt_field_of_a_core_is_corrected() -> None:
    assert fixed({"/core": {"share": 0.5, "strenght": 0.5}}) == "did you mean 'strength'?"
    policy = {"name": "divprune", "params": {"tile_scop": "global"}}
    assert fixed({"/core": {"share": 0.5, "policy": policy}}) == "did you mean 'tile_scope'?"


@pytest.mark.parametrize("core", CORES)
def test_the_schema_accepts_what_loads(core: str) -> None:
    assert accepts(CORES[core])


@pytest.mark.parametrize(
    ("share", "budget", "core"), [(0.07, 100, 7), (0.5, 1, 0), (1.0, 8, 8), (0.75, 32, 24)]
)
def test_core_tokens_of_a_budget(share: float, budget: int, core: int) -> None:
    assert materialize(with_core({"share": share}), budget).core == core


def test_a_core_of_more_than_k_tokens_is_refused() -> None:
    with pytest.raises(BudgetError, match="9 core tokens of K = 8"):
        materialize(with_core({"share": 0.5}), 8, 9)
