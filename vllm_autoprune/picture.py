"""What a policy keeps of an image, drawn as one PNG: panels with a title above, a legend below."""

from __future__ import annotations

import colorsys
import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFont

from vllm_autoprune.explain import Explanation
from vllm_autoprune.tpdsl.tokens import Grid


@dataclass(frozen=True, slots=True)
class Panel:
    """One copy of the picture.

    ``heat`` has one value for each token; ``lit`` are the tokens that are not dimmed, None means
    all. ``removed`` are those that left; others are as in :class:`Trace`.
    """

    title: str
    detail: str
    heat: tuple[float, ...] | None = None
    lit: tuple[int, ...] | None = None
    removed: tuple[int, ...] = ()
    entered: tuple[int, ...] = ()
    core: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()


def list_panels(explanation: Explanation) -> list[Panel]:
    """Picture, reference, exchange, groups, quality, signals; what there is of them."""
    trace, base = explanation.trace, explanation.policy.base.name
    extra = f" + {trace.extra} merged rows" if trace.extra else ""
    reference = f"{base}: {len(trace.reference)} tokens{extra}"
    panels = [
        Panel("image", f"{trace.grid.tokens} tokens, as the model sees it"),
        Panel("reference selection", reference, lit=trace.reference, core=trace.core),
    ]
    if trace.quality is not None:
        swaps = f"{len(trace.left)} out, {len(trace.entered)} in"
        exchange = (trace.kept, trace.left, trace.entered, trace.core)
        panels.append(Panel("after exchange", swaps, None, *exchange))
    if trace.owners:
        merged = sum(owner >= 0 for owner in trace.owners)
        into = f"{merged} dropped into {len(set(trace.owners) - {-1})} kept"
        panels.append(Panel("merged", into, lit=trace.kept, owners=trace.owners))
    if trace.quality is not None:
        panels.append(Panel("quality g", "all signals fused", trace.quality))
        panels += [
            Panel(signal.atom.replace("_", " "), f"weight {signal.weight:.3g}", signal.values)
            for signal in trace.signals
        ]
    return panels


Colour = tuple[int, int, int]
_Box = tuple[int, int, int, int]

_PAPER: Colour = (255, 255, 255)
_INK: Colour = (28, 32, 40)
_QUIET: Colour = (98, 105, 118)
_STAYED: Colour = (255, 255, 255)
LEFT: Colour = (230, 97, 0)
ENTERED: Colour = (26, 208, 170)
CORE: Colour = (86, 180, 233)

RAMP: tuple[Colour, ...] = (
    (10, 8, 38), (66, 18, 105), (130, 32, 112), (194, 56, 84), (238, 106, 44), (250, 180, 40),
    (253, 252, 190),
)  # fmt: skip
"""From dark to light, so that it can be read in grey as well."""

SIDE = 420
"""Width of one tile's panel in pixels, up to a whole number of pixels a token."""

_GAP, _COLUMNS = 28, 3
_QUESTION, _NOTE, _TITLE, _DETAIL = 30, 18, 20, 17
_LINES = 6
"""Maximum number of lines of a question."""
_GROUP = 0.55
"""Opacity of a group's colour over the picture."""
_HEAT = 0.72
"""Opacity of a heat map over the picture."""


