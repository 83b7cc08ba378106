"""The picture: its size, dimming and outlines."""

from __future__ import annotations

from PIL import Image

from benchmarks.demo.picture import (
    EVIDENCE,
    GAP,
    KEPT,
    PAPER,
    PATCH,
    RIGHT,
    SCALE,
    WRONG,
    Panel,
    draw,
    patch_box,
    scene,
)

GREY = (120, 130, 140)
SIDE = 168 * SCALE


def image() -> Image.Image:
    return Image.new("RGB", (168, 168), GREY)


def middle(patch: int) -> tuple[int, int]:
    left, top, right, bottom = patch_box(patch, 12)
    return (left + right) // 2, (top + bottom) // 2


def test_patches_lie_in_raster_order() -> None:
    size = PATCH * SCALE

    assert patch_box(0, 12) == (0, 0, size, size)
    assert patch_box(13, 12) == (size, size, 2 * size, 2 * size)
    assert patch_box(143, 12) == (SIDE - size, SIDE - size, SIDE, SIDE)


def test_kept_patches_stay_as_they_are_and_the_rest_is_dimmed() -> None:
    shown = scene(image(), {5, 70}, evidence=())

    assert shown.size == (SIDE, SIDE)
    assert shown.getpixel(middle(5)) == shown.getpixel(middle(70)) == GREY
    dimmed = shown.getpixel(middle(6))
    assert isinstance(dimmed, tuple) and max(dimmed) < 80
    left, top, right, bottom = patch_box(70, 12)
    for corner in ((left, top), (right - 1, top), (left, bottom - 1), (right - 1, bottom - 1)):
        assert shown.getpixel(corner) == KEPT


def test_nothing_is_dimmed_where_everything_is_kept() -> None:
    assert scene(image(), None, evidence=()).getcolors() == [(SIDE * SIDE, GREY)]


def test_evidence_is_outlined_around_the_whole_and_not_between_its_patches() -> None:
    shown = scene(image(), None, evidence=(26, 27))
    left, top, _, bottom = patch_box(26, 12)
    between = patch_box(27, 12)[0]
    centre = (top + bottom) // 2

    assert shown.getpixel((left, centre)) == EVIDENCE
    assert shown.getpixel((between, top)) == EVIDENCE
    assert shown.getpixel((between, centre)) == GREY


def test_evidence_at_the_border_does_not_wrap_to_the_next_row() -> None:
    shown = scene(image(), None, evidence=(11, 12))

    assert shown.getpixel((SIDE - 1, PATCH * SCALE // 2)) == EVIDENCE
    assert shown.getpixel((1, PATCH * SCALE * 3 // 2)) == EVIDENCE


def test_the_sheet_has_a_column_for_each_panel() -> None:
    panels = [
        Panel("full", "144 tokens", None, "7", right=True),
        Panel("random keep", "8 tokens", (1, 2, 3), "", right=False),
    ]

    sheet = draw(image(), "What digit is on the red circle?", panels, (40, 41))

    assert sheet.width == GAP + 2 * (SIDE + GAP)
    assert SIDE < sheet.height < SIDE + 400
    colours = {colour for _, colour in sheet.getcolors(1 << 24) or ()}
    assert {PAPER, GREY, EVIDENCE, RIGHT, WRONG} <= colours
