"""``python -m benchmarks.search.split``: search states with a core, and compare on the test split.

States are chosen on validation questions; the winners are then measured once on test questions.
Every answer is recorded, so that an interrupted run continues where it was.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from pydantic import JsonValue

from benchmarks.accuracy.yardsticks.catalogue import open_yardstick
from benchmarks.common.progress import log_progress
from benchmarks.minillava.split import CHECKPOINT
from benchmarks.search.split.candidates import (
    FAMILIES,
    Family,
    neighbours,
    shares_half,
    start_states,
)
from benchmarks.search.split.comparison import Entrant, Row, compare, tables, verdicts, winners
from benchmarks.search.split.halving import Effort, Measurement, climb, judge_at, judge_worst
from benchmarks.search.yardstick_evaluator import YardstickEvaluator
from offline_search.dataset import Example, Split
from offline_search.evaluation.answers import accuracy
from offline_search.evaluation.evaluator import Evaluator, RecordedEvaluator
from offline_search.ledger import Ledger
from offline_search.ledger.records import SettingsRecord
from offline_search.settings import Settings
from vllm_autoprune import PruningState, load_state
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.errors import AutopruneError

REFERENCES = ("minillava", "cdpruner", "shared-core", "divprune")
ALL_BUDGETS = "split, one state for all K"


def main(arguments: Sequence[str] | None = None) -> int:
    """Search and print the table; returns the exit status, 1 if it cannot be made."""
    options = build_parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        with Ledger(options.out / "ledger.jsonl") as ledger:
            report = asyncio.run(run(options, ledger, _evaluator(options)))
    except AutopruneError as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(report.as_json(), indent=1))
    else:
        print(report.markdown(), end="")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = CommandParser(
        prog="python -m benchmarks.search.split",
        description="Search for states with a shared core, against the best ones without.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/search/split"),
        metavar="FOLDER",
        help="folder for the results",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--budgets", type=int, nargs="+", default=[8, 16, 32], metavar="K", help="each K"
    )
    parser.add_argument(
        "--scenes", type=int, nargs="+", default=[24, 96, 320], metavar="N",
        help="validation scenes of each stage of halving, ascending",
    )  # fmt: skip
    parser.add_argument("--each", type=int, default=4, help="questions about a scene")
    parser.add_argument(
        "--test-scenes", type=int, default=400, metavar="N", help="scenes of the test split"
    )
    parser.add_argument("--keep", type=int, default=5, help="a stage keeps one state of this many")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of neighbours of the best")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument(
        "--checkpoint", type=Path, default=CHECKPOINT, help="folder of the checkpoint"
    )
    return parser


def _evaluator(options: argparse.Namespace) -> YardstickEvaluator:
    scenes: dict[Split, int] = {
        "search": 1,
        "validation": options.scenes[-1],
        "test": options.test_scenes,
    }
    yardstick = open_yardstick("minillava", options.checkpoint)
    return YardstickEvaluator(yardstick, scenes, each=options.each)


async def run(options: argparse.Namespace, ledger: Ledger, evaluator: Evaluator) -> Report:
    """Search every family at every K on validation questions, then measure on test questions."""
    # Refuses a ledger of other questions or of another checkpoint.
    ledger.put(SettingsRecord(settings=Settings(evaluator=evaluator.name)))
    recorded = RecordedEvaluator(ledger, evaluator)
    stops = count_questions(evaluator.dataset.examples("validation"), options.scenes)
    validation = Measurement(recorded, "validation", stops)
    effort = Effort(len(stops), options.keep, options.rounds)
    best: dict[tuple[int, Family], list[PruningState]] = {}
    for budget in options.budgets:
        for family in FAMILIES:
            near = partial(neighbours, family=family, budget=budget)
            judge = judge_at(validation, budget)
            log = partial(_log, f"K = {budget}, {family}")
            states = start_states(family, budget)
            best[budget, family] = await climb(states, near, judge, effort, log)
    together = await _search_all_budgets(best, validation, effort)
    log_progress("test questions")
    examples = evaluator.dataset.examples("test")
    test = Measurement(recorded, "test", [len(examples)])
    rows = []
    for budget in options.budgets:
        measured = {f"best {family}": best[budget, family][0] for family in FAMILIES}
        measured[ALL_BUDGETS] = together
        measured |= {name: load_state(name) for name in REFERENCES}
        entrants = [
            Entrant(label, state, {budget: await test.answers(state, budget, 0)})
            for label, state in measured.items()
        ]
        rows += compare(entrants, budget, [example.image for example in examples])
    full = accuracy(await test.answers(None, 0, 0))
    return Report(evaluator.name, stops[-1], len(examples), 100 * full, rows)


async def _search_all_budgets(
    best: Mapping[tuple[int, Family], Sequence[PruningState]],
    measurement: Measurement,
    effort: Effort,
) -> PruningState:
    """One state for all K, with at least half of K as core.

    It gains most, at its worst K, on the best state without a core.
    """
    references = {budget: states[0] for (budget, kind), states in best.items() if kind == "unsplit"}
    least = min(references)

    def near(state: PruningState) -> list[PruningState]:
        return list(filter(shares_half, neighbours(state, "split", least)))

    known = [one for (_, kind), states in best.items() if kind == "split" for one in states]
    states = list(filter(shares_half, [*known, *start_states("split", least)]))
    judge = judge_worst(measurement, references)
    return (await climb(states, near, judge, effort, partial(_log, ALL_BUDGETS)))[0]


def _log(search: str, line: str) -> None:
    log_progress(f"{search}: {line}")


def count_questions(examples: Sequence[Example], scenes: Sequence[int]) -> list[int]:
    """The number of questions about the first so many scenes, for each number of scenes."""
    counts = [len(list(group)) for _, group in groupby(examples, key=lambda one: one.image)]
    return [sum(counts[:number]) for number in scenes]


@dataclass(frozen=True)
class Report:
    """The rows of all K, and what they were measured on."""

    evaluator: str
    validation: int
    test: int
    full: float
    rows: Sequence[Row]

    def as_json(self) -> dict[str, JsonValue]:
        """Everything, with the states."""
        return {
            "evaluator": self.evaluator,
            "validation questions": self.validation,
            "test questions": self.test,
            "full tokens": self.full,
            "rows": [row.as_json() for row in self.rows],
        }

    def markdown(self) -> str:
        """The tables."""
        lines = [
            f"{self.evaluator}; chosen on {self.validation} validation questions, measured on "
            f"{self.test} test questions. All tokens: {self.full:.1f} % right."
        ]
        references = ("best unsplit", "best question-free", "minillava")
        for table in (*tables(self.rows, references), verdicts(self.rows), winners(self.rows)):
            lines += ["", table.caption, "", table.markdown()]
        return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
