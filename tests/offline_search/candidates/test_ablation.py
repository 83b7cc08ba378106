from __future__ import annotations

import json
import re
from collections import Counter
from itertools import chain
from pathlib import Path
from random import Random

import jsonschema  # type: ignore[import-untyped]
import pytest
import torch

from offline_search.candidates.ablation import (
    ablate,
    excluded_atoms,
    fixed_numbers,
    state_components,
)
from offline_search.candidates.components import feature_names
from offline_search.candidates.menu import draw_menu
from offline_search.candidates.proposal import assemble_state
from offline_search.candidates.schema import MAX_SIGNALS, proposal_schema
from offline_search.candidates.search_space import RandomSource, sample_proposal
from offline_search.dataset import Dataset
from offline_search.ledger.records import ProposalRecord
from offline_search.proposers.prompt import describe_language
from offline_search.settings import Settings
from offline_search.strategies.start_states import base_state
from tests.offline_search.replies import BUDGET, valid_replies
from tests.offline_search.synthetic import SyntheticEvaluator, records_of_kind, run_search
from tests.tpdsl.samples import images
from vllm_autoprune import Grid, PruningState, load_state, materialize
from vllm_autoprune.tpdsl.atoms.constraints import SelectorInputs, run_selector
from vllm_autoprune.tpdsl.atoms.pools import build_pool
from vllm_autoprune.tpdsl.registry import ATOMS, AtomCall, Component, default_call

COMPONENTS: tuple[Component, ...] = ("anchoring", "fusion", "diversity")
CANDIDATES = 1000
SAMPLES = 300
BY_QUALITY = (
    "reference_residual_exchange_selector",
    "reference_margin_gated_exchange_selector",
    "quality_topk_selector",
)


@pytest.mark.parametrize("component", COMPONENTS)
def test_no_candidate_of_an_ablation_has_the_component(component: Component) -> None:
    settings = Settings(budgets=(BUDGET,), without=(component,))
    others = set[Component]()
    for seed in range(CANDIDATES):
        proposal = sample_proposal(RandomSource(Random(seed)), BUDGET)
        state = assemble_state(proposal, settings)
        present = state_components(state, BUDGET)
        assert component not in present, (seed, sorted(feature_names(state)))
        others |= present
    assert others == set(COMPONENTS) - {component}, "an ablation removes one component only"


def test_removing_all_components_leaves_the_best_by_one_signal() -> None:
    settings = Settings(budgets=(BUDGET,), without=COMPONENTS)
    for seed in range(100):
        state = assemble_state(sample_proposal(RandomSource(Random(seed)), BUDGET), settings)
        assert not state_components(state, BUDGET)
        assert state.constraints.selector.atom == "quality_topk_selector"


def sampled_pair(seed: int, component: Component) -> tuple[PruningState, PruningState]:
    """One proposal as a state of the whole search, and of the search without the component."""
    proposal = sample_proposal(RandomSource(Random(seed)), BUDGET)
    without = Settings(budgets=(BUDGET,), without=(component,))
    return assemble_state(proposal, Settings(budgets=(BUDGET,))), assemble_state(proposal, without)


@pytest.mark.parametrize("component", COMPONENTS)
def test_an_ablation_takes_one_thing_away_and_nothing_else(component: Component) -> None:
    excluded, alone = excluded_atoms((component,)), Counter[str]()
    for seed in range(SAMPLES):
        whole, part = sampled_pair(seed, component)
        assert component not in state_components(part, BUDGET)
        assert (part.reassembly, part.scoring.kernel) == (whole.reassembly, whole.scoring.kernel)
        signals = [call for call in whole.scoring.signals if call.atom not in excluded]
        if component == "fusion":
            signals = [max(signals, key=lambda call: call.weight)]
            alone[signals[0].atom] += 1
        assert list(part.scoring.signals) == signals or not signals
        if whole.scoring.fusion.atom not in excluded:
            assert part.scoring.fusion == whole.scoring.fusion
        if component != "anchoring":
            pool = tuple(call for call in whole.constraints.pool if call.atom not in excluded)
            assert part.constraints.pool == pool or not pool
        old, new = whole.constraints.selector, part.constraints.selector
        set_by_it = set(fixed_numbers((component,), 0 if component == "anchoring" else None))
        if old.atom not in excluded:
            assert new.model_dump(exclude=set_by_it) == old.model_dump(exclude=set_by_it)
        elif component == "diversity":
            assert new.bounds(BUDGET) == old.bounds(BUDGET)
    if component == "fusion":  # all signals are tried, none in most of the candidates
        assert len(alone) == len(ATOMS.names("scoring")) and max(alone.values()) < SAMPLES / 4


