"""Draws a scene once for each way to choose its tokens: kept patches bright, the rest dimmed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageEnhance, ImageFont

from vllm_autoprune.report.panels import group_colour

Colour = tuple[int, int, int]

PATCH = 14
SCALE = 3
GAP = 28
PAPER: Colour = (255, 255, 255)
TEXT: Colour = (32, 36, 44)
QUIET: Colour = (104, 110, 122)
KEPT: Colour = (255, 255, 255)
EVIDENCE: Colour = (255, 196, 0)
RIGHT: Colour = (21, 128, 61)
WRONG: Colour = (190, 30, 45)

_TITLE, _LABEL, _ANSWER, _LEGEND = 46, 35, 35, 30


@dataclass(frozen=True)
class Panel:
    """One copy of the scene: a title, what is kept (None: everything), and the answer.

    ``owners`` has for every patch the kept one that it is merged into, or -1.
    """

    title: str
    detail: str
    kept: tuple[int, ...] | None
    answer: str
    right: bool
    owners: tuple[int, ...] = ()


def draw(
    image: Image.Image, question: str, panels: Sequence[Panel], evidence: Sequence[int]
) -> Image.Image:
    """The picture: the question, and the panels side by side with their answers."""
    side = image.width * SCALE
    top, below = GAP + _TITLE + 28 + _LABEL + 16, 18 + _ANSWER + 28 + _LEGEND + GAP
    width = GAP + len(panels) * (side + GAP)
    sheet = Image.new("RGB", (width, top + side + below), PAPER)
    pen = ImageDraw.Draw(sheet)
    pen.text((GAP, GAP - 6), f"“{question}”", TEXT, _font(_TITLE))
    for number, panel in enumerate(panels):
        left = GAP + number * (side + GAP)
        _label(pen, left, top - 16 - _LABEL, panel)
        sheet.paste(scene(image, panel.kept, evidence, panel.owners), (left, top))
        _answer(pen, left, top + side + 16, panel)
    merged = any(panel.owners for panel in panels)
    _legend(pen, GAP, top + side + 18 + _ANSWER + 28, merged)
    return sheet


def scene(
    image: Image.Image,
    kept: Iterable[int] | None,
    evidence: Sequence[int],
    owners: Sequence[int] = (),
) -> Image.Image:
    """One panel's image, enlarged and marked; merged patches have the colour of their group."""
    big = image.resize((image.width * SCALE, image.height * SCALE), Image.Resampling.NEAREST)
    columns = image.width // PATCH
    if kept is None:
        shown, chosen = big.copy(), set[int]()
    else:
        grey = ImageEnhance.Color(big).enhance(0.3)
        shown, chosen = ImageEnhance.Brightness(grey).enhance(0.42), set(kept)
    colours = {patch: group_colour(n) for n, patch in enumerate(sorted(chosen))} if owners else {}
    for patch, owner in enumerate(owners):
        if owner >= 0:
            box = patch_box(patch, columns)
            tint = Image.new("RGB", (PATCH * SCALE, PATCH * SCALE), colours[owner])
            shown.paste(Image.blend(big.crop(box), tint, 0.5), box[:2])
    for patch in chosen:
        box = patch_box(patch, columns)
        shown.paste(big.crop(box), box[:2])
    pen = ImageDraw.Draw(shown)
    _outline(pen, evidence, columns)
    for patch in chosen:
        left, top, right, bottom = patch_box(patch, columns)
        colour, width = colours.get(patch, KEPT), 6 if patch in colours else 3
        pen.rectangle((left, top, right - 1, bottom - 1), outline=colour, width=width)
    return shown


def patch_box(patch: int, columns: int) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a raster patch in the enlarged scene."""
    row, column = divmod(patch, columns)
    size = PATCH * SCALE
    return column * size, row * size, (column + 1) * size, (row + 1) * size


def _outline(pen: ImageDraw.ImageDraw, patches: Sequence[int], columns: int) -> None:
    """The border of a set of patches, without the lines between them."""
    marked = set(patches)
    for patch in marked:
        left, top, right, bottom = patch_box(patch, columns)
        column = patch % columns
        edges = {
            (left, top, right, top): patch - columns,
            (left, bottom, right, bottom): patch + columns,
            (left, top, left, bottom): patch - 1 if column else -1,
            (right, top, right, bottom): patch + 1 if column < columns - 1 else -1,
        }
        for line, neighbour in edges.items():
            if neighbour not in marked:
                pen.line(line, fill=EVIDENCE, width=7)


def _label(pen: ImageDraw.ImageDraw, left: int, top: int, panel: Panel) -> None:
    pen.text((left, top), panel.title, TEXT, _font(_LABEL))
    start = left + pen.textlength(panel.title, _font(_LABEL)) + 14
    pen.text((start, top), panel.detail, QUIET, _font(_LABEL))


def _answer(pen: ImageDraw.ImageDraw, left: int, top: int, panel: Panel) -> None:
    pen.text((left, top), "answer: ", QUIET, _font(_ANSWER))
    start = left + pen.textlength("answer: ", _font(_ANSWER))
    colour = RIGHT if panel.right else WRONG
    pen.text((start, top), panel.answer or "(nothing)", colour, _font(_ANSWER), stroke_width=0.5)


def _legend(pen: ImageDraw.ImageDraw, left: int, top: int, merged: bool) -> None:
    size, step = 36, 12
    entries = [(KEPT, "kept patch"), (EVIDENCE, "patches that hold the answer")]
    if merged:
        entries.append((group_colour(0), "merged into the framed patch of its colour"))
    for colour, words in entries:
        pen.rectangle((left, top, left + size, top + size), fill=TEXT)
        pen.rectangle((left + 6, top + 6, left + size - 6, top + size - 6), QUIET, colour, 4)
        left += size + step
        pen.text((left, top + 1), words, QUIET, _font(_LEGEND))
        left += int(pen.textlength(words, _font(_LEGEND))) + 3 * step


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
