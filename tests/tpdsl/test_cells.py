"""Which cells of a picture are dropped, and what states make of a grid without them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.tpdsl.samples import images
from vllm_autoprune.errors import StateError
from vllm_autoprune.tpdsl.atoms.pools import _grid_cells
from vllm_autoprune.tpdsl.atoms.scoring import run_signal
from vllm_autoprune.tpdsl.cells import Cells, kept_cells
from vllm_autoprune.tpdsl.registry import ATOMS
from vllm_autoprune.tpdsl.tokens import Grid

Pixels = NDArray[numpy.uint8]
FLAT = Cells(most=1.0)


def cells_of(picture: Pixels, side: int = 8) -> Pixels:
    """Cells ``(H, W, 4, 3, pixels)`` of a picture ``(h, w, 3)``, as image processors make them."""
    height, width = picture.shape[0] // side, picture.shape[1] // side
    half = side // 2
    patches = picture.reshape(height, 2, half, width, 2, half, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    return numpy.ascontiguousarray(patches).reshape(height, width, 4, 3, half * half)


def scan(cells: Pixels, rule: Cells) -> list[int]:
    """The anchors by PixelPrune's scan, one cell after another."""
    height, width = cells.shape[:2]
    rows = cells.reshape(height * width, -1).astype(int)
    colours = cells.reshape(height * width, 4, 3, -1).astype(int)
    anchors: list[int] = []

    def alike(a: int, b: int) -> bool:
        return bool(abs(rows[a] - rows[b]).max() <= rule.tolerance)

    for at in range(height * width):
        y, x = divmod(at, width)
        predicted = None
        if y and x:
            beside, above, corner = anchors[at - 1], anchors[at - width], anchors[at - width - 1]
            predicted = above if alike(beside, corner) and not alike(above, corner) else beside
        elif at:
            predicted = anchors[at - 1] if x else anchors[at - width]
        spread = colours[at].max(axis=(0, 2)) - colours[at].min(axis=(0, 2))
        flat = rule.rule == "predicted" or spread.max() <= rule.tolerance
        dropped = predicted is not None and flat and alike(at, predicted)
        anchors.append(predicted if dropped and predicted is not None else at)
    return anchors


@given(
    st.integers(0, 2**32 - 1),
    st.tuples(st.integers(1, 7), st.integers(1, 7)),
    st.sampled_from(("flat", "predicted")),
    st.sampled_from((0, 1, 3)),
)
def test_cells_are_those_that_a_scan_one_by_one_drops(
    seed: int, shape: tuple[int, int], rule: Literal["flat", "predicted"], tolerance: int
) -> None:
    """Of cells of few kinds, so that every case of the prediction occurs, and of near ones."""
    source = numpy.random.default_rng(seed)
    kinds = source.integers(0, 8, (4, 4, 3, 4)).astype(numpy.uint8)
    kinds[:2] = kinds[:2, :1, :, :1]  # of one colour
    cells = kinds[source.integers(0, 4, shape)]
    cells += source.integers(0, 2, cells.shape, dtype=numpy.uint8) * (tolerance > 0)
    asked = Cells(rule=rule, tolerance=tolerance, most=1.0)
    found = asked.find_anchors(cells)
    assert found is not None and found.tolist() == scan(cells, asked)
    places = numpy.arange(found.size)
    assert (found <= places).all() and (found[found] == found).all() and found[0] == 0


def test_a_blank_page_keeps_one_cell_and_a_photograph_is_encoded_whole() -> None:
    blank = cells_of(numpy.full((64, 48, 3), 255, numpy.uint8))
    photograph = numpy.random.default_rng(0).integers(0, 255, (64, 48, 3), dtype=numpy.uint8)
    for rule in (Cells(), Cells(rule="predicted")):
        anchors = rule.find_anchors(blank)
        assert anchors is not None and kept_cells(anchors).tolist() == [0]
        assert rule.find_anchors(cells_of(photograph)) is None


