"""`python -m benchmarks.cost overhead`: what the plugin itself costs a server."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
from pathlib import Path

from benchmarks.common.report import Section, markdown, write_section
from benchmarks.cost.overhead.settings import Settings
from benchmarks.minillava.split import CLIP, LLAVA

LAYERS = 16
MEASUREMENTS = {
    "ttft": "ttft",
    "inert": "no_state_overhead",
    "memory": "memory",
    "second-question": "second_question",
}
"""Module of each measurement."""
TITLE = "What pruning itself costs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options; each has a default."""
    parser.add_argument(
        "what", nargs="?", default="all", choices=(*MEASUREMENTS, "all"), help="what to measure"
    )
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
    sections: list[Section] = []
    for name in MEASUREMENTS if options.what == "all" else (options.what,):
        # Imported here, because these modules import vLLM.
        module = importlib.import_module(f"{__name__}.{MEASUREMENTS[name]}")
        sections.append(module.measure(settings))
        write_section(sections[-1], options.out, tuple(MEASUREMENTS), TITLE)
    if options.json:
        print(json.dumps([dataclasses.asdict(section) for section in sections], indent=1))
    else:
        print(markdown(sections, TITLE))
    return 0
