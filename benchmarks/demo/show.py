"""The demo from its options to what is printed and written."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time

import torch
from rich.console import Console
from rich.padding import Padding

from benchmarks.common import BenchmarkError
from benchmarks.common.progress import create_progress
from benchmarks.demo.example import ExamplePicture, draw_example
from benchmarks.demo.interrupt import InterruptHandler
from benchmarks.demo.measure import Settings, measure
from benchmarks.demo.results import Results
from benchmarks.demo.table import markdown, notes, terminal
from benchmarks.minillava.split import CLIP, LLAVA
from vllm_autoprune import load_state


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
