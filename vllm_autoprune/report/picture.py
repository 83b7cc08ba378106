"""An explanation as one PNG: panels in rows, a title above, a legend below; and its colours."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageEnhance, ImageFont

from vllm_autoprune.report.panels import Explanation, Panel, cell, group_colour
from vllm_autoprune.tpdsl.tokens import Grid

Colour = tuple[int, int, int]

PAPER: Colour = (255, 255, 255)
INK: Colour = (28, 32, 40)
QUIET: Colour = (98, 105, 118)
STAYED: Colour = (255, 255, 255)
LEFT: Colour = (230, 97, 0)
ENTERED: Colour = (26, 208, 170)
CORE: Colour = (86, 180, 233)

RAMP: tuple[Colour, ...] = (
    (10, 8, 38),
    (66, 18, 105),
    (130, 32, 112),
    (194, 56, 84),
    (238, 106, 44),
    (250, 180, 40),
    (253, 252, 190),
)
"""From dark to light, so that it can be read in grey as well."""


def heat_colour(value: float) -> Colour:
    """Colour of a value on the ramp; values are clamped to 0..1."""
    place = min(max(value, 0.0), 1.0) * (len(RAMP) - 1)
    step = min(int(place), len(RAMP) - 2)
    share = place - step
    red, green, blue = (
        round(low + share * (high - low))
        for low, high in zip(RAMP[step], RAMP[step + 1], strict=True)
    )
    return red, green, blue


def stretch_values(values: Sequence[float]) -> list[float]:
    """Values scaled to 0..1; all 0 if they are equal or none is finite."""
    finite = [value for value in values if abs(value) < float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    if high - low < 1e-12:
        return [0.0] * len(values)
    # NaN compares false with everything, and becomes 0.
    return [(value - low) / (high - low) if low <= value <= high else 0.0 for value in values]


SIDE = 420
"""Width of one tile's panel in pixels, up to a whole number of pixels a token."""

GAP = 28
COLUMNS = 3
_QUESTION, _NOTE, _TITLE, _DETAIL = 30, 18, 20, 17
_LINES = 6
"""Maximum number of lines of a question."""
_GROUP = 0.55
"""Opacity of a group's colour over the picture."""
_HEAT = 0.72
"""Opacity of a heat map over the picture."""


