"""``python -m benchmarks.accuracy.yardsticks``: accuracy table of the small models.

Every base policy and shipped state is compared with full, resized, random and oracle, at K = N/2 to
N/16. Accuracy is measured in this process with transformers, on the selection code that a server
runs. A case costs a selection and a pass of the language model, so hundreds of cases take minutes.
"""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from benchmarks.common.command import run_command
from benchmarks.common.report import (
    command_line,
    format_estimate,
    log_progress,
    read_commit,
)
from benchmarks.policies import READING, SEARCH_RESULTS, SOURCE, SPLIT
from benchmarks.yardsticks import YARDSTICKS, open_yardstick
from benchmarks.yardsticks.examples import Example, draw_examples
from benchmarks.yardsticks.questions import CATEGORIES
from benchmarks.yardsticks.yardstick import ALL_TOKENS, Case, Scores, Yardstick
from offline_search.dataset import SPLITS
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.report import Table
from vllm_autoprune.statistics import ClusterBootstrap, Estimate, Floats
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.state import PruningState

_DOCS = Path(__file__).resolve().parents[2] / "docs"

_STATES = (
    "norm",
    READING,
    SPLIT,
    SOURCE,
    "instruction-free",
    "shared-core",
    *SEARCH_RESULTS,
)
"""Shipped states that are measured beside every base policy alone."""

_CONTROLS = ("resized", "random", "oracle")

_BEFORE = "@merger_in"
"""Suffix of a case's name: its state ranks tokens by their features before the patch merger."""

_UPON = f"{SOURCE} upon "
"""Beginning of the name of a case that exchanges tokens as the released state does."""

_EXCHANGE_BUDGETS = ("K = 36", "K = 9", "K = N/2", "K = N/16")
"""Of each yardstick the budget at which 2 tokens are the paper's share of K, 6 %, and the one at
which K is the paper's share of N, 6 %."""

_BY_KIND = (2, ("cen_divprune", "divprune", "cdpruner", "minillava"))
"""Divisor of N, and the states, in the table of positions by kind of question."""

_WITHOUT_FEATURES = ("mmtok", "scope", "prunesid", "holov")
"""Base policies that read encoder tokens anyway, or only attention, so that ranking before the
merger changes nothing."""


def _build_cases(yardstick: Yardstick, names: Sequence[str] = ()) -> list[Case]:
    """The full model, then every case whose inputs a yardstick has, or those in ``names``.

    A name may also be that of an ablation, or the path of a state. The full model and the resize
    control are always included. If a yardstick has a patch merger, every base policy and state that
    reads features is also ranked before it. If positions have one axis, every one is also measured
    with the other positions: packed, or true if it is packed itself. Policies for videos are left
    out.
    """
    available = yardstick.available
    state_names = [
        name.partition("@")[0] for name in names if name not in ("full", *_CONTROLS)
    ]
    states = {
        name: load_state(name)
        for name in dict.fromkeys((*BASE_POLICIES, *_STATES, *state_names))
    }
    cases = [Case("full", ALL_TOKENS)]
    for budget in yardstick.budgets:
        cases += [Case(control, budget) for control in _CONTROLS]
        for name, state in states.items():
            if not _is_measured(yardstick, name, state):
                continue
            base = "" if name in BASE_POLICIES else state.base_policy.name
            if base and yardstick.has_one_axis and state.positions == "packed":
                base += "@packed"
            cases.append(Case(name, budget, state=state, base=base))
            unmerged = state.model_copy(update={"rank_at": "merger_in"})
            if (
                name not in _WITHOUT_FEATURES
                and materialize(unmerged, 16).needs <= available
            ):
                cases.append(
                    Case(f"{name}{_BEFORE}", budget, state=unmerged, base=name)
                )
            if yardstick.has_one_axis:
                alternative = "true" if state.positions == "packed" else "packed"
                moved = state.model_copy(update={"positions": alternative})
                cases.append(
                    Case(f"{name}@{alternative}", budget, state=moved, base=name)
                )
    return [
        case for case in cases if not names or case.name in {*names, "full", "resized"}
    ]


