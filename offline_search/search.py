"""Search loop: Algorithm 2 of the paper, with every step recorded in a ledger.

    strategy ─ proposer ─> drafts ─> load ─> safety check ─> duplicates ─> evaluator ─> trials
        ^                                                                                 │
        └─────────────────────────── summary H_t <── history <────────────────────────────┘

Resuming and replaying need no code of their own: the loop runs again from its start and takes
completed steps from the ledger.

If the search split is longer than a block, every round has fresh questions of it. Leaders are asked
them as well, so that a candidate that was lucky once falls back. If leaders are tied, other
structures are searched; if nothing better is found, the search ends
(:mod:`offline_search.schedule`). The winner is chosen on search and validation questions together
(:mod:`offline_search.winner`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NamedTuple

from offline_search.candidates import Stage, base_state, list_purposes, minimal_state
from offline_search.components import structure
from offline_search.dataset import SPLITS, Dataset, Split, read_dataset
from offline_search.evaluator import EvaluationJob, Evaluator, RecordedEvaluator
from offline_search.history import Answers, History, gave_up
from offline_search.image_facts import ImageFacts, describe_facts
from offline_search.ledger import (
    Cost,
    Ledger,
    SettingsRecord,
    SummaryRecord,
    WinnerRecord,
    digest_records,
    read_ledger,
    select_records,
)
from offline_search.models import check_objective
from offline_search.probes import Probes
from offline_search.prompt import Messages, describe_request, proposal_prompt
from offline_search.proposer import ProposalClient, Proposer
from offline_search.report import ProgressLog
from offline_search.rounds import RoundEvaluator
from offline_search.schedule import EvaluationBudget, Plateau
from offline_search.settings import Settings
from offline_search.strategies import STRATEGIES
from offline_search.strategies.language_model import Round
from offline_search.summary import summarize
from offline_search.winner import HeldOutEvaluator
from vllm_autoprune.errors import SearchError


class NothingMeasured(SearchError):
    """No candidate of a search was measured on the whole search split."""


_SILENT = ProgressLog(lambda line: None)


class Search:
    """One search; ``most_money`` bounds the proposer's cost, and ``observer`` reports progress.

    Without a ``proposer``, a request whose reply is not recorded ends the search.
    """

    history: History | None = None
    """What was measured so far; None until the base policy is measured."""

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        evaluator: Evaluator,
        proposer: Proposer | None = None,
        most_money: float | None = None,
        observer: ProgressLog = _SILENT,
    ) -> None:
        check_objective(settings)
        self._settings = settings
        self._ledger = ledger
        self._observer = observer
        self._dataset = evaluator.dataset
        self._base = base_state(settings)
        self._evaluator = RecordedEvaluator(ledger, evaluator, self._base.digest)
        self._client = ProposalClient(settings, ledger, proposer, most_money)
        examples = self._dataset.splits["search"]
        probes = evaluator.probes()
        facts = evaluator.image_facts
        if probes and not facts:
            facts = {
                model: ImageFacts.of_probes(images) for model, images in probes.items()
            }
        self._facts = describe_facts(facts, settings) if settings.proposer else ""
        self._rounds = RoundEvaluator(
            settings, ledger, self._evaluator, examples, probes
        )
        blocks = self._rounds.blocks
        self._budget = EvaluationBudget(settings, blocks[0].stop, len(blocks) > 1)

    async def run(self) -> WinnerRecord:
        """Run or resume the search; raises :class:`SearchError` if it cannot continue."""
        settings = self._settings
        self._record_settings()
        strategy = STRATEGIES[settings.strategy](settings)
        history = self.history = await self._measure_baselines()
        plateau = Plateau()
        summary = summarize(history)
        for number in range(1, settings.maximum_rounds + 1):
            if self._budget.is_spent(history.answers):
                break
            current = self._plan_round(number, history, summary, plateau)
            drafts = await strategy.propose(current)
            trials = await self._rounds.evaluate_round(
                drafts, number, history, settings.races
            )
            self._update_resolution(history)
            share = self._budget.share(number, history.answers)
            plateau.update(history, number, share)
            summary = summarize(history)
            standing = history.standing(plateau.level)
            record = SummaryRecord(round=number, text=summary, standing=standing)
            self._ledger.put(record)
            self._observer.on_round(trials, history, share, self._client.total_cost())
            if plateau.level and plateau.since == number:
                self._observer.on_plateau(standing, self._budget.answers)
            results = [trial.result for trial in history.trials]
            if plateau.level > 1 or gave_up(results):
                break
        if history.best() is None:
            raise NothingMeasured.of(
                "search",
                "no candidate was evaluated to the end",
                "`vllm-autoprune search report` has the reasons; fix them and begin a new ledger",
            )
        winner = self._ledger.put(await self._hold_out().choose_winner(history))
        self._observer.on_finish(winner, settings)
        return winner

    def _record_settings(self) -> None:
        """Record the settings; raises :class:`SearchError` if the ledger has other settings."""
        opened = self._ledger.find(SettingsRecord, "opened")
        if opened is not None and opened.settings != self._settings:
            recorded = dict(opened.settings)
            differences = [
                f"{name} is {value!r}, was {recorded[name]!r}"
                for name, value in self._settings
                if value != recorded[name]
            ]
            raise SearchError.of(
                f"ledger {self._ledger.path}",
                f"belongs to another search ({'; '.join(differences)})",
                "give the same settings again, or another ledger",
            )
        self._ledger.put(SettingsRecord(settings=self._settings))

    async def _measure_baselines(self) -> History:
        """Measure the unpruned model and the base policy on all splits; returns the history H_0.

        Held-out splits are measured now, because a question that cannot be asked would otherwise
        end the search only when it is almost done.
        """
        history = await self._rounds.evaluate_baselines(self._base)
        held_out = self._hold_out()
        await held_out.compare(self._base, "validation")
        await held_out.compare(self._base, "test")
        history.resolution = self._settings.resolution or 0.0
        self._observer.on_start(history, self._budget.questions)
        return history

    def _hold_out(self) -> HeldOutEvaluator:
        """The evaluator on held-out splits, in the scales that the base policy's losses give."""
        return HeldOutEvaluator(
            self._settings,
            self._evaluator,
            self._dataset,
            self._base,
            self._rounds.scales,
        )

    def _plan_round(
        self, number: int, history: History, summary: str, plateau: Plateau
    ) -> Round:
        """The input from which the strategy proposes the candidates of a round."""
        tied = history.tied() if plateau.level else []
        spent = history.answers
        return Round(
            number=number,
            count=self._budget.count_proposals(spent),
            history=history,
            context=f"{self._facts}{summary}",
            rng=Random(f"{self._settings.seed} {number}"),
            client=self._client,
            tied=frozenset(structure(trial.require_state()) for trial in tied),
            position=self._budget.describe_round(number, spent, history.resolution),
            stage=self._choose_stage(number, history, plateau),
        )

    def _choose_stage(self, number: int, history: History, plateau: Plateau) -> Stage:
        """The stage of the search, which determines the purposes of a round's proposals."""
        if history.best() is None:
            return "first"
        if self._budget.is_last(number, history.answers):
            return "last"
        return "tied" if plateau.level and history.tied() else "open"

    def _update_resolution(self, history: History) -> None:
        """Set the resolution to the difference that the budget can detect, if it is not a setting.

        It stays 0 unless rounds have fresh questions, because repeated ones say nothing new about
        a leader.
        """
        if self._settings.resolution is None and len(self._rounds.blocks) > 1:
            questions = self._settings.rounds * self._budget.questions
            history.resolution = history.reach(min(len(history.examples), questions))


