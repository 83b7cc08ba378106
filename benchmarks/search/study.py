"""Comparison of search strategies: same evaluator and number of evaluations, several seeds.

Each yardstick and K has its own folder. Every search has its own ledger there, and a line in the
results once it has ended. A search whose result is known is not run again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.common.report import log_progress
from benchmarks.search.evaluator import JointEvaluator, YardstickEvaluator
from benchmarks.search.results import (
    BASE,
    CONFIRMED,
    Confirmed,
    SearchResult,
    format_tables,
    read_confirmed,
    read_results,
    read_space,
)
from benchmarks.yardsticks import open_yardstick
from benchmarks.yardsticks.yardstick import Yardstick
from offline_search.candidates import base_state, paper_state
from offline_search.dataset import Dataset, Split
from offline_search.evaluator import EvaluationJob, Evaluator
from offline_search.history import Answers
from offline_search.ledger import Ledger, read_ledger
from offline_search.models import ModelScales, mask_models
from offline_search.proposer import Proposer
from offline_search.report import ProgressLog, read_report
from offline_search.search import NothingMeasured, Search, replay_on
from offline_search.settings import STRATEGIES_WITH_LISTS, Settings
from offline_search.strategies import STRATEGIES
from vllm_autoprune.cli.output import write_file
from vllm_autoprune.errors import SearchError
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.state import PruningState

WITHOUT_PROPOSER = ("random", "tpe", "autoprune+@none")
"""Arms that use no language model.