def _is_measured(yardstick: Yardstick, name: str, state: PruningState) -> bool:
    """Whether a state is for images, has its inputs here, and is not another policy by its name."""
    if state.frames or name in yardstick.equal_policies:
        return False
    return materialize(state, 16).needs <= yardstick.available


def _build_exchange(yardstick: Yardstick) -> list[Case]:
    """The full model, then every base policy alone and with the released exchange upon it.

    Both have kept tokens where the released state has them, so that they differ in the exchange
    alone.
    """
    source = load_state(SOURCE)
    cases = [Case("full", ALL_TOKENS)]
    for budget in yardstick.budgets:
        for name in BASE_POLICIES if budget.label in _EXCHANGE_BUDGETS else ():
            alone = load_state(name).model_copy(update={"positions": source.positions})
            if _is_measured(yardstick, name, alone):
                update = {"base_policy": alone.base_policy}
                upon = source.model_copy(update=update)
                cases.append(Case(name, budget, state=alone))
                cases.append(Case(f"{_UPON}{name}", budget, state=upon, base=name))
    return cases


def _build_duel(yardstick: Yardstick, names: Sequence[str], against: str) -> list[Case]:
    """The cases in ``names``, all if it is empty, each compared with the one named ``against``.

    Raises :class:`ConfigError` if the yardstick has no such case.
    """
    cases = _build_cases(yardstick, names and (*names, against))
    if against not in {case.name for case in cases}:
        problem = f"has no inputs of {against}, or it is of another kind"
        remedy = "choose another method, or other yardsticks"
        raise ConfigError(yardstick.name, [Problem("--against", problem, remedy)])
    return [replace(case, base=against) for case in cases]


