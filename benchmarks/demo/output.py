"""Output of the demo: its table and notes, printed and written."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
import timeit

import torch
from rich.console import Console
from rich.padding import Padding

from benchmarks.common import BenchmarkError
from benchmarks.common.report import Table as ReportTable
from benchmarks.common.report import show_stage
from benchmarks.common.shapes import TOKENS
from benchmarks.demo.configurations import NAMES
from benchmarks.demo.example import ExamplePicture, draw_example
from benchmarks.demo.interrupt import InterruptHandler
from benchmarks.demo.measure import Settings, measure
from benchmarks.demo.results import Results, Row
from benchmarks.demo.speed import WIDTH
from benchmarks.demo.summary import summary, summary_notes, terminal
from benchmarks.minillava.split import CLIP, LLAVA
from vllm_autoprune import load_state
from vllm_autoprune.ops.dtype import Dtype, choose_dtype

COLUMNS = ("K", "tokens chosen by", "accuracy %", "accuracy+ %", "prompt tokens", "KV bytes")

INTRODUCTION = """\
This demo serves two models with `vllm serve`, stock and pruned, on this machine, and compares both
with resizing the image to as many tokens:
  mini-LLaVA, trained, tiny:                      how many answers stay right
  LLaVA-1.5's proportions, random weights, large: how much faster and smaller requests become
The large one is served in {dtype}, which this machine multiplies fast, the tiny one in {small}. By
a product timed just now it takes about {minutes} minutes here, longer beside other work, and ends
with one table and a picture."""

OTHER_SECONDS = 140
"""Starts of four servers and mini-LLaVA's questions, on two idle cores."""
PRODUCTS = 1100
"""What all requests to the large model take, in products of one image's tokens in its MLP."""


def cells(row: Row, visual_tokens: int) -> tuple[str, ...]:
    """The columns of one row, as text."""
    budget = row.configuration.budget
    return (
        str(visual_tokens if budget is None else budget),
        NAMES[row.configuration.keep],
        f"{100 * row.accuracy:.1f} ± {100 * row.half_width:.1f}",
        f"{100 * row.accuracy_plus:.1f}",
        f"{row.prompt_tokens:.1f}",
        f"{row.kv_bytes:,.0f}",
    )


def details(results: Results) -> str:
    """All configurations of mini-LLaVA, as Markdown."""
    rows = [cells(row, results.visual_tokens) for row in results.rows]
    table = ReportTable("", COLUMNS, rows, "rl" + "r" * (len(COLUMNS) - 2)).markdown()
    return "\n".join([table, "", results.verdict(), "", *(f"- {n}" for n in notes(results))]) + "\n"


def notes(results: Results) -> tuple[str, ...]:
    """How to read the table of details."""
    control = results.control
    return (
        f"{results.questions} questions on {results.scenes} scenes, the same in every row. "
        "± is half of the 95 % interval. accuracy+ counts a yes/no pair only where both are "
        "right.",
        f"KV bytes = {results.kv_formula}. Prompt tokens as the server counts them, mean over "
        "the questions.",
        f"Control: keeping all {results.visual_tokens} tokens, the pruned server gave "
        f"{control.same_answers} of {control.asked} answers exactly as the stock one.",
    )


def estimate_minutes(dtype: Dtype) -> int:
    """Duration of the demo, by the time that a product of the large model takes now."""
    rows, weight = torch.randn(TOKENS, WIDTH), torch.randn(11008 * WIDTH // 4096, WIDTH)
    if dtype == "bfloat16":
        rows, weight = rows.bfloat16(), weight.bfloat16()
    seconds = timeit.repeat(lambda: torch.nn.functional.linear(rows, weight), number=1, repeat=5)
    return math.ceil((OTHER_SECONDS + PRODUCTS * statistics.median(seconds)) / 60)


def run_demo(options: argparse.Namespace, interrupt: InterruptHandler) -> None:
    """The whole demo."""
    start = time.monotonic()
    settings = Settings(
        model=options.model or LLAVA,
        text_tower=options.text_tower or CLIP,
        state=options.state,
        scenes=options.scenes,
        out=options.out.resolve(),
    )
    for checkpoint in (settings.model, settings.text_tower):
        if not (checkpoint / "model.safetensors").is_file():
            raise BenchmarkError(f"{checkpoint} contains no checkpoint (model.safetensors)")
    load_state(settings.state)  # fails here rather than after a minute
    dtype = choose_dtype()
    minutes = estimate_minutes(dtype)
    introduction = INTRODUCTION.format(dtype=dtype, small=settings.dtype, minutes=minutes)
    print(introduction, file=sys.stderr, flush=True)
    # Busy-waiting threads of torch in the client would slow the server that is measured.
    torch.set_num_threads(1)
    results, questions, measured = measure(settings, interrupt)
    with show_stage("picture"):
        picture = draw_example(settings, questions, measured)
    results = dataclasses.replace(results, seconds=time.monotonic() - start)
    _write(settings, results, picture)
    if options.json:
        print(_as_json(results, picture))
    else:
        _print(settings, results, picture)


def _write(settings: Settings, results: Results, picture: ExamplePicture) -> None:
    (settings.out / "results.json").write_text(_as_json(results, picture) + "\n")
    (settings.out / "accuracy.md").write_text(details(results))
    (settings.out / "table.md").write_text(summary(results))


def _as_json(results: Results, picture: ExamplePicture) -> str:
    content = {**dataclasses.asdict(picture), "agrees": picture.agrees}
    return json.dumps({**results.to_json(), "picture": content}, indent=2)


def _print(settings: Settings, results: Results, picture: ExamplePicture) -> None:
    console = Console()
    if console.is_terminal:
        console.print("", terminal(results))
        for note in summary_notes(results):
            console.print(Padding(f"• {note}", (0, 0, 0, 2)), style="dim", highlight=False)
    else:
        print(summary(results), end="")
    checked = "as served" if picture.agrees else f"different when served: {picture.served}"
    console.print(
        f"\npicture: {picture.path} (answers {checked}; patches recomputed with transformers, "
        f"whose rounding may\nkeep a few others); every configuration: "
        f"{settings.out / 'accuracy.md'}; {results.seconds:.0f} s in all",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