def encode_picture(explanations: Sequence[Explanation]) -> bytes:
    """A PNG file with the sheets of all regions of an image, one below another."""
    sheets = [draw_sheet(explanation) for explanation in explanations]
    size = max(sheet.width for sheet in sheets), sum(sheet.height for sheet in sheets)
    joined, top = Image.new("RGB", size, _PAPER), 0
    for sheet in sheets:
        joined.paste(sheet, (0, top))
        top += sheet.height
    buffer = io.BytesIO()
    joined.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def draw_sheet(explanation: Explanation) -> Image.Image:
    """Question and summary, all panels in rows, and a legend below."""
    grid, panels = explanation.trace.grid, list_panels(explanation)
    size = max(4, SIDE // grid.width)
    width, height = size * grid.width * grid.tiles, size * grid.height
    columns = max(1, min(_COLUMNS // grid.tiles, len(panels)))
    rows = -(-len(panels) // columns)
    step = _TITLE + 10 + height + _GAP
    sheet_width = _GAP + columns * (width + _GAP)
    lines = []
    for text, font_size, colour in (
        (explanation.question, _QUESTION, _INK),
        (explanation.summary, _NOTE, _QUIET),
    ):
        # A letter is about half as wide as the font size.
        fits = max(20, int((sheet_width - 2 * _GAP) / (font_size * 0.52)))
        words = " ".join(text.split())
        wrapped = textwrap.wrap(words, fits, max_lines=_LINES, placeholder=" ...") or [""]
        lines += [(line, font_size, colour) for line in wrapped]
    top = _GAP + sum(font_size + 8 for _, font_size, _ in lines) + 18
    sheet = Image.new("RGB", (sheet_width, top + rows * step + _NOTE + 12 + _GAP), _PAPER)
    pen, y = ImageDraw.Draw(sheet), _GAP - 6
    for line, font_size, colour in lines:
        pen.text((_GAP, y), line, colour, _font(font_size))
        y += font_size + 8
    base = explanation.picture.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        x, y = _GAP + column * (width + _GAP), top + row * step
        pen.text((x, y), panel.title, _INK, _font(_TITLE))
        used = pen.textlength(panel.title, _font(_TITLE)) + 10
        if used + pen.textlength(panel.detail, _font(_DETAIL)) <= width:
            place = (x + used, y + _TITLE - _DETAIL)
            pen.text(place, panel.detail, _QUIET, _font(_DETAIL))
        sheet.paste(draw_panel(base, panel, grid, size), (x, y + _TITLE + 10))
    _draw_legend(pen, (_GAP, top + rows * step), panels)
    return sheet


def draw_heat_map(values: Sequence[float], grid: Grid) -> Image.Image:
    """One pixel for each token, in the colours of the ramp; values are scaled to its ends.

    Values that are not finite, and all of them where they are equal, have its dark end.
    """
    heat = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(heat)
    low, high = heat[finite].min(initial=np.inf), heat[finite].max(initial=-np.inf)
    flat = not high - low >= 1e-12
    share = np.where(finite & (not flat), (heat - low) / (1.0 if flat else high - low), 0.0)
    places = np.linspace(0, 1, len(RAMP))
    levels = [np.interp(share, places, channel) for channel in zip(*RAMP, strict=True)]
    tiles = np.stack(levels, -1).round().astype(np.uint8)
    tiles = tiles.reshape(grid.tiles, grid.height, grid.width, 3)
    return Image.fromarray(np.concatenate(list(tiles), axis=1))


def _group_colour(number: int) -> Colour:
    """Colour of a group of merged tokens; neighbouring numbers have hues far apart."""
    red, green, blue = colorsys.hsv_to_rgb((number * 0.618034) % 1.0, 0.75, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


def draw_panel(base: Image.Image, panel: Panel, grid: Grid, size: int) -> Image.Image:
    """The picture with what a panel shows; ``size`` are the pixels of a token's side."""
    if panel.heat is not None:
        colours = draw_heat_map(panel.heat, grid).resize(base.size, Image.Resampling.NEAREST)
        return Image.blend(base.convert("L").convert("RGB"), colours, _HEAT)
    if panel.lit is None:
        return base
    dimmed = ImageEnhance.Brightness(ImageEnhance.Color(base).enhance(0.25)).enhance(0.38)
    pen, line = ImageDraw.Draw(dimmed), max(1, size // 14)

    def box_of(token: int) -> _Box:
        """Tiles stand side by side."""
        tile, inside = divmod(token, grid.per_tile)
        row, column = divmod(inside, grid.width)
        x, y = (tile * grid.width + column) * size, row * size
        return x, y, x + size, y + size

    groups = {token: _group_colour(number) for number, token in enumerate(panel.lit)}
    for token, owner in enumerate(panel.owners):
        if owner >= 0:
            tint = Image.new("RGB", (size, size), groups[owner])
            box = box_of(token)
            dimmed.paste(Image.blend(base.crop(box), tint, _GROUP), box[:2])
    for token in (*panel.lit, *panel.removed):
        box = box_of(token)
        if token not in panel.removed:
            dimmed.paste(base.crop(box), box[:2])
        if panel.owners:
            _draw_mark(pen, box, groups[token], max(2, size // 7))
        elif token in panel.removed:
            _draw_mark(pen, box, LEFT, 2 * line + 1, "-")
        elif token in panel.entered:
            _draw_mark(pen, box, ENTERED, 2 * line + 1, "+")
        else:
            _draw_mark(pen, box, CORE if token in panel.core else _STAYED, line)
    return dimmed


def _draw_mark(
    pen: ImageDraw.ImageDraw, box: _Box, colour: Colour, line: int, sign: str = ""
) -> None:
    """Draw a frame and a sign in it, which tells exchanged tokens apart without colour."""
    x1, y1, x2, y2 = box
    pen.rectangle((x1, y1, x2 - 1, y2 - 1), outline=colour, width=line)
    x, y, size = (x1 + x2) // 2, (y1 + y2) // 2, x2 - x1
    arm, thick = size // 4, max(2, size // 9)
    if sign:
        pen.line((x - arm, y, x + arm, y), colour, thick)
    if sign == "+":
        pen.line((x, y - arm, x, y + arm), colour, thick)


def _draw_legend(pen: ImageDraw.ImageDraw, place: tuple[int, int], panels: Sequence[Panel]) -> None:
    """Draw the legend of the marks and colours that the panels use."""
    (x, y), side = place, _NOTE + 6
    marks = [(_STAYED, "kept", "")]
    if any(panel.core for panel in panels):
        marks = [(CORE, "core, kept for every question", ""), (_STAYED, "delta", "")]
    if any(panel.removed or panel.entered for panel in panels):
        marks += [(LEFT, "swapped out", "-"), (ENTERED, "swapped in", "+")]

    def write(words: str, x: int) -> int:
        pen.text((x, y + 1), words, _QUIET, _font(_NOTE))
        return x + int(pen.textlength(words, _font(_NOTE))) + _GAP

    for colour, words, sign in marks:
        box = (x, y, x + side, y + side)
        pen.rectangle((x - 3, y - 3, x + side + 2, y + side + 2), _INK)
        _draw_mark(pen, box, colour, 3, sign)
        x = write(words, x + side + 10)
    if any(panel.owners for panel in panels):
        for number in range(3):
            pen.rectangle((x + 9 * number, y, x + 9 * number + 8, y + side), _group_colour(number))
        x = write("one colour: merged into the framed token", x + 36)
    if any(panel.heat is not None for panel in panels):
        bar = 160
        ramp = draw_heat_map(range(bar), Grid(1, bar))
        for step in range(bar):
            pen.line((x + step, y, x + step, y + side - 1), ramp.getpixel((step, 0)))
        write("low to high, each map on its own scale", x + bar + 8)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
