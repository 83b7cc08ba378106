"""Comparison of search strategies: same evaluator and number of evaluations, several seeds.

Each yardstick and K has its own folder. Every search has its own ledger there, and once it has
ended a line in the results: a search whose result is known is not run again, and results are enough
to print the tables. A ledger takes hundreds of kilobytes, a result two: those of published tables
are in the repository.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import get_args

import numpy as np
from pydantic import Field, JsonValue, TypeAdapter

from benchmarks.common.report import log_progress
from benchmarks.search.evaluator import YardstickEvaluator
from benchmarks.yardsticks.yardstick import Yardstick
from offline_search.candidates import base_state, paper_state
from offline_search.dataset import Split
from offline_search.evaluator import EvaluationJob, Evaluator
from offline_search.history import Answers
from offline_search.ledger import Ledger, read_ledger
from offline_search.proposer import Proposer
from offline_search.report import ProgressLog, read_report
from offline_search.search import NothingMeasured, Search
from offline_search.settings import STRATEGIES_WITH_LISTS, Settings, Space
from offline_search.strategies import STRATEGIES
from vllm_autoprune.cli.output import write_file
from vllm_autoprune.errors import SearchError
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.report import Table
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.state import PruningState

WITHOUT_PROPOSER = ("random", "tpe", "autoprune+@none")
"""Arms that ask no language model.

