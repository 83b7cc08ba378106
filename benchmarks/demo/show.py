"""From options to what is printed and written: measure, draw, tell.

Knows nothing about signals or exit statuses.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time

import torch
from rich.console import Console
from rich.padding import Padding

from benchmarks.demo.example import Drawn, draw_example
from benchmarks.demo.failure import DemoError
from benchmarks.demo.measure import Setting, measure
from benchmarks.demo.progress import progress_on
from benchmarks.demo.results import Results
from benchmarks.demo.stop import Stopper
from benchmarks.demo.table import markdown, notes, terminal
from benchmarks.minillava.split import CLIP, LLAVA
from vllm_autoprune import load_state


def demo(options: argparse.Namespace, stopper: Stopper) -> None:
    """The whole demo."""
    start = time.monotonic()
    # Spinning helpers of the client would take the cores from the server that is measured.
    torch.set_num_threads(1)
    setting = Setting(
        model=options.model or LLAVA,
        text_tower=options.text_tower or CLIP,
        state=options.state,
        scenes=options.scenes,
        rounds=options.rounds,
        out=options.out.resolve(),
    )
    for checkpoint in (setting.model, setting.text_tower):
        if not (checkpoint / "model.safetensors").is_file():
            raise DemoError(f"{checkpoint} holds no checkpoint (model.safetensors)")
    load_state(setting.state)  # a state that cannot be served fails here, not after a minute
    progress = progress_on(Console(stderr=True))
    results, questions, measured = measure(setting, progress, stopper)
    with progress.stage("picture"):
        drawn = draw_example(setting, questions, measured)
    results = dataclasses.replace(results, seconds=time.monotonic() - start)
    _write(setting, results, drawn)
    if options.json:
        print(_as_json(results, drawn))
    else:
        _tell(results, drawn)


def _write(setting: Setting, results: Results, drawn: Drawn) -> None:
    (setting.out / "results.json").write_text(_as_json(results, drawn) + "\n")
    (setting.out / "table.md").write_text(markdown(results))


def _as_json(results: Results, drawn: Drawn) -> str:
    picture = {**dataclasses.asdict(drawn), "agrees": drawn.agrees}
    return json.dumps({**results.as_json(), "picture": picture}, indent=2)


def _tell(results: Results, drawn: Drawn) -> None:
    console = Console()
    if console.is_terminal:
        console.print(
            "", terminal(results, console.width), Padding(f"[bold]{results.verdict()}[/]", (1, 0))
        )
        for note in notes(results):
            console.print(Padding(f"• {note}", (0, 0, 0, 2)), style="dim", highlight=False)
    else:
        print(markdown(results), end="")
    checked = "as served" if drawn.agrees else f"served otherwise: {drawn.served}"
    console.print(
        f"\npicture: {drawn.path} (answers {checked}; patches recomputed with transformers, whose "
        f"rounding may\nkeep a few others); {results.seconds:.0f} s in all",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