@dataclass(frozen=True)
class _Recording:
    """Evaluator of a replay: all answers and fingerprints have to come from the recording."""

    name: str
    dataset: Dataset
    image_facts: Mapping[str, ImageFacts] = field(default_factory=dict)

    def probes(self) -> Probes:
        return {}

    async def evaluate(self, job: EvaluationJob) -> Answers:
        questions = f"questions {job.start} to {job.stop} of the {job.split} split"
        raise SearchError.of(
            "recording",
            f"has no evaluation of {questions} at K = {job.budget}",
            "resume the recorded search to its end first",
        )


class Replay(NamedTuple):
    """A replayed search: its winner, the digests of both ledgers, and its questions."""

    winner: WinnerRecord
    recorded: str
    replayed: str
    dataset: Dataset


async def replay(
    recording: Path, into: Path, data: Path, images: int | None = None
) -> Replay:
    """:func:`replay_on` a data folder, of which at most ``images`` images a split are read."""

    def read(settings: Settings) -> Dataset:
        # The seed determines the order of the questions, and with ``images`` their selection.
        dataset = read_dataset(data, settings.seed, images)
        ordered = dataset.in_blocks(settings.block, settings.seed)
        return ordered.ask_models(settings.models)

    return await replay_on(read, recording, into)


async def replay_on(
    read: Callable[[Settings], Dataset], recording: Path, into: Path
) -> Replay:
    """Replay a recording into a new ledger.

    ``read`` returns the data set for the settings of the recorded search. The recording is not
    changed. Raises :class:`SearchError` if it was made on other data, or if a step needs a request
    that was not recorded.
    """
    recorded = read_ledger(recording)
    opened = select_records(recorded, SettingsRecord)
    if not opened:
        raise SearchError.of(
            f"ledger {recording}", "contains no search", "give one that has begun"
        )
    settings = opened[0].settings
    dataset = read(settings)
    # All evaluators of the package and the benchmarks have such a name; others are not checked.
    named = re.search(r"data ([0-9a-f]{12})$", settings.evaluator)
    if named is not None and not dataset.digest.startswith(named[1]):
        raise SearchError.of(
            f"ledger {recording}",
            f"its search had other questions than {dataset.folder} gives "
            f"(data {named[1]}, not {dataset.digest[:12]})",
            "give the data folder and the --images of the recorded search",
        )
    with Ledger(into, recorded) as ledger:
        winner = await Search(
            settings, ledger, _Recording(settings.evaluator, dataset)
        ).run()
        digests = (digest_records(recorded), digest_records(ledger))
        return Replay(winner, *digests, dataset)


