"""Pictures: tokens are drawn at their places."""

from __future__ import annotations

import dataclasses
import io

import pytest
from PIL import Image

from vllm_autoprune import Grid
from vllm_autoprune.report.panels import Explanation, Panel
from vllm_autoprune.report.picture import (
    CORE,
    ENTERED,
    LEFT,
    RAMP,
    SIDE,
    draw_heat_map,
    draw_sheet,
    encode_png,
    heat_colour,
    stretch_values,
)
from vllm_autoprune.report.trace import SignalTrace, Trace

GRID = Grid(4, 6)
QUESTION = "Is this safe?"
TRACE = Trace(
    grid=GRID,
    reference=(7, 3, 20),
    kept=(7, 8, 20),
    left=(3,),
    entered=(8,),
    extra=0,
    signals=(SignalTrace("local_contrast_saliency", 0.5, tuple(i / 23 for i in range(24))),),
    quality=tuple(1 - i / 23 for i in range(24)),
    fallback="none",
)


def explanation(question: str = QUESTION, trace: Trace = TRACE) -> Explanation:
    panels = (
        Panel("image", "24 tokens"),
        Panel("after exchange", "1 out, 1 in", None, trace.kept, trace.left, trace.entered),
        Panel("local contrast saliency", "weight 0.5", trace.signals[0].values),
    )
    return Explanation(
        Image.new("RGB", (120, 80), (200, 40, 40)),
        question,
        "mine",
        "0123456789abcdef",
        trace,
        panels,
    )


def test_the_ramp_grows_lighter_and_is_clamped() -> None:
    light = [sum(heat_colour(step / 20)) for step in range(21)]
    assert light == sorted(light)
    assert (heat_colour(-1), heat_colour(2), heat_colour(1)) == (RAMP[0], RAMP[-1], RAMP[-1])


def test_non_finite_values_are_stretched_to_zero() -> None:
    assert stretch_values([1.0, 3.0, 2.0]) == [0.0, 1.0, 0.5]
    assert stretch_values([2.0, 2.0]) == [0.0, 0.0]
    assert stretch_values([float("nan"), 0.0, 1.0, float("inf")]) == [0.0, 0.0, 1.0, 0.0]
    assert stretch_values([float("nan")] * 2) == [0.0, 0.0]


def test_a_heat_map_has_one_pixel_a_token() -> None:
    values = [0.0] * 24
    values[8] = 1.0
    image = draw_heat_map(values, GRID)
    assert image.size == (6, 4)
    assert image.getpixel((2, 1)) == RAMP[-1]
    assert image.getpixel((1, 2)) == RAMP[0]


def test_a_heat_map_of_tiles_is_as_wide_as_all_of_them() -> None:
    image = draw_heat_map([0.0] * 6 + [1.0] + [0.0] * 5, Grid(2, 3, tiles=2))
    assert image.size == (6, 2)
    assert image.getpixel((3, 0)) == RAMP[-1]


def test_marks_are_drawn_on_their_tokens() -> None:
    sheet = draw_sheet(explanation())
    size = SIDE // GRID.width
    # The second panel of the first row: found by its frame colours, so layout may change.
    for colour, token in ((LEFT, 3), (ENTERED, 8)):
        pixels = [
            (x, y)
            for x in range(size * GRID.width, 2 * size * GRID.width + 80)
            for y in range(sheet.height - 60)
            if sheet.getpixel((x, y)) == colour
        ]
        width = max(x for x, _ in pixels) - min(x for x, _ in pixels) + 1
        height = max(y for _, y in pixels) - min(y for _, y in pixels) + 1
        assert (width, height) == (size, size), token


def test_swapped_tokens_stand_apart_by_as_much_as_their_places() -> None:
    sheet, size = draw_sheet(explanation()), SIDE // GRID.width
    corner = {
        colour: min(
            (y, x)
            for x in range(size * GRID.width, 2 * size * GRID.width + 80)
            for y in range(sheet.height - 60)
            if sheet.getpixel((x, y)) == colour
        )
        for colour in (LEFT, ENTERED)
    }
    down, right = (corner[ENTERED][i] - corner[LEFT][i] for i in (0, 1))
    assert (down, right) == (size, -size)  # token 3 is row 0, column 3; token 8 row 1, column 2


@pytest.mark.parametrize("question", ["", "x" * 5000, "many words " * 800, "面白い?"])
def test_any_question_can_be_drawn(question: str) -> None:
    sheet = draw_sheet(explanation(question))
    assert sheet.height < 2000
    with Image.open(io.BytesIO(encode_png(sheet))) as again:
        assert again.format == "PNG" and again.size == sheet.size


def test_tokens_of_the_core_have_a_colour_of_their_own() -> None:
    trace = dataclasses.replace(TRACE, left=(), entered=(), core=(7,))
    panels = (Panel("reference selection", "3 tokens", lit=trace.kept, core=trace.core),)
    split = dataclasses.replace(explanation(trace=trace), panels=panels)
    colours = draw_sheet(split).getcolors(1 << 20)
    assert colours is not None and CORE in {colour for _, colour in colours}
    plain = draw_sheet(explanation()).getcolors(1 << 20)
    assert plain is not None and CORE not in {colour for _, colour in plain}
