"""``python -m benchmarks.accuracy.yardsticks``: accuracy table of the small models.

Every base policy and shipped state is compared with full, resized, random and oracle, at K = N/2 to
N/16. Accuracy is measured in this process with transformers, on the selection code that a server
runs. A case costs a selection and a pass of the language model, so hundreds of cases take minutes.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from benchmarks.accuracy import tables
from benchmarks.accuracy.rows import Row, merge_rows, read_rows, write_rows
from benchmarks.accuracy.scoring import join_rights, score_cases
from benchmarks.accuracy.tables import UPON
from benchmarks.common.command import run_command
from benchmarks.common.report import command_line, read_commit
from benchmarks.policies import READING, SEARCH_RESULTS, SOURCE, SPLIT
from benchmarks.yardsticks import YARDSTICKS, open_yardstick
from benchmarks.yardsticks.examples import Example, draw_examples
from benchmarks.yardsticks.questions import CATEGORIES
from benchmarks.yardsticks.yardstick import ALL_TOKENS, Case, Yardstick
from offline_search.dataset import SPLITS
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.statistics import ClusterBootstrap, Estimate, Floats
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.state import PruningState

_DATA = Path(__file__).resolve().parents[2] / "docs/data"

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

_EXCHANGE_BUDGETS = ("K = 36", "K = 9", "K = N/2", "K = N/16")
"""Of each yardstick the budget at which 2 tokens are the paper's share of K, 6 %, and the one at
which K is the paper's share of N, 6 %."""

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
                cases.append(Case(f"{UPON}{name}", budget, state=upon, base=name))
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
) -> Iterator[Row]:
    """Rows of every case: for all questions, for each category, and for each kind."""
    command = shlex.join(command_line())
    commit = read_commit("benchmarks/accuracy/yardsticks.py")
    scores = score_cases(yardstick, cases, examples)
    rights = join_rights(scores)
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
            yield Row(
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
                command=command,
                commit=commit,
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, and update the documentation if a flag asks for it.

    Returns the exit status, 1 after an error.
    """
    return run_command("yardsticks", lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> None:
    parser = _build_parser()
    options = parser.parse_args(arguments)
    if options.write_docs and options.checkpoint:
        parser.error("--write-docs does not take --checkpoint")
    # The last bits of pictures depend on the number of threads.
    torch.set_num_threads(1)
    rows = list[Row]()
    parts = list[str]()
    for name in options.yardsticks:
        yardstick = open_yardstick(name, options.checkpoint)
        if options.exchange:
            cases = _build_exchange(yardstick)
        elif options.against:
            cases = _build_duel(yardstick, options.methods, options.against)
        else:
            cases = _build_cases(yardstick, options.methods)
        examples = draw_examples(options.split, options.images, yardstick.key)
        measured = list(_measure(yardstick, cases, examples))
        parts.append(tables.tabulate_accuracy(yardstick, measured, options.split))
        rows += measured
    if options.exchange:
        parts = [tables.tabulate_gains(rows, "upon")]
    elif options.against:
        parts = [tables.tabulate_gains(rows, f"less {options.against}")]
    print(*parts, sep="\n", end="")
    if options.write_docs and options.exchange:
        (_DATA / "exchange.csv").write_text(write_rows(rows), encoding="utf-8")
    elif options.write_docs and options.against:
        _write_duels(rows, options.against)
    elif options.write_docs:
        _write_docs(rows, keep=bool(options.methods))


def _build_parser() -> CommandParser:
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
    text = "also write docs/data/exchange.csv; or replace what was measured in duels.csv; or in "
    text += "accuracy.csv and docs/accuracy.md's tables"
    add("--write-docs", action="store_true", help=text)
    return parser


def _write_duels(rows: Sequence[Row], against: str) -> None:
    """Put the rows of the methods into duels.csv, by the names of both; kinds are left out."""
    data = _DATA / "duels.csv"
    old = read_rows(data.read_text(encoding="utf-8")) if data.exists() else []
    duels = [
        replace(row, name=f"{row.name} less {against}")
        for row in rows
        if row.less_base is not None and row.kind is None
    ]
    merged = merge_rows(old, duels, [open_yardstick(name).name for name in YARDSTICKS])
    data.write_text(write_rows(merged), encoding="utf-8")


def _write_docs(rows: Sequence[Row], *, keep: bool) -> None:
    """Put rows into accuracy.csv, and write the tables of accuracy.md anew from all its rows.

    Other rows of the yardsticks that were measured go, unless ``keep``.
    """
    data = _DATA / "accuracy.csv"
    measured = {row.yardstick for row in rows}
    old = [
        row
        for row in read_rows(data.read_text(encoding="utf-8"))
        if keep or row.yardstick not in measured
    ]
    merged = merge_rows(old, rows, [open_yardstick(name).name for name in YARDSTICKS])
    data.write_text(write_rows(merged), encoding="utf-8")
    tables.write_parts(_DATA.with_name("accuracy.md"), build_parts(merged))


def build_parts(rows: Sequence[Row]) -> dict[str, str]:
    """The tables of accuracy.md, by name, from all rows of its data.

    They have methods in the order in which they are measured all together. Positions are compared
    by kind of question on the first model with one axis alone.
    """
    names = ("full", *_CONTROLS, *dict.fromkeys((*BASE_POLICIES, *_STATES)))
    order = {name: number for number, name in enumerate(names)}
    ordered = sorted(rows, key=lambda row: order.get(row.name, len(order)))
    by_yardstick = {
        yardstick: [row for row in ordered if row.yardstick == yardstick.name]
        for yardstick in map(open_yardstick, YARDSTICKS)
    }
    accuracy = [tables.tabulate_accuracy(*part) for part in by_yardstick.items()]
    one_axis = next(part for part in by_yardstick.items() if part[0].has_one_axis)
    return {
        "yardsticks": "\n".join(accuracy),
        "positions": tables.tabulate_positions(*one_axis),
    }


if __name__ == "__main__":
    raise SystemExit(main())
