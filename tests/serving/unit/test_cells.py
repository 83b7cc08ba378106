"""Dropped cells before an engine: what is sent of an image, under which identity, and what not."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
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
from tests.serving.unit.test_history import FREE
from vllm_autoprune import RequestError
from vllm_autoprune.serving.api.cells import (
    _UNCOMPARED,
    EncodedImages,
    SentImage,
    Trimming,
    _drop_cells,
)
from vllm_autoprune.serving.api.foreign_items import check_features
from vllm_autoprune.serving.inputs import CELLS_FIELD, check_inputs
from vllm_autoprune.serving.models import BACKBONES
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


@pytest.mark.parametrize("architecture", BACKBONES)
def test_cells_are_compared_only_where_the_tower_normalises_pixels(
    architecture: str,
) -> None:
    row = BACKBONES[architecture]
    module, _, name = row.model.partition(":")
    model = vars(import_module(module))[name]
    assert row.whole_only or model.supports_mm_device_do_normalize


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


def screen(*places: int, seed: int = 0) -> Image.Image:
    """A screen of 8 x 6 cells of noise, some of which are other noise, at places of the raster."""
    drawn = picture(6 * UNIT, 8 * UNIT, seed)
    for place in places:
        corner = place % 6 * UNIT, place // 6 * UNIT
        drawn.paste(picture(UNIT, UNIT, 100 + place), corner)
    return drawn


def test_of_a_screen_after_another_the_first_cell_and_what_changed_are_sent(
    sender: Sender,
) -> None:
    """In raster order, as rows of the whole screen, as often as it is sent."""
    shots = [screen(), screen(7, 20), screen(7, 20), screen(7, 8, seed=1)]
    sent, again = (sender.send(shots, cells="changed") for _ in range(2))
    assert [plan.tokens for plan in sent.plans] == sent.lengths == [48, 3, 1, 48]
    assert again.identities == sent.identities and again.plans == sent.plans
    assert len(set(sent.identities)) == 4
    unpruned = sender.send(shots, cells="none").identities
    assert [a == b for a, b in zip(sent.identities, unpruned, strict=True)] == [
        *(True, False, False, True)
    ]
    sender.cache = None
    rows = [
        sender.process(shots[:2], cells=rule)["mm_kwargs"]["image"][1]
        for rule in ("none", "changed")
    ]
    all_rows, kept_rows = (data["pixel_values"].data.split(4) for data in rows)
    for kept, place in zip(kept_rows, (0, 7, 20), strict=True):
        assert torch.equal(kept, all_rows[place])
    anchors = torch.arange(48).clamp(max=20)
    anchors[1:7] = 0
    anchors[7:20] = 7
    assert rows[1][CELLS_FIELD].data.tolist() == anchors.tolist()


def test_turns_that_are_added_change_nothing_of_a_screen_before_them(
    sender: Sender,
) -> None:
    """Also where one picture object is sent several times."""
    start = screen()
    second = screen(3)
    shots = [start, second, start, start, screen(4), second]
    every = sender.send(shots, cells="changed")
    for count in range(1, len(shots)):
        fewer = sender.send(shots[:count], cells="changed")
        assert fewer.identities == every.identities[:count]
        assert fewer.plans == every.plans[:count]
    assert every.lengths == [48, 2, 2, 1, 2, 3]


def test_a_screen_after_other_screens_is_another_image(sender: Sender) -> None:
    """Even if the same cells are kept, and so the same rows."""
    shot = screen(5)
    after = [screen(), screen(5, 6), screen(6, seed=2), shot, page()]
    sent = [sender.send([before, shot], cells="changed") for before in after]
    assert [made.lengths[1] for made in sent] == [2, 2, 48, 1, 48]
    sent += [sender.send([screen(5, 7), shot], cells="changed")]
    pruned = [made for made in sent if made.lengths[1] < 48]
    assert len({made.identities[1] for made in pruned}) == len(pruned) == 4
    fewer = [sender.send([before, shot], cells="changed", budget=1) for before in after]
    assert len({made.plans[1].key for made in fewer}) == 4  # two are whole
    named = sender.send([screen(), shot], cells="changed+flat")
    assert named.identities[1] not in {made.identities[1] for made in sent}


def test_screens_of_unlike_size_are_not_compared(sender: Sender) -> None:
    lower = screen().crop((0, 0, 6 * UNIT, 7 * UNIT))
    turned = screen().transpose(Image.Transpose.TRANSPOSE)
    sent = sender.send([screen(), lower, turned, turned], cells="changed")
    assert sent.lengths == [48, 42, 48, 1]
    blank = sender.send([screen(), page(), lower, page()], cells="changed+flat")
    assert blank.lengths == [48, 6, 42, 6]


def test_a_screen_whose_predecessor_comes_by_its_name_is_compared_with_it(
    folder: Any,
) -> None:
    def serve() -> Sender:
        return Sender(folder, budget=1000).with_cache()

    sender = serve()
    shots = [screen(), screen(1), screen(1, 2)]
    expected = serve().send(shots, cells="changed")
    sender.send(shots[:1], ["a"], cells="changed")
    sender.send([None, shots[1]], ["a", "b"], cells="changed")
    sent = sender.send([None, None, shots[2]], ["a", "b", "c"], cells="changed")
    assert sent.identities == expected.identities and sent.plans == expected.plans
    forgetful = serve()
    forgetful.send(shots[:1], ["a"], cells="flat")
    with pytest.raises(RequestError, match=r"compared with it -> send the picture"):
        forgetful.send([None, shots[1]], ["a", "b"], cells="changed")


def test_a_screen_that_is_retired_keeps_its_core(folder: Any) -> None:
    """Of the cells that are sent; all of them, where there are no more than the core has."""
    sender = Sender(folder, 1000, placeholder="<|image_pad|> what", **FREE)
    shots = [screen(), screen(*range(1, 10)), screen(), screen(2)]
    rules: dict[str, Any] = {"cells": "changed", "history": "1:4"}
    sent = sender.send(shots, **rules)
    assert [f"{plan.part} {plan.budget} of {plan.tokens}" for plan in sent.plans] == [
        "core 4 of 48",
        "core 4 of 10",
        "core 4 of 10",
        "whole 2 of 2",
    ]
    added = sender.send([*shots, screen(2, 3)], **rules)
    assert added.identities[:4] == sent.identities


@pytest.mark.parametrize("name", ["internvl", "glm_ocr"])
def test_models_that_encode_whole_images_refuse_rules(name: str) -> None:
    """At start: ``test_startup_rules.py``."""
    sender = Sender(built(name), budget=1, placeholder="")
    for rule in ("flat", "changed"):
        with pytest.raises(RequestError, match="no cell can be dropped: this model"):
            sender.send([OTHER], cells=rule)


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
    sent = [SentImage(digest, None) for digest in "ab"]
    names = [images.find(trimming, image, None, {}).digest for image in sent]
    assert len({*names, *"ab"}) == 4