_CHARACTERS_PER_TOKEN = 3.5
"""Approximate number for English and JSON."""

_REPLY_TOKENS = 300
"""Approximate tokens of a proposal; the history adds about four times that number to a prompt."""


def estimate_cost(
    settings: Settings, dataset: Dataset, price: tuple[float, float]
) -> tuple[Messages, int, Cost, dict[Split, int]]:
    """The first prompt of a search, and its number of requests, its cost, and answers by split.

    Requests and answers are upper bounds without repairs; tokens and money are rough averages.
    ``dataset`` has every question once. ``price`` is that of a million prompt tokens, and of a
    million reply tokens.
    """
    history = "(the history comes here)"
    example = minimal_state(settings)
    listed = settings.proposals_per_reply
    total = settings.per_round
    purposes = list_purposes(0, min(listed, total), "open") if listed > 1 else ()
    request = describe_request(1, 0, purposes=purposes)
    messages = proposal_prompt(settings, history, example, request)
    # Proposals that repeat earlier ones cost a call and no evaluation, so there may be more calls.
    rounds = settings.maximum_rounds
    proposals = total if STRATEGIES[settings.strategy](settings).uses_proposer else 0
    calls = rounds * math.ceil(proposals / listed)
    length = (
        sum(len(message["content"]) for message in messages) / _CHARACTERS_PER_TOKEN
    )
    prompt_tokens = round(calls * (length + 4 * _REPLY_TOKENS))
    # The unpruned model and the base policy are measured as well as the candidates.
    measured = {
        "search": settings.total_candidates,
        "validation": settings.confirmed,
        "test": 2,  # the winner, and the default state
    }
    budgets = len(settings.budgets)
    answers = {
        split: len(dataset.splits[split]) * (1 + budgets * (measured[split] + 1))
        for split in SPLITS
    }
    if len(pool := dataset.splits["search"]) > settings.block:
        answers["search"] = len(pool) * (1 + budgets)
        answers["search"] += settings.block * settings.total_candidates * budgets
    models = max(len(settings.models), 1)
    answers = {split: models * count for split, count in answers.items()}
    cost = Cost.at(price, prompt_tokens, rounds * proposals * _REPLY_TOKENS)
    return messages, calls, cost, answers
