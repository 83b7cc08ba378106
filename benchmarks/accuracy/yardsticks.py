"""``python -m benchmarks.accuracy.yardsticks``: one table of both yardsticks.

Every base policy and shipped state beside full, resized, random and oracle, at K = N/2 to N/16.
Measured in this process with transformers, on the selection code that a server runs: a case costs a
selection and a pass of the language model, so hundreds of cases take minutes.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
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
    Case,
    Yardstick,
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

DOCS = Path(__file__).resolve().parents[2] / "docs"

_STATES = ("norm", SOURCE, "instruction-free", "shared-core", *SEARCH_RESULTS)
"""Shipped states that are measured beside every base policy alone."""

_BEFORE: Final = "@merger_in"
"""Behind the name of a case: the state ranks tokens by what enters the patch merger."""

_WITHOUT_FEATURES = ("mmtok", "scope", "prunesid", "holov")
"""Base policies that read encoder tokens anyway, or attention alone: the same before the merger."""


def build_cases(yardstick: Yardstick, names: Sequence[str] = ()) -> list[Case]:
    """Every case whose inputs a yardstick has, the full model first; or the named ones of them.

    A name may also be that of any other shipped state, such as an ablation. The full model and the
    resize control are always among them. Where a yardstick has a patch merger, every base policy
    and state that reads features also ranks before it.
    """
    available = yardstick.available
    ablations = [name for name in names if name in shipped_states() and name not in _STATES]
    states = {name: load_state(name) for name in (*BASE_POLICIES, *_STATES, *ablations)}
    cases = [Case(FULL, ALL_TOKENS, FULL)]
    for budget in yardstick.budgets:
        cases += [Case(control, budget, control) for control in (RESIZED, RANDOM, ORACLE)]
        for name, state in states.items():
            if name in yardstick.equal_policies or not materialize(state, 16).needs <= available:
                continue
            base = "" if name in BASE_POLICIES else state.base_policy.name
            cases.append(Case(name, budget, state=state, base=base))
            before = state.model_copy(update={"rank_at": "merger_in"})
            if name not in _WITHOUT_FEATURES and materialize(before, 16).needs <= available:
                cases.append(Case(f"{name}{_BEFORE}", budget, state=before, base=name))
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


_SCORES: TypeAdapter[_BatchScores] = TypeAdapter(_BatchScores)


def _digest(batch: Sequence[Example]) -> str:
    """Identifies the questions, answers and images of a batch."""
    digest = hashlib.sha256()
    image = -1
    for example in batch:
        if example.image_id != image:
            image = example.image_id
            digest.update(example.image.numpy().tobytes())
        digest.update(f"{example.question}\n{example.answer}\n".encode())
    return digest.hexdigest()[:12]


def measure(
    yardstick: Yardstick, cases: Sequence[Case], examples: Sequence[Example], path: Path
) -> list[Row]:
    """Rows of all cases on the questions; what the journal at a path has is not measured again.

    Cases are measured batch by batch, so that an interrupted run has few questions in all cases
    rather than all questions in few.
    """
    progress = Progress(lambda line: print(f"{yardstick.key}: {line}", file=sys.stderr, flush=True))
    groups = {_digest(batch): batch for batch in batches(yardstick, examples)}
    with RecordFile(path, _SCORES, EvaluationError) as journal:
        known = {(r.case, r.questions): r for r in journal.records if r.model == yardstick.model}
        missing = {
            digest: [case for case in cases if (case.key, digest) not in known] for digest in groups
        }
        total = len(groups) * len(cases)
        progress.begin(total, total - sum(map(len, missing.values())))
        for digest, unmeasured in missing.items():
            if not unmeasured:
                continue
            encoded, records = yardstick.encode(groups[digest]), []
            for case in unmeasured:
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
    results = {case.key: [known[case.key, digest] for digest in groups] for case in cases}
    return list(_build_rows(yardstick, cases, examples, results))


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


def _build_rows(
    yardstick: Yardstick,
    cases: Sequence[Case],
    examples: Sequence[Example],
    results: Mapping[str, Sequence[_BatchScores]],
) -> Iterator[Row]:
    """Rows of every case: of all questions, of each category, and of each kind."""
    rights = {
        case.name + case.budget.label: [d == "1" for r in results[case.key] for d in r.right]
        for case in cases
    }
    kinds = [(name, kind) for name, kinds in yardstick.categories.items() for kind in kinds]
    parts: list[tuple[str | None, str | None]] = [(None, None)]
    for category, kind in [*parts, *((name, None) for name in yardstick.categories), *kinds]:
        wanted = [k for name, k in kinds if category in (None, name) and kind in (None, k)]
        members = [example.kind in wanted for example in examples]
        if not any(members):
            continue
        images = list(compress((example.image_id for example in examples), members))
        bootstrap = ClusterBootstrap(images)

        def percent(values: Sequence[float], bootstrap: ClusterBootstrap = bootstrap) -> Estimate:
            return estimate(100 * bootstrap.mean(values)).rounded(2)

        for case in cases:
            scores, label = results[case.key], case.budget.label
            right = list(compress(map(float, rights[case.name + label]), members))
            logprob = list(compress((value for r in scores for value in r.logprob), members))
            less: dict[str, Estimate | None] = {}
            for name in (RESIZED, case.base, yardstick.default):
                other = None if name == case.name else rights.get(name + label)
                pairs = zip(right, compress(other or [], members), strict=other is not None)
                less[name] = percent([a - b for a, b in pairs]) if other else None
            yield Row(
                yardstick=yardstick.name,
                budget=label,
                name=case.name,
                reads_question=case.reads_question,
                digest="" if case.state is None else case.state.digest[:12],
                category=category,
                kind=kind,
                questions=len(right),
                images=len(set(images)),
                tokens=round(sum(record.tokens for record in scores) / len(scores), 1),
                accuracy=percent(right),
                logprob=round(sum(logprob) / len(right), 3),
                less_resized=less[RESIZED],
                less_base=less[case.base],
                less_default=less[yardstick.default],
            )


def as_csv(rows: Sequence[Row]) -> str:
    """All rows, one a line; an estimate is three columns, its 95 % interval ``low`` to ``high``."""
    records: list[dict[str, object]] = []
    for row in rows:
        record: dict[str, object] = {}
        for name, value in asdict(row).items():
            if name == "accuracy" or name.startswith("less_"):
                figures = value or dict.fromkeys(("value", "low", "high"))
                record[name] = figures.pop("value")
                record |= {f"{name}_{side}": figure for side, figure in figures.items()}
            else:
                record[name] = value
        records.append(record)
    text = io.StringIO()
    writer = csv.DictWriter(text, records[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def as_markdown(yardstick: Yardstick, rows: Sequence[Row]) -> str:
    """What the default state gains upon resizing, and the table of all cases.

    A cell is per cent right and points more than resizing; there are no rows before the merger.
    """
    full = rows[0]
    right = format_estimate(full.accuracy, between=" to ").replace(" (", " % (")
    lines = [
        f"### {yardstick.name}\n",
        f"{yardstick.model}; {full.questions} questions about {full.images} images of the test "
        f"split. With all tokens ({full.tokens:.1f} on average) {right} are right.\n",
    ]
    for row in rows:
        more, detailed = row.less_resized, row.budget == yardstick.eighth
        if row.name != yardstick.default or row.kind is not None or more is None:
            continue
        if row.category is None or detailed:
            verdict = "not decided"
            if more.low > 0:
                verdict = f"`{row.name}` is better than resizing"
            elif more.high < 0:
                verdict = f"resizing is better than `{row.name}`"
            difference = f"{more.value:+.1f} ({more.low:+.1f} to {more.high:+.1f})"
            part = row.category or "all questions"
            lines.append(f"- {row.budget}, {part}: {difference}; {verdict}")
    overall = [row for row in rows[1:] if row.category is None and not row.name.endswith(_BEFORE)]
    budgets = list(dict.fromkeys(row.budget for row in overall))
    cells: dict[str, dict[str, str]] = {}
    for row in overall:
        label = f"**{row.name}**" if row.name == yardstick.default else row.name
        reads = {True: "read", False: "not read", None: ""}[row.reads_question]
        figure, more = f"{row.accuracy.value:.1f}", row.less_resized
        if more is not None:
            width = max(more.high - more.value, more.value - more.low)
            figure += f" {more.value:+.1f}±{width:.1f}"
        cells.setdefault(row.name, {"": label, "question": reads})[row.budget] = figure
    table = [
        [at.get(column, "-") for column in ("", "question", *budgets)] for at in cells.values()
    ]
    columns, align = ("method", "question", *budgets), "--" + "r" * len(budgets)
    return "\n".join([*lines, "", Table("", columns, table, align).markdown(), ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, and print the table or write it into the documentation."""
    parser = CommandParser(
        prog="python -m benchmarks.accuracy.yardsticks",
        description="Measure base policies, states and controls on mini-LLaVA and mini-Qwen3-VL. "
        "A run that is stopped goes on when the command is repeated.",
    )
    add, text = parser.add_argument, "models to measure on"
    add("--yardsticks", nargs="+", default=list(YARDSTICKS), choices=YARDSTICKS, help=text)
    add("--checkpoint", type=Path, help="another training of a single yardstick")
    add("--images", type=int, default=100, help="images of the test split")
    add("--methods", nargs="*", default=[], help="default: all of them")
    text = "write docs/accuracy.md's tables and docs/data/accuracy.csv"
    add("--write-docs", action="store_true", help=text)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the last bits of pictures depend on it
    parts, all_rows = [], list[Row]()
    try:
        for name in options.yardsticks:
            yardstick = open_yardstick(name, options.checkpoint)
            cases = build_cases(yardstick, options.methods)
            examples = yardstick.draw("test", options.images)
            rows = measure(yardstick, cases, examples, Path("out/yardsticks") / f"{name}.jsonl")
            parts.append(as_markdown(yardstick, rows))
            all_rows += rows
    except AutopruneError as error:
        print(error, file=sys.stderr)
        return 1
    page = "\n".join(parts)
    if not options.write_docs:
        print(page, end="")
        return 0
    path = DOCS / "accuracy.md"
    marked = re.compile(r"(?<=<!-- yardsticks -->\n\n).*(?=\n<!-- /yardsticks -->)", re.DOTALL)
    text = marked.sub(lambda _: page, path.read_text(encoding="utf-8"))
    path.write_text(text, encoding="utf-8")
    (DOCS / "data" / "accuracy.csv").write_text(as_csv(all_rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
