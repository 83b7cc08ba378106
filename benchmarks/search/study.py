"""Comparison of search strategies: same evaluator and number of evaluations, several seeds.

Every search has its own ledger, so a comparison can be resumed, and a line in the results. The
published comparison is a study: each yardstick and K has its own folder, so that it can be resumed,
extended by strategies, and printed again, for which its results are enough, without the ledgers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.common.report import log_progress
from benchmarks.search import results
from benchmarks.search.evaluator import YardstickEvaluator
from benchmarks.search.tables import format_states, format_tables
from benchmarks.yardsticks import open_yardstick
from offline_search.candidates import base_state, paper_state
from offline_search.components import Candidate
from offline_search.dataset import Split
from offline_search.evaluator import EvaluationJob, Evaluator
from offline_search.history import relative_logprob
from offline_search.ledger import Ledger
from offline_search.proposer import Proposer
from offline_search.replay import UnavailableBackend
from offline_search.search import NothingMeasured, ProgressLog, Search
from offline_search.settings import STRATEGIES_WITH_LISTS, Settings
from offline_search.strategies import STRATEGIES
from vllm_autoprune.errors import SearchError
from vllm_autoprune.tpdsl.state import PruningState

WITHOUT_PROPOSER = ("random", "tpe", "autoprune+@none")
"""Arms that ask no language model.

``@none`` is behind the name of a strategy that may use one; the name of a smaller space, such as
``@numbers``, may follow.
"""

ARMS = (
    *WITHOUT_PROPOSER, "autoprune+", "autoprune", "evoprompting-states", "openevolve-states",
    "evoprompting-code", "openevolve-code",
)  # fmt: skip

ABLATIONS = tuple(
    f"autoprune+@none@{space}"
    for space in ("released", "without-diversity", "without-fusion", "without-anchoring")
)
"""The searches of the component table: the full policy, and each smaller space."""

BASE_POLICIES = {"minillava": "visionzip", "miniqwen": "divprune"}
"""Base policy of each yardstick: one that does not read the question, which leaves much to find."""

RELEASED = {"minillava": ("cdpruner", 16), "miniqwen": ("divprune", 8)}
"""Base policy and K of searches around the released policy, which refines CDPruner; mini-Qwen3-VL
has no CLIP for that."""

_IMAGES: dict[Split, int] = {"search": 128, "validation": 128, "test": 128}
_CONFIRMING_IMAGES: dict[Split, int] = {"search": 1, "validation": 1, "test": 600}
"""Images of the test split that winners are confirmed on, each with one question.

