"""Search loop: Algorithm 2 of the paper, with every step recorded in a ledger.

    strategy ─ proposer ─> drafts ─> load ─> safety check ─> duplicates ─> evaluator ─> trials
        ^                                                                                 │
        └─────────────────────────── summary H_t <── history <────────────────────────────┘

Resuming and replaying need no code of their own: the loop runs again from its start and takes
completed steps from the ledger.

Where the search split is longer than a block, each round has fresh questions of it, which leaders
are asked as well: who was lucky once falls back. Where leaders are tied the search goes elsewhere,
and where nothing better is found it ends.

The winner has the best lower bound of its paired gain over the base policy on search and validation
examples together: the search split alone overestimates candidates that were lucky on it, and the
validation split alone is a smaller sample. Of those that are tied it is the simplest. It is
reported on the test split, beside the base policy on the same examples.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

from offline_search.candidates import base_state, list_purposes, minimal_state
from offline_search.components import structure
from offline_search.dataset import SPLITS, Dataset, Split, read_dataset
from offline_search.evaluator import EvaluationJob, Evaluator, RecordedEvaluator
from offline_search.history import Answers, History, compare, fit_difficulty, gave_up
from offline_search.ledger import (
    Comparison,
    Cost,
    Ledger,
    SettingsRecord,
    Standing,
    SummaryRecord,
    WinnerRecord,
    digest_records,
    read_ledger,
)
from offline_search.prompt import Messages, describe_images, proposal_prompt, summarize
from offline_search.proposer import ProposalClient, Proposer
from offline_search.report import ProgressLog
from offline_search.rounds import RoundEvaluator
from offline_search.settings import RACED_PER_PLACE, Settings
from offline_search.strategies import STRATEGIES
from offline_search.strategies.language_model import Round
from vllm_autoprune.errors import EvaluationFailed, SearchError
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.statistics import ClusterBootstrap, Estimate, Floats
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import VisualTokens


class NothingMeasured(SearchError):
    """No candidate of a search was measured on the whole search split."""


_SILENT = ProgressLog(lambda line: None)

_LEAST_SHARE = 0.5
"""Share of its budget before which no plateau ends a search."""

_IDLE_ROUNDS = 4
"""Rounds in a row after which a search ends where the best of none is ahead by the resolution."""


class Search:
    """One search; ``most_money`` bounds the cost of its proposer, ``observer`` is told.

    Without a ``proposer`` a request to it ends the search, unless its reply is recorded.
    """

    history: History | None = None
    """What was measured, once the base policy was."""

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        evaluator: Evaluator,
        proposer: Proposer | None = None,
        most_money: float | None = None,
        observer: ProgressLog = _SILENT,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._observer = observer
        self._dataset = evaluator.dataset
        self._base = base_state(settings)
        self._evaluator = RecordedEvaluator(ledger, evaluator, self._base.digest)
        self._client = ProposalClient(settings, ledger, proposer, most_money)
        examples = self._dataset.splits["search"]
        probes = evaluator.probes()
        self._facts = describe_images(settings, probes) if settings.proposer else ""
        self._rounds = RoundEvaluator(
            settings, ledger, self._evaluator, examples, probes
        )

    async def run(self) -> WinnerRecord:  # noqa: C901, PLR0915
        """Run or resume the search; raises :class:`SearchError` if it cannot continue."""
        settings = self._settings
        ledger = self._ledger
        known = ledger.find(SettingsRecord, "opened")
        if known is not None and known.settings != settings:
            before = dict(known.settings)
            now = dict(settings)
            differing = [
                f"{name} is {now[name]!r}, was {before[name]!r}"
                for name in before
                if before[name] != now[name]
            ]
            raise SearchError(
                f"ledger {ledger.path} belongs to another search ({'; '.join(differing)}) -> give "
                "the same settings again, or another ledger"
            )
        ledger.put(SettingsRecord(settings=settings))
        strategy = STRATEGIES[settings.strategy](settings)
        history = self.history = await self._rounds.evaluate_baselines(self._base)
        # The other splits now, because a question that cannot be asked would else end the search.
        await self._compare(self._base, "validation")
        await self._compare(self._base, "test")
        examples = self._rounds.blocks[0].stop
        self._observer.on_start(history, examples)
        full = examples * len(settings.budgets)
        budget = settings.total_candidates * full
        plateaus = 0
        since = 0
        fresh = len(self._rounds.blocks) > 1
        history.resolution = settings.resolution or 0.0
        summary = summarize(history)
        for number in range(1, settings.maximum_rounds + 1):
            spent = history.answers
            if settings.has_fixed_evaluations and spent >= budget:
                break
            count = settings.per_round
            if settings.races:
                # The last round is smaller, so that a race exceeds its budget by little.
                count = RACED_PER_PLACE * min(count, max(1, (budget - spent) // full))
            rng = Random(f"{settings.seed} {number}")
            tied = (
                {structure(each.require_state()) for each in history.tied()}
                if plateaus
                else ()
            )
            place = f"Round {number} of {settings.rounds}."
            last = number == settings.rounds
            if settings.has_fixed_evaluations:
                place = f"Round {number}; {spent} of {budget} answers are spent."
                last = budget - spent <= settings.per_round * full
            if last and history.best() is not None:
                place += " It is the last one: only refinements of listed candidates are asked for."
            current = Round(
                number,
                count,
                history,
                summary,
                rng,
                self._client,
                frozenset(tied),
                self._facts,
                place,
            )
            drafts = await strategy.propose(current)
            trials = await self._rounds.evaluate_round(
                drafts, number, history, settings.races
            )
            fixed = settings.has_fixed_evaluations
            share = min(
                1.0, history.answers / budget if fixed else number / settings.rounds
            )
            if fresh and settings.resolution is None:
                reach = min(len(history.examples), settings.rounds * examples)
                history.resolution = history.reach(reach)
            if history.resolution and number >= since + 2:
                leads = history.leads(number - 1, number)
                recent = {gap.verdict(history.resolution) for gap in leads}
                if "better" in recent:
                    plateaus = 0
                elif not plateaus and recent == {"undecided"}:
                    plateaus = 1
                    since = number
            ahead = [
                gap.value for gap in history.leads(number - _IDLE_ROUNDS + 1, number)
            ]
            is_idle = (
                bool(history.resolution and ahead) and max(ahead) <= history.resolution
            )
            if share >= _LEAST_SHARE and is_idle:
                plateaus = 2
                since = number
            standing = self._describe_standing(history, plateaus)
            summary = summarize(history)
            ledger.put(SummaryRecord(round=number, text=summary, standing=standing))
            self._observer.on_round(trials, history, share, self._client.total_cost())
            if plateaus and since == number:
                self._observer.on_plateau(standing, budget)
            if plateaus > 1 or gave_up([trial.result for trial in history.trials]):
                break
        winner = ledger.put(await self._choose_winner(history))
        self._observer.on_finish(winner)
        return winner

    @staticmethod
    def _describe_standing(history: History, plateaus: int) -> Standing:
        leader = history.leader()
        base = history.base
        gain = history.compare(leader, base)
        return Standing(
            best=leader.name,
            objective=history.estimate(leader) or 0.0,
            gain=round(gain.value, 6),
            error=round(gain.error, 6) if math.isfinite(gain.error) else 0.0,
            tied=tuple(trial.name for trial in history.tied()),
            resolution=history.resolution,
            answers=history.answers,
            plateaus=plateaus,
        )

    async def _choose_winner(self, history: History) -> WinnerRecord:
        """The winner; raises :class:`SearchError` if no candidate was measured to the end."""
        settings = self._settings
        candidates = {
            trial.name: trial for trial in history.ranked()[: settings.confirmed]
        }
        if not candidates:
            raise NothingMeasured(
                "no candidate was evaluated to the end -> `vllm-autoprune search report` has the "
                "reasons; fix them and begin a new ledger"
            )
        confirmed = dict[str, Comparison]()
        both = dict[str, Floats]()  # values on the questions of both splits, (M + V,)
        examples = [*history.examples, *self._dataset.splits["validation"]]
        for name, trial in {"": history.base, **candidates}.items():
            with contextlib.suppress(EvaluationFailed):
                state = trial.require_state()
                searched = history.values(trial)
                comparison = await self._compare(state, "validation")
                values, _ = await self._values(state, "validation")
                both[name] = values if searched is None else np.append(searched, values)
                if name:
                    confirmed[name] = comparison
        fitted = [*both.values()]
        unasked = np.full(len(examples) - len(history.examples), np.nan)
        for trial in history.evaluated():
            if (
                trial.name not in both
                and (searched := history.values(trial)) is not None
            ):
                fitted.append(np.append(searched, unasked))
        # Of both splits together: their shares differ between candidates, and so do their levels.
        difficulty = fit_difficulty(np.array(fitted))
        gains = {
            name: compare(examples, both[name], both[""], difficulty)
            for name in confirmed
        }
        estimates = {}
        for name, validation in confirmed.items():
            total = len(history.examples) * (history.estimate(candidates[name]) or 0.0)
            total += validation.examples * validation.objective.value
            estimates[name] = round(total / len(examples), 6)

        def rank(name: str) -> tuple[bool, float, float]:
            """Those within a standard error of the best first (Breiman 1984), by simplicity."""
            gap = compare(examples, both[name], both[best], difficulty)
            is_tied = name == best or abs(gap.value) <= min(
                history.resolution, gap.error
            )
            state = candidates[name].require_state()
            selector = state.constraints.selector
            complexity = (
                len(structure(state))
                + selector.bounds(settings.source_budget)[0] / 1000
            )
            return not is_tied, complexity if is_tied else 0.0, -gains[name].low

        best = max(gains, key=lambda name: gains[name].low, default="")
        test = None
        name = ""
        for name in sorted(gains, key=rank):
            with contextlib.suppress(EvaluationFailed):
                test = await self._compare(candidates[name].require_state(), "test")
                break
        if test is None:
            raise SearchError(
                "none of the best candidates could be measured on the validation and test splits "
                "-> look at the server's log and begin a new ledger"
            )
        winner = candidates[name]
        base = await self._compare(self._base, "test")
        state = winner.require_state()
        figures = {
            "validation": confirmed[name],
            "test": test,
            "test_base_policy": base,
        }
        scores = {
            key: scores.model_dump(mode="json") for key, scores in figures.items()
        }
        provenance = state.provenance.model_copy(
            update={
                "found_by": f"vllm-autoprune search, strategy {settings.strategy}, "
                f"proposer {settings.proposer or 'none'}",
                "evaluated_on": settings.evaluator,
                "seed": settings.seed,
                "scores": {"search_objective": history.estimate(winner), **scores},
                "notes": f"Candidate {name} by {winner.proposal.origin}. "
                f"Objective: {settings.objective_text}. Ahead of {settings.base_policy} alone by "
                f"{_format_gain(confirmed[name])} on validation, {_format_gain(test)} on test.",
            }
        )
        # Name and provenance are outside a state's digest.
        budget = re.sub(r"\W+", "-", f"{settings.budgets[0]}")
        title = f"{state.base_policy.name}-searched-k{budget}"
        state = state.model_copy(update={"name": title, "provenance": provenance})
        return WinnerRecord(
            winner=name,
            digest=state.digest,
            state=state.model_dump(mode="json"),
            confirmed=confirmed,
            estimates=estimates,
            gains={name: gap.estimate() for name, gap in gains.items()},
            test=test,
            base=base,
        )

    async def _compare(self, candidate: PruningState, split: Split) -> Comparison:
        """Scores of a candidate on a split, and paired differences to the base policy."""
        examples = self._dataset.splits[split]
        values, ours = await self._values(candidate, split)
        base_values, theirs = await self._values(self._base, split)
        # Share of budgets at which each example is answered correctly, (M,).
        correct, base_correct = (
            np.mean([np.asarray(each.right, float) for each in answers], axis=0)
            for answers in (ours, theirs)
        )

        def mean(scores: Sequence[float]) -> float:
            return round(sum(scores) / len(scores), 6)

        return Comparison(
            split=split,
            examples=len(examples),
            accuracy=mean([answers.accuracy for answers in ours]),
            mme_total=mean(
                [1000 * float(each.mme_shares(examples).mean()) for each in ours]
            ),
            objective=_bootstrap_mean(examples, values),
            gain=_bootstrap_mean(examples, values - base_values),
            accuracy_gain=_bootstrap_mean(examples, correct - base_correct),
        )

    async def _values(
        self, candidate: PruningState, split: Split
    ) -> tuple[Floats, Sequence[Answers]]:
        """Values of a candidate on a split ``(M,)``, and its answers at each budget."""
        settings = self._settings
        examples = self._dataset.splits[split]

        async def measure(candidate: PruningState | None, budget: int | str) -> Answers:
            job = EvaluationJob(candidate, budget, split, 0, len(examples))
            return await self._evaluator.evaluate(job)

        full = await measure(None, 0)
        answers = [await measure(candidate, budget) for budget in settings.budgets]
        relative = [
            each.relative_to(full, examples, settings.objective) for each in answers
        ]
        return np.mean(relative, 0), answers


def _format_gain(comparison: Comparison) -> str:
    gain = comparison.gain
    return f"{gain.value:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})"


def _bootstrap_mean(examples: Sequence[Example], values: Floats) -> Estimate:
    """Mean with its 95 % bootstrap interval, clustered by image, rounded to six decimals."""
    bootstrap = ClusterBootstrap([example.image for example in examples])
    return Estimate.of(bootstrap.mean(values)).rounded(6)


@dataclass(frozen=True)
class _Recording:
    """Evaluator whose answers are all recorded; fingerprints of selections are as well."""

    name: str
    dataset: Dataset

    def probes(self) -> Sequence[VisualTokens]:
        return ()

    async def evaluate(self, job: EvaluationJob) -> Answers:
        raise SearchError(
            f"the recording has no evaluation of examples {job.start} to {job.stop} of the "
            f"{job.split} split at K = {job.budget} -> resume the recorded search to its end first"
        )


async def replay(
    recording: Path, into: Path, data: Path, images: int | None = None
) -> tuple[WinnerRecord, str, str]:
    """:func:`replay_on` of a data folder, ``images`` of each of whose splits are read."""

    def read(settings: Settings) -> Dataset:
        # The order of the questions, and with ``images`` their choice, depends on the seed.
        dataset = read_dataset(data, settings.seed, images)
        return dataset.in_blocks(settings.block, settings.seed)

    return await replay_on(read, recording, into)


async def replay_on(
    read: Callable[[Settings], Dataset], recording: Path, into: Path
) -> tuple[WinnerRecord, str, str]:
    """Replay a recording into a new ledger; returns the winner and the digests of both ledgers.

    ``read`` gives the questions of a search with these settings. The recording is only read. Raises
    :class:`SearchError` if it was made on other data, or if a step needs a request that was not
    recorded.
    """
    recorded = read_ledger(recording)
    head = next(
        (record for record in recorded if isinstance(record, SettingsRecord)), None
    )
    if head is None:
        raise SearchError(
            f"ledger {recording}: contains no search -> give one that has begun"
        )
    settings, dataset = head.settings, read(head.settings)
    # Every evaluator of the package and of the benchmarks ends its name so; others are not checked.
    named = re.search(r"data ([0-9a-f]{12})$", settings.evaluator)
    if named is not None and not dataset.digest.startswith(named[1]):
        raise SearchError(
            f"ledger {recording}: its search had other questions than {dataset.folder} gives "
            f"(data {named[1]}, not {dataset.digest[:12]}) -> give the data folder and the "
            "--images of the recorded search"
        )
    with Ledger(into, recorded) as ledger:
        winner = await Search(
            settings, ledger, _Recording(settings.evaluator, dataset)
        ).run()
        return winner, digest_records(recorded), digest_records(ledger)


_CHARACTERS_PER_TOKEN = 3.5
"""Approximate, for English and JSON."""

_REPLY_TOKENS = 300
"""Approximate tokens of a proposal; the history adds about four times as many to a prompt."""


def estimate_cost(
    settings: Settings, dataset: Dataset, price: tuple[float, float]
) -> tuple[Messages, int, Cost, dict[Split, int]]:
    """The first prompt of a search, and the requests, the cost, and the answers that it takes.

    Requests and answers of each split are upper bounds without repairs; tokens and money, at the
    price of a million tokens of prompts and of replies, are rough averages.
    """
    history = "(the history comes here)"
    example = minimal_state(settings)
    listed = settings.proposals_per_reply
    total = settings.per_round
    purposes = list_purposes(0, min(listed, total), measured=True) if listed > 1 else ()
    messages = proposal_prompt(settings, history, example, 0, total, purposes)
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
        "test": 1,
    }
    budgets = len(settings.budgets)
    answers = {
        split: len(dataset.splits[split]) * (1 + budgets * (measured[split] + 1))
        for split in SPLITS
    }
    if len(pool := dataset.splits["search"]) > settings.block:
        answers["search"] = len(pool) * (1 + budgets)
        answers["search"] += settings.block * settings.total_candidates * budgets
    cost = Cost.at(price, prompt_tokens, rounds * proposals * _REPLY_TOKENS)
    return messages, calls, cost, answers
