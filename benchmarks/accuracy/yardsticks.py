"""``python -m benchmarks.accuracy.yardsticks``: one table of both yardsticks.

Every base policy and shipped state beside full, resized, random and oracle, at K = N/2 to N/16.
Measured in this process with transformers, on the selection code that a server runs: a case costs a
selection and a pass of the language model, so hundreds of cases take minutes.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import compress
from pathlib import Path
from typing import Final

import torch
from pydantic import TypeAdapter

from benchmarks.common.report import format_estimate
from benchmarks.policies import SEARCH_RESULTS, SOURCE
from benchmarks.yardsticks import YARDSTICKS, open_yardstick
from benchmarks.yardsticks.examples import Example
from benchmarks.yardsticks.yardstick import (
    ALL_TOKENS,
    FULL,
    ORACLE,
    RANDOM,
    RESIZED,
    Budget,
    Case,
    Yardstick,
    batch_digest,
    batches,
)
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.evaluation.journal import EvaluationError
from vllm_autoprune.evaluation.run import Progress
from vllm_autoprune.record_file import FrozenModel, RecordFile
from vllm_autoprune.report import Table
from vllm_autoprune.statistics import ClusterBootstrap, Estimate, estimate
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import load_state, shipped_states
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.tokens import Need

DOCS = Path(__file__).resolve().parents[2] / "docs"

STATES = ("norm", SOURCE, "instruction-free", "shared-core", *SEARCH_RESULTS)
"""Shipped states that are measured beside every base policy alone."""

BEFORE: Final = "@merger_in"
"""Behind the name of a case: the state ranks tokens by what enters the patch merger."""

_WITHOUT_FEATURES = ("mmtok", "scope", "prunesid", "holov")
"""Base policies that read encoder tokens anyway, or attention alone: the same before the merger."""


def build_cases(
    budgets: Sequence[Budget], available: frozenset[Need], names: Sequence[str] = ()
) -> list[Case]:
    """Every case whose inputs a yardstick has, the full model first; or the named ones of them.

    A name may also be that of any other shipped state, such as an ablation.
    The full model and the resize control are always among them. Where a yardstick has a patch
    merger, every base policy and state that reads features also ranks before it.
    """
    ablations = [name for name in names if name in shipped_states() and name not in STATES]
    states = {name: load_state(name) for name in (*BASE_POLICIES, *STATES, *ablations)}
    cases = [Case(FULL, ALL_TOKENS, FULL)]
    for budget in budgets:
        cases += [Case(control, budget, control) for control in (RESIZED, RANDOM, ORACLE)]
        for name, state in states.items():
            if not materialize(state, 16).needs <= available:
                continue
            base = "" if name in BASE_POLICIES else state.base_policy.name
            cases.append(Case(name, budget, state=state, base=base))
            before = state.model_copy(update={"rank_at": "merger_in"})
            if name not in _WITHOUT_FEATURES and materialize(before, 16).needs <= available:
                cases.append(Case(f"{name}{BEFORE}", budget, state=before, base=name))
    return [case for case in cases if not names or case.name in {*names, FULL, RESIZED}]


class _BatchScores(FrozenModel):
    """Scores of one case on one batch of questions.

    ``right`` has a digit 0 or 1 for each question; ``model`` and ``questions`` identify what was
    measured, so that scores of other weights or questions are not used.
    """

    model: str
    questions: str
    case: str
    right: str
    logprob: tuple[float, ...]
    tokens: int


SCORES: TypeAdapter[_BatchScores] = TypeAdapter(_BatchScores)


@dataclass(frozen=True)
class CaseResult:
    """Scores of one case on all questions in order; tokens are the mean over images."""

    case: Case
    right: list[bool]
    logprob: list[float]
    tokens: float


def measure(
    yardstick: Yardstick,
    cases: Sequence[Case],
    examples: Sequence[Example],
    journal: RecordFile[_BatchScores],
    progress: Progress,
) -> list[CaseResult]:
    """Scores of all cases on the questions.

    What the journal has is not measured again. Cases are measured batch by batch, so that an
    interrupted run has few questions in all cases rather than all questions in few.
    """
    known = {(r.case, r.questions): r for r in journal.records if r.model == yardstick.model}
    groups = {batch_digest(batch): batch for batch in batches(yardstick, examples)}
    missing = {
        digest: [case for case in cases if (case.key, digest) not in known] for digest in groups
    }
    total = len(groups) * len(cases)
    progress.begin(total, total - sum(map(len, missing.values())))
    for digest, todo in missing.items():
        if not todo:
            continue
        encoded, records = yardstick.encode(groups[digest]), []
        for case in todo:
            scores = encoded.score(case)
            record = _BatchScores(
                model=yardstick.model,
                questions=digest,
                case=case.key,
                right="".join("01"[int(right)] for right in scores.right.tolist()),
                logprob=tuple(round(value, 4) for value in scores.logprob.tolist()),
                tokens=scores.tokens,
            )
            records.append(record)
            known[case.key, digest] = record
            progress.advance()
        # Together, because every append waits for the disk.
        journal.append(records)
    results = []
    for case in cases:
        records = [known[case.key, digest] for digest in groups]
        right = [digit == "1" for record in records for digit in record.right]
        logprob = [value for record in records for value in record.logprob]
        tokens = sum(record.tokens for record in records) / len(records)
        results.append(CaseResult(case, right, logprob, tokens))
    return results


@dataclass(frozen=True)
class Row:
    """One case on all questions, or on those of one category or kind; in per cent right.

    ``less_resized`` is the case less the resize control at the same K, ``less_base`` a state less
    its base policy, ``less_default`` the case less the yardstick's default state; all are paired by
    question, with intervals over images.
    """

    yardstick: str
    budget: str
    name: str
    reads_question: bool | None
    digest: str
    category: str | None
    kind: str | None
    questions: int
    images: int
    tokens: float
    accuracy: Estimate
    logprob: float
    less_resized: Estimate | None
    less_base: Estimate | None
    less_default: Estimate | None


def build_rows(
    yardstick: Yardstick, examples: Sequence[Example], results: Sequence[CaseResult]
) -> Iterator[Row]:
    """Rows of every case: of all questions, of each category, and of each kind."""
    by_name = {(result.case.name, result.case.budget.label): result for result in results}
    categories = yardstick.categories
    kinds = [(name, kind, (kind,)) for name, kinds in categories.items() for kind in kinds]
    parts: list[tuple[str | None, str | None, Sequence[str]]] = [
        (None, None, [kind for _, kind, _ in kinds]),
        *((name, None, kinds) for name, kinds in categories.items()),
        *kinds,
    ]
    for category, kind, wanted in parts:
        members = [example.kind in wanted for example in examples]
        if not any(members):
            continue
        images = list(compress((example.image_id for example in examples), members))
        bootstrap = ClusterBootstrap(images)

        def percent(values: Sequence[float], bootstrap: ClusterBootstrap = bootstrap) -> Estimate:
            return estimate(100 * bootstrap.mean(values)).rounded(2)

        for result in results:
            case, right = result.case, list(compress(map(float, result.right), members))
            less: dict[str, Estimate | None] = {}
            for name in (RESIZED, case.base, yardstick.default):
                other = by_name.get((name, case.budget.label))
                less[name] = None
                if other is not None and other is not result:
                    pairs = zip(right, compress(other.right, members), strict=True)
                    less[name] = percent([value - control for value, control in pairs])
            yield Row(
                yardstick=yardstick.name,
                budget=case.budget.label,
                name=case.name,
                reads_question=case.reads_question,
                digest="" if case.state is None else case.state.digest,
                category=category,
                kind=kind,
                questions=len(right),
                images=len(set(images)),
                tokens=round(result.tokens, 1),
                accuracy=percent(right),
                logprob=round(sum(compress(result.logprob, members)) / len(right), 3),
                less_resized=less[RESIZED],
                less_base=less[case.base],
                less_default=less[yardstick.default],
            )


_ESTIMATES = ("accuracy", "less_resized", "less_base", "less_default")

BEGIN, END = "<!-- yardsticks -->", "<!-- /yardsticks -->"


@dataclass(frozen=True)
class Measured:
    """The rows of one yardstick, its model, and the state that is the default on it."""

    name: str
    model: str
    default: str
    detailed_budget: str
    """The budget whose verdicts are given for every category of questions."""
    rows: Sequence[Row]


def as_json(measured: Sequence[Measured]) -> str:
    """All rows, also those by kind at every budget."""
    return json.dumps([asdict(yardstick) for yardstick in measured], indent=1)


def as_csv(measured: Sequence[Measured]) -> str:
    """All rows, one a line; an estimate is three columns, its 95 % interval ``low`` to ``high``."""
    records: list[dict[str, object]] = []
    for row in (row for yardstick in measured for row in yardstick.rows):
        flat: dict[str, object] = {}
        for name, value in asdict(row).items():
            if name in _ESTIMATES:
                value = value or dict.fromkeys(("value", "low", "high"))
                flat[name], low, high = value.values()
                flat |= {f"{name}_low": low, f"{name}_high": high}
            else:
                flat[name] = value[:12] if name == "digest" else value
        records.append(flat)
    text = io.StringIO()
    writer = csv.DictWriter(text, records[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def as_markdown(measured: Sequence[Measured]) -> str:
    """A verdict on each default state, and one table of every yardstick."""
    lines: list[str] = []
    for yardstick in measured:
        overall = [row for row in yardstick.rows if row.category is None and row.kind is None]
        full = overall[0]
        right = format_estimate(full.accuracy, between=" to ").replace(" (", " % (")
        lines += [f"### {yardstick.name}", ""]
        lines.append(
            f"{yardstick.model}; {full.questions} questions about {full.images} images of the test "
            f"split. With all tokens ({full.tokens:.1f} on average) {right} are right."
        )
        lines += ["", *_default_lines(yardstick), "", _table(yardstick, overall[1:]).markdown(), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(measured: Measured, rows: Sequence[Row]) -> Table:
    """Per cent right at every budget, and points more than resizing; no rows before the merger."""
    budgets = list(dict.fromkeys(row.budget for row in rows))
    by_name: dict[str, dict[str, Row]] = {}
    for row in rows:
        if not row.name.endswith(BEFORE):
            by_name.setdefault(row.name, {})[row.budget] = row
    cells = []
    for name, at in by_name.items():
        reads = next(iter(at.values())).reads_question
        figures = ["-"] * len(budgets)
        for place, row in ((budgets.index(budget), row) for budget, row in at.items()):
            figures[place], more = f"{row.accuracy.value:.1f}", row.less_resized
            if more is not None:
                width = max(more.high - more.value, more.value - more.low)
                figures[place] += f" {more.value:+.1f}±{width:.1f}"
        label = f"**{name}**" if name == measured.default else name
        cells.append((label, {True: "read", False: "not read", None: ""}[reads], *figures))
    return Table("", ("method", "question", *budgets), cells, "--" + "r" * len(budgets))


def _default_lines(measured: Measured) -> Iterator[str]:
    """Where the default state is better than resizing, and where it is not."""
    for row in measured.rows:
        if row.name != measured.default or row.kind is not None or row.less_resized is None:
            continue
        if row.category is not None and row.budget != measured.detailed_budget:
            continue
        part, more, verdict = row.category or "all questions", row.less_resized, "not decided"
        if more.low > 0:
            verdict = f"`{row.name}` is better than resizing"
        elif more.high < 0:
            verdict = f"resizing is better than `{row.name}`"
        difference = f"{more.value:+.1f} ({more.low:+.1f} to {more.high:+.1f})"
        yield f"- {row.budget}, {part}: {difference}; {verdict}"


def write_between_markers(path: Path, text: str) -> None:
    """Replace what stands between the markers of a document."""
    document = path.read_text(encoding="utf-8")
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no {BEGIN} ... {END}")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, and print the table or write it into the documentation."""
    parser = CommandParser(
        prog="python -m benchmarks.accuracy.yardsticks",
        description="Measure base policies, states and controls on mini-LLaVA and mini-Qwen3-VL. "
        "A run that is stopped goes on when the command is repeated.",
    )
    add, text = parser.add_argument, "folder for the results"
    add("--out", type=Path, default=Path("out/yardsticks"), metavar="FOLDER", help=text)
    both, text = list(YARDSTICKS), "models to measure on"
    add("--yardsticks", nargs="+", default=both, choices=YARDSTICKS, help=text)
    add("--checkpoint", type=Path, help="another training of a single yardstick")
    add("--images", type=int, default=100, help="images of the test split")
    add("--methods", nargs="*", default=[], help="default: all of them")
    add("--threads", type=int, default=1, help="threads of torch")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="all rows as JSON")
    text = "write docs/accuracy.md's tables and docs/data/accuracy.csv"
    output.add_argument("--write-docs", action="store_true", help=text)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        measured = [_measure(name, options) for name in options.yardsticks]
    except AutopruneError as error:
        print(error, file=sys.stderr)
        return 1
    if options.write_docs:
        write_between_markers(DOCS / "accuracy.md", as_markdown(measured))
        (DOCS / "data" / "accuracy.csv").write_text(as_csv(measured), encoding="utf-8")
    else:
        print(as_json(measured) if options.json else as_markdown(measured), end="")
    return 0


def _measure(name: str, options: argparse.Namespace) -> Measured:
    yardstick = open_yardstick(name, options.checkpoint)
    progress = Progress(lambda line: print(f"{name}: {line}", file=sys.stderr, flush=True))
    cases = [
        case
        for case in build_cases(yardstick.budgets, yardstick.available, options.methods)
        if case.name not in yardstick.equal_policies
    ]
    examples = yardstick.draw("test", options.images)
    with RecordFile(options.out / f"{name}.jsonl", SCORES, EvaluationError) as journal:
        results = measure(yardstick, cases, examples, journal, progress)
    rows = list(build_rows(yardstick, examples, results))
    return Measured(yardstick.name, yardstick.model, yardstick.default, yardstick.eighth, rows)


if __name__ == "__main__":
    raise SystemExit(main())
