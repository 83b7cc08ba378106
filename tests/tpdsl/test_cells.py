"""Which cells of a picture are dropped, and what states make of a grid without them."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.tables import parametrize_from_file
from tests.tpdsl.samples import call, images
from vllm_autoprune.errors import StateError
from vllm_autoprune.tpdsl.atoms.pools import _grid_cells
from vllm_autoprune.tpdsl.atoms.signals import run_signal
from vllm_autoprune.tpdsl.cells import Cells, digest_cells, kept_cells
from vllm_autoprune.tpdsl.tokens import Grid, VisualTokens


@given(
    st.integers(0, 2**32 - 1),
    st.tuples(st.integers(1, 7), st.integers(1, 7)),
    st.sampled_from(("flat", "predicted")),
    st.sampled_from((0, 1, 3)),
)
def test_cells_are_those_that_a_scan_one_by_one_drops(
    seed: int,
    shape: tuple[int, int],
    rule: Literal["flat", "predicted"],
    tolerance: int,
) -> None:
    """Of cells of few kinds, so that every case of the prediction occurs, and of near ones."""

    def scan(cells: NDArray[numpy.uint8], rule: Cells) -> list[int]:
        """The anchors by PixelPrune's scan, one cell after another."""
        height, width = cells.shape[:2]
        pixels = cells.reshape(height * width, *cells.shape[2:]).astype(int)
        anchors: list[int] = []

        def alike(a: int, b: int) -> bool:
            return bool(abs(pixels[a] - pixels[b]).max() <= rule.tolerance)

        for at in range(height * width):
            y, x = divmod(at, width)
            predicted = at
            if y and x:
                beside = anchors[at - 1]
                above = anchors[at - width]
                corner = anchors[at - width - 1]
                predicted = (
                    above
                    if alike(beside, corner) and not alike(above, corner)
                    else beside
                )
            elif at:
                predicted = anchors[at - 1] if x else anchors[at - width]
            spread = numpy.ptp(pixels[at], axis=(0, 2)).max()
            dropped = (rule.rule == "predicted" or spread <= rule.tolerance) and alike(
                at, predicted
            )
            anchors.append(predicted if dropped else at)
        return anchors

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


@given(
    st.integers(0, 2**32 - 1),
    st.tuples(st.integers(1, 7), st.integers(1, 7)),
    st.floats(0, 1),
    st.sampled_from((0.5, 0.9, 1.0)),
)
def test_what_is_kept_and_the_picture_before_are_the_whole_picture(
    seed: int, shape: tuple[int, int], changed: float, most: float
) -> None:
    """Of screens that change more or less, and are whole where they change too much."""
    source = numpy.random.default_rng(seed)
    kinds = source.integers(0, 8, (4, 4, 3, 4)).astype(numpy.uint8)
    screens = [kinds[source.integers(0, 4, shape)]]
    for _ in range(3):
        new = kinds[source.integers(0, 4, shape)]
        is_new = source.random(shape) < changed
        screens.append(numpy.where(is_new[..., None, None, None], new, screens[-1]))
    rule = Cells(rule="changed", most=most)
    assert rule.find_anchors(screens[0]) is None
    for before, screen in pairwise(screens):
        equal = (digest_cells(screen) == digest_cells(before)).all(axis=2).ravel()
        differ = (screen != before).any(axis=(2, 3, 4)).ravel()
        assert (equal != differ).all()
        anchors = rule.find_anchors(screen, equal)
        differ[0] = True  # the first cell is always kept
        assert (anchors is None) == (differ.sum() > most * differ.size)
        if anchors is None:
            continue
        kept = kept_cells(anchors)
        assert kept.tolist() == numpy.flatnonzero(differ).tolist()
        rebuilt = before.copy().reshape(-1, *before.shape[2:])
        rebuilt[kept] = screen.reshape(rebuilt.shape)[kept]
        assert (rebuilt.reshape(screen.shape) == screen).all()
        assert (anchors <= numpy.arange(anchors.size)).all()
        assert (anchors[anchors] == anchors).all()