def test_without_anchoring_all_tokens_of_the_base_policy_may_go() -> None:
    tokens = images(3, batch=1, grid=Grid(7, 7))
    g = torch.linspace(0, 1, tokens.count)[None]
    picks = torch.arange(BUDGET)[None]  # those of lowest quality
    for seed in range(SAMPLES):
        constraints = sampled_pair(seed, "anchoring")[1].constraints
        pool = build_pool(constraints.pool, tokens, g, picks)
        assert int(pool.sum()) >= BUDGET and constraints.selector.bounds(BUDGET) == (BUDGET, 0)
        partition, kernel = constraints.partition, default_call(AtomCall, "pairwise_cosine_kernel")
        inputs = SelectorInputs(tokens, picks, pool, g, BUDGET, kernel, partition)
        if constraints.selector.atom in BY_QUALITY:
            assert not run_selector(constraints.selector, inputs)[0, :BUDGET].any(), seed


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_proposer_is_offered_nothing_that_an_ablation_removes(component: Component) -> None:
    settings = Settings(budgets=(BUDGET,), without=(component,), library="paper")
    quota = settings.fixed_quota
    schema = proposal_schema(BUDGET, library="paper", without=settings.without, quota=quota)
    text = f"{describe_language(settings)} {json.dumps(schema)}"
    excluded = excluded_atoms((component,))
    assert excluded and not [name for name in excluded if re.search(rf"{name}[^a-z_]", text)]
    assert '"anyOf": []' not in text
    check = jsonschema.Draft202012Validator(
        proposal_schema(BUDGET, without=settings.without, quota=quota)
    )
    for seed in range(SAMPLES):
        part = sampled_pair(seed, component)[1]
        body = part.model_dump(mode="json", include={"scoring", "constraints", "reassembly"})
        body["constraints"]["selector"].pop("r_min", None)
        body["scoring"]["signals"] = body["scoring"]["signals"][:MAX_SIGNALS]
        check.validate(body)
        menu = draw_menu(Random(seed), [part], 3, BUDGET, (), settings.without, quota)
        assert not excluded & set(chain.from_iterable(menu.atoms.values()))
        assert component != "fusion" or len(menu.atoms["signals"]) == 1
        assert quota is None or menu.quotas == (quota,)


@pytest.mark.parametrize("strategy", ["random", "tpe", "autoprune", "autoprune+"])
@pytest.mark.parametrize("component", COMPONENTS)
async def test_no_strategy_measures_a_candidate_with_the_component(
    strategy: str, component: Component, data: Dataset, tmp_path: Path
) -> None:
    settings = Settings(
        strategy=strategy, rounds=3, per_round=5, budgets=(BUDGET,), without=(component,),
        proposer="scripted", other_bases=("divprune",),
    )  # fmt: skip
    replies = [json.dumps({**json.loads(r), "base_policy": "divprune"}) for r in valid_replies(9)]
    await run_search(tmp_path / "l", settings, SyntheticEvaluator(data), replies)
    states = [one.state for one in records_of_kind(tmp_path / "l", ProposalRecord) if one.state]
    assert len(states) >= 9
    for body in states:
        assert component not in state_components(load_state(json.dumps(body)), BUDGET)


def test_a_program_has_no_part_to_remove_and_a_large_k_keeps_its_anchors() -> None:
    with pytest.raises(ValueError, match="only a state has parts to remove"):
        Settings(strategy="evoprompting-code", proposer="m", without=("fusion",))
    with pytest.raises(ValueError, match="above K = 640"):
        Settings(budgets=(32, 641), without=("anchoring",))


def test_diverse_selectors_and_pools_say_so() -> None:
    diverse = {name for name in ATOMS.names() if "diversity" in ATOMS[name].components}
    selectors = set(ATOMS.names("selection_constraints"))
    compared = {name for name in selectors if "dpp" in name or "marginal" in name}
    assert compared | {"reference_strict_margin_exchange_selector"} == diverse & selectors
    assert "diversity_pool_builder" in diverse and "quality_pool_builder" not in diverse


@pytest.mark.parametrize("seed", range(10))
def test_a_fixed_quota_is_that_of_every_candidate(seed: int) -> None:
    settings = Settings(budgets=(BUDGET,), quota=3)
    body = sample_proposal(RandomSource(Random(seed)), BUDGET)
    assert "q_e=3" in feature_names(assemble_state(body, settings))


@pytest.mark.parametrize(
    "odd", [{}, {"scoring": 3}, {"constraints": []}, {"constraints": {"selector": "x"}}]
)
def test_ablation_leaves_malformed_input_to_the_loader(odd: dict[str, object]) -> None:
    settings = Settings(without=COMPONENTS, quota=2)
    assert ablate(odd, settings) is not None  # type: ignore[arg-type]


def test_ablation_does_not_change_the_base_policy() -> None:
    settings = Settings(budgets=(BUDGET,))
    for changes in ({"quota": 4}, {"without": ("anchoring",)}, {"without": ("fusion",)}):
        state = base_state(settings.model_copy(update=changes))
        assert materialize(state, BUDGET).quota == 0
