from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from offline_search.candidates import assemble_state, paper_state, warm_start_states
from offline_search.components import Components
from offline_search.dataset import Dataset
from offline_search.ledger import ProposalRecord
from offline_search.search_space import SPACES, RandomSource, choices_of_state, sample_proposal
from offline_search.settings import MAX_QUOTA, Settings, Space
from tests.offline_search.candidates.test_search_space import FixedSource
from tests.offline_search.replies import BUDGET, valid_replies
from tests.offline_search.synthetic import SyntheticEvaluator, records_of_kind, run_search
from vllm_autoprune import PruningState, load_state
from vllm_autoprune.tpdsl.transfer import list_changes

SELECTOR, SIGNALS = "/constraints/selector", "/scoring/signals"
NUMBERS = {
    *(f"{SELECTOR}/{name}" for name in ("q_e", "lam", "keep_weight", "power")),
    "/reassembly/strength",
}


def sampled(space: Space, seed: int) -> PruningState:
    """The state of a random proposal, as it was drawn."""
    proposal = sample_proposal(RandomSource(Random(seed)), BUDGET, space=space)
    return assemble_state(proposal, Settings(budgets=(BUDGET,)))


def is_inside(state: PruningState, space: Space) -> bool:
    """Whether a state is of a space, by the text of the released search."""
    data = state.model_dump(mode="json")
    selector, signals = data["constraints"]["selector"], data["scoring"]["signals"]
    q_e, lam = selector["q_e"], selector["lam"]
    selector = {"keep_weight": 0.0, "power": 1.0, **selector}  # dumps leave these defaults out
    keep, power, strength = (
        selector["keep_weight"],
        selector["power"],
        data["reassembly"]["strength"],
    )
    bias = [one["bias"] for one in signals if one["atom"] == "spatial_centrality_prior"]
    released = load_state("autoprune").model_dump(mode="json")["scoring"]["signals"]
    known = {one["atom"] for one in signals} <= {one["atom"] for one in released}
    if not known or selector["r_min"] is not None:
        return False
    if space in ("numbers", "released"):
        fixed = signals == released if space == "numbers" else all(0.35 <= b <= 0.95 for b in bias)
        numbers = 0.04 <= lam <= 0.22 and 0.1 <= keep <= 0.8 and 0.7 <= power <= 1.5
        bounds = 0 <= q_e <= 3 and 0 <= strength <= (0.003 if q_e >= 2 else 0.006)
        return fixed and numbers and bounds
    ablated = {
        "without-diversity": lam == 0 and q_e == 2 and keep <= 0.6,
        "without-fusion": len(signals) == 1 and 0.05 <= lam <= 0.5 and q_e == 2 and keep <= 0.6,
        "without-anchoring": (q_e, keep) == (MAX_QUOTA, 0) and 0.05 <= lam <= 0.5,
    }[space]
    free = 0.5 <= power <= 1.8 and all(0.35 <= b <= 0.95 for b in bias)
    return ablated and free and strength == 0.0005


@pytest.mark.parametrize("space", SPACES)
def test_every_proposal_is_put_into_its_space_and_its_own_stay(space: Space) -> None:
    settings = Settings(budgets=(BUDGET,), space=space)
    digests = set()
    for seed in range(200):
        state = sampled(space, seed)
        assert is_inside(state, space), seed
        parts = Components.from_state(state).to_json()
        assert assemble_state(parts, settings).digest == state.digest
        choices = FixedSource(choices_of_state(state, BUDGET, space=space))
        again = assemble_state(sample_proposal(choices, BUDGET, space=space), settings)
        assert again.digest == state.digest
        digests.add(state.digest)
        other = sample_proposal(RandomSource(Random(seed)), BUDGET)
        assert is_inside(assemble_state(other, settings), space), seed
    assert len(digests) > 150
    starts = warm_start_states(settings)
    assert starts and all(is_inside(state, space) for state in starts)


def test_the_numbers_alone_differ_from_the_selected_policy() -> None:
    released, varied = paper_state(Settings(budgets=(BUDGET,))).model_dump(mode="json"), set()
    for seed in range(50):
        state = sampled("numbers", seed).model_dump(mode="json")
        varied |= {change.where for change in list_changes(released, state)}
    assert varied == NUMBERS


def test_signals_are_free_where_the_space_says_so() -> None:
    for space, count in (("released", 5), ("without-fusion", 4)):
        states = [sampled(space, seed) for seed in range(100)]  # type: ignore[arg-type]
        assert len({call.atom for one in states for call in one.scoring.signals}) == count


@pytest.mark.parametrize("strategy", ["random", "tpe", "autoprune", "autoprune+"])
async def test_every_strategy_stays_in_the_space(
    strategy: str, data: Dataset, tmp_path: Path
) -> None:
    settings = Settings(
        strategy=strategy, rounds=4, per_round=5, budgets=(BUDGET,), space="released",
        proposer="scripted",
    )  # fmt: skip
    await run_search(tmp_path / "l", settings, SyntheticEvaluator(data), valid_replies(30))
    states = [one.state for one in records_of_kind(tmp_path / "l", ProposalRecord) if one.state]
    assert len(states) >= 15
    assert all(is_inside(load_state(json.dumps(body)), "released") for body in states)


@pytest.mark.parametrize(
    "other",
    [
        {"library": "paper"},
        {"strategy": "openevolve-code"},
    ],
    ids=str,
)
def test_a_space_is_of_states_of_the_released_atoms(other: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="leave others out"):
        Settings.model_validate({"space": "numbers", "proposer": "m", **other})
