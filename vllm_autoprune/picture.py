"""What a policy keeps of an image, drawn as one PNG: panels with a title above, a legend below.

A video is a filmstrip: its frames, each with what it keeps.
"""

from __future__ import annotations

import io
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from unicodedata import category

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFont, ImageOps
from PIL.ImageFont import FreeTypeFont

from vllm_autoprune.explain import Explanation, Trace
from vllm_autoprune.tpdsl.tokens import Grid

_PAPER = (255, 255, 255)
_INK = (28, 32, 40)

DARK = "#0a0826"
MIDDLE = "#c23854"
LIGHT = "#fdfcbe"
"""Ends and middle of the heat colours, which stay distinct in greyscale."""

_SIDE = 420
"""Width of one tile's panel in pixels, up to a whole number of pixels a token."""

_GAP = 28
_COLUMNS = 3
_FRAME_SIDE = 180
_FRAME_COLUMNS = 8
_MOST_FRAMES = 32
"""Width of a frame of a filmstrip in pixels as above, frames of a row, and of all rows."""
_QUESTION = 30
_NOTE = 18
"""Sizes of fonts."""
_HEAT = 0.72
"""Opacity of a heat map over the picture."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """Frame around a token; its sign tells exchanged tokens apart without colour."""

    words: str
    colour: tuple[int, int, int]
    sign: str = ""

    def draw(
        self, pen: ImageDraw.ImageDraw, box: tuple[int, int, int, int], line: int
    ) -> None:
        """Frame and sign in a square; ``line``: width of the frame in pixels."""
        x1, y1, x2, y2 = box
        pen.rectangle((x1, y1, x2 - 1, y2 - 1), outline=self.colour, width=line)
        x = (x1 + x2) // 2
        y = (y1 + y2) // 2
        size = x2 - x1
        arm = size // 4
        thick = max(2, size // 9)
        if self.sign:
            pen.line((x - arm, y, x + arm, y), self.colour, thick)
        if self.sign == "+":
            pen.line((x, y - arm, x, y + arm), self.colour, thick)


KEPT = _Mark("kept", (255, 255, 255))
CORE = _Mark("core, kept for every question", (86, 180, 233))
LEFT = _Mark("swapped out", (230, 97, 0), "-")
ENTERED = _Mark("swapped in", (26, 208, 170), "+")


@dataclass(frozen=True, slots=True)
class _Panel:
    """One copy of the picture, with heat over it or marks on some of its tokens.

    ``heat`` has one value for each token. Tokens without a mark, and those that left, are dimmed.
    """

    title: str
    detail: str
    heat: tuple[float, ...] = ()
    marks: Mapping[int, _Mark] = field(default_factory=dict)


def _list_panels(trace: Trace, base: str) -> list[_Panel]:
    """Panels that apply: picture, tokens of the base policy, exchange, and deciding maps."""
    core = dict.fromkeys(trace.core, CORE)
    extra = f" + {trace.extra} merged rows" if trace.extra else ""
    title = "kept tokens" if trace.quality is None else "reference selection"
    reference = f"{base}: {len(trace.reference)} tokens{extra}"
    panels = [
        _Panel("image", f"{trace.grid.tokens} tokens, as the model sees it"),
        _Panel(title, reference, marks=dict.fromkeys(trace.reference, KEPT) | core),
    ]
    if trace.quality is not None:
        swaps = f"{len(trace.left)} out, {len(trace.entered)} in"
        marks = dict.fromkeys(trace.kept, KEPT) | core
        marks |= dict.fromkeys(trace.left, LEFT) | dict.fromkeys(trace.entered, ENTERED)
        panels.append(_Panel("after exchange", swaps, marks=marks))
        maps = [_Panel("quality g", "decides the exchange", trace.quality)]
        maps += [
            _Panel(
                signal.title,
                f"weight {signal.weight:.3g}",
                signal.values,
            )
            for signal in trace.signals
        ]
        # A map with equal values for all tokens decides nothing.
        panels += [panel for panel in maps if len(set(panel.heat)) > 1]
    return panels


# Words of any script, in one font of this machine.

_NO_CHARACTER = "\U0010ffff"

_STYLES = re.compile("Bold|Italic|Oblique|Thin|Light|Mono|Cond")
"""Fonts that come after the plain ones."""


def _list_fonts() -> Iterator[FreeTypeFont]:
    """Pillow's own font, which has the letters of English, fonts of this machine, DejaVu Sans."""
    font = ImageFont.load_default(_QUESTION)
    assert isinstance(font, FreeTypeFont)
    yield font
    data = os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share"
    home = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    folders = [f"{folder}/fonts" for folder in (home, *data.split(":"))]
    folders += [
        "~/.fonts",
        "~/Library/Fonts",
        "/Library/Fonts",
        "/System/Library/Fonts",
    ]
    paths = [
        p for f in folders for p in Path(f).expanduser().rglob("*.[OoTt][Tt][CcFf]")
    ]
    if (matplotlib := find_spec("matplotlib")) is not None and matplotlib.origin:
        paths.append(
            Path(matplotlib.origin).with_name("mpl-data") / "fonts/ttf/DejaVuSans.ttf"
        )
    paths.sort(key=lambda path: (_STYLES.search(path.name) is not None, path))
    for path in paths:
        if not path.name.startswith("LastResort"):  # has a box for every character
            with suppress(OSError):  # damaged, or made of pictures of another size
                yield ImageFont.truetype(path, _QUESTION)


