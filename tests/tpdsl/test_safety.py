"""The safety check and its probes, and the predicted cost of a state."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tpdsl.samples import images, means, plain, state
from vllm_autoprune import (
    PruningPolicy,
    RefinedTokens,
    SafetyRecord,
    StateError,
    VisualTokens,
    load_state,
    materialize,
    refine,
    safety_check,
)
from vllm_autoprune.tpdsl import safety
from vllm_autoprune.tpdsl.atoms.safety import VERDICTS
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, ReferenceSelection
from vllm_autoprune.tpdsl.cost import (
    DEFAULT_COST,
    atom_costs,
    require_affordable,
    state_cost,
)
from vllm_autoprune.tpdsl.loading import shipped_states
from vllm_autoprune.tpdsl.registry import ATOMS
from vllm_autoprune.tpdsl.safety import MAX_PROBED_BUDGET, synthetic_probes

Break = Callable[[RefinedTokens], dict[str, Tensor]]


def failed(record: SafetyRecord) -> list[str]:
    assert [verdict.name for verdict in record.verdicts] == list(VERDICTS)
    assert record.valid == (not record.failures())
    return [verdict.name for verdict in record.failures()]


def details(record: SafetyRecord) -> dict[str, str]:
    return {verdict.name: verdict.detail for verdict in record.verdicts}


def replace_base(
    monkeypatch: pytest.MonkeyPatch, select: Callable[[object, VisualTokens, int], Tensor]
) -> None:
    def selects(params: object, tokens: VisualTokens, budget: int) -> ReferenceSelection:
        return ReferenceSelection(select(params, tokens, budget))

    broken = dataclasses.replace(BASE_POLICIES["cdpruner"], function=selects)
    monkeypatch.setitem(BASE_POLICIES, "cdpruner", broken)


def replace_atom(
    monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., object]
) -> None:
    broken = dataclasses.replace(ATOMS[name], function=function)
    monkeypatch.setitem(ATOMS._atoms, name, broken)


def replace_outcome(monkeypatch: pytest.MonkeyPatch, break_: Break) -> None:
    """Replace the result of the executor."""

    def broken(policy: PruningPolicy, tokens: VisualTokens) -> RefinedTokens:
        actual = refine(policy, tokens)
        return dataclasses.replace(actual, **break_(actual))

    monkeypatch.setattr(safety, "refine", broken)


@pytest.mark.parametrize("name", shipped_states())
@pytest.mark.parametrize("budget", [1, 4, 32])
def test_shipped_states_are_valid(name: str, budget: int) -> None:
    record = safety_check(materialize(load_state(name), budget))
    assert failed(record) == []
    assert all(verdict.detail for verdict in record.verdicts)


@pytest.mark.parametrize("budget", [1, 15, 16, 17, 79, 80, 100])
def test_the_probes_hold_more_tokens_than_are_kept(budget: int) -> None:
    probes = synthetic_probes(budget)
    assert all(probe.count > budget for probe in probes)
    assert {probe.grid.tiles for probe in probes} == {1, 5}
    # The probes include an image of identical tokens, the hardest case to select from.
    assert any(bool((probe.cosine > 0.999).all()) for probe in probes)


@pytest.mark.parametrize("budget", [641, 65536])
def test_large_budget_is_checked_at_a_smaller_one_with_a_note(
    budget: int,
) -> None:
    largest: dict[str, object] = {
        "/constraints/selector": {"atom": "reference_residual_exchange_selector", "q_e": 640}
    }
    policy = materialize(state(largest), budget)
    begun = time.process_time()
    record = safety_check(policy)
    assert time.process_time() - begun < 30
    assert failed(record) == []
    assert details(record)["exact_count"].endswith(f", K = 640, checked in place of K = {budget}")
    # The caller's probes are used unchanged.
    assert details(safety_check(policy, [images(1)]))["exact_count"].endswith(", K = 36")


def test_probed_budget_has_room_for_every_r_min_and_quota() -> None:
    for name in ATOMS.names("selection_constraints"):
        bounds = ATOMS[name].call.model_json_schema()["properties"]
        stated = [bounds[field] for field in ("q_e", "r_min") if field in bounds]
        for branch in (inner for field in stated for inner in field.get("anyOf", [field])):
            assert branch.get("maximum", 0) <= MAX_PROBED_BUDGET


def test_one_failing_probe_fails_the_check() -> None:
    bad = images(4)
    bad.features[0, 0, 0] = torch.nan
    record = safety_check(materialize(state(), 4), [images(3), bad, images(5)])
    assert failed(record) == ["finite_scores"]
    assert details(record)["finite_scores"] == "finite rows: True, fell back: 1"


class TestVerdicts:
    """Each verdict fails for its own reason, without affecting the others."""

    @pytest.mark.parametrize("count", [3, 5])
    @means("preserve_budget")
    def test_exact_count(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        replace_outcome(
            monkeypatch, lambda _: {"indices": torch.arange(count).expand(2, -1).clone()}
        )
        record = safety_check(materialize(state(), 4))
        assert failed(record) == ["exact_count", "valid_indices"]
        assert details(record)["exact_count"] == (
            f"2 images of {count} tokens and 0 extra rows, K = 4"
        )
        assert details(record)["valid_indices"] == "not checked: the count is wrong"

    @pytest.mark.parametrize(
        "row", [[0, 1, 1, 2], [3, 2, 1, 0], [-1, 0, 1, 2], [0, 1, 2, 10**6]], ids=str
    )
    def test_valid_indices(self, monkeypatch: pytest.MonkeyPatch, row: list[int]) -> None:
        replace_outcome(monkeypatch, lambda _: {"indices": torch.tensor([row, row])})
        assert failed(safety_check(materialize(state(), 4))) == ["valid_indices"]

    @pytest.mark.parametrize(("r_min", "least"), [(None, 6), (1, 1)])
    def test_valid_indices_means_no_more_exchanges_than_the_quota(
        self, monkeypatch: pytest.MonkeyPatch, r_min: int | None, least: int
    ) -> None:
        def swap_three(outcome: RefinedTokens) -> dict[str, Tensor]:
            reference = outcome.reference[0].tolist()
            others = [i for i in range(36) if i not in reference][:3]
            return {"indices": torch.tensor([sorted([*others, *reference[:5]])])}

        replace_outcome(monkeypatch, swap_three)
        policy = materialize(state({"/constraints/selector/r_min": r_min}), 8)
        assert policy.quota == 2
        record = safety_check(policy, [images(1, batch=1)])
        assert failed(record) == ["valid_indices"]
        assert details(record)["valid_indices"].endswith(f"kept: 5 of at least {least}")

    def test_finite_scores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def nothing(call: object, tokens: VisualTokens, picks: Tensor) -> Tensor:
            return torch.full((tokens.batch, tokens.count), torch.nan)

        replace_atom(monkeypatch, "spatial_centrality_prior", nothing)
        assert failed(safety_check(materialize(state(), 4))) == ["finite_scores"]

    def test_finite_scores_means_finite_rows_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        replace_outcome(monkeypatch, lambda outcome: {"features": outcome.features / 0})
        record = safety_check(materialize(state(), 4))
        assert "finite_scores" in failed(record)
        assert details(record)["finite_scores"] == "finite rows: False, fell back: 0"

    @pytest.mark.parametrize(
        "change",
        [
            lambda rows: rows[:, :3],
            lambda rows: rows[..., :-1],
            lambda rows: rows.half(),
        ],
        ids=["fewer rows", "narrower rows", "another dtype"],
    )
    @means("no_shape_change")
    def test_shapes(
        self, monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]
    ) -> None:
        replace_outcome(monkeypatch, lambda outcome: {"features": change(outcome.features)})
        assert "shapes" in failed(safety_check(materialize(state(), 4)))

    @means("deterministic")
    def test_determinism(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def random(params: object, tokens: VisualTokens, budget: int) -> Tensor:
            return torch.rand(tokens.batch, tokens.count).argsort(dim=1)[:, :budget]

        replace_base(monkeypatch, random)
        assert failed(safety_check(materialize(state(), 8))) == ["determinism"]

    def test_determinism_means_the_same_bits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        step = iter(range(100))
        replace_outcome(
            monkeypatch, lambda outcome: {"features": outcome.features + 1e-3 * next(step)}
        )
        assert failed(safety_check(materialize(state(), 4))) == ["determinism"]

    def test_determinism_uses_the_repeats_of_the_state(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runs: list[int] = []

        def third_time_differs(outcome: RefinedTokens) -> dict[str, Tensor]:
            runs.append(1)
            return {"features": outcome.features + (len(runs) == 3)}

        replace_outcome(monkeypatch, third_time_differs)
        assert failed(safety_check(materialize(state(), 4), [images(1)])) == []
        runs.clear()
        thrice = state({"/safety/2": {"atom": "deterministic", "repeats": 3}})
        assert failed(safety_check(materialize(thrice, 4), [images(1)])) == ["determinism"]

    def test_state_cannot_omit_a_check(self, monkeypatch: pytest.MonkeyPatch) -> None:
        replace_outcome(
            monkeypatch, lambda outcome: {"indices": outcome.indices[:, :1].expand(-1, 4)}
        )
        lax = materialize(state({"/safety": ["fallback_to_selection"]}), 4)
        assert failed(safety_check(lax)) == ["valid_indices"]


class TestBrokenBasePolicies:
    @pytest.mark.parametrize("q_e", [0, 2])
    @pytest.mark.parametrize(
        "row", [[0, 0, 0, 0], [0, 1, 2, 2], [9, 9, 8, 8]], ids=["one", "last", "pairs"]
    )
    def test_repeated_indices(
        self, monkeypatch: pytest.MonkeyPatch, row: list[int], q_e: int
    ) -> None:
        # With q_e = 0 the gap is filled from the front, so the K rows themselves may look sound.
        replace_base(monkeypatch, lambda *_: torch.tensor([row, row]))
        policy = materialize(state({"/constraints/selector/q_e": q_e}), 4)
        assert failed(safety_check(policy)) == ["valid_indices"]

    def test_too_few_picks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        replace_base(monkeypatch, lambda *_: torch.arange(3).expand(2, -1))
        record = safety_check(materialize(state(), 4))
        assert failed(record) == ["exact_count", "valid_indices", "shapes"]

    def test_picks_out_of_range(self, monkeypatch: pytest.MonkeyPatch) -> None:
        replace_base(monkeypatch, lambda *_: torch.arange(10**6, 10**6 + 4).expand(2, -1))
        assert failed(safety_check(materialize(state(), 4))) == list(VERDICTS)


@pytest.mark.parametrize(
    "error", [ValueError("no such thing"), RuntimeError("out of memory"), KeyError("x")], ids=repr
)
def test_an_exception_becomes_the_reason_of_every_verdict(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def raises(*_: object) -> Tensor:
        raise error

    replace_atom(monkeypatch, "local_contrast_saliency", raises)
    record = safety_check(materialize(state(), 4))
    assert failed(record) == list(VERDICTS)
    assert set(details(record).values()) == {f"{type(error).__name__}: {error}"}


def test_probe_without_required_inputs_is_a_failure() -> None:
    record = safety_check(materialize(state(), 4), [plain(torch.randn(2, 20, 4))])
    assert failed(record) == list(VERDICTS)
    assert "SelectionError" in details(record)["shapes"]


@pytest.mark.parametrize("budget", [1, 33, 640])
def test_probes_have_the_inputs_of_every_policy(budget: int) -> None:
    for tokens in synthetic_probes(budget):
        for policy in BASE_POLICIES.values():
            actual = policy.select(policy.call.model_fields["params"].default, tokens, budget)
            extra = 0 if actual.extra is None else actual.extra.shape[1]
            assert actual.picks.shape == (2, budget - extra)


def test_probes_are_deterministic() -> None:
    for one, other in zip(synthetic_probes(9), synthetic_probes(9), strict=True):
        assert torch.equal(one.features, other.features)
        mine, yours = one.require_tower(), other.require_tower()
        assert torch.equal(mine.patches, yours.patches)
        assert torch.equal(mine.project(mine.patches), yours.project(yours.patches))
        assert torch.equal(
            one.require_language().attention(1), other.require_language().attention(5)
        )


@pytest.mark.parametrize("name", shipped_states())
def test_shipped_states_are_far_below_the_bound(name: str) -> None:
    assert 2 * state_cost(load_state(name)) < DEFAULT_COST


def test_every_atom_has_a_cost() -> None:
    changes: list[dict[str, object]] = [
        {"/constraints/selector": {"atom": name}} for name in ATOMS.names("selection_constraints")
    ]
    pools = [name for name in ATOMS.names("candidate_pool") if name.endswith("_builder")]
    changes += [{"/constraints/pool": [{"atom": name}]} for name in pools]
    for one in [*map(load_state, shipped_states()), *map(state, changes)]:
        costs = atom_costs(one)
        assert all(cost.milliseconds > 0 for cost in costs), one
        assert state_cost(one) == sum(cost.milliseconds for cost in costs)
    for signal in ATOMS.names("scoring"):
        assert state_cost(state({"/scoring/signals": [{"atom": signal}]})) > 0
    for name in ATOMS.names("reassembly"):
        field = "margin" if "margin" in ATOMS[name].call.model_fields else "strength"
        working = state({"/reassembly": {"atom": name, field: 0.5}})
        assert state_cost(working) > state_cost(state()), name
    for base in BASE_POLICIES:
        prior = {"atom": "external_policy", "policy": base}
        assert state_cost(state({"/source/priors": [prior]})) > state_cost(state()), base


GROWING: list[tuple[str, Any, Any]] = [
    ("/scoring/signals/0/weight", 0.0, 0.5),
    ("/scoring/signals/4/radius", 1, 3),
    ("/constraints/pool/1/pool_ratio", 0.25, 2.0),
    (
        "/constraints/selector",
        {"atom": "maximal_marginal_relevance_pool_selector", "q_e": 2},
        {"atom": "maximal_marginal_relevance_pool_selector", "q_e": 100},
    ),
    (
        "/scoring/signals/0",
        {"atom": "cluster_centroid_representativeness", "clusters": 4},
        {"atom": "cluster_centroid_representativeness", "clusters": 64},
    ),
]


@pytest.mark.parametrize(("pointer", "less", "more"), GROWING, ids=lambda value: str(value)[:30])
def test_more_work_costs_more(pointer: str, less: Any, more: Any) -> None:
    assert state_cost(state({pointer: less})) < state_cost(state({pointer: more}))


def test_large_r_min_does_not_reduce_the_cost() -> None:
    """At the K of the check nothing can be exchanged, but requests may ask for a larger one."""
    selector = {"atom": "reference_residual_exchange_selector", "q_e": 640, "r_min": 200}
    signals = [{"atom": "cluster_centroid_representativeness", "clusters": 64}] * 32
    hidden = state(
        {
            "/scoring/signals": signals,
            "/constraints/selector": selector,
            "/budget/atom": "fixed_budget@640",
        }
    )
    assert state_cost(hidden) > 2 * state_cost(state())


def test_the_refusal_names_the_sum_the_bound_and_the_dearest_atoms() -> None:
    require_affordable(state(), DEFAULT_COST)
    signals = [{"atom": "local_detail_energy", "radius": 3, "weight": 1.0}] * 32
    with pytest.raises(StateError) as caught:
        require_affordable(state({"/scoring/signals": signals}), 100.0)
    (problem,) = caught.value.problems
    assert "may take 100" in problem.what
    assert "32 x local_detail_energy" in problem.what
    assert "--autoprune-request-cost" in str(caught.value)


def test_a_core_costs_its_policy_and_its_cover() -> None:
    def cost(**core: object) -> float:
        return state_cost(state({"/core": {"share": 0.5, **core}}))

    assert state_cost(state()) < cost() < cost(cover=0.5) < cost(cover=0.5, strength=0.25)
    places = {part.where for part in atom_costs(state({"/core": {"share": 0.5, "cover": 0.5}}))}
    assert {"/core/policy", "/core/cover", "/base_policy"} <= places


def test_a_state_that_is_all_core_costs_the_core_alone() -> None:
    (only,) = atom_costs(state({"/core": {"share": 1.0}}))
    assert only.where == "/core/policy"
