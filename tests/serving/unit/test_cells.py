"""Dropped cells before an engine: what is sent of an image, under which identity, and what not."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from PIL import Image
from transformers import BatchFeature
from vllm.config import MultiModalConfig

from tests.serving.engine import built
from tests.serving.unit.samples import PLAN, element, feature, served
from tests.serving.unit.sender import OTHER, Sender, picture
from vllm_autoprune import RequestError
from vllm_autoprune.serving.api.cells import (
    _UNCOMPARED,
    EncodedImages,
    Trimming,
    _drop_cells,
)
from vllm_autoprune.serving.api.foreign_items import check_features
from vllm_autoprune.serving.inputs import CELLS_FIELD, check_inputs
from vllm_autoprune.serving.plan import NO_KEY, ItemPlan
from vllm_autoprune.serving.plan_rules import PlanRules
from vllm_autoprune.serving.request_rules import RequestRules
from vllm_autoprune.serving.served_state import Capabilities
from vllm_autoprune.tpdsl.cells import Cells

pytestmark = pytest.mark.compat

UNIT = 28


def page(row: int = 1) -> Image.Image:
    """A white page of 8 x 6 cells, three of them noise: 6 are left, for white follows the noise."""
    blank = Image.new("RGB", (6 * UNIT, 8 * UNIT), "white")
    blank.paste(picture(3 * UNIT, UNIT), (UNIT, row * UNIT))
    return blank


@pytest.fixture(params=[True, False], ids=["cache", "no cache"])
def sender(request: pytest.FixtureRequest, folder: Any) -> Sender:
    server = Sender(folder, budget=1000)
    return server.with_cache() if request.param else server


def test_what_is_left_of_an_image_is_its_tokens_and_its_placeholders(
    sender: Sender,
) -> None:
    """As often as it is sent, whether vLLM has it or not; K is of the whole image's tokens."""
    find = Cells.find_anchors
    with patch.object(
        Cells, "find_anchors", autospec=True, side_effect=find
    ) as counted:
        sent, again = (sender.send([page()], cells="flat") for _ in range(2))
    assert (sent.lengths, sent.plans[0].tokens, sent.plans[0].budget) == ([6], 6, 6)
    assert (again.lengths, again.identities) == (sent.lengths, sent.identities)
    assert counted.call_count == (1 if sender.cache is not None else 2)
    fewer = sender.send([page()], cells="flat", budget="1/12")
    assert (fewer.lengths, fewer.plans[0].tokens) == ([4], 6)


def test_identities_hold_which_cells_there_are(sender: Sender) -> None:
    """Another rule or tolerance is another image, and so is the whole one."""
    rules = (None, "none", "flat", "flat:1", "predicted")
    identities = [sender.send([page()], cells=rule).identities[0] for rule in rules]
    assert identities[0] == identities[1] and len(set(identities)) == 4


def test_equal_rows_in_other_places_are_another_image(sender: Sender) -> None:
    here, there = (sender.send([page(row)], cells="flat", budget=4) for row in (1, 2))
    assert here.plans[0].tokens == there.plans[0].tokens == 6
    assert here.identities != there.identities and here.data != there.data
    assert here.plans[0].key != there.plans[0].key


def test_a_photograph_is_sent_as_without_a_rule(sender: Sender) -> None:
    plain, by_rule = (
        sender.send([OTHER, page()], cells=rule) for rule in ("none", "flat")
    )
    assert (
        plain.identities[0] == by_rule.identities[0]
        and plain.plans[0] == by_rule.plans[0]
    )
    assert plain.identities[1] != by_rule.identities[1]


@pytest.mark.parametrize(
    ("pixels", "frames"),
    [
        (torch.ones(48, 588), 1),
        (torch.ones(48, 588).byte(), 2),
        (torch.ones(48, 196).byte(), 1),
    ],
    ids=["normalised before", "frames", "grey"],
)
def test_pixels_that_cannot_be_compared_are_sent_whole_and_counted(
    pixels: torch.Tensor, frames: int
) -> None:
    grid = torch.tensor([[frames, 8, 6]])
    data = BatchFeature({"pixel_values": pixels, "image_grid_thw": grid})
    original = _UNCOMPARED._value.get()
    assert _drop_cells(data, Cells()) is data
    assert _UNCOMPARED._value.get() == original + 1


def test_an_image_that_comes_by_its_name_keeps_its_cells(folder: Any) -> None:
    sender = Sender(folder, budget=1000).with_cache()
    original = sender.send([page()], ["x"], cells="flat")
    assert sender.send([None], ["x"], cells="flat") == replace(original, data=[None])
    with pytest.raises(ValueError, match="data is not provided"):
        sender.send([None], ["x"], cells="predicted")