@dataclass(frozen=True)
class _Row:
    """Per cent of right answers of one case, on all questions or on those of a category or kind.

    ``less_resized`` is the case minus the resize control at the same K, ``less_base`` minus its
    ``base``, ``less_search_result`` the case minus the state that a search found on the
    yardstick. All are paired by question, with intervals over images.
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
    less_search_result: Estimate | None


def _list_slices(
    yardstick: Yardstick, kinds: Sequence[str]
) -> Iterator[tuple[str | None, str | None, Sequence[str]]]:
    """Category, kind, and the kinds included, of each slice: all, a category, or one kind."""
    categories = CATEGORIES[yardstick.key]
    yield None, None, kinds
    for category, of_category in categories.items():
        yield category, None, of_category
    for category, of_category in categories.items():
        for kind in of_category:
            yield category, kind, [kind]


def _measure(
    yardstick: Yardstick, cases: Sequence[Case], examples: Sequence[Example]
) -> Iterator[_Row]:
    """Rows of every case: for all questions, for each category, and for each kind."""
    scores: dict[tuple[str, str], list[Scores]] = {
        (c.name, c.budget.label): [] for c in cases
    }
    log_progress(f"{len(cases)} cases on {yardstick.name}")
    for batch in yardstick.batches(examples):
        encoded = yardstick.encode(batch)
        for case in cases:
            scores[case.name, case.budget.label].append(encoded.score(case))
    rights = {
        key: torch.cat([batch.correct for batch in batches]).double().numpy()
        for key, batches in scores.items()
    }
    image_of = np.array([example.image_id for example in examples])
    kind_of = np.array([example.kind for example in examples])
    for category, kind, kinds in _list_slices(yardstick, kind_of.tolist()):
        members = np.isin(kind_of, kinds)
        if not members.any():
            continue
        bootstrap = ClusterBootstrap(image_of[members].tolist())

        def percent(
            values: Floats, bootstrap: ClusterBootstrap = bootstrap
        ) -> Estimate:
            return Estimate.of(100 * bootstrap.mean(values)).rounded(2)

        for case in cases:
            label = case.budget.label
            correct = rights[case.name, label][members]
            less: dict[str, Estimate | None] = {}
            for name in ("resized", case.base, yardstick.search_result):
                other = None if name == case.name else rights.get((name, label))
                less[name] = (
                    None if other is None else percent(correct - other[members])
                )
            # The logarithm of each question is rounded before the mean, as in the published table.
            logprobs = (
                torch.cat([s.logprob for s in scores[case.name, label]])
                .double()
                .numpy()
            )
            yield _Row(
                yardstick=yardstick.name,
                budget=label,
                name=case.name,
                reads_question=materialize(case.state).reads_instruction
                if case.state
                else None,
                digest="" if case.state is None else case.state.digest[:12],
                category=category,
                kind=kind,
                questions=len(correct),
                images=len(set(image_of[members])),
                tokens=round(fmean(s.tokens for s in scores[case.name, label]), 1),
                accuracy=percent(correct),
                logprob=round(float(logprobs.round(4)[members].mean()), 3),
                less_resized=less["resized"],
                less_base=less[case.base],
                less_search_result=less[yardstick.search_result],
            )


def _as_csv(rows: Sequence[_Row]) -> str:
    """One row a line; an estimate has three columns, with its 95 % interval ``low`` to ``high``.

    Every row ends with the command that measured it, and the last commit that changed the command.
    """
    source = {
        "command": shlex.join(command_line()),
        "commit": read_commit("benchmarks/accuracy/yardsticks.py"),
    }
    records = []
    for row in rows:
        record: dict[str, object] = {}
        for name, value in asdict(row).items():
            record[name] = value
            if name == "accuracy" or name.startswith("less_"):
                figures = value or dict.fromkeys(("value", "low", "high"))
                record |= {name: figures["value"]}
                record |= {f"{name}_{side}": figures[side] for side in ("low", "high")}
        records.append(record | source)
    text = io.StringIO()
    writer = csv.DictWriter(text, records[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _as_markdown(
    yardstick: Yardstick, rows: Sequence[_Row], split: str = "test"
) -> str:
    """Table of all cases except variants that are compared with another case of the same state.

    States that a search found are in bold. A cell has per cent right, then points above resizing ±
    the longer side of the interval.
    """
    full = rows[0]
    images = f"{full.images} images of the {split} split"
    accuracy = format_estimate(full.accuracy, between=" to ").replace(" (", " % (")
    cells: dict[str, dict[str, str]] = {}
    for row in rows[1:]:
        if row.category is None and "@" not in row.name:
            reads = {True: "read", False: "-", None: ""}[row.reads_question]
            figure = f"{row.accuracy.value:.1f}"
            if more := row.less_resized:
                width = max(more.high - more.value, more.value - more.low)
                figure += f" {more.value:+.1f}±{width:.1f}"
            label = (
                f"**{row.name}**" if row.name == yardstick.search_result else row.name
            )
            method = cells.setdefault(row.name, {"method": label, "question": reads})
            method[row.budget] = figure
    columns = ("method", "question", *(budget.label for budget in yardstick.budgets))
    table = [
        [method.get(column, "-") for column in columns] for method in cells.values()
    ]
    return (
        f"### {yardstick.name}\n\n{yardstick.model}; {full.questions} questions about {images}. "
        f"With all tokens ({full.tokens:.1f} on average) {accuracy} are right.\n\n"
        f"{Table('', columns, table, '--rrrr').markdown()}\n"
    )


def _tabulate_positions(yardstick: Yardstick, rows: Sequence[_Row]) -> str:
    """Per cent right of a few states by kind of question, with packed and with true positions."""
    number, states = _BY_KIND
    label = yardstick.budgets[number].label
    by_kind: dict[str, dict[str, str]] = {}
    for row in rows:
        if row.budget == label and (row.kind or row.category is None):
            by_kind.setdefault(row.kind or "all", {})[row.name] = (
                f"{row.accuracy.value:.1f}"
            )
    table = [
        [kind, *(f"{by_name[f'{name}@packed']}→{by_name[name]}" for name in states)]
        for kind, by_name in by_kind.items()
    ]
    columns = (f"{yardstick.name}, {label}", *(f"`{name}`" for name in states))
    return Table("", columns, table, "-" + "r" * len(states)).markdown() + "\n"


def _tabulate_gains(rows: Sequence[_Row], heading: str) -> str:
    """Points that every case gains upon the one it is compared with, with their intervals."""
    columns = dict.fromkeys(
        f"{row.yardstick}, {row.budget}" for row in rows if row.less_base is not None
    )
    gains: dict[str, dict[str, str]] = {}
    for row in rows:
        if row.less_base is not None and row.category is None:
            name = row.name.removeprefix(_UPON)
            gains.setdefault(name, {})[f"{row.yardstick}, {row.budget}"] = (
                format_estimate(row.less_base, between=" to ")
            )
    table = [
        [f"`{name}`", *(by_column.get(column, "-") for column in columns)]
        for name, by_column in gains.items()
    ]
    return Table("", [heading, *columns], table).markdown() + "\n"


def _write_parts(page: Path, parts: Mapping[str, str]) -> None:
    """Write each part of a page between ``<!-- name -->`` and ``<!-- /name -->``."""
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        head, begin, tail = text.partition(f"<!-- {name} -->\n")
        _, end, tail = tail.partition(f"<!-- /{name} -->")
        text = f"{head}{begin}\n{part}\n{end}{tail}"
    page.write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, and update the documentation if a flag asks for it.

    Returns the exit status, 1 after an error.
    """
    return run_command("yardsticks", lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> None:
    parser = CommandParser(
        prog="python -m benchmarks.accuracy.yardsticks",
        description="Measure base policies, states and controls on the small models.",
    )
    add = parser.add_argument
    text = "models to measure on"
    add(
        "--yardsticks",
        nargs="+",
        default=list(YARDSTICKS),
        choices=YARDSTICKS,
        help=text,
    )
    add("--checkpoint", type=Path, help="another training of a single yardstick")
    add("--split", choices=SPLITS, default="test", help="of the questions")
    add("--images", type=int, default=100, help="images of the split")
    add(
        "--methods",
        nargs="*",
        default=[],
        help="names, or files of states (default: all)",
    )
    text = (
        "instead compare every base policy with the released exchange of tokens upon it"
    )
    others = parser.add_mutually_exclusive_group()
    others.add_argument("--exchange", action="store_true", help=text)
    text = "instead tell how far the methods are ahead of this one, by question"
    others.add_argument("--against", metavar="METHOD", help=text)
    text = "also write docs/data/exchange.csv, or accuracy.csv and docs/accuracy.md's tables"
    add("--write-docs", action="store_true", help=text)
    options = parser.parse_args(arguments)
    # The last bits of pictures depend on the number of threads.
    torch.set_num_threads(1)
    parts = list[str]()
    all_rows = list[_Row]()
    positions = list[str]()
    for name in options.yardsticks:
        yardstick = open_yardstick(name, options.checkpoint)
        if options.exchange:
            cases = _build_exchange(yardstick)
        elif options.against:
            cases = _build_duel(yardstick, options.methods, options.against)
        else:
            cases = _build_cases(yardstick, options.methods)
        examples = draw_examples(options.split, options.images, yardstick.key)
        rows = list(_measure(yardstick, cases, examples))
        parts.append(_as_markdown(yardstick, rows, options.split))
        all_rows += rows
        if yardstick.has_one_axis and not (options.methods or options.exchange):
            positions.append(_tabulate_positions(yardstick, rows))
    tables = {"yardsticks": "\n".join(parts)}
    if options.exchange:
        tables = {"exchange": _tabulate_gains(all_rows, "upon")}
    elif options.against:
        tables = {"differences": _tabulate_gains(all_rows, f"less {options.against}")}
    elif positions:
        tables["positions"] = "\n".join(positions)
    print(*tables.values(), sep="\n", end="")
    if options.write_docs:
        data = "exchange.csv" if options.exchange else "accuracy.csv"
        if not options.exchange:
            _write_parts(_DOCS / "accuracy.md", tables)
        (_DOCS / "data" / data).write_text(_as_csv(all_rows), encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
