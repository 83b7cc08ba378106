"""`python -m benchmarks.cost cells`: what it saves to drop blank cells before the vision tower.

Qwen3-VL-8B and its pictures are scaled alike: attention in the tower has the share that it has
there. Every request brings a new picture, and arms take turns on one server. Processor time and
bytes are those of pictures of full size.
"""

from __future__ import annotations

import argparse
import csv
import shlex
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from itertools import count, product
from pathlib import Path
from random import Random

from PIL import Image, ImageDraw, ImageFont

from benchmarks import BenchmarkError
from benchmarks.common import shapes
from benchmarks.common.client import Client
from benchmarks.common.report import command_line, log_progress
from benchmarks.common.requests import build_body, build_content, draw_picture, encode_picture
from benchmarks.server import serve
from vllm_autoprune.selftest.backbones import build
from vllm_autoprune.statistics import Estimate, Spread
from vllm_autoprune.tpdsl.cells import Cells, kept_cells

_FLAGS = (
    "--served-model-name served --autoprune-state cen_divprune --autoprune-budget 1/8 "
    "--autoprune-requests states --max-model-len 4096 --max-num-batched-tokens 4096 "
    "--block-size 32 --mm-processor-cache-gb 0.5 --enforce-eager"
)
_ARMS: Mapping[str, Mapping[str, object]] = {
    "stock": {"enabled": False},
    "selection": {},
    "cells": {"cells": "flat", "budget": "100%"},
    "both": {"cells": "flat"},
}
_USERS, _FIELDS = (1, 8), {"ignore_eos": True, "allowed_token_ids": [4]}  # a word
_SIZES = {"A4 page": (1654, 2338), "screenshot": (1920, 1080), "photo": (1280, 960)}
_LEAST = {"A4 page": 1.6, "photo": 0.98}
"""Promised requests/s of both over those of selection alone."""


def _draw(kind: str, seed: int, scale: float) -> Image.Image:
    """A picture whose words are as large, in cells, as at its full size."""
    random, (width, height) = Random(seed), (int(scale * side) for side in _SIZES[kind])
    if kind == "photo":
        return draw_picture(seed, width, height)
    image = Image.new("RGB", (width, height), "white")
    pen, size, margin = ImageDraw.Draw(image), 30, int(scale * 196)
    columns = [(margin, width - margin)]
    if kind == "screenshot":  # a title, a list at the left, a text and a photo
        size, margin, columns = 14, height // 18, [(8, width // 6), (width // 5, width * 2 // 3)]
        pen.rectangle((0, 0, width, height // 27), (38, 50, 72))
        pen.rectangle((0, height // 27, width // 6, height), (243, 243, 245))
        image.paste(draw_picture(seed, width // 4, height // 3), (width * 7 // 10, height // 5))
    for start, end in columns:
        y = margin
        while y < height - margin - size:
            last = random.random() < 0.25  # of a paragraph
            length = (end - start) / (0.52 * size) * (random.uniform(0.2, 0.9) if last else 0.98)
            words = shapes.draw_words(60, random.randrange(10**6))[: int(length)]
            pen.text((start, y), words, (30, 30, 30), ImageFont.load_default(size))
            y += int(1.4 * size) * (1 + last)
    return image


OPTIONS = {
    "--rounds": {"type": int, "default": 5, "help": "turns at 8 users; three times as many at 1"},
    "--out": {"type": Path, "default": Path("out/cells"), "help": "folder of files"},
}


def run(options: argparse.Namespace) -> int:
    """Print rows of ``docs/data``: medians and quartiles, ratios with 95 % intervals."""
    from transformers import AutoImageProcessor

    table = tomllib.loads(Path(shapes.__file__).with_suffix(".toml").read_text())
    folder = build("qwen3_vl", options.out / "model", table["scaled-qwen3-vl"])
    writer, call = csv.writer(sys.stdout, lineterminator="\n"), shlex.join(command_line())
    writer.writerow(["what", "setting", "value", "low", "high", "unit", "verdict", "command"])

    def add(
        what: str, setting: str, figure: Spread | Estimate, unit: str, verdict: str = ""
    ) -> None:
        values = (f"{value:.4g}" for value in astuple(figure)[:3])
        writer.writerow([what, setting, *values, unit, verdict, call])
        sys.stdout.flush()

    processor = AutoImageProcessor.from_pretrained(folder)
    for kind, rule in product(_SIZES, (Cells(), Cells(rule="predicted"))):
        figures = defaultdict[tuple[str, str], list[float]](list)
        for seed in range(9):
            image, begin = _draw(kind, seed, 1), time.process_time()
            data = processor(image, do_rescale=False, do_normalize=False, return_tensors="pt")
            figures["image processor", "ms"].append(1000 * (time.process_time() - begin))
            height, width = (data["image_grid_thw"][0, 1:] // 2).tolist()
            cells = data["pixel_values"].numpy().reshape(height, width, 4, 3, -1)
            begin = time.process_time()
            anchors = rule.find_anchors(cells)
            figures["find_anchors", "ms"].append(1000 * (time.process_time() - begin))
            kept = 1 if anchors is None else len(kept_cells(anchors)) / len(anchors)
            figures["cells kept", "%"].append(100 * kept)
            figures["pixels between processes", "MB"].append(kept * cells.nbytes / 1e6)
        for (what, unit), values in figures.items():
            add(what, f"{kind} of full size; {rule}", Spread.of(values), unit)

    seeds, pool = count(1000), ThreadPoolExecutor(max(_USERS))
    with serve(folder, *_FLAGS.split(), log=options.out / "server.log") as server:
        client = Client(server.url)
        for kind, users in product(_SIZES, _USERS):
            seconds, ttft = (defaultdict[str, list[float]](list) for _ in range(2))
            for turn in range(-1, options.rounds * (3 if users == 1 else 1)):  # -1: warm-up
                for arm in list(_ARMS)[:: -1 if turn % 2 else 1]:
                    fields = _FIELDS | {"mm_processor_kwargs": {"autoprune": _ARMS[arm]}}
                    urls = [encode_picture(_draw(kind, next(seeds), 0.5)) for _ in range(users)]
                    contents = [build_content("what is the colour", [url]) for url in urls]
                    bodies = [build_body("served", c, tokens=4, fields=fields) for c in contents]
                    begin = time.perf_counter()
                    records = list(pool.map(client.send, bodies))
                    end = time.perf_counter()
                    if errors := [record.error for record in records if record.error]:
                        raise BenchmarkError(f"{kind}, {arm}: {errors[0]}")
                    if turn >= 0:
                        seconds[arm].append((end - begin) / users)
                        ttft[arm] += [record.ttft for record in records]
            setting = f"{kind}, {users} at once"
            log_progress(setting)
            for arm in _ARMS:
                rates = Spread.of([1 / value for value in seconds[arm]])
                add("throughput", f"{setting}; {arm}", rates, "requests/s")
                add("TTFT", f"{setting}; {arm}", Spread.of(ttft[arm]), "s")
            for under, over in (("stock", "cells"), ("stock", "both"), ("selection", "both")):
                gain = Estimate.ratio_of_medians(seconds[under], seconds[over])
                inverse = Estimate.ratio_of_medians(seconds[over], seconds[under])
                least = _LEAST.get(kind) if under == "selection" else None
                verdict = f"at least {least}: {inverse.at_most(1 / least)}" if least else ""
                add(f"throughput, {over} over {under}", setting, gain, "times", verdict)
    return 0
