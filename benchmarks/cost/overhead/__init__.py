"""`python -m benchmarks.cost overhead`: what the plugin itself costs a server."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.common.report import Section, markdown, write_section
from benchmarks.cost.overhead.settings import Settings
from benchmarks.minillava.split import CLIP, LLAVA

LAYERS = 16
TITLE = "What pruning itself costs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options; each has a default."""
    parser.add_argument("what", nargs="?", default="all", choices=(*MEASUREMENTS, "all"))
    parser.add_argument(
        "--layers", type=int, default=LAYERS, help="language layers of the model of ttft"
    )
    parser.add_argument("--quick", action="store_true", help="few requests, as a trial run")
    parser.add_argument(
        "--model", type=Path, default=LLAVA, help="checkpoint of the other parts (mini-LLaVA)"
    )
    parser.add_argument("--text-tower", type=Path, default=CLIP, help="CLIP that belongs to it")
    parser.add_argument(
        "--out", type=Path, default=Path("out/overhead"), help="folder of all files"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")


def run(options: argparse.Namespace) -> int:
    """The exit status: 0 once everything is measured, whatever the verdicts."""
    settings = Settings(
        options.model, options.text_tower, options.layers, options.quick, options.out
    )
    sections = []
    for name in MEASUREMENTS if options.what == "all" else (options.what,):
        sections.append(MEASUREMENTS[name](settings))
        write_section(sections[-1], options.out, tuple(MEASUREMENTS), TITLE)
    if options.json:
        print(json.dumps([dataclasses.asdict(section) for section in sections], indent=1))
    else:
        print(markdown(sections, TITLE))
    return 0


def _measure_ttft(settings: Settings) -> Section:
    from benchmarks.common.shapes import write_clip, write_llava
    from benchmarks.cost.overhead import ttft, ttft_parts

    llava = write_llava(settings.out / f"llava-{settings.layers}-layers", settings.layers)
    clip = write_clip(settings.out / "clip")
    runs = [ttft.measure(settings, llava, tower) for tower in (clip, None)]
    parts = ttft_parts.measure_parts(llava, clip, settings.quick)
    return ttft.build_section(settings.layers, runs, parts)


def _measure_inert(settings: Settings) -> Section:
    from benchmarks.cost.overhead import inert

    return inert.measure(settings)


def _measure_memory(settings: Settings) -> Section:
    from benchmarks.cost.overhead import memory

    return memory.measure(settings)


def _measure_second_question(settings: Settings) -> Section:
    from benchmarks.cost.overhead import second_question

    return second_question.measure(settings)


MEASUREMENTS: Mapping[str, Callable[[Settings], Section]] = {
    "ttft": _measure_ttft,
    "inert": _measure_inert,
    "memory": _measure_memory,
    "second-question": _measure_second_question,
}
