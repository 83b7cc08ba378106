"""Output of the demo: its table and notes, printed and written."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time

import torch
from rich.box import HORIZONTALS
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from benchmarks.common import BenchmarkError
from benchmarks.common.progress import create_progress
from benchmarks.common.report import Table as ReportTable
from benchmarks.common.report import format_spread
from benchmarks.demo.configurations import NAMES
from benchmarks.demo.example import ExamplePicture, draw_example
from benchmarks.demo.interrupt import InterruptHandler
from benchmarks.demo.measure import Settings, measure
from benchmarks.demo.results import Results, Row
from benchmarks.minillava.split import CLIP, LLAVA
from vllm_autoprune import load_state
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
        style = "dim" if row.configuration.keep in ("random", "resized") else None
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


def run_demo(options: argparse.Namespace, interrupt: InterruptHandler) -> None:
    """The whole demo."""
    start = time.monotonic()
    # Busy-waiting threads of torch in the client would slow the server that is measured.
    torch.set_num_threads(1)
    settings = Settings(
        model=options.model or LLAVA,
        text_tower=options.text_tower or CLIP,
        state=options.state,
        scenes=options.scenes,
        rounds=options.rounds,
        out=options.out.resolve(),
    )
    for checkpoint in (settings.model, settings.text_tower):
        if not (checkpoint / "model.safetensors").is_file():
            raise BenchmarkError(f"{checkpoint} contains no checkpoint (model.safetensors)")
    load_state(settings.state)  # fails here rather than after a minute
    progress = create_progress()
    results, questions, measured = measure(settings, progress, interrupt)
    with progress.stage("picture"):
        picture = draw_example(settings, questions, measured)
    results = dataclasses.replace(results, seconds=time.monotonic() - start)
    _write(settings, results, picture)
    if options.json:
        print(_as_json(results, picture))
    else:
        _print(results, picture)


def _write(settings: Settings, results: Results, picture: ExamplePicture) -> None:
    (settings.out / "results.json").write_text(_as_json(results, picture) + "\n")
    (settings.out / "table.md").write_text(markdown(results))


def _as_json(results: Results, picture: ExamplePicture) -> str:
    content = {**dataclasses.asdict(picture), "agrees": picture.agrees}
    return json.dumps({**results.to_json(), "picture": content}, indent=2)


def _print(results: Results, picture: ExamplePicture) -> None:
    console = Console()
    if console.is_terminal:
        console.print(
            "", terminal(results, console.width), Padding(f"[bold]{results.verdict()}[/]", (1, 0))
        )
        for note in notes(results):
            console.print(Padding(f"• {note}", (0, 0, 0, 2)), style="dim", highlight=False)
    else:
        print(markdown(results), end="")
    checked = "as served" if picture.agrees else f"different when served: {picture.served}"
    console.print(
        f"\npicture: {picture.path} (answers {checked}; patches recomputed with transformers, "
        f"whose rounding may\nkeep a few others); {results.seconds:.0f} s in all",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