@cache
def _choose_font(text: str) -> tuple[FreeTypeFont, str]:
    """The first font that has most of the characters of a text, and the characters it lacks."""
    # Spaces and marks of direction are not drawn; nor what only changes the character before it.
    drawn = [
        c
        for c in dict.fromkeys(text)
        if category(c) not in ("Cc", "Cf", "Zl", "Zp", "Zs")
    ]
    chosen: tuple[FreeTypeFont, str] | None = None
    for font in _list_fonts():
        # One character alone; the layout that joins letters writes a circle below a mark.
        single = font.font_variant(layout_engine=ImageFont.Layout.BASIC)
        box = _draw_glyph(single, _NO_CHARACTER)
        lacks = "".join(
            c
            for c in drawn
            if not "\ufe00" <= c <= "\ufe0f" and _draw_glyph(single, c) == box
        )
        if chosen is None or len(lacks) < len(chosen[1]):
            chosen = font, lacks
        if not lacks:
            break
    assert chosen is not None
    return chosen


def _draw_glyph(font: FreeTypeFont, character: str) -> tuple[tuple[int, int], bytes]:
    mask = font.getmask(character)
    return mask.size, bytes(mask)


def list_undrawn(text: str) -> str:
    """Characters of a text that its font lacks: it has a box for each of them."""
    return _choose_font(text)[1]


def _write(
    pen: ImageDraw.ImageDraw, x: int, y: int, text: str, size: int = _NOTE
) -> int:
    """Write one line, and return where it ends."""
    font = _choose_font(text)[0].font_variant(size=size)
    pen.text((x, y + size), text, _INK, font, anchor="ls")
    return x + round(font.getlength(text))