An arm is the name of a strategy. The suffix ``@none`` makes a strategy do without its language
model. The name of a smaller space may follow, as in ``@numbers``.
"""
ARMS = (*WITHOUT_PROPOSER, "autoprune+", "autoprune", "evoprompting", "openevolve")
ABLATIONS = tuple(
    f"autoprune+@none@{space}"
    for space in (
        "released",
        "without-diversity",
        "without-fusion",
        "without-anchoring",
    )
)
"""The searches of the component table: the full policy, and each smaller space."""
BASE_POLICIES = {"minillava": "visionzip", "miniqwen": "divprune"}
"""Base policy of each yardstick; neither reads the question, which leaves much for a search to
find."""
ANY_BASE_POLICY = "divprune"
"""Base policy of searches over several yardsticks, and on others: every model can run it."""
RELEASED = {"minillava": ("cdpruner", 16), "miniqwen": ("divprune", 8)}
"""Base policy and K of searches around the released policy. It refines CDPruner, which
mini-Qwen3-VL cannot run, because it has no CLIP."""

PROPOSED = Path(__file__).parent / "recorded/proposed"
"""Folder of the ledgers of searches with proposals of a capable language model, by yardstick; a
search of several yardsticks has another name."""

_IMAGES: Mapping[Split, int] = {"search": 128, "validation": 128, "test": 128}
_CONFIRMING_IMAGES: Mapping[Split, int] = {"search": 1, "validation": 1, "test": 600}
"""Images of the test split on which winners are confirmed, with one question each. The first of
them are also the test images of a search."""
_BLOCKS = 24
"""Number of blocks of questions whose mean scores are kept, for intervals over questions."""

Connect = Callable[[], AbstractAsyncContextManager[Proposer]]
"""Opens the language model; called once for each comparison, because each has its own event
loop."""


def asks_model(arm: str, settings: Settings) -> bool:
    """Whether an arm uses a language model."""
    strategy, *options = arm.split("@")
    return "none" not in options and STRATEGIES[strategy](settings).uses_proposer


@dataclass(frozen=True)
class Study:
    """Searches of one folder: each arm with each seed, and otherwise the same settings.

    ``at_once`` searches run together, because a small model answers 25 prompts in little more time
    than 5. This changes nothing but the times in a search's records, because searches are
    independent. The ``leaders`` best candidates of each search are measured on new questions too.
    """

    folder: Path
    arms: Sequence[str]
    seeds: Sequence[int]
    settings: Settings
    connect: Connect | None = None
    at_once: int = 1
    leaders: int = 0

    def run(
        self,
        yardsticks: Sequence[Yardstick],
        quotas: Sequence[int] = (),
        pool: int = _IMAGES["search"],
    ) -> str:
        """Run the searches that the folder lacks, and return the tables.

        With several ``yardsticks``, every candidate is measured on each. ``pool`` is the number of
        questions of the search split, to each yardstick. If it exceeds the settings' block, each
        round gets fresh questions from it. The base policy is confirmed too and, with ``quotas``,
        the released policy with each of these values of q_e.
        """
        settings = self.settings
        self.folder.mkdir(parents=True, exist_ok=True)
        images: dict[Split, int] = {**_IMAGES, "search": pool}
        self.search(open_evaluator(yardsticks, images, settings.block))
        states = {BASE: base_state(settings)}
        states |= {f"q_e = {quota}": paper_state(settings, quota) for quota in quotas}
        self.confirm(open_evaluator(yardsticks, _CONFIRMING_IMAGES), states)
        tables = format_tables(self.folder, self.arms, self.seeds)
        names = " and ".join(yardstick.name for yardstick in yardsticks)
        return f"## {names}, K = {settings.budgets[0]}\n\n{tables}"

    def search(self, evaluator: Evaluator) -> None:
        """Run all searches that have not finished, seed by seed."""

        async def run_all() -> None:
            slots = asyncio.Semaphore(self.at_once)
            async with self.connect() if self.connect else nullcontext() as proposer:
                searches = (
                    self._search(arm, seed, evaluator, proposer, slots)
                    for seed in self.seeds
                    for arm in self.arms
                )
                await asyncio.gather(*searches)

        asyncio.run(run_all())

    async def _search(
        self,
        arm: str,
        seed: int,
        evaluator: Evaluator,
        proposer: Proposer | None,
        slots: asyncio.Semaphore,
    ) -> None:
        """Run one search and add its result, unless the folder has the result already."""
        name = f"{arm}-{seed}"
        settings = self._choose_settings(arm, seed, evaluator.name)
        if (previous := read_results(self.folder).get(name)) is not None:
            if previous.settings != settings:
                raise SearchError.of(
                    str(self.folder),
                    f"{name} has other settings",
                    "give the same settings again, or another folder",
                )
            # A search whose leaders are missing is run again from its ledger.
            if previous.leaders or not self.leaders:
                return
        path = self.folder / f"{name}.jsonl"
        backend = proposer if settings.proposer else None
        observer = ProgressLog(lambda line: print(f"{arm} {seed}: {line}", flush=True))
        async with slots:
            with Ledger(path) as ledger:
                search = Search(settings, ledger, evaluator, backend, observer=observer)
                try:
                    await search.run()
                except NothingMeasured as error:
                    # The other arms go on, because it is a result too that a model writes nothing
                    # valid.
                    print(f"{arm} {seed}: {error}", flush=True)
        assert search.history is not None, "a search measures its base policy or raises"
        result = SearchResult.read(name, path, search.history, self.leaders)
        results = {**read_results(self.folder), name: result}
        lines = (f"{results[key].model_dump_json()}\n" for key in sorted(results))
        write_file(self.folder / "results.jsonl", "".join(lines))

    def _choose_settings(self, arm: str, seed: int, evaluator: str) -> Settings:
        """Settings of one search; those of a language model are dropped if its arm uses none."""
        strategy = arm.partition("@")[0]
        changes = {
            "strategy": strategy,
            "space": read_space(arm),
            "seed": seed,
            "evaluator": evaluator,
            "equal_evaluations": True,
        }
        asks = asks_model(arm, self.settings)
        if not asks:
            changes["proposer"] = ""
        if not asks or strategy not in STRATEGIES_WITH_LISTS:
            changes["proposals_per_reply"] = 1
        return self.settings.model_copy(update=changes)

    def confirm(self, evaluator: Evaluator, states: Mapping[str, PruningState]) -> None:
        """Measure the winners, leaders and other ``states`` that were not measured yet.

        The file is written after each of them.
        """
        confirmed = read_confirmed(self.folder)
        count = len(evaluator.dataset.splits["test"])

        def answer(state: PruningState | None) -> Answers:
            budget = self.settings.budgets[0]
            job = EvaluationJob(state, budget, "test", 0, count)
            return asyncio.run(evaluator.evaluate(job))

        examples = evaluator.dataset.splits["test"]
        models = mask_models(examples)
        scales = ModelScales()
        if models:
            base = answer(base_state(self.settings)).relative_to(answer(None), ())
            scales = ModelScales.measure(examples, base)
        candidates = dict(states)
        results = read_results(self.folder).values()
        for result in results:
            if result.winner is not None:
                candidates[result.name] = load_state(result.winner.state)
        for result in results:
            for leader in result.leaders:
                candidates[f"{result.name} {leader.name}"] = load_state(leader.state)
        for name, state in candidates.items():
            previous = confirmed.get(name)
            if (
                previous
                and previous.digest == state.digest
                and previous.evaluator == evaluator.name
                and previous.accuracy_blocks
            ):
                continue
            answers = answer(state)
            loss = answers.relative_to(answer(None), ())
            objective = scales.apply(examples, loss)
            correct = np.array(answers.right)
            blocks = np.array_split(objective, min(_BLOCKS, count))
            rights = np.array_split(correct, len(blocks))
            confirmed[name] = Confirmed(
                questions=count,
                evaluator=evaluator.name,
                digest=state.digest,
                objective=round(float(objective.mean()), 6),
                accuracy=round(answers.accuracy, 6),
                blocks=tuple(round(float(block.mean()), 4) for block in blocks),
                accuracy_blocks=tuple(
                    round(float(right.mean()), 4) for right in rights
                ),
                models={
                    model: (
                        round(float(objective[mask].mean()), 6),
                        round(float(correct[mask].mean()), 6),
                    )
                    for model, mask in models.items()
                },
            )
            log_progress(f"{name}: {confirmed[name].objective:+.4f}")
            content = CONFIRMED.dump_json(confirmed, indent=1)
            write_file(self.folder / "confirmation.json", content)


def open_evaluator(
    yardsticks: Sequence[Yardstick],
    images: Mapping[Split, int],
    block: int | None = None,
) -> YardstickEvaluator | JointEvaluator:
    """The evaluator of one yardstick or several, with one question about every image."""
    evaluators = [
        YardstickEvaluator(yardstick, images, each=1, block=block)
        for yardstick in yardsticks
    ]
    return evaluators[0] if len(evaluators) == 1 else JointEvaluator(evaluators)


def read_questions(recording: Path, settings: Settings) -> Dataset:
    """Questions of ``recording``, one of the ledgers in ``PROPOSED``."""
    names = settings.models or (recording.stem,)
    yardsticks = [open_yardstick(name) for name in names]
    return open_evaluator(yardsticks, _IMAGES, settings.block).dataset


def replay_study(recording: Path) -> str:
    """Replay ``recording``, one of the ledgers in ``PROPOSED``, without its model.

    Returns its result. Raises :class:`SearchError` if the replay's records differ.
    """
    read = partial(read_questions, recording)
    with TemporaryDirectory() as folder:
        again = Path(folder) / recording.name
        result = asyncio.run(replay_on(read, recording, again))
        best = read_report(read_ledger(again)).curve()[-1][1]
    if result.recorded != result.replayed:
        raise SearchError.of(
            str(recording), "its replay differs", "use the version that wrote it"
        )
    winner = result.winner
    test = winner.test
    gain = test.gain
    return (
        f"{recording.stem}: candidate {winner.winner}, search objective {best:+.2f}; on "
        f"{test.examples} test questions {gain.value:+.2f} ({gain.low:+.2f} to {gain.high:+.2f}) "
        "over the base policy; "
        f"records {result.replayed[:12]}, equal to the replay's"
    )
