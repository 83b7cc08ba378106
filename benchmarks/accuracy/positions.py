"""``python -m benchmarks.accuracy.positions``: packed against true positions, through lmms-eval.

LLaVA-1.5-7B and an InternVL find boxes in RefCOCO and answer GQA and TextVQA: with all tokens, and
with the same kept tokens at packed and at true positions. Both are served by vLLM on other
machines, with ``--autoprune-requests states``. Differences are paired; published figures stand
beside them.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.command import run_command
from benchmarks.common.report import command_line, format_estimate, log_progress
from vllm_autoprune.cli.flags import add_connection_flags, read_connection
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.cases import FULL
from vllm_autoprune.evaluation.journal import JOURNAL, Case, Contents, Journal
from vllm_autoprune.evaluation.lmms import LmmsSuite
from vllm_autoprune.evaluation.lmms_benchmarks import select_benchmarks
from vllm_autoprune.evaluation.run import Server, evaluate
from vllm_autoprune.evaluation.scoring_request import pruning_options
from vllm_autoprune.http_client import ServerClient
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.report import Table
from vllm_autoprune.statistics import ClusterBootstrap, Estimate, Floats
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.tokens import Positions

_QUESTIONS = ("gqa", "textvqa_val")


class _Model(NamedTuple):
    """A model of the comparison: its name in tables, its grounding task, and K."""

    title: str
    grounding: str
    budgets: tuple[int | str, ...]


_MODELS: Mapping[str, _Model] = {
    # LLaVA was trained to write boxes as fractions, InternVL as thousandths, so each has the task
    # that parses its format. The shares are equal to 64 and 32 of 576 tokens.
    "llava": _Model("LLaVA-1.5-7B", "refcoco_bbox_rec_val", (64, 32)),
    "internvl": _Model("InternVL", "refcoco_grounding_testA", ("1/9", "1/18")),
}


_PUBLISHED = Path(__file__).with_name("published_positions.csv")
"""Published figures; none were found of an InternVL, nor of true positions on GQA and TextVQA."""


class _Row(FrozenModel):
    """A case on one benchmark, in per cent; ``less`` are paired differences from other cases."""

    benchmark: str
    case: str
    right: Estimate
    less: Mapping[str, Estimate]
    questions: int
    images: int


class _Result(FrozenModel):
    """The result of one model; ``reasons`` say why it is not valid."""

    model: str
    served: str
    state: str
    reasons: tuple[str, ...]
    rows: tuple[_Row, ...]


def _build_cases(
    state_name: str, budgets: Sequence[int | str], positions: Sequence[Positions]
) -> list[Case]:
    """The case with all tokens, then the state at each K with each positions, packed first."""
    state = load_state(state_name)
    cases = [FULL]
    for budget in budgets:
        for position in positions:
            # The state has the positions for its digest; the request repeats them to override a
            # server's flag.
            moved = state.model_copy(update={"positions": position})
            case = Case(
                name=f"{position}@{budget}",
                arm="found",
                label=f"{state.name}, {position}",
                named=1 + positions.index(position),
                budget=budget,
                base="" if position == "packed" else f"packed@{budget}",
                digest=moved.digest,
                pruning={**pruning_options(moved, budget), "positions": position},
            )
            cases.append(case)
    return cases


def _compare(contents: Contents, cases: Sequence[Case]) -> Iterator[_Row]:
    """A row for each benchmark and case, if all of its questions were scored."""
    for benchmark in dict.fromkeys(q.benchmark for q in contents.questions.values()):
        images = {
            q.id: q.image
            for q in contents.questions.values()
            if q.benchmark == benchmark
        }
        bootstrap = ClusterBootstrap([*images.values()])
        means = dict[str, Floats]()
        for case in cases:
            answers = contents.answers.get(case.name, {})
            scored = [answers[id].score for id in images if id in answers]
            scores = [score for score in scored if score is not None]
            if len(scores) < len(images):
                continue
            means[case.name] = mean = 100 * bootstrap.mean(scores)
            references = means.keys() & {FULL.name, case.base}
            yield _Row(
                benchmark=benchmark,
                case=case.name,
                right=Estimate.of(mean).rounded(2),
                less={
                    o: Estimate.of(mean - means[o]).rounded(2)
                    for o in references - {case.name}
                },
                questions=len(images),
                images=len({*images.values()}),
            )


def _find_faults(contents: Contents, cases: Sequence[Case]) -> Iterator[str]:
    """Signs that a case differs from its packed case in more than positions, or not at all."""
    for case in cases:
        packed = contents.answers.get(case.base, {})
        moved = contents.answers.get(case.name, {})
        pairs = [(packed[id], moved[id]) for id in packed.keys() & moved.keys()]
        pairs = [pair for pair in pairs if not any(answer.failure for answer in pair)]
        if any(
            packed_answer.prompt_tokens != moved_answer.prompt_tokens
            for packed_answer, moved_answer in pairs
        ):
            yield f"{case.name}: prompts are not as long as packed ones: K is not the same"
        if pairs and all(
            packed_answer.text == moved_answer.text
            for packed_answer, moved_answer in pairs
        ):
            yield f"{case.name}: every answer is the packed one: this server moves no tokens"


def _measure(key: str, options: argparse.Namespace) -> _Result:
    """Ask one model the questions without an answer yet, and compare its cases."""
    model = _MODELS[key]
    url = getattr(options, key)
    connection = read_connection(options)
    with ServerClient(url, connection) as client, client.reporting_failures():
        served = client.choose_model(client.list_models(), None)
    positions: tuple[Positions, ...] = ("packed", "true")
    if options.spread:
        positions = (*positions, "spread")
    cases = _build_cases(options.state, model.budgets, positions)
    tasks = ",".join((options.grounding or model.grounding, *_QUESTIONS))
    folder: Path = options.out / key
    suite = LmmsSuite(
        Server(url, connection, served, options.concurrency),
        cases,
        select_benchmarks(tasks, cognition=False, with_tasks=False),
        options.lmms_eval,
        folder / "lmms-eval",
        mme_divisor=20.0,
        limit=options.limit,
    )
    log_progress(f"{model.title}, {served}: {suite.plan()}")
    report = evaluate(suite.setup, cases, suite.measure, folder, resume=options.resume)
    with Journal(folder / JOURNAL) as journal:
        contents = journal.contents
    refused = (f"{case.name}: {case.refused}" for case in report.refused if case.budget)
    return _Result(
        model=model.title,
        served=served,
        state=options.state,
        reasons=(*report.reasons, *refused, *_find_faults(contents, cases)),
        rows=tuple(_compare(contents, cases)),
    )


def _format(result: _Result) -> str:
    """A section of the report with the table of one model."""
    lines = []
    for row in result.rows:
        packed = next((name for name in row.less if name != FULL.name), "")
        differences = (row.less.get(name) for name in (FULL.name, packed))
        figures = (
            format_estimate(x, between=" to ") if x else ""
            for x in (row.right, *differences)
        )
        lines.append(
            [row.benchmark, row.case, *figures, f"{row.questions:,}", f"{row.images:,}"]
        )
    head = [
        "benchmark",
        "case",
        "% right",
        "less full",
        "less packed",
        "questions",
        "images",
    ]
    title = f"## {result.model}: {result.served}, {result.state}"
    reasons = [f"Not valid: {reason}" for reason in result.reasons]
    return "\n\n".join([title, *reasons, Table("", head, lines, "ll").markdown()])


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags of the command."""
    parser = CommandParser(
        prog="python -m benchmarks.accuracy.positions", description=__doc__
    )
    add = parser.add_argument
    for key, model in _MODELS.items():
        add(f"--{key}", metavar="URL", help=f"a running vllm serve of {model.title}")
    add("--lmms-eval", default="lmms-eval", metavar="PROGRAM", help="path of lmms-eval")
    add(
        "--state",
        default="divprune",
        help="state whose tokens are kept: a file or a name",
    )
    add(
        "--spread", action="store_true", help="also spread evenly over the image's span"
    )
    text = "task of lmms-eval with boxes (default: by the model)"
    add("--grounding", metavar="TASK", help=text)
    add(
        "--limit",
        type=int,
        metavar="N",
        help="questions of each task, from its beginning",
    )
    text = "concurrent requests"
    add("--at-once", type=int, default=32, dest="concurrency", metavar="N", help=text)
    add(
        "--out",
        type=Path,
        default=Path("out/positions"),
        metavar="FOLDER",
        help="journals",
    )
    add("--resume", action="store_true", help="continue what is in --out")
    add("--json", action="store_true", help="print JSON")
    add_connection_flags(parser)
    return parser.parse_args(words)


def main() -> int:
    """Measure, and print tables; returns the exit status, 1 where a result is not valid."""
    return run_command("positions", _run)


def _run() -> int:
    options = parse_arguments()
    published = [*csv.DictReader(_PUBLISHED.read_text().splitlines())]
    keys = [key for key in _MODELS if getattr(options, key)]
    if not keys:
        flags = " or ".join(f"--{key}" for key in _MODELS)
        problem = Problem(flags, "is missing", "give the address of a vllm serve")
        raise ConfigError("", [problem])
    results = [_measure(key, options) for key in keys]
    if options.json:
        record = {
            "command": command_line(),
            "results": [result.model_dump(mode="json") for result in results],
            "published": published,
        }
        print(json.dumps(record, indent=1))
    else:
        table = Table(
            "", [*published[0]], [[*row.values()] for row in published], "ll----l"
        )
        print(*map(_format, results), "## Published", table.markdown(), sep="\n\n")
    return int(any(result.reasons for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
