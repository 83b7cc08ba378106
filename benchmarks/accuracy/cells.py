"""``python -m benchmarks.accuracy.cells``: marks lost with cells that no vision tower encodes.

Pictures show marks that rules for cells may lose; no model is asked. Cells are those of Qwen3-VL.
"""

from __future__ import annotations

import csv
import io
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from random import Random

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from benchmarks.common.command import run_command
from benchmarks.common.report import command_line
from benchmarks.yardsticks.scenes import WORDS
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.evaluation.pictures import _decode
from vllm_autoprune.tpdsl.cells import Cells, kept_cells

_PATCH = 16
_WIDTH = 960
_HEIGHT = 800
_PAPER = 245
_INK = 20
_VISIBLE = 4  # grey levels by which a person sees a mark on even ground

_Marks = Sequence[tuple[Sequence[int], Sequence[int], int | str, int, int]]
"""Marks of one kind: their lefts, their tops, width in pixels or a text, height, and grey level.
There is a mark at each combination of a left and a top."""
_Process = Callable[[Image.Image], Image.Image]


def _write(x: int = 50, step: int = 26) -> _Marks:
    rng = Random(0)
    tops = range(44, 740, step)
    lines = [" ".join(rng.choices(WORDS, k=rng.randint(4, 11))) for _ in tops]
    return [([x], [y], line, 18, _INK) for y, line in zip(tops, lines, strict=True)]


def _draw_boxes(step: int) -> _Marks:
    """Check boxes; every third one is ticked."""
    outer = range(40, 680, step)
    inner = range(42, 680, step)
    ticks = range(45, 680, 3 * step)
    edges = ([72], outer, 16, 16, _INK), ([74], inner, 12, 12, _PAPER)
    return [*edges, ([77], ticks, 6, 6, _INK)]


def _draw_board(side: int) -> _Marks:
    odd, even = (range(start, 64 + 8 * side, 2 * side) for start in (64, 64 + side))
    squares = (odd, odd, side, side, 150), (even, even, side, side, 150)
    return [
        *squares,
        (odd, odd[:1], "R", side - 16, _INK),
        (even, odd[3:], "P", side - 16, _INK),
    ]


def _compress(image: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return _decode(file.getvalue())[1].convert("L")


def _draw(marks: _Marks, process: _Process) -> NDArray[np.uint8]:
    """Cells ``(H, W, patches, channels, pixels)`` of a picture with ``marks``, processed."""
    image = Image.new("L", (_WIDTH, _HEIGHT), _PAPER)
    pen = ImageDraw.Draw(image)
    for lefts, tops, width, height, grey in marks:
        for x, y in product(lefts, tops):
            if isinstance(width, str):
                pen.text((x, y), width, grey, ImageFont.load_default(height))
            else:
                pen.rectangle((x, y, x + width - 1, y + height - 1), grey)
    pixels = np.asarray(process(image))
    rows, columns = (side // (2 * _PATCH) for side in pixels.shape)
    patches = pixels.reshape(rows, 2, _PATCH, columns, 2, _PATCH).transpose(
        0, 3, 1, 4, 2, 5
    )
    return patches.reshape(rows, columns, 4, 1, -1)


_NOISE = np.random.default_rng(0).integers(2, size=(_HEIGHT, _WIDTH), dtype=np.uint8)
_ROWS = range(56, 740, 32)
_LABELS: _Marks = [([28], [y], WORDS[y // 32], 14, _INK) for y in _ROWS]
_WIDGETS = [([16], _ROWS, 160, 24, 150), *_LABELS, *_write(220)]
_WINDOW = [([0], [0], _WIDTH, 40, 60), ([0], [40], 192, _HEIGHT, 225)]

_KINDS: dict[str, tuple[_Marks, _Marks] | tuple[_Marks, _Marks, _Process]] = {
    "text": (_write(), []),
    "check boxes every 32 pixels": (_draw_boxes(32), _write(140)),
    "check boxes every 40 pixels": (_draw_boxes(40), _write(140)),
    "dot leaders every 8 pixels": (
        [(range(320, 800, 8), range(56, 690, 52), 2, 2, _INK)],
        [],
    ),
    "dot leaders every 7 pixels": (
        [(range(320, 800, 7), range(56, 690, 52), 2, 2, _INK)],
        [],
    ),
    "lone points of 3 x 3 pixels": (
        [(range(50, 900, 117), range(60, 760, 97), 3, 3, _INK)],
        [],
    ),
    "lines of one pixel": ([([60], range(70, 701, 90), 841, 1, 190)], _write()),
    "watermark of 6 levels": (
        [([60], [300], "DRAFT", 250, _PAPER - 6)],
        _write(step=52),
    ),
    "board of 60 pixels a square": (_draw_board(60), []),
    "board of 64 pixels a square": (_draw_board(64), []),
    "bars of a chart": (
        [([x], [x // 2], 90, 700 - x // 2, 90) for x in range(80, 880, 160)],
        [],
    ),
    "noise of one level": (
        _write(),
        [],
        lambda im: Image.fromarray(np.asarray(im) + _NOISE),
    ),
    **{
        f"JPEG {q}": (_write(), [], partial(_compress, quality=q)) for q in (95, 75, 50)
    },
    "screenshot": (_WIDGETS, _WINDOW),
    "screenshot scaled by 0.8": (
        _WIDGETS,
        _WINDOW,
        lambda image: image.resize((768, 640), 3),
    ),
}


def count_losses() -> Iterator[tuple[str | int, ...]]:
    """Kind, rule, and numbers of cells: all, kept, marked; marked and dropped, of one colour."""
    for name, (marks, ground, *processes) in _KINDS.items():
        process = processes[0] if processes else Image.Image.copy
        cells = _draw([*ground, *marks], process)
        bare = _draw(ground, process)
        marked = (abs(cells.astype(int) - bare).max((2, 3, 4)) >= _VISIBLE).ravel()
        even = (np.ptp(cells, (2, 3, 4)) == 0).ravel()
        for rule in ("flat", "predicted", "flat:2", "predicted:2", "flat:8"):
            anchors = Cells.model_validate(Cells.parse(rule, "")).find_anchors(cells)
            selection = np.zeros_like(marked)
            selection[slice(None) if anchors is None else kept_cells(anchors)] = True
            dropped = marked & ~selection
            masks = (selection, marked, dropped, dropped & even)
            yield name, rule, len(marked), *(int(mask.sum()) for mask in masks)


def main() -> int:
    """Count, and print rows of ``docs/data``; returns the exit status, 1 after an error."""
    return run_command("cells", _count)


def _count() -> None:
    parser = CommandParser(
        prog="python -m benchmarks.accuracy.cells", description=__doc__
    )
    parser.parse_args()
    head = (
        "kind",
        "rule",
        "cells",
        "kept",
        "marks",
        "dropped",
        "dropped_of_one_colour",
        "command",
    )
    command = shlex.join(command_line())
    rows = [[*row, command] for row in count_losses()]
    csv.writer(sys.stdout, lineterminator="\n").writerows((head, *rows))


if __name__ == "__main__":
    raise SystemExit(main())