def test_a_picture_with_little_to_drop_is_encoded_whole() -> None:
    """More than 0.9 of 100 cells would stay; with the gate open they are dropped."""
    picture = numpy.random.default_rng(0).integers(0, 255, (80, 80, 3), dtype=numpy.uint8)
    picture[:8] = 7
    cells = cells_of(picture)
    assert Cells().find_anchors(cells) is None
    picture[8:16, :16] = 7
    for rule, dropped in ((Cells(), None), (FLAT, 9)):
        anchors = rule.find_anchors(cells)
        assert (None if anchors is None else 100 - len(kept_cells(anchors))) == dropped
    less = Cells().find_anchors(cells_of(picture))
    assert less is not None and len(kept_cells(less)) == 89


def test_a_slow_gradient_is_not_followed() -> None:
    """One grey level a cell: with a tolerance of 2 every third cell is kept, none is 3 apart."""
    ramp = numpy.repeat(numpy.arange(12, dtype=numpy.uint8), 8)
    cells = cells_of(numpy.broadcast_to(ramp[None, :, None], (8, 96, 3)).copy())
    anchors = Cells(tolerance=2, most=1.0).find_anchors(cells)
    assert anchors is not None and kept_cells(anchors).tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("flat", Cells()),
        ("predicted", Cells(rule="predicted")),
        ("flat:2", Cells(tolerance=2)),
        ({"rule": "flat", "most": 0.5}, Cells(most=0.5)),
        ("none", None),
    ],
)
def test_a_rule_is_said_in_one_word_or_as_an_object(value: object, rule: Cells | None) -> None:
    assert Cells.parse(value, "/cells") == rule
    assert rule is None or rule.most != 0.9 or Cells.parse(str(rule), "") == rule


@pytest.mark.parametrize(
    "value",
    ["", "Flat", "flat:", "flat:-1", "flat:33", "flat:1:2", 1, True, [], {"rule": 1}, {"x": 1}],
)
def test_what_is_no_rule_is_refused(value: object) -> None:
    with pytest.raises(StateError, match="is no rule for cells -> give"):
        Cells.parse(value, "/cells")


# ---- a grid without some of its cells ----

ANCHORS = numpy.array([0, 0, 2, 3, 0, 5, 2, 3, 8, 9, 2, 11], numpy.int32)
SPARSE = Grid(3, 4, anchors=ANCHORS.tobytes())
KEPT = [0, 2, 3, 5, 8, 9, 11]
SOURCE = [KEPT.index(anchor) for anchor in ANCHORS]


@pytest.mark.parametrize(
    "name",
    ["spatial_centrality_prior", "local_contrast_saliency", "local_detail_energy"],
)
def test_signals_that_read_a_grid_see_anchors_in_the_place_of_dropped_cells(name: str) -> None:
    """As of the whole grid in which a dropped cell is equal to its anchor."""
    tokens = replace(images(grid=Grid(1, 7)), grid=SPARSE)
    dense = replace(tokens, features=tokens.features[:, SOURCE], grid=Grid(3, 4))
    dense = replace(dense, cls_attention=None, instruction=None)
    call: Any = ATOMS[name].call.model_validate({"atom": name})
    none = torch.zeros(2, 1, dtype=torch.int64)
    found, expected = run_signal(call, tokens, none), run_signal(call, dense, none)
    torch.testing.assert_close(found, expected[:, KEPT])


def test_places_of_tokens_are_those_of_their_cells() -> None:
    device, dense = torch.device("cpu"), Grid(3, 4)
    assert (SPARSE.tokens, SPARSE.per_tile, dense.tokens) == (7, 7, 12)
    for of in (
        lambda grid: grid.centre_distance(device),
        lambda grid: _grid_cells(grid, 2, device)[0],
    ):
        assert of(SPARSE).tolist() == of(dense)[KEPT].tolist()
    assert SPARSE.at_places(torch.arange(7)).tolist() == SOURCE
