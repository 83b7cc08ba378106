"""The safety check and its probes, and the cost of a state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.tpdsl.samples import Changes, images, state
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
    require_affordable,
    state_cost,
)
from vllm_autoprune.tpdsl.loading import shipped_states
from vllm_autoprune.tpdsl.registry import ATOMS
from vllm_autoprune.tpdsl.safety import synthetic_probes


def failed(record: SafetyRecord) -> list[str]:
    assert [verdict.name for verdict in record.verdicts] == list(VERDICTS)
    assert record.valid == (not record.failures())
    return [verdict.name for verdict in record.failures()]


def details(record: SafetyRecord) -> dict[str, str]:
    return {verdict.name: verdict.detail for verdict in record.verdicts}


@pytest.mark.parametrize("budget", [1, 16, 80, 640])
def test_the_probes_hold_more_tokens_than_are_kept_and_one_equal_tokens(
    budget: int,
) -> None:
    probes = synthetic_probes(budget)
    assert all(probe.count > budget for probe in probes)
    assert any(bool((probe.cosine > 0.999).all()) for probe in probes)


def test_large_budget_is_checked_at_a_smaller_one_with_a_note() -> None:
    policy = materialize(state(), 641)
    record = safety_check(policy)
    assert failed(record) == []
    assert details(record)["exact_count"].endswith(
        ", K = 640, checked in place of K = 641"
    )


def swap_three(outcome: RefinedTokens) -> Changes:
    reference = outcome.reference[0].tolist()
    others = [i for i in range(outcome.indices.max() + 9) if i not in reference][:3]
    return {
        "indices": torch.tensor(
            [sorted([*others, *reference[: len(reference) - 3]])] * 2
        )
    }


def rows_of(*row: int) -> Callable[[RefinedTokens], Changes]:
    return lambda _: {"indices": torch.tensor([row, row])}


RUNS = iter(range(10_000))
OUTCOMES: dict[str, tuple[Callable[[RefinedTokens], Changes], set[str]]] = {
    "too few": (rows_of(0, 1, 2), {"exact_count", "valid_indices"}),
    "repeated": (rows_of(0, 1, 1, 2), {"valid_indices"}),
    "negative": (rows_of(-1, 0, 1, 2), {"valid_indices"}),
    "out of range": (rows_of(0, 1, 2, 10**6), {"valid_indices"}),
    "more exchanges than the quota": (swap_three, {"valid_indices"}),
    "rows not finite": (
        lambda outcome: {"features": outcome.features / 0},
        {"finite_scores"},
    ),
    "a fallback": (
        lambda outcome: {"fallback": torch.ones_like(outcome.fallback)},
        {"finite_scores"},
    ),
    "another dtype": (
        lambda outcome: {"features": outcome.features.half()},
        {"shapes"},
    ),
    "other bits each time": (
        lambda outcome: {"features": outcome.features + 1e-3 * next(RUNS)},
        {"determinism"},
    ),
}
"""What is wrong with every outcome of the executor at K = 4, and the verdicts that say so."""


@pytest.mark.parametrize("fault", OUTCOMES)
def test_each_verdict_fails_for_its_own_reason(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    change, verdicts = OUTCOMES[fault]

    def broken(policy: PruningPolicy, tokens: VisualTokens) -> RefinedTokens:
        refined = refine(policy, tokens)
        return replace(refined, **change(refined))  # type: ignore[arg-type]

    monkeypatch.setattr(safety, "refine", broken)
    # A state cannot leave a check out.
    for changes in ({}, {"/safety": ["fallback_to_selection"]}):
        assert set(failed(safety_check(materialize(state(changes), 4)))) == verdicts


def test_determinism_uses_the_repeats_of_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[int] = []

    def third_time_differs(
        policy: PruningPolicy, tokens: VisualTokens
    ) -> RefinedTokens:
        runs.append(1)
        refined = refine(policy, tokens)
        return replace(refined, features=refined.features + (len(runs) == 3))

    monkeypatch.setattr(safety, "refine", third_time_differs)
    assert failed(safety_check(materialize(state(), 4), [images(1)])) == []
    runs.clear()
    thrice = state({"/safety/2": {"atom": "deterministic", "repeats": 3}})
    assert failed(safety_check(materialize(thrice, 4), [images(1)])) == ["determinism"]


def test_a_base_policy_that_repeats_a_token_or_raises_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def repeats(
        params: object, tokens: VisualTokens, budget: int
    ) -> ReferenceSelection:
        return ReferenceSelection(torch.tensor([[0, 1, 2, 2]] * 2))

    def raises(params: object, tokens: VisualTokens, budget: int) -> ReferenceSelection:
        raise KeyError("x")

    # With q_e = 0 the gap is filled from the front, so the K rows themselves look sound.
    policy = materialize(state({"/constraints/selector/q_e": 0}), 4)
    for function, verdicts in ((repeats, ["valid_indices"]), (raises, list(VERDICTS))):
        broken = replace(BASE_POLICIES["cdpruner"], function=function)
        monkeypatch.setitem(BASE_POLICIES, "cdpruner", broken)
        record = safety_check(policy)
        assert failed(record) == verdicts
    assert set(details(record).values()) == {"KeyError: 'x'"}


# What a selection costs.


def test_every_atom_that_runs_has_a_cost_and_shipped_states_are_well_below_the_bound() -> (
    None
):
    ends: dict[str, tuple[str, ...]] = {
        "token_source_base_policy": ("prior", "policy"),
        "candidate_pool": ("_builder",),
        **dict.fromkeys(("scoring", "selection_constraints"), ("",)),
    }
    costs = [
        atom.cost
        for name, atom in ATOMS.items()
        if name.endswith(ends.get(atom.group, ()))
    ]
    assert (
        len(costs) > 25
        and min(*costs, *(policy.cost for policy in BASE_POLICIES.values())) > 0
    )
    for name in shipped_states():
        assert 0 < 2 * state_cost(load_state(name)) < DEFAULT_COST, name


PRIORS = [
    {"atom": "external_policy", "policy": "fsr"},
    {"atom": "native_teacher_mask_prior"},
]
SOURCES = {
    "atom": "multi_source_pool_builder",
    "sources": [{"atom": "diversity_pool_builder"}] * 2,
}


CENTRED = {"atom": "centred_cosine_kernel"}
STRICT = {"atom": "reference_strict_margin_exchange_selector"}
ANCHORED = {"atom": "anchor_controlled_pool_dpp_selector"}


@pytest.mark.parametrize(
    ("changes", "milliseconds"),
    [
        # CDPruner, five signals and an exchange; what is not run costs nothing.
        ({}, 43.0),
        ({"/scoring/signals/4/weight": 0.0}, 43.0 - 1.1),
        ({"/constraints/selector/q_e": 0, "/reassembly": {
            "atom": "reassemble/nearest.mean.residual.score"}}, 8.5 + 6.4 + 18.5 + 1.0),
        ({"/source": {"priors": PRIORS}}, 43.0 + 0.1 + 41.3 + 0.1 + 8.5),
        ({"/constraints/pool/1": SOURCES}, 43.0 + 0.1 + 2 * 2.7 - 2.7),
        # The kernel of the state, only for a selector that reads it.
        ({"/scoring/kernel": CENTRED, "/constraints/selector": STRICT}, 43.0 - 5.8 + 9.6),
        ({"/scoring/kernel": CENTRED, "/constraints/selector": ANCHORED},
         43.0 - 5.8 + 7.6 + 25.1),
        ({"/reassembly/strength": 0.5}, 43.0 + 11.8),
        ({"/core": {"share": 0.5}}, 43.0 + 28.8),
        ({"/core": {"share": 1.0, "cover": 0.5}}, 28.8 + 8.7 + 18.5),
    ],
)  # fmt: skip
def test_a_cost_is_the_sum_over_the_atoms_that_run(
    changes: Changes, milliseconds: float
) -> None:
    assert state_cost(state(changes)) == pytest.approx(milliseconds)


def test_a_base_policy_alone_that_compares_tokens_computes_their_cosines() -> None:
    # DivPrune declares them in its own cost, CDPruner does not.
    assert state_cost(load_state("cdpruner")) == pytest.approx(8.5 + 1.0 + 18.5)
    assert state_cost(load_state("divprune")) == pytest.approx(28.8 + 1.0)


def test_a_dear_state_is_refused_by_the_sum_the_bound_and_its_dearest_atoms() -> None:
    require_affordable(state(), DEFAULT_COST)
    signals = [{"atom": "local_detail_energy", "radius": 3, "weight": 1.0}] * 32
    with pytest.raises(StateError) as caught:
        require_affordable(state({"/scoring/signals": signals}), 100.0)
    (problem,) = caught.value.problems
    assert "may take 100" in problem.what and "32 x local_detail_energy" in problem.what
    assert "--autoprune-request-cost" in problem.fix
