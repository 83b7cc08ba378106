from __future__ import annotations

from random import Random

import pytest

from offline_search.ablation import ablated
from offline_search.history import parts
from offline_search.proposal import assembled
from offline_search.settings import Settings
from offline_search.space import Dice, composed
from offline_search.strategies.starts import base_state, plain_state, warm_starts
from tests.offline_search.replies import BUDGET
from vllm_autoprune import materialize


@pytest.mark.parametrize("seed", range(10))
def test_no_candidate_has_what_is_taken_away(seed: int, settings: Settings) -> None:
    body = composed(Dice(Random(seed)), BUDGET)

    def made(**changes: object) -> frozenset[str]:
        changed = settings.model_copy(update=changes)
        return parts(assembled(body, changed, "candidate"))

    assert "quality_topk_selector" in made(without=("anchoring",))
    signals = assembled(body, settings.model_copy(update={"without": ("fusion",)}), "x").scoring
    assert len(signals.signals) == 1
    assert not {n for n in made(without=("diversity",)) if n.endswith("pool_builder")} - {
        "quality_pool_builder"
    }
    assert "q_e=3" in made(quota=3)
    everything = made(without=("anchoring", "fusion", "diversity"), quota=3)
    assert {"quality_topk_selector", "quality_pool_builder"} <= everything


@pytest.mark.parametrize(
    "odd", [{}, {"scoring": 3}, {"constraints": []}, {"constraints": {"selector": "x"}}]
)
def test_what_is_malformed_is_left_to_the_loader(odd: dict[str, object]) -> None:
    assert ablated(odd, ("anchoring", "fusion", "diversity"), 2) is not None  # type: ignore[arg-type]


def test_the_base_policy_stays_itself(settings: Settings) -> None:
    for changes in ({"quota": 4}, {"without": ("anchoring",)}, {"without": ("fusion",)}):
        state = base_state(settings.model_copy(update=changes))
        assert materialize(state, BUDGET).quota == 0


def test_without_ablation_nothing_changes(settings: Settings) -> None:
    assert settings.without == () and settings.quota is None
    digests = {state.digest for state in (plain_state(settings), *warm_starts(settings))}
    assert len(digests) == 1 + len(warm_starts(settings))
