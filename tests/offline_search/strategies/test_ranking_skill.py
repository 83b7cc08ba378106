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
    RankingSkill,
    chance_probability,
    weigh_answers,
)
from offline_search.strategies.strategy import Round
from tests.offline_search.synthetic import ScriptedProposer


class Model:
    """Ranks candidates by their objective or by chance, takes the first, or does not reply."""

    def __init__(self, kind: str, seed: int) -> None:
        self._kind = kind
        self._rng = Random(seed)
        self._opinions: dict[str, float] = {}
        self.asked = 0

    async def choose(self, number: int, shortlist: Sequence[Trial]) -> int | None:
        self.asked += 1
        if self._kind == "silent":
            return None
        if self._kind == "first":
            return 0
        for one in shortlist:
            opinion = one.score if self._kind == "knowing" else self._rng.random()
            self._opinions.setdefault(one.name, opinion)
        return max(range(len(shortlist)), key=lambda index: self._opinions[shortlist[index].name])


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


async def round_of_skill(
    client: ProposalClient, model: Model, seed: int, count: int = 12, status: Status = "evaluated"
) -> int:
    """The round in which skill is found; 0 if in none of seven."""
    base = TrialRecord(round=0, index=0, status="evaluated", objective=-1.0)
    history, skill = History(base, np.array([-1.0])), RankingSkill(seed)
    rounds = []
    for number in range(2, 9):
        add_round(history, number - 1, seed, count, status)
        current = Round(number, 15, history, "", Random(0), client)
        rounds.append(await skill.is_found(current, model.choose))
    assert rounds == sorted(rounds), "once found, it stays"
    return 2 + rounds.index(True) if True in rounds else 0


async def test_a_model_that_knows_is_found_out_soon_and_asked_no_further(
    client: ProposalClient,
) -> None:
    for seed in range(10):
        model = Model("knowing", seed)
        assert 2 <= await round_of_skill(client, model, seed) <= 4
        assert model.asked < MAX_QUESTIONS


@pytest.mark.parametrize("kind", ["chance", "first"])
async def test_a_model_that_knows_nothing_is_asked_no_further(
    kind: str, client: ProposalClient
) -> None:
    """One in twenty is lucky; more than 4 of 20 are in three of a thousand such tests."""
    lucky = 0
    for seed in range(20):
        model = Model(kind, seed)
        found = await round_of_skill(client, model, seed)
        lucky += found > 0
        assert found or model.asked == MAX_QUESTIONS
    assert lucky <= 4


async def test_failed_requests_are_no_answers_and_end_no_test(client: ProposalClient) -> None:
    silent = Model("silent", 0)
    assert await round_of_skill(client, silent, 0) == 0
    assert silent.asked == 7 * MAX_QUESTIONS // 4


async def test_no_question_is_asked_without_enough_measured_candidates(
    client: ProposalClient,
) -> None:
    few, unmeasured = Model("knowing", 0), Model("knowing", 0)
    assert await round_of_skill(client, few, 0, count=4) == 0
    assert await round_of_skill(client, unmeasured, 0, status="unsafe") == 0
    assert few.asked == unmeasured.asked == 0


def test_a_candidate_of_several_shortlists_does_not_count_as_several_hits() -> None:
    """A liking for one candidate, which happens to be the best of ten, is right with p = 1/10."""
    scores = [float(index) for index in range(10)]
    shortlists = [(9, *others) for others in ((0, 1, 2), (3, 4, 5), (6, 7, 8))] * 8
    liking = weigh_answers(scores, [(one, 9) for one in shortlists])
    assert 0.05 < chance_probability([liking], Random(0)) < 0.2
    drawn = [Random(number).sample(range(10), 4) for number in range(24)]
    knowing = weigh_answers(scores, [(one, max(one)) for one in drawn])
    assert chance_probability([knowing], Random(0)) < 0.005
