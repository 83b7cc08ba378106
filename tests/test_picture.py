"""Pictures: tokens are drawn at their places."""

from __future__ import annotations

import dataclasses
import io

import pytest
from PIL import Image

from tests.tpdsl.samples import images, state
from vllm_autoprune import Grid, materialize, refine
from vllm_autoprune.explain import Explanation, SignalTrace, Trace, trace_images
from vllm_autoprune.picture import (
    CORE,
    ENTERED,
    LEFT,
    RAMP,
    SIDE,
    draw_heat_map,
    draw_sheet,
    encode_picture,
    list_panels,
)

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


MERGING: dict[str, object] = {"/reassembly": {"atom": "mean_residual", "strength": 0.5}}


def explanation(question: str = QUESTION, trace: Trace = TRACE) -> Explanation:
    picture = Image.new("RGB", (120, 80), (200, 40, 40))
    return Explanation(picture, question, materialize(state(), 12), trace)


def explain_sample(changes: dict[str, object] | None = None) -> Explanation:
    tokens, policy = images(seed=5), materialize(state(changes), 12)
    trace = trace_images(policy, tokens, refine(policy, tokens))[0]
    return Explanation(Image.new("RGB", (60, 60)), "What?", policy, trace)


def test_panels_show_image_selection_and_every_signal() -> None:
    sample = explain_sample({"/scoring/signals/2/weight": 3.99961, **MERGING})
    panels, trace = list_panels(sample), sample.trace
    assert [panel.title for panel in panels] == [
        "image",
        "reference selection",
        "after exchange",
        "merged",
        "quality g",
        *(signal.atom.replace("_", " ") for signal in trace.signals),
    ]
    assert panels[1].lit == trace.reference
    assert (panels[2].removed, panels[2].entered) == (trace.left, trace.entered)
    assert (panels[3].lit, panels[3].owners) == (trace.kept, trace.owners)
    assert "weight 4" in [panel.detail for panel in panels]
    assert sample.summary.startswith("sample (") and "keeps 12 of 36" in sample.summary
    assert "24 dropped ones are merged into them" in sample.summary


def test_a_base_policy_alone_has_two_panels_and_a_core_is_marked() -> None:
    assert len(list_panels(explain_sample({"/constraints/selector/q_e": 0}))) == 2
    split = explain_sample({"/core": {"share": 0.5}})
    assert [bool(panel.core) for panel in list_panels(split)[:3]] == [False, True, True]
    assert "6 of them are the core" in split.summary


def test_a_fallback_is_named() -> None:
    trace = dataclasses.replace(TRACE, fallback="reference")
    assert "not finite, reference selection instead" in explanation(trace=trace).summary


def test_a_heat_map_is_scaled_to_the_ramp_and_has_one_pixel_a_token() -> None:
    def shares(*values: float) -> list[bool]:
        """Which values are drawn in the ramp's dark end, or in its light one."""
        drawn = draw_heat_map(values, Grid(1, len(values)))
        colours = [drawn.getpixel((x, 0)) for x in range(len(values))]
        assert {*colours} <= {RAMP[0], RAMP[-1]}
        return [colour == RAMP[-1] for colour in colours]

    assert shares(1.0, 3.0) == [False, True]
    assert shares(2.0, 2.0) == shares(float("nan"), float("nan")) == [False, False]
    assert shares(float("nan"), 0.0, 1.0, float("inf")) == [False, False, True, False]
    ramp = draw_heat_map(range(21), Grid(1, 21))
    light = [sum(ramp.getpixel((x, 0))) for x in range(21)]  # type: ignore[arg-type]
    assert light == sorted(light)
    image = draw_heat_map([float(token == 8) for token in range(24)], GRID)
    assert image.size == (6, 4)
    assert image.getpixel((2, 1)) == RAMP[-1] and image.getpixel((1, 2)) == RAMP[0]
    tiles = draw_heat_map([float(token == 6) for token in range(12)], Grid(2, 3, tiles=2))
    assert tiles.size == (6, 2) and tiles.getpixel((3, 0)) == RAMP[-1]


def test_marks_are_drawn_on_their_tokens() -> None:
    # Found by their frame colours, of the panel after the exchange alone.
    sheet, size = draw_sheet(explanation()), SIDE // GRID.width
    corners = {}
    for colour in (LEFT, ENTERED):
        colours = [[sheet.getpixel((x, y)) for x in range(sheet.width)]
                   for y in range(sheet.height - 60)]  # fmt: skip
        pixels = [(x, y) for y, row in enumerate(colours) for x, c in enumerate(row) if c == colour]
        (x1, x2), (y1, y2) = ((min(axis), max(axis)) for axis in zip(*pixels, strict=True))
        assert (x2 - x1 + 1, y2 - y1 + 1) == (size, size), colour
        corners[colour] = x1, y1
    right, down = (corners[ENTERED][axis] - corners[LEFT][axis] for axis in (0, 1))
    assert (right, down) == (-size, size)  # token 3 is row 0, column 3; token 8 row 1, column 2


@pytest.mark.parametrize("question", ["", "x" * 5000, "many words " * 800, "面白い?"])
def test_any_question_can_be_drawn(question: str) -> None:
    sheet = draw_sheet(explanation(question))
    assert sheet.height < 2000
    with Image.open(io.BytesIO(encode_picture([explanation(question)] * 2))) as again:
        assert again.format == "PNG" and again.size == (sheet.width, 2 * sheet.height)


def test_tokens_of_the_core_have_a_colour_of_their_own() -> None:
    split = dataclasses.replace(TRACE, left=(), entered=(), core=(7,))
    for trace in (split, TRACE):
        colours = draw_sheet(explanation(trace=trace)).getcolors(1 << 20)
        assert colours is not None
        assert (CORE in {colour for _, colour in colours}) == (trace is split)