def draw_sheet(explanation: Explanation) -> Image.Image:
    """Draw all panels on one sheet."""
    grid = explanation.trace.grid
    size = max(4, SIDE // grid.width)
    width, height = size * grid.width * grid.tiles, size * grid.height
    columns = max(1, min(COLUMNS // grid.tiles, len(explanation.panels)))
    rows = -(-len(explanation.panels) // columns)
    step = _TITLE + 10 + height + GAP
    sheet_width = GAP + columns * (width + GAP)
    question = _wrap_text(explanation.question, _QUESTION, sheet_width - 2 * GAP)
    summary = _wrap_text(explanation.summary, _NOTE, sheet_width - 2 * GAP)
    top = GAP + len(question) * (_QUESTION + 8) + len(summary) * (_NOTE + 6) + 18
    sheet = Image.new("RGB", (sheet_width, top + rows * step + _NOTE + 12 + GAP), PAPER)
    pen = ImageDraw.Draw(sheet)
    y = GAP - 6
    for line in question:
        pen.text((GAP, y), line, INK, _font(_QUESTION))
        y += _QUESTION + 8
    y += 4
    for line in summary:
        pen.text((GAP, y), line, QUIET, _font(_NOTE))
        y += _NOTE + 6
    base = explanation.picture.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
    for number, panel in enumerate(explanation.panels):
        row, column = divmod(number, columns)
        left, above = GAP + column * (width + GAP), top + row * step
        _draw_caption(pen, (left, above), width, panel)
        sheet.paste(_draw_panel(base, panel, grid, size), (left, above + _TITLE + 10))
    _draw_legend(pen, (GAP, top + rows * step), explanation.panels)
    return sheet


def draw_sheets(explanations: Sequence[Explanation]) -> Image.Image:
    """Draw the sheets of all regions of an image, one below another."""
    sheets = [draw_sheet(explanation) for explanation in explanations]
    width, height = max(sheet.width for sheet in sheets), sum(sheet.height for sheet in sheets)
    joined = Image.new("RGB", (width, height), PAPER)
    top = 0
    for sheet in sheets:
        joined.paste(sheet, (0, top))
        top += sheet.height
    return joined


def encode_png(image: Image.Image) -> bytes:
    """Bytes of a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def draw_heat_map(values: Sequence[float], grid: Grid) -> Image.Image:
    """Draw one pixel for each token, in the colours of the ramp."""
    image = Image.new("RGB", (grid.width * grid.tiles, grid.height))
    for token, value in enumerate(stretch_values(values)):
        row, column = cell(token, grid)
        image.putpixel((column, row), heat_colour(value))
    return image


def _draw_panel(base: Image.Image, panel: Panel, grid: Grid, size: int) -> Image.Image:
    if panel.heat is not None:
        colours = draw_heat_map(panel.heat, grid).resize(base.size, Image.Resampling.NEAREST)
        return Image.blend(base.convert("L").convert("RGB"), colours, _HEAT)
    if panel.lit is None:
        return base
    dimmed = ImageEnhance.Brightness(ImageEnhance.Color(base).enhance(0.25)).enhance(0.38)
    line = max(1, size // 14)
    pen = ImageDraw.Draw(dimmed)
    if panel.owners:
        return _draw_groups(base, dimmed, panel, grid, size)
    for token in (*panel.lit, *panel.left):
        box = _token_box(token, grid, size)
        if token not in panel.left:
            dimmed.paste(base.crop(box), box[:2])
        colour = STAYED
        if token in panel.left:
            colour = LEFT
        elif token in panel.entered:
            colour = ENTERED
        elif token in panel.core:
            colour = CORE
        exchanged = colour in (LEFT, ENTERED)
        _draw_frame(pen, box, colour, 2 * line + 1 if exchanged else line)
        if exchanged:
            _draw_sign(pen, box, colour, plus=token in panel.entered)
    return dimmed


def _draw_groups(
    base: Image.Image, dimmed: Image.Image, panel: Panel, grid: Grid, size: int
) -> Image.Image:
    """Tint every group of merged tokens in its own colour, and frame its kept token."""
    kept = panel.lit or ()
    colours = {token: group_colour(number) for number, token in enumerate(kept)}
    pen = ImageDraw.Draw(dimmed)
    for token, owner in enumerate(panel.owners):
        if owner < 0:
            continue
        box = _token_box(token, grid, size)
        tint = Image.new("RGB", (size, size), colours[owner])
        dimmed.paste(Image.blend(base.crop(box), tint, _GROUP), box[:2])
    for token in kept:
        box = _token_box(token, grid, size)
        dimmed.paste(base.crop(box), box[:2])
        _draw_frame(pen, box, colours[token], max(2, size // 7))
    return dimmed


def _token_box(token: int, grid: Grid, size: int) -> tuple[int, int, int, int]:
    row, column = cell(token, grid)
    return column * size, row * size, (column + 1) * size, (row + 1) * size


def _draw_frame(
    pen: ImageDraw.ImageDraw, box: tuple[int, int, int, int], colour: Colour, line: int
) -> None:
    left, top, right, bottom = box
    pen.rectangle((left, top, right - 1, bottom - 1), outline=colour, width=line)


def _draw_sign(
    pen: ImageDraw.ImageDraw, box: tuple[int, int, int, int], colour: Colour, *, plus: bool
) -> None:
    """Draw a plus or a minus, so that exchanged tokens can be distinguished without colour."""
    left, top, right, bottom = box
    x, y, arm = (left + right) // 2, (top + bottom) // 2, (right - left) // 4
    thick = max(2, (right - left) // 9)
    pen.line((x - arm, y, x + arm, y), colour, thick)
    if plus:
        pen.line((x, y - arm, x, y + arm), colour, thick)


def _draw_caption(
    pen: ImageDraw.ImageDraw, place: tuple[int, int], width: int, panel: Panel
) -> None:
    title, detail = _font(_TITLE), _font(_DETAIL)
    x, y = place
    pen.text((x, y), panel.title, INK, title)
    used = pen.textlength(panel.title, title)
    if used + 10 + pen.textlength(panel.detail, detail) <= width:
        pen.text((x + used + 10, y + _TITLE - _DETAIL), panel.detail, QUIET, detail)


def _draw_legend(pen: ImageDraw.ImageDraw, place: tuple[int, int], panels: Sequence[Panel]) -> None:
    """Draw the legend of the marks and colours that the panels use."""
    x, y = place
    font, side = _font(_NOTE), _NOTE + 6
    exchanged = any(panel.left or panel.entered for panel in panels)
    marks = [(STAYED, "kept", "")]
    if any(panel.core for panel in panels):
        marks = [(CORE, "core, kept for every question", ""), (STAYED, "delta", "")]
    if exchanged:
        marks += [(LEFT, "swapped out", "-"), (ENTERED, "swapped in", "+")]
    for colour, words, sign in marks:
        box = (x, y, x + side, y + side)
        pen.rectangle((x - 3, y - 3, x + side + 2, y + side + 2), INK)
        _draw_frame(pen, box, colour, 3)
        if sign:
            _draw_sign(pen, box, colour, plus=sign == "+")
        pen.text((x + side + 10, y + 1), words, QUIET, font)
        x += side + 10 + int(pen.textlength(words, font)) + GAP
    if any(panel.owners for panel in panels):
        words = "one colour: merged into the framed token"
        for number in range(3):
            pen.rectangle((x + 9 * number, y, x + 9 * number + 8, y + side), group_colour(number))
        pen.text((x + 36, y + 1), words, QUIET, font)
        x += 36 + int(pen.textlength(words, font)) + GAP
    if any(panel.heat is not None for panel in panels):
        bar = 160
        for step in range(bar):
            pen.line((x + step, y, x + step, y + side - 1), heat_colour(step / (bar - 1)))
        pen.text((x + bar + 8, y + 1), "low to high, each map on its own scale", QUIET, font)


def _wrap_text(text: str, size: int, width: int) -> list[str]:
    """Wrap text to a width in pixels; a letter is about half as wide as the font size."""
    fits = max(20, int(width / (size * 0.52)))
    return textwrap.wrap(" ".join(text.split()), fits, max_lines=_LINES, placeholder=" ...") or [""]


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