An arm is a strategy; ``@none`` behind it leaves out the language model of one that may use one, and
the name of a smaller space, such as ``@numbers``, may follow.
"""
ARMS = (*WITHOUT_PROPOSER, "autoprune+", "autoprune", "evoprompting", "openevolve")
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

BASE = "base policy"
"""Name of the base policy alone among what was confirmed."""
_CURVE_SHARES = (0.1, 0.2, 0.4, 1.0)
"""Shares of all answers after which the best objective on the search split is kept."""
_IMAGES: Mapping[Split, int] = {"search": 128, "validation": 128, "test": 128}
_CONFIRMING_IMAGES: Mapping[Split, int] = {"search": 1, "validation": 1, "test": 600}
"""Images of the test split that winners are confirmed on, each with one question; the first of them
are those of a search."""
_BLOCKS = 24
"""Blocks of questions whose means are kept, for intervals over questions."""

Connect = Callable[[], AbstractAsyncContextManager[Proposer]]
"""Opens the language model, once for each comparison, because each has its event loop."""


class _Winner(FrozenModel):
    """The winner of a search, with its scores on the test split."""

    digest: str
    objective: float
    gain: float = Field(description="objective less the base policy's")
    accuracy: float
    state: dict[str, JsonValue]


class _SearchResult(FrozenModel):
    """One search that has ended; without a winner where it gave up before anything was measured."""

    name: str
    settings: Settings
    candidates: int
    invalid: int = Field(description="candidates that were invalid or unsafe")
    replies: int = Field(description="replies of the language model")
    answers: int
    curve: tuple[float | None, ...]
    winner: _Winner | None

    @classmethod
    def read(cls, name: str, path: Path) -> _SearchResult:
        """The result of a search whose ledger is complete."""
        report = read_report(read_ledger(path))
        answers, winner = report.answers, None
        best = [[y for x, y in report.curve() if x <= share * answers] for share in _CURVE_SHARES]
        if (record := report.winner) is not None:
            winner = _Winner(
                digest=record.digest,
                objective=record.test.objective.value,
                gain=record.test.gain.value,
                accuracy=record.test.accuracy,
                # Without the provenance, which has the scores again.
                state={k: v for k, v in record.state.items() if k != "provenance"},
            )
        return cls(
            name=name,
            settings=report.settings,
            candidates=len(report.trials),
            invalid=report.statuses.get("invalid", 0) + report.statuses.get("unsafe", 0),
            replies=len(report.replies),
            answers=answers,
            curve=tuple(reached[-1] if reached else None for reached in best),
            winner=winner,
        )


class _Confirmed(FrozenModel):
    """One winner or state: its mean objective, and accuracy."""

    questions: int
    evaluator: str
    digest: str
    objective: float
    accuracy: float
    blocks: tuple[float, ...] = Field(
        default=(),
        exclude_if=lambda blocks: not blocks,
        description="mean objective of each of several equal blocks of the questions",
    )


_CONFIRMED = TypeAdapter(dict[str, _Confirmed])


def _read_results(folder: Path) -> dict[str, _SearchResult]:
    """Results of the searches that have ended, by arm and seed, such as ``tpe-0``."""
    path = folder / "results.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    return {result.name: result for result in map(_SearchResult.model_validate_json, lines)}


def _read_confirmed(folder: Path) -> dict[str, _Confirmed]:
    """What was confirmed so far, by name of the search or state."""
    path = folder / "confirmation.json"
    return _CONFIRMED.validate_json(path.read_bytes()) if path.exists() else {}


def _read_space(arm: str) -> Space:
    """The space of an arm: the whole language unless its name ends in another, as ``@numbers``."""
    return next((space for space in get_args(Space) if arm.endswith(f"@{space}")), "all")


def asks_model(arm: str, settings: Settings) -> bool:
    """Whether an arm asks a language model."""
    strategy, *options = arm.split("@")
    return "none" not in options and STRATEGIES[strategy](settings).uses_proposer


def _run_comparison(
    folder: Path,
    arms: Sequence[str],
    seeds: Sequence[int],
    common: Settings,
    evaluator: Evaluator,
    connect: Connect | None = None,
    at_once: int = 1,
) -> None:
    """Run all searches that have not finished, seed by seed.

    ``at_once`` searches run together, because a small model answers 25 prompts in little more time
    than 5. Searches are independent, so this changes no record except its clock.
    """
    slots = asyncio.Semaphore(at_once)

    async def run_search(arm: str, seed: int, proposer: Proposer | None) -> None:
        name, strategy, asks = f"{arm}-{seed}", arm.partition("@")[0], asks_model(arm, common)
        writes_lists = asks and strategy in STRATEGIES_WITH_LISTS
        # Without the settings of a language model that the strategy ignores.
        update = {
            "strategy": strategy,
            "space": _read_space(arm),
            "seed": seed,
            "evaluator": evaluator.name,
            "equal_evaluations": True,
            "proposer": common.proposer if asks else "",
            "proposals_per_reply": common.proposals_per_reply if writes_lists else 1,
        }
        settings = common.model_copy(update=update)
        if (known := _read_results(folder).get(name)) is not None:
            if known.settings != settings:
                fix = "give the same settings again, or another folder"
                raise SearchError(f"{folder}: {name} has other settings -> {fix}")
            return
        path, backend = folder / f"{name}.jsonl", proposer if settings.proposer else None
        observer = ProgressLog(lambda line: print(f"{arm} {seed}: {line}", flush=True))
        async with slots:
            with Ledger(path) as ledger:
                try:
                    await Search(settings, ledger, evaluator, backend, observer=observer).run()
                except NothingMeasured as error:
                    # The other arms go on: that a model writes nothing valid is a result as well.
                    print(f"{arm} {seed}: {error}", flush=True)
        results = {**_read_results(folder), name: _SearchResult.read(name, path)}
        lines = (f"{results[key].model_dump_json()}\n" for key in sorted(results))
        write_file(folder / "results.jsonl", "".join(lines))

    async def run_all() -> None:
        async with connect() if connect else nullcontext() as proposer:
            searches = (run_search(arm, seed, proposer) for seed in seeds for arm in arms)
            await asyncio.gather(*searches)

    asyncio.run(run_all())


def _confirm(
    folder: Path, evaluator: Evaluator, states: Mapping[str, PruningState], budget: int
) -> None:
    """Measure what was not measured yet, every winner and other ``states``, with K = ``budget``.

    The file is written after each.
    """
    confirmed, count = _read_confirmed(folder), len(evaluator.dataset.splits["test"])

    def answer(state: PruningState | None) -> Answers:
        return asyncio.run(evaluator.evaluate(EvaluationJob(state, budget, "test", 0, count)))

    winners = {n: load_state(r.winner.state) for n, r in _read_results(folder).items() if r.winner}
    for name, state in {**states, **winners}.items():
        known = confirmed.get(name)
        if known and (known.digest, known.evaluator) == (state.digest, evaluator.name):
            continue
        answers = answer(state)
        objective = answers.relative_to(answer(None), ())
        blocks = np.array_split(objective, min(_BLOCKS, count))
        confirmed[name] = _Confirmed(
            questions=count,
            evaluator=evaluator.name,
            digest=state.digest,
            objective=round(float(objective.mean()), 6),
            accuracy=round(answers.accuracy, 6),
            blocks=tuple(round(float(block.mean()), 4) for block in blocks),
        )
        log_progress(f"{name}: {confirmed[name].objective:+.4f}")
        write_file(folder / "confirmation.json", _CONFIRMED.dump_json(confirmed, indent=1))


def run_study(
    folder: Path,
    yardstick: Yardstick,
    arms: Sequence[str],
    seeds: Sequence[int],
    settings: Settings,
    connect: Connect | None = None,
    at_once: int = 1,
    quotas: Sequence[int] = (),
    pool: int = _IMAGES["search"],
) -> str:
    """Run what a folder lacks of one yardstick; returns its tables.

    ``pool``: questions of the search split, from which rounds have fresh ones where they are more
    than the settings' block. The base policy is confirmed too, and with ``quotas`` the released
    policy with each of these q_e.
    """
    folder.mkdir(parents=True, exist_ok=True)
    images: dict[Split, int] = {**_IMAGES, "search": pool}
    evaluator = YardstickEvaluator(yardstick, images, each=1, block=settings.block)
    _run_comparison(folder, arms, seeds, settings, evaluator, connect, at_once)
    confirming = YardstickEvaluator(yardstick, _CONFIRMING_IMAGES, each=1)
    states = {BASE: base_state(settings)}
    states |= {f"q_e = {quota}": paper_state(settings, quota) for quota in quotas}
    _confirm(folder, confirming, states, settings.source_budget)
    title = f"## {yardstick.name}, K = {settings.source_budget}"
    return f"{title}\n\n{format_tables(folder, arms, seeds)}"


# Two-sided 95 % quantiles of Student's t distribution, for 1 to 9 degrees of freedom.
_T_QUANTILES = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_REFERENCES = ("tpe", "autoprune+@none")
"""The arms that the others are compared with, where they are among them."""


def format_tables(folder: Path, arms: Sequence[str], seeds: Sequence[int]) -> str:
    """The searches of a folder; their winners beside each reference; single states.

    Winners that were not confirmed are left out. Spaces are compared by strategy, each with the
    largest.
    """
    tables = _tabulate_searches(_read_results(folder), arms, seeds)
    groups = {arm: list(arms) for arm in _REFERENCES if arm in arms} or {arms[0]: list(arms)}
    if any(_read_space(arm) != "all" for arm in arms):
        strategies: dict[str, list[str]] = {}
        for arm in arms:
            strategies.setdefault(arm.removesuffix(f"@{_read_space(arm)}"), []).append(arm)
        groups = {group[0]: group for group in strategies.values()}
    confirmed = _read_confirmed(folder)
    texts = [f"{table.markdown()}\n" for table in tables]
    if confirmed:
        texts += [_tabulate_winners(confirmed, group, seeds, arm) for arm, group in groups.items()]
    base = confirmed.get(BASE)
    states = [
        (name, f"{s.objective:.2f}", f"{100 * s.accuracy:.1f}", _format_difference([(s, base)]))
        for name, s in confirmed.items()
        if base and name.startswith("q_e = ")
    ]
    if states:
        columns = ("state", "objective", "accuracy %", f"less {BASE}")
        texts.append(Table("", columns, states, "lrrr").markdown() + "\n")
    return "\n".join(texts)


def _tabulate_searches(
    known: Mapping[str, _SearchResult], arms: Sequence[str], seeds: Sequence[int]
) -> list[Table]:
    """Test results, and the best objective after shares of the answers."""
    rows, curves = [], []
    for arm in arms:
        results = [known[name] for name in (f"{arm}-{seed}" for seed in seeds) if name in known]
        candidates = sum(result.candidates for result in results)
        invalid = sum(result.invalid for result in results)
        share = f"{100 * invalid / candidates:.0f}" if candidates else ""
        ended = [(result, result.winner) for result in results if result.winner is not None]
        if not ended:
            rows.append([arm, "0", *[""] * 4, share])
            continue
        winners = [winner for _, winner in ended]
        rows.append([
            arm,
            str(len(ended)),
            _format_mean([winner.objective for winner in winners]),
            _format_mean([winner.gain for winner in winners]),
            _format_mean([100 * winner.accuracy for winner in winners], 1),
            f"{statistics.mean(result.answers for result, _ in ended):.0f}",
            share,
        ])  # fmt: skip
        columns = zip(*(result.curve for result, _ in ended), strict=True)
        # Where every search has a best objective by then.
        means = (
            "" if None in column else f"{statistics.mean(v for v in column if v is not None):.4f}"
            for column in columns
        )
        curves.append([arm, *means])
    head = ["strategy", "seeds", "test objective", "gain over base", "accuracy %", "answers"]
    shares = (f"{share:.0%}" for share in _CURVE_SHARES)
    return [
        Table("", [*head, "invalid %"], rows, "lrrrrrr"),
        Table("", ["search objective after", *shares], curves, "lrrrr"),
    ]


def _tabulate_winners(
    confirmed: Mapping[str, _Confirmed], arms: Sequence[str], seeds: Sequence[int], reference: str
) -> str:
    """Confirmed objective and accuracy of each arm, less a reference and less the base policy."""
    base = confirmed.get(BASE)
    rows = []
    for arm in arms:
        scores = {s: confirmed[name] for s in seeds if (name := f"{arm}-{s}") in confirmed}
        if not scores:
            continue
        others = {s: confirmed.get(f"{reference}-{s}") for s in scores}
        pairs = [(score, other) for s, score in scores.items() if (other := others[s]) is not None]
        rows.append([
            arm,
            str(len(scores)),
            _format_mean([score.objective for score in scores.values()], 2),
            _format_mean([100 * score.accuracy for score in scores.values()], 1),
            _format_difference(pairs) if pairs and arm != reference else "-",
            *([_format_difference([(score, base) for score in scores.values()])] if base else []),
        ])  # fmt: skip
    head = ["strategy", "seeds", "objective", "accuracy %", f"less {reference}, paired by seed"]
    head += [f"less {BASE}"] if base else []
    questions = sorted({score.questions for score in confirmed.values()})
    note = f"{', '.join(map(str, questions))} questions; \u00b1 is Student's t over seeds"
    note += ", in differences over questions as well." if base else "."
    return "\n".join([Table("", head, rows, "lrrrrr"[: len(head)]).markdown(), "", note]) + "\n"


def _format_mean(values: Sequence[float], digits: int = 4) -> str:
    """Mean with its 95 % confidence interval by Student's t; only the mean of a single value."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{mean:.{digits}f}"
    width = _t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.{digits}f} ± {width:.{digits}f}"


