"""`python -m benchmarks.cost questions`: what one image with many questions costs.

python -m benchmarks.cost questions ttft
python -m benchmarks.cost questions blocks
python -m benchmarks.cost questions total out/questions/llava-1.5-half-4-layers.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path

from benchmarks.common import BenchmarkError
from benchmarks.common.report import Section, markdown
from benchmarks.cost.efficiency.models import SHAPES
from benchmarks.cost.questions import blocks, total, ttft
from benchmarks.cost.questions.arms import (
    ARMS,
    HALF,
    REQUEST_FLAGS,
    SPLIT,
    STOCK,
    build_arms,
    find_digest,
    load_shape,
    request_settings,
)

TITLE = "One image, many questions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options; each has a default."""
    add = parser.add_argument
    add("what", choices=tuple(MEASUREMENTS), help="what is measured or computed")
    add("files", nargs="*", type=Path, help="total: files of ttft, at one depth or at two")
    add("--model", choices=(HALF, *SHAPES), default=HALF, help="true shape without weights")
    add("--layers", type=int, default=4, help="language layers that are served")
    add("--budget", type=int, default=64, help="K")
    add("--core-share", type=float, default=0.8, help="part of K that the split's core holds")
    add("--state", default="autoprune", help="state that reads the question, a file or a name")
    add("--no-text-tower", action="store_true", help="measure relevance by input embeddings")
    add("--arms", default=",".join(ARMS), help="arms to measure")
    add("--rounds", type=int, default=12, help="images")
    add("--questions", type=int, default=3, help="questions on each image, 2 or more")
    add("--many", type=int, default=0, help="questions on one further image")
    add("--share-server", action="store_true", help="one server for all pruned arms")
    add("--out", type=Path, default=Path("out/questions"), help="folder of files")
    add("--json", action="store_true", help="print JSON instead of Markdown")


def run(options: argparse.Namespace) -> int:
    """The exit status: 0 once everything is measured, whatever the verdicts."""
    section = MEASUREMENTS[options.what](options)
    if options.json:
        print(json.dumps(dataclasses.asdict(section), indent=1))
    else:
        print(markdown([section], TITLE))
    return 0


def _measure_ttft(options: argparse.Namespace) -> Section:
    model = load_shape(options.model, options.layers, options.out)
    label = f"{options.model}-{options.layers}-layers"
    label += "-no-text-tower" if options.no_text_tower else ""
    names = tuple(options.arms.split(","))
    arms = build_arms(
        model,
        tuple(name for name in names if name in (STOCK, SPLIT)) if options.share_server else names,
        options.state,
        options.core_share,
        options.budget,
        options.out,
        not options.no_text_tower,
    )
    settings: dict[str, dict[str, object]] = {}
    if options.share_server:
        arms = [
            arm
            if arm.digest is None
            else arm.model_copy(update={"flags": (*arm.flags, *REQUEST_FLAGS)})
            for arm in arms
        ]
        settings = request_settings(names, options.state, options.budget)
    load = [os.getloadavg()[0]]
    measured = ttft.measure(
        arms,
        model,
        rounds=options.rounds,
        questions=options.questions,
        many=options.many,
        settings=settings,
        logs=options.out / "servers" / label,
    )
    load.append(os.getloadavg()[0])
    servers = "one server for all pruned arms" if settings else "a server for each arm"
    setup = [
        f"{options.model}, {options.layers} language layers, dummy weights, K = {options.budget}",
        f"state `{options.state}`, core of {options.core_share:g}; {options.rounds} images, "
        f"{options.questions} questions each; {servers}",
        "relevance by the input embeddings of the language model"
        if options.no_text_tower
        else "relevance by the text tower of CLIP-L, in float32",
    ]
    section = ttft.build_section(setup, measured, " and ".join(f"{one:.2f}" for one in load))
    content = {
        "model": options.model,
        "layers": options.layers,
        "budget": options.budget,
        "digests": {name: find_digest(name, options.state, options.core_share) for name in names},
        "passes": {
            name: [
                {
                    "ttft": one.first("ttft"),
                    "again": one.again("ttft"),
                    "processor": one.first("processor"),
                    "processor_again": one.again("processor"),
                }
            ]
            for name, one in measured.items()
        },
        "many": {name: [a.ttft for a in one.many] for name, one in measured.items()},
        "answers": {name: one.model_dump() for name, one in measured.items()},
        "environment": section.environment,
    }
    (options.out / f"{label}.json").write_text(json.dumps(content, indent=1) + "\n")
    (options.out / f"{label}.md").write_text(section.markdown())
    return section


def _count_blocks(options: argparse.Namespace) -> Section:
    options.out.mkdir(parents=True, exist_ok=True)
    counts = blocks.measure(options.state, options.core_share, options.out)
    section = blocks.build_section(counts, options.core_share)
    (options.out / "blocks.json").write_text(json.dumps(dataclasses.asdict(section)) + "\n")
    return section


def _compute_total(options: argparse.Namespace) -> Section:
    try:
        section = total.build_section(options.files)
        _, costs = total.read_costs(options.files, total.TIMES["time to first token"])
        many = total.read_many(options.files[0]) if len(options.files) == 1 else {}
    except OSError as error:
        raise BenchmarkError(str(error)) from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise BenchmarkError(f"not files of benchmarks.cost questions ttft: {error!r}") from error
    path = options.files[-1].with_suffix(".svg")
    path.write_text(total.draw_totals(costs, many))
    return section


MEASUREMENTS = {"ttft": _measure_ttft, "blocks": _count_blocks, "total": _compute_total}
