"""The table of the demo, for a terminal and as Markdown, and its notes."""

from __future__ import annotations

from rich.box import HORIZONTALS
from rich.table import Table

from benchmarks.common.report import Table as ReportTable
from benchmarks.common.report import format_spread
from benchmarks.demo.configurations import NAMES
from benchmarks.demo.results import Results, Row
from vllm_autoprune.statistics import Spread

COLUMNS = (
    "K", "tokens chosen by", "accuracy %", "accuracy+ %",
    "prompt tokens", "KV bytes", "TTFT ms", "request ms",
)  # fmt: skip
_WIDE = 116


def cells(row: Row, visual_tokens: int, quartiles: bool = True) -> tuple[str, ...]:
    """The columns of one row, as text."""
    budget = row.configuration.budget
    took = [times(s) if quartiles else f"{s.median:.1f}" for s in (row.ttft, row.total)]
    return (
        str(visual_tokens if budget is None else budget),
        NAMES[row.configuration.keep],
        f"{100 * row.accuracy:.1f} ± {100 * row.half_width:.1f}",
        f"{100 * row.accuracy_plus:.1f}",
        f"{row.prompt_tokens:.1f}",
        f"{row.kv_bytes:,.0f}",
        *took,
    )


def times(sample: Spread) -> str:
    """Median and quartiles of milliseconds."""
    return format_spread(sample, 1.0)


def markdown(results: Results) -> str:
    """The table and its notes as Markdown."""
    rows = [cells(row, results.visual_tokens) for row in results.rows]
    table = ReportTable("", COLUMNS, rows, "rl" + "r" * (len(COLUMNS) - 2)).markdown()
    return "\n".join([table, "", results.verdict(), "", *(f"- {n}" for n in notes(results))]) + "\n"


def terminal(results: Results, width: int) -> Table:
    """The table for `rich`, with a rule between budgets; only medians where it gets narrow."""
    wide = width >= _WIDE
    table = Table(box=HORIZONTALS, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for number, name in enumerate(COLUMNS):
        header = name if wide else name.replace(" ", "\n", 1)
        table.add_column(header, justify="left" if number == 1 else "right", no_wrap=True)
    budget = results.rows[0].configuration.budget
    for row in results.rows:
        if row.configuration.budget != budget:
            table.add_section()
            budget = row.configuration.budget
        style = "dim" if row.configuration.keep == "random" else None
        table.add_row(*cells(row, results.visual_tokens, quartiles=wide), style=style)
    return table


def notes(results: Results) -> tuple[str, ...]:
    """How to read the table."""
    sample, control = results.full.ttft.count, results.control
    return (
        f"{results.questions} questions on {results.scenes} scenes, the same in every row. "
        "± is half of the 95 % interval. accuracy+ counts a yes/no pair only where both are "
        "right.",
        f"KV bytes = {results.kv_formula}. Prompt tokens as the server counts them, mean over "
        "the questions.",
        f"Times: median (quartiles) of {sample} streamed requests a row, one at a time, each of "
        "the same length, configurations in turn, each on a new image. Prefix "
        "caching and the plugin's feature cache are off, so no request profits from another.",
        f"Control: keeping all {results.visual_tokens} tokens, the pruned server gave "
        f"{control.same_answers} of {control.asked} answers exactly as the stock one, "
        f"TTFT {times(control.ttft)} ms, request {times(control.total)} ms.",
        "This model is tiny: a request is mostly HTTP, image decoding and scheduling, so times "
        "say little about a real model. What carries over is the number of tokens, and with it "
        "prefill work and KV memory.",
    )