def test_what_has_no_picture_before_it_or_changed_much_may_lose_blank_cells() -> None:
    page = numpy.zeros((2, 5, 1, 1, 4), numpy.uint8)
    page[1] = numpy.arange(20).reshape(5, 1, 1, 4)
    rule = Cells(rule="changed+flat")
    flat = Cells().find_anchors(page)
    assert flat is not None and kept_cells(flat).tolist() == [0, 5, 6, 7, 8, 9]
    for unchanged in (None, numpy.zeros(10, bool)):
        anchors = rule.find_anchors(page, unchanged)
        assert anchors is not None and anchors.tolist() == flat.tolist()
    anchors = rule.find_anchors(page, numpy.arange(10) < 7)
    assert anchors is not None and kept_cells(anchors).tolist() == [0, 7, 8, 9]


@pytest.mark.parametrize("rule", ["flat", "predicted"])
@parametrize_from_file("blank", "most", "kept")
def test_a_blank_page_keeps_one_cell_and_where_little_is_blank_all_are_encoded(
    rule: Literal["flat", "predicted"], blank: int, most: float, kept: int | None
) -> None:
    """Of 100 cells; those that are not blank are noise, as all are in a photograph."""
    cells = numpy.random.default_rng(0).integers(
        0, 255, (10, 10, 4, 3, 16), dtype=numpy.uint8
    )
    cells.reshape(100, -1)[:blank] = 7
    anchors = Cells(rule=rule, most=most).find_anchors(cells)
    assert (None if anchors is None else len(kept_cells(anchors))) == kept


def test_cells_with_equal_samples_are_compared_by_all_bytes() -> None:
    """Pixels 0 and 256 of the cells are alike, which are looked at first; pixel 1 is not."""
    cells = numpy.zeros((1, 4, 1, 1, 512), dtype=numpy.uint8)
    cells[0, 1:3, :, :, 1] = 9
    anchors = Cells(rule="predicted", most=1.0).find_anchors(cells)
    assert anchors is not None and anchors.tolist() == [0, 1, 1, 3]


def test_a_slow_gradient_is_not_followed() -> None:
    """One grey level a cell: with a tolerance of 2 every third cell is kept, none is 3 apart."""
    ramp = numpy.arange(12, dtype=numpy.uint8).reshape(1, 12, 1, 1, 1)
    anchors = Cells(tolerance=2).find_anchors(ramp)
    assert anchors is not None and kept_cells(anchors).tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("flat", Cells()),
        ("predicted", Cells(rule="predicted")),
        ("flat:2", Cells(tolerance=2)),
        ("changed", Cells(rule="changed")),
        ("changed+flat", Cells(rule="changed+flat")),
        ("changed+flat:2", Cells(rule="changed+flat", tolerance=2)),
        ({"rule": "flat", "most": 0.5}, Cells(most=0.5)),
        ("none", None),
    ],
)
def test_a_rule_is_said_in_one_word_or_as_an_object(
    value: object, rule: Cells | None
) -> None:
    assert Cells.parse(value, "/cells") == rule
    if rule is not None and isinstance(value, str):
        assert str(rule) == value


@parametrize_from_file("value")
def test_what_is_no_rule_is_refused(value: object) -> None:
    with pytest.raises(StateError, match="is no rule for cells -> give"):
        Cells.parse(value, "/cells")


# ---- a grid without some of its cells ----

ANCHORS = numpy.array([0, 0, 2, 3, 0, 5, 2, 3, 8, 9, 2, 11], numpy.int32)
DENSE = Grid(3, 4)
SPARSE = Grid(3, 4, anchors=ANCHORS.tobytes())
KEPT = [0, 2, 3, 5, 8, 9, 11]


@pytest.mark.parametrize(
    "name",
    ["spatial_centrality_prior", "local_contrast_saliency", "local_detail_energy"],
)
def test_signals_that_read_a_grid_see_anchors_in_the_place_of_dropped_cells(
    name: str,
) -> None:
    """As of the whole grid in which a dropped cell is equal to its anchor."""
    features = images(grid=Grid(1, len(KEPT))).features
    at_places = features[:, [KEPT.index(anchor) for anchor in ANCHORS]]
    none = torch.zeros(2, 1, dtype=torch.int64)
    found = run_signal(call(name), VisualTokens(features, SPARSE), none)
    expected = run_signal(call(name), VisualTokens(at_places, DENSE), none)
    torch.testing.assert_close(found, expected[:, KEPT])


def test_parts_of_a_grid_have_the_tokens_of_their_cells() -> None:
    parts, found = (_grid_cells(images(grid=grid), 2)[0][0] for grid in (DENSE, SPARSE))
    assert found.tolist() == parts[KEPT].tolist()