@pytest.mark.parametrize("name", ["internvl", "glm_ocr"])
def test_models_that_encode_whole_images_refuse_rules(name: str) -> None:
    """At start: ``test_startup_rules.py``."""
    sender = Sender(built(name), budget=1, placeholder="")
    with pytest.raises(RequestError, match="no cell can be dropped: this model"):
        sender.send([OTHER], cells="flat")


# ---- cells that another process, or a client, has made ----

ANCHORS = torch.tensor([0, 0, 2, 3, 0, 5], dtype=torch.int32)
GRID = torch.tensor([1, 4, 6])
ROWS = torch.zeros(16, 12, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("anchors", "grid", "rows"),
    [
        (ANCHORS.tolist(), GRID, ROWS),
        (ANCHORS.long(), GRID, ROWS),
        (ANCHORS[None], GRID, ROWS),
        (ANCHORS, None, ROWS),
        (ANCHORS, GRID[1:], ROWS),
        (ANCHORS, GRID, None),
        (ANCHORS[:-1], GRID, ROWS),
        (ANCHORS, torch.tensor([2, 2, 6]), ROWS),
        (ANCHORS, torch.tensor([1, -4, -6]), ROWS),
        (ANCHORS, torch.tensor([1, 2**33, 3 * 2**34]), ROWS),
        (ANCHORS.masked_fill(ANCHORS == 2, -1), GRID, ROWS[4:]),
        (ANCHORS.masked_fill(ANCHORS == 2, 6), GRID, ROWS[4:]),
        (
            ANCHORS.masked_fill(ANCHORS == 2, 1),
            GRID,
            ROWS[4:],
        ),  # an anchor that is dropped itself
        (ANCHORS, GRID, ROWS[4:]),
        (ANCHORS, GRID, ROWS.repeat(2, 1)),
    ],
)
def test_forged_cells_are_refused(anchors: Any, grid: Any, rows: Any) -> None:
    def check(anchors: Any, grid: Any, rows: Any, **plan_fields: Any) -> None:
        fields = {CELLS_FIELD: anchors, "image_grid_thw": grid, "pixel_values": rows}
        present = {name: value for name, value in fields.items() if value is not None}
        check_inputs(
            ItemPlan(2, NO_KEY, tokens=4, **plan_fields), "image", present, None
        )

    with pytest.raises(
        RequestError, match=r"autoprune_cells: |image_grid_thw: |pixels of nothing"
    ):
        check(anchors, grid, rows)
    check(ANCHORS, GRID, ROWS)
    with pytest.raises(RequestError, match="dropped of an image that is resized"):
        check(ANCHORS, GRID, ROWS, keep="resized")


@pytest.mark.parametrize(
    ("rows", "on_cpu", "whole_only", "problem"),
    [
        (ROWS, True, "", ""),
        (ROWS, False, "", "not batched as a processor does"),
        (ROWS[4:], True, "", "16 patches, and there are 12"),
        (ROWS, True, "encodes squares", "not dropped of this model's images"),
    ],
)
def test_cells_in_a_request_from_elsewhere_are_checked(
    rows: torch.Tensor, on_cpu: bool, whole_only: str, problem: str
) -> None:
    item = feature(replace(PLAN, tokens=4).encode())
    item.data[CELLS_FIELD] = element(ANCHORS, keep_on_cpu=on_cpu)
    item.data |= {
        "image_grid_thw": element(GRID, keep_on_cpu=True),
        "pixel_values": element(rows),
    }
    rules = PlanRules(
        replace(served(), capabilities=Capabilities(whole_only=whole_only)), 100
    )
    with pytest.raises(RequestError, match=problem) if problem else nullcontext():
        check_features(rules, [item], "", MultiModalConfig())


def test_what_plans_from_elsewhere_keep_together_is_bounded() -> None:
    def items() -> list[Any]:
        return [feature(PLAN.encode()) for _ in range(2)]

    for total, problem in (
        (2 * PLAN.budget, ""),
        (2 * PLAN.budget - 1, "which may keep"),
    ):
        rules = PlanRules(replace(served(), rules=RequestRules(total=total)), 100)
        with pytest.raises(RequestError, match=problem) if problem else nullcontext():
            check_features(rules, items(), "", MultiModalConfig())


def test_an_image_that_comes_by_its_name_alone_is_no_other_image() -> None:
    """Its cells are forgotten: no cache may hold it under its name, nor under another's."""
    images = EncodedImages(lambda picture, arguments: BatchFeature(), size=4)
    trimming = Trimming(Cells())
    names = [images.find(trimming, digest, None, {}).digest for digest in "ab"]
    assert len({*names, *"ab"}) == 4
