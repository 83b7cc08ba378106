from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest

from offline_search.evaluation.history import History, Trial
from offline_search.ledger import Ledger
from offline_search.ledger.records import ProposalRecord, Status, TrialRecord
from offline_search.proposers.proposal_client import ProposalClient, SpendingLimits
from offline_search.settings import Settings
from offline_search.strategies.ranking_skill import (
    MAX_QUESTIONS,
    Choices,
    RankingSkill,
    probability_of_chance,
)
from offline_search.strategies.strategy import Round
from tests.offline_search.synthetic import ScriptedProposer


class Model:
    """Ranks candidates by their objective, by chance, or always takes the first of a menu."""

    def __init__(self, kind: str, seed: int) -> None:
        self._kind = kind
        self._rng = Random(seed)
        self._opinions: dict[str, float] = {}
        self.asked = 0

    async def choose(self, number: int, menu: Sequence[Trial]) -> int:
        self.asked += 1
        if self._kind == "first":
            return 0
        for one in menu:
            opinion = one.score if self._kind == "knowing" else self._rng.random()
            self._opinions.setdefault(one.name, opinion)
        return max(range(len(menu)), key=lambda index: self._opinions[menu[index].name])


def add_round(history: History, number: int, seed: int, count: int, status: Status) -> None:
    rng = Random(f"{seed} {number}")
    for index in range(count):
        proposal = ProposalRecord(round=number, index=index, origin="tpe")
        result = TrialRecord(round=number, index=index, status=status, objective=-rng.random())
        history.trials.append(Trial(proposal, result))


@pytest.fixture
def client(tmp_path: Path) -> ProposalClient:
    ledger = Ledger(tmp_path / "l")
    return ProposalClient(Settings(), ledger, ScriptedProposer([]), SpendingLimits())


async def shown_after(
    client: ProposalClient, model: Model, seed: int, count: int = 12, status: Status = "evaluated"
) -> int:
    """The round in which skill is shown; 0 if in none of seven."""
    base = TrialRecord(round=0, index=0, status="evaluated", objective=-1.0)
    history, skill = History(base, np.array([-1.0])), RankingSkill(seed)
    rounds = []
    for number in range(2, 9):
        add_round(history, number - 1, seed, count, status)
        current = Round(number, 15, history, "", Random(0), client)
        rounds.append(await skill.is_shown(current, model.choose))
    assert rounds == sorted(rounds), "once shown, it stays"
    return 2 + rounds.index(True) if True in rounds else 0


async def test_a_model_that_knows_is_found_out_soon_and_asked_no_further(
    client: ProposalClient,
) -> None:
    for seed in range(10):
        model = Model("knowing", seed)
        assert 2 <= await shown_after(client, model, seed) <= 4
        assert model.asked < MAX_QUESTIONS


@pytest.mark.parametrize(("kind", "most"), [("chance", 5), ("first", 5)])
async def test_a_model_that_knows_nothing_is_asked_no_further(
    kind: str, most: int, client: ProposalClient
) -> None:
    """Four in a hundred show skill by luck; more than 5 of 40 are one study in a hundred."""
    lucky = 0
    for seed in range(40):
        model = Model(kind, seed)
        shown = await shown_after(client, model, seed)
        lucky += shown > 0
        assert shown or model.asked == MAX_QUESTIONS
    assert lucky <= most


async def test_no_question_is_asked_without_enough_measured_candidates(
    client: ProposalClient,
) -> None:
    few, unmeasured = Model("knowing", 0), Model("knowing", 0)
    assert await shown_after(client, few, 0, count=4) == 0
    assert await shown_after(client, unmeasured, 0, status="unsafe") == 0
    assert few.asked == unmeasured.asked == 0


def test_candidates_that_stand_in_several_menus_do_not_count_as_several_hits() -> None:
    """A liking for one candidate, which happens to be the best of ten, is right with p = 1/10."""
    menus = [(9, one, two, three) for one, two, three in ((0, 1, 2), (3, 4, 5), (6, 7, 8))] * 8
    liking = Choices(tuple(range(10)), tuple((menu, 9) for menu in menus))
    assert 0.05 < probability_of_chance([liking], Random(0)) < 0.2
    knowing = Choices(tuple(range(10)), tuple((menu, max(menu)) for menu in
                      [tuple(Random(n).sample(range(10), 4)) for n in range(24)]))  # fmt: skip
    assert probability_of_chance([knowing], Random(0)) < 0.005
