"""The last screen of the demo: stock, resized and pruned, by speed, size and right answers."""

from __future__ import annotations

from rich.box import HORIZONTALS
from rich.table import Table

from benchmarks.common.report import Table as ReportTable
from benchmarks.demo.results import Results
from benchmarks.demo.speed import ANSWER_TOKENS, USERS, SpeedRow
from vllm_autoprune.statistics import Spread

SHOWN_BUDGET = 16
"""K of mini-LLaVA's 144 tokens, the same ninth as 64 of 576."""

HEAD = ("", "stock", "resized", "pruned")
Cells = tuple[str, str, str, str]


def sections(results: Results) -> tuple[tuple[Cells, ...], tuple[Cells, ...]]:
    """Rows of the large model, and rows of mini-LLaVA; the first of each is its heading."""
    speed = results.speed
    three = (speed.stock, speed.resized, speed.pruned)
    large = (
        _heading("large, random weights", speed.tokens, speed.budget),
        _row("prompt tokens of a request", [f"{one.prompt_tokens}" for one in three]),
        _row("KV cache of a request, MB", [f"{one.kv_bytes / 1e6:.1f}" for one in three]),
        _row("first token, alone, ms", [_median(one.alone) for one in three]),
        _row(f"first token, {USERS} at once, ms", [_median(one.together) for one in three]),
        _row(f"requests/s, {USERS} at once", [f"{one.requests_per_second:.2f}" for one in three]),
        _row("first token, question 1/2/3, ms", [_questions(one) for one in three]),
    )
    rows = (
        results.full,
        results.row("resized", SHOWN_BUDGET),
        results.row("state", SHOWN_BUDGET),
    )
    small = (
        _heading("mini-LLaVA, trained", results.visual_tokens, SHOWN_BUDGET),
        _row("prompt tokens of a request", [f"{row.prompt_tokens:.1f}" for row in rows]),
        _row("KV cache of a request, MB", [f"{row.kv_bytes / 1e6:.2f}" for row in rows]),
        _row(
            "right answers, %",
            [f"{100 * row.accuracy:.1f} ± {100 * row.half_width:.1f}" for row in rows],
        ),
    )
    return large, small


def summary(results: Results) -> str:
    """The table and its notes as Markdown."""
    large, small = sections(results)
    bold = [tuple(f"**{cell}**" for cell in block[0]) for block in (large, small)]
    rows = [bold[0], *large[1:], bold[1], *small[1:]]
    table = ReportTable("", HEAD, rows, "lrrr").markdown()
    return "\n".join([table, "", *(f"- {note}" for note in summary_notes(results))]) + "\n"


def terminal(results: Results) -> Table:
    """The table for `rich`, with a rule between the models."""
    table = Table(box=HORIZONTALS, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for number, name in enumerate(HEAD):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for block in sections(results):
        table.add_section()
        for number, row in enumerate(block):
            table.add_row(*row, style=None if number else "bold")
    return table


def summary_notes(results: Results) -> tuple[str, ...]:
    """How to read the table."""
    speed = results.speed
    alone, machine = speed.stock.alone, results.environment
    base = results.row("reference", SHOWN_BUDGET)
    return (
        "Large: LLaVA-1.5's shape at half its width, 4 language layers and 2 of the tower, in "
        f"{machine['dtype of local servers']}. Medians of {alone.count} requests alone "
        f"and {speed.stock.together.count} at once, each of {ANSWER_TOKENS} tokens and on a new "
        f"image; quartiles alone: {_spread(alone)} stock, "
        f"{_spread(speed.pruned.alone)} pruned. {machine['cores']} cores at a load average of "
        f"{machine['load average']}: other work changes such times. Resized and pruned have the "
        "same number of tokens; their times differ by more than the selection takes.",
        "Question 1/2/3: one image asked about three times, prefix caching on. Stock finds "
        "the image in its cache; a state that reads the question prefills K tokens again.",
        f"mini-LLaVA, in {results.dtype}: {results.questions} held-out questions, ± half of the "
        "95 % interval. Pruned is the state that a search found for it; its base policy alone: "
        f"{100 * base.accuracy:.1f} %. Resized: its tokens pooled to K cells, which it was not "
        "trained on, so it is a weak rival here.",
    )


def _heading(model: str, tokens: int, budget: int) -> Cells:
    return (model, f"N = {tokens}", f"K = {budget}", f"K = {budget}")


def _row(name: str, values: list[str]) -> Cells:
    stock, resized, pruned = values
    return (name, stock, resized, pruned)


def _median(sample: Spread) -> str:
    return f"{sample.median:,.0f}"


def _spread(sample: Spread) -> str:
    return f"{sample.low:,.0f} to {sample.high:,.0f}"


def _questions(row: SpeedRow) -> str:
    return "/".join(_median(sample) for sample in row.questions)