def _t_quantile(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t distribution.

    Above the table by the expansion around the normal quantile (Abramowitz and Stegun, 26.7.5),
    which is right to three decimals there.
    """
    if freedom <= len(_T_QUANTILES):
        return _T_QUANTILES[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    linear = (z**3 + z) / 4
    square = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    cubic = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + linear / freedom + square / freedom**2 + cubic / freedom**3


def _format_difference(pairs: Sequence[tuple[_Confirmed, _Confirmed]]) -> str:
    """Mean difference over pairs, one a seed, with its 95 % interval over seeds and questions.

    The variance of the mean is bounded by the sum of those over seeds and over blocks of questions
    (two crossed random effects, whose residual counts twice), and Student's t has the fewer degrees
    of freedom of the two. An effect with a single level is left out, as questions without blocks.
    """
    by_seed = [score.objective - other.objective for score, other in pairs]
    blocks = [np.subtract(a.blocks, b.blocks) for a, b in pairs if a.blocks and b.blocks]
    by_block = np.mean(blocks, axis=0).tolist() if blocks else []
    mean = statistics.mean(by_seed)
    effects = [effect for effect in (by_seed, by_block) if len(effect) > 1]
    if not effects:
        return f"{mean:.2f}"
    variance = sum(statistics.variance(effect) / len(effect) for effect in effects)
    width = _t_quantile(min(map(len, effects)) - 1) * math.sqrt(variance)
    return f"{mean:.2f} ± {width:.2f}"