The first of them are those of a search."""

_BLOCKS = 24
"""Blocks of questions whose means are kept, for intervals over questions."""

Connect = Callable[[], Proposer]
"""Opens the language model, once for each comparison, because each has its event loop."""


def run_comparison(
    folder: Path,
    arms: Sequence[str],
    seeds: Sequence[int],
    settings: Settings,
    evaluator: Evaluator,
    connect: Connect | None,
    concurrency: int = 1,
) -> None:
    """Run all searches that have not finished, seed by seed.

    An arm is a strategy that may end in ``@none``, without a language model, and in a space.
    ``concurrency`` searches run together, because a small model answers 25 prompts in little more
    time than 5. Searches are independent, so this changes no record except its clock.
    """

    async def run() -> None:
        slots = asyncio.Semaphore(concurrency)
        proposer = connect() if connect else None

        async def run_next(seed: int, arm: str) -> None:
            async with slots:
                await _run_search(folder, arm, seed, settings, evaluator, proposer)

        try:
            await asyncio.gather(*(run_next(seed, arm) for seed in seeds for arm in arms))
        finally:
            if proposer is not None:
                await proposer.close()

    asyncio.run(run())


async def _run_search(
    folder: Path,
    arm: str,
    seed: int,
    common: Settings,
    evaluator: Evaluator,
    proposer: Proposer | None,
) -> None:
    strategy = arm.partition("@")[0]
    asks = asks_model(arm, common)
    writes_lists = asks and strategy in STRATEGIES_WITH_LISTS
    # Without the settings of the language model that a strategy ignores.
    settings = common.model_copy(
        update={
            "strategy": strategy,
            "space": results.space_of(arm),
            "seed": seed,
            "evaluator": evaluator.name,
            "equal_evaluations": True,
            "proposer": common.proposer if asks else "",
            "proposals_per_reply": common.proposals_per_reply if writes_lists else 1,
        }
    )
    name = results.search_name(arm, seed)
    known = results.read_results(folder).get(name)
    if known is not None and known.settings != settings:
        raise SearchError(
            f"{folder / results.RESULTS}: {name} has other settings -> give the same settings "
            "again, or another folder"
        )
    if known is not None:
        return
    progress = ProgressLog(lambda line: print(f"{arm} {seed}: {line}", flush=True))
    with Ledger(folder / f"{name}.jsonl") as ledger:
        backend = proposer if settings.proposer else None
        backend = backend or UnavailableBackend(settings.evaluator, evaluator.dataset)
        try:
            await Search(settings, ledger, evaluator, backend, observer=progress).run()
        except NothingMeasured as error:
            # The other arms go on: that a model writes nothing valid is a result as well.
            print(f"{arm} {seed}: {error}", flush=True)
    results.add_result(folder, arm, seed)


def asks_model(arm: str, settings: Settings) -> bool:
    """Whether an arm asks a language model."""
    strategy, *others = arm.split("@")
    return "none" not in others and STRATEGIES[strategy](settings).uses_proposer


def confirm(
    folder: Path, evaluator: Evaluator, states: Mapping[str, PruningState] | None = None
) -> dict[str, results.Confirmed]:
    """Measure what was not measured yet, every winner and other ``states`` at their own K.

    The file is written after each. Raises :class:`SearchError` for a search on another model than
    the evaluator's.
    """
    confirmed = results.read_confirmation(folder)
    count = len(evaluator.dataset.examples("test"))
    candidates: dict[str, tuple[Candidate, Sequence[int]]] = {
        name: (state, state.budget.range()[:1]) for name, state in (states or {}).items()
    }
    # The name of an evaluator is that of its model, then that of its data.
    model = evaluator.name.partition(", data ")[0]
    for name, result in results.read_results(folder).items():
        searched = result.settings.evaluator.partition(", data ")[0]
        if searched != model:
            raise SearchError(
                f"{name} was measured on {searched}, not on {model} -> give its model with "
                "--yardstick and --checkpoint"
            )
        if result.winner is not None:
            candidates[name] = result.winner.load(), result.settings.budgets

    async def measure(candidate: Candidate, budgets: Sequence[int]) -> results.Confirmed:
        full, *answers = [
            await evaluator.evaluate(EvaluationJob(kept, budget, "test", 0, count))
            for kept, budget in ((None, 0), *((candidate, budget) for budget in budgets))
        ]
        objective = np.mean([relative_logprob(each, full) for each in answers], axis=0)
        right = sum(sum(each.right) for each in answers)
        blocks = np.array_split(objective, min(_BLOCKS, count))
        return results.Confirmed(
            questions=count,
            evaluator=evaluator.name,
            digest=candidate.digest,
            objective=round(float(objective.mean()), 6),
            accuracy=round(right / (count * len(budgets)), 6),
            blocks=tuple(round(float(block.mean()), 4) for block in blocks),
        )

    for name, (candidate, budgets) in candidates.items():
        known = confirmed.get(name)
        if known and (known.digest, known.evaluator) == (candidate.digest, evaluator.name):
            continue
        confirmed[name] = asyncio.run(measure(candidate, budgets))
        log_progress(f"{name}: {confirmed[name].objective:+.4f}")
        results.write_confirmation(folder, confirmed)
    return confirmed


def run_study(
    folder: Path,
    name: str,
    arms: Sequence[str],
    seeds: Sequence[int],
    settings: Settings,
    connect: Connect | None,
    concurrency: int = 1,
    quotas: Sequence[int] = (),
) -> str:
    """Run what a folder lacks of one yardstick at the K of the settings; the tables in Markdown.

    With ``quotas``, the released policy is measured with each of these q_e.
    """
    folder.mkdir(parents=True, exist_ok=True)
    yardstick, (budget,), base = open_yardstick(name), settings.budgets, settings.base_policy
    evaluator = YardstickEvaluator(yardstick, _IMAGES, each=1, base_policy=base)
    run_comparison(folder, arms, seeds, settings, evaluator, connect, concurrency)
    confirming = YardstickEvaluator(yardstick, _CONFIRMING_IMAGES, each=1, base_policy=base)
    swept = {f"q_e = {q}": paper_state(settings, q) for q in quotas if q <= budget}
    confirm(folder, confirming, {results.BASE: base_state(settings), **swept})
    tables = format_tables(folder, arms, seeds)
    if swept:
        tables += f"\n{format_states(folder, swept)}"
    return f"## {yardstick.name}, K = {budget}\n\n{tables}"