def encode_picture(explanations: Sequence[Explanation]) -> bytes:
    """A PNG file with the sheets of all regions of an image, one below another, or a filmstrip."""
    sheets = [_draw_filmstrip(e) if e.frames else _draw_sheet(e) for e in explanations]
    size = max(sheet.width for sheet in sheets), sum(sheet.height for sheet in sheets)
    joined = Image.new("RGB", size, _PAPER)
    top = 0
    for sheet in sheets:
        joined.paste(sheet, (0, top))
        top += sheet.height
    buffer = io.BytesIO()
    joined.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _draw_sheet(explanation: Explanation) -> Image.Image:
    """Question and summary, all panels in rows, and a legend below."""
    grid = explanation.trace.grid
    panels = _list_panels(explanation.trace, explanation.policy.base.name)
    size = max(4, _SIDE // grid.width)
    width = size * grid.width * grid.tiles
    height = size * grid.height
    columns = max(1, min(_COLUMNS // grid.tiles, len(panels)))
    rows = -(-len(panels) // columns)
    step = _NOTE + 12 + height + _GAP
    sheet, top = _draw_head(explanation, _GAP + columns * (width + _GAP), rows * step)
    pen = ImageDraw.Draw(sheet)
    base = explanation.picture.convert("RGB").resize(
        (width, height), Image.Resampling.LANCZOS
    )
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        x = _GAP + column * (width + _GAP)
        y = top + row * step
        _write(pen, x, y, f"{panel.title}: {panel.detail}", _NOTE - 1)
        sheet.paste(_draw_panel(base, panel, grid, size), (x, y + _NOTE + 12))
    x = _draw_legend(
        pen, top + rows * step, (m for panel in panels for m in panel.marks.values())
    )
    if any(panel.heat for panel in panels):
        text = "maps: from dark (low) to light (high), each on its own scale"
        _write(pen, x, top + rows * step + 1, text)
    return sheet


def _draw_filmstrip(explanation: Explanation) -> Image.Image:
    """Question and summary, the frames of a video with what each keeps and K_t below, a legend."""
    trace = explanation.trace
    frames = explanation.frames
    grid = Grid(trace.grid.height, trace.grid.width)
    marks = dict.fromkeys(trace.kept, KEPT) | dict.fromkeys(trace.core, CORE)
    marks |= dict.fromkeys(trace.left, LEFT) | dict.fromkeys(trace.entered, ENTERED)
    drawn = min(len(frames), _MOST_FRAMES)
    numbers = [
        number * (len(frames) - 1) // max(1, drawn - 1) for number in range(drawn)
    ]
    size = max(4, _FRAME_SIDE // grid.width)
    width = size * grid.width
    height = size * grid.height
    columns = min(_FRAME_COLUMNS, drawn)
    step = height + _NOTE + 12 + _GAP
    rows = -(-drawn // columns)
    note = f"{drawn} of {len(frames)} frames are drawn, evenly spaced" * (
        drawn < len(frames)
    )
    sheet, top = _draw_head(
        explanation, _GAP + columns * (width + _GAP), rows * step, note
    )
    pen = ImageDraw.Draw(sheet)
    counts = trace.kept_by_frame
    for position, number in enumerate(numbers):
        row, column = divmod(position, columns)
        x = _GAP + column * (width + _GAP)
        y = top + row * step
        begin = number * grid.per_tile
        of_frame = {
            token - begin: mark
            for token, mark in marks.items()
            if 0 <= token - begin < grid.tokens
        }
        base = (
            frames[number]
            .convert("RGB")
            .resize((width, height), Image.Resampling.LANCZOS)
        )
        sheet.paste(_mark_tokens(base, of_frame, grid, size), (x, y))
        _write(
            pen,
            x,
            y + height + 6,
            f"{number + 1}: {counts[number]} of {grid.tokens}",
            _NOTE - 1,
        )
    _draw_legend(pen, top + rows * step, marks.values())
    return sheet


def _draw_head(
    explanation: Explanation, width: int, height: int, note: str = ""
) -> tuple[Image.Image, int]:
    """A sheet with question, summary and a note, and where its panels of this height begin."""
    texts = [(explanation.question, _QUESTION), (explanation.summary, _NOTE)]
    texts += [(note, _NOTE)] if note else []
    lines = list[tuple[str, int]]()
    for text, font in texts:
        words = " ".join(
            "".join(c for c in text if c.isspace() or category(c) != "Cc").split()
        )
        length = _choose_font(words)[0].font_variant(size=font).getlength(words)
        # Lines are as long as their average, and six at most.
        fits = max(20, int(len(words) * 0.95 * (width - 2 * _GAP) / max(1, length)))
        wrapped = textwrap.wrap(words, fits, max_lines=6, placeholder=" ...") or [""]
        lines += [(line, font) for line in wrapped]
    top = _GAP + sum(font + 8 for _, font in lines) + 18
    sheet = Image.new("RGB", (width, top + height + _NOTE + 12 + _GAP), _PAPER)
    pen = ImageDraw.Draw(sheet)
    y = _GAP - 6
    for line, font in lines:
        _write(pen, _GAP, y, line, font)
        y += font + 8
    return sheet, top


def _draw_legend(pen: ImageDraw.ImageDraw, y: int, marks: Iterable[_Mark]) -> int:
    """Draw what each mark means in one line, and return where it ends."""
    x = _GAP
    side = _NOTE + 6
    for mark in dict.fromkeys(marks):
        pen.rectangle((x - 3, y - 3, x + side + 2, y + side + 2), _INK)
        mark.draw(pen, (x, y, x + side, y + side), 3)
        x = _write(pen, x + side + 10, y + 1, mark.words) + _GAP
    return x


def _draw_heat_map(values: Sequence[float], grid: Grid) -> Image.Image:
    """One pixel for each token, from :data:`DARK` to :data:`LIGHT`; tiles stand side by side.

    Values that are not finite, and all of them where they are equal, are dark.
    """
    heat = np.asarray(values, dtype=np.float64)
    heat[~np.isfinite(heat)] = np.nan if np.isfinite(heat).any() else 0.0
    low = np.nanmin(heat)
    span = np.nanmax(heat) - np.nanmin(heat)
    levels = np.nan_to_num(255 * (heat - low) / (span if span >= 1e-12 else np.inf))
    tiles = levels.round().astype(np.uint8).reshape(grid.tiles, grid.height, grid.width)
    grey = Image.fromarray(np.concatenate(list(tiles), axis=1))
    return ImageOps.colorize(grey, DARK, LIGHT, MIDDLE)


def _draw_panel(base: Image.Image, panel: _Panel, grid: Grid, size: int) -> Image.Image:
    """The picture with what a panel shows; ``size`` are the pixels of a token's side."""
    if panel.heat:
        colours = _draw_heat_map(panel.heat, grid).resize(
            base.size, Image.Resampling.NEAREST
        )
        return Image.blend(base.convert("L").convert("RGB"), colours, _HEAT)
    return _mark_tokens(base, panel.marks, grid, size) if panel.marks else base


def _mark_tokens(
    base: Image.Image, marks: Mapping[int, _Mark], grid: Grid, size: int
) -> Image.Image:
    """The picture with marked tokens framed, and the others dimmed."""
    dimmed = ImageEnhance.Brightness(ImageEnhance.Color(base).enhance(0.25)).enhance(
        0.38
    )
    pen = ImageDraw.Draw(dimmed)
    line = max(1, size // 14)
    for token, mark in marks.items():
        # Tiles stand side by side.
        tile, position = divmod(token, grid.per_tile)
        row, column = divmod(position, grid.width)
        x = (tile * grid.width + column) * size
        y = row * size
        box = x, y, x + size, y + size
        if mark is not LEFT:
            dimmed.paste(base.crop(box), box[:2])
        mark.draw(pen, box, 2 * line + 1 if mark.sign else line)
    return dimmed
