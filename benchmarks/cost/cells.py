"""`python -m benchmarks.cost cells`: what it saves to drop blank cells before the vision tower.

Qwen3-VL-8B and its pictures are scaled alike, so attention in the tower has the same share as at
full size. Every request has a new picture, and the arms take turns on one server. Processor time
and bytes are those of full-size pictures.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from random import Random

from PIL import Image, ImageDraw, ImageFont

from benchmarks.common.requests import build_content, draw_picture, encode_picture
from benchmarks.common.shapes import draw_words
from benchmarks.cost import turns
from benchmarks.cost.turns import SERVED, USERS, Table, Turns, as_fields, build_model
from benchmarks.server import serve
from vllm_autoprune.statistics import Spread
from vllm_autoprune.tpdsl.cells import Cells, kept_cells

_FLAGS = (
    f"{SERVED} --autoprune-state cen_divprune --autoprune-budget 1/8 "
    "--autoprune-requests states"
)
_ARMS: Mapping[str, Mapping[str, object]] = {
    "stock": {"enabled": False},
    "selection": {},
    "cells": {"cells": "flat", "budget": "100%"},
    "both": {"cells": "flat"},
}
_SIZES = {"A4 page": (1654, 2338), "screenshot": (1920, 1080), "photo": (1280, 960)}
_LEAST = {"A4 page": 1.6, "photo": 0.98}
"""Promised minimum of the ratio of requests/s, ``both`` over ``selection``, by kind of picture."""


def _draw(kind: str, seed: int, scale: float) -> Image.Image:
    """Draw a picture whose words cover as many cells as at its full size."""
    random = Random(seed)
    (width, height) = (int(scale * side) for side in _SIZES[kind])
    if kind == "photo":
        return draw_picture(seed, width, height)
    image = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(image)
    size = 30
    margin = int(scale * 196)
    columns = [(margin, width - margin)]
    if kind == "screenshot":  # a title, a list on the left, a text and a photo
        size = 14
        margin = height // 18
        columns = [(8, width // 6), (width // 5, width * 2 // 3)]
        pen.rectangle((0, 0, width, height // 27), (38, 50, 72))
        pen.rectangle((0, height // 27, width // 6, height), (243, 243, 245))
        image.paste(
            draw_picture(seed, width // 4, height // 3), (width * 7 // 10, height // 5)
        )
    for start, end in columns:
        y = margin
        while y < height - margin - size:
            last = random.random() < 0.25  # line of a paragraph
            length = (
                (end - start)
                / (0.52 * size)
                * (random.uniform(0.2, 0.9) if last else 0.98)
            )
            words = draw_words(60, random.randrange(10**6))[: int(length)]
            pen.text((start, y), words, (30, 30, 30), ImageFont.load_default(size))
            y += int(1.4 * size) * (1 + last)
    return image


OPTIONS = turns.OPTIONS | {
    "--arms": {
        "nargs": "+",
        "choices": [*_ARMS],
        "default": [*_ARMS],
        "help": "that take turns",
    },
    "--kinds": {
        "nargs": "+",
        "choices": [*_SIZES],
        "default": [*_SIZES],
        "help": "of pictures",
    },
    "--out": {"type": Path, "default": Path("out/cells"), "help": "folder of files"},
}


def run(options: argparse.Namespace) -> int:
    """Measure, and print rows of ``docs/data``."""
    from transformers import AutoImageProcessor

    folder = build_model(options.out)
    table = Table()
    processor = AutoImageProcessor.from_pretrained(folder)
    for kind, rule in product(options.kinds, (Cells(), Cells(rule="predicted"))):
        figures = defaultdict[tuple[str, str], list[float]](list)
        for seed in range(9):
            image = _draw(kind, seed, 1)
            begin = time.process_time()
            data = processor(
                image, do_rescale=False, do_normalize=False, return_tensors="pt"
            )
            figures["image processor", "ms"].append(
                1000 * (time.process_time() - begin)
            )
            height, width = (data["image_grid_thw"][0, 1:] // 2).tolist()
            cells = data["pixel_values"].numpy().reshape(height, width, 4, 3, -1)
            begin = time.process_time()
            anchors = rule.find_anchors(cells)
            figures["find_anchors", "ms"].append(1000 * (time.process_time() - begin))
            share = 1 if anchors is None else len(kept_cells(anchors)) / len(anchors)
            figures["cells kept", "%"].append(100 * share)
            figures["pixels between processes", "MB"].append(share * cells.nbytes / 1e6)
        for (what, unit), values in figures.items():
            table.add(what, f"{kind} of full size; {rule}", Spread.of(values), unit)

    def draw(kind: str, seed: int) -> Sequence[Mapping[str, object]]:
        return build_content(
            "what is the colour", [encode_picture(_draw(kind, seed, 0.5))]
        )

    with serve(folder, *_FLAGS.split(), log=options.out / "server.log") as server:
        arms = {name: (server, as_fields(_ARMS[name])) for name in options.arms}
        for kind, users in product(options.kinds, USERS):
            taken = Turns(f"{kind}, {users} at once")
            taken.take(arms, users, options.rounds, partial(draw, kind))
            compared = {("stock", "cells"): None, ("stock", "both"): None}
            taken.write(table, {**compared, ("selection", "both"): _LEAST.get(kind)})
    return 0
