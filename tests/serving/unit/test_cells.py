"""Dropped cells before an engine: what is sent of an image, under which identity, and what not."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
)

from tests.serving.unit.samples import OTHER, Sender, places, served, vllm_config
from vllm_autoprune import RequestError, load_state
from vllm_autoprune.selftest.backbones import build
from vllm_autoprune.serving.api import cells as module
from vllm_autoprune.serving.api import engine_requests
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.serving.plan import CELLS_FIELD, FIELD, ItemPlan, check_cells
from vllm_autoprune.serving.served_state import PlanRules
from vllm_autoprune.serving.settings import CELLS_FLAG
from vllm_autoprune.tpdsl.cells import Cells, kept_cells

pytestmark = pytest.mark.compat

UNIT = 28


def page(rows: int = 8, columns: int = 6, marks: int = 0) -> Image.Image:
    """A white page with noise in three cells of its second row, and a mark in cells of the last."""
    pixels = numpy.full((rows * UNIT, columns * UNIT, 3), 255, numpy.uint8)
    noise = numpy.random.default_rng(0).integers(0, 255, (UNIT, 3 * UNIT, 3))
    pixels[UNIT : 2 * UNIT, UNIT : 4 * UNIT] = noise
    for mark in range(marks):
        pixels[-UNIT // 2, mark * UNIT + 3] = 0
    return Image.fromarray(pixels)


def alone(sender: Sender, image: Any, **entry: Any) -> tuple[str, int, str | None]:
    """Identity, tokens and digest of the tensors of one image."""
    sent = sender.send([image], **entry)
    return sent.identities[0], sent.lengths[0], sent.data[0]


@pytest.fixture(params=[True, False], ids=["cache", "no cache"])
def sender(request: pytest.FixtureRequest, folder: Any) -> Sender:
    made = Sender(folder, budget=1000)
    return made.with_cache() if request.param else made


def test_what_is_left_of_an_image_is_its_tokens_its_rows_and_its_placeholders(
    sender: Sender,
) -> None:
    """As often as it is sent, whether vLLM has it or not; K is of the whole image's tokens."""
    anchors: list[Any] = []
    find = Cells.find_anchors

    def record(rule: Cells, cells: Any) -> Any:
        anchors.append(find(rule, cells))
        return anchors[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cells, "find_anchors", record)
        sent, again = (sender.send([page()], cells="flat") for _ in range(2))
    (found,) = anchors[:1]
    count = len(kept_cells(found))
    assert (sent.lengths, sent.plans[0].tokens, sent.plans[0].budget) == ([count], count, count)
    assert (again.lengths, again.identities) == (sent.lengths, sent.identities)
    assert len(anchors) == (1 if sender.cache is not None else 2), "found once"
    fewer = sender.send([page()], cells="flat", budget="1/12")
    assert fewer.lengths == [4] and fewer.plans[0].tokens == count


def test_identities_hold_which_cells_there_are(sender: Sender) -> None:
    """Another rule, tolerance or place is another image, and so is the whole one."""
    identities = [
        alone(sender, image, **fields)[0]
        for image, fields in (
            (page(), {}),
            (page(), {"cells": "none"}),
            (page(), {"cells": "flat"}),
            (page(), {"cells": "flat:1"}),
            (page(), {"cells": "predicted"}),
            (page(marks=1), {"cells": "flat"}),
        )
    ]
    assert identities[0] == identities[1]
    assert len(set(identities)) == 5


def test_equal_rows_in_other_places_are_another_image(sender: Sender) -> None:
    """The same pixels left, of pages that are as high as others are wide."""
    high, wide = (sender.send([page(*shape)], cells="flat", budget=4) for shape in ((8, 6), (6, 8)))
    assert high.plans[0].tokens == wide.plans[0].tokens < 48
    assert high.identities != wide.identities and high.data != wide.data
    assert high.plans[0].key != wide.plans[0].key


def test_a_photograph_is_sent_as_without_a_rule(sender: Sender) -> None:
    plain, asked = (sender.send([OTHER, page()], cells=rule) for rule in ("none", "flat"))
    assert plain.identities[0] == asked.identities[0] and plain.plans[0] == asked.plans[0]
    assert plain.identities[1] != asked.identities[1]


def test_pixels_that_cannot_be_compared_are_sent_whole_and_counted(
    folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor that normalises on the host sends floats."""
    sender, before = Sender(folder, budget=1000), module._UNCOMPARED._value.get()
    drop = module._drop_cells

    def normalised(data: Any, rule: Cells) -> Any:
        return drop(type(data)({**data, "pixel_values": data["pixel_values"].float() / 255}), rule)

    monkeypatch.setattr(module, "_drop_cells", normalised)
    assert alone(sender, page(), cells="flat")[:2] == alone(sender, page())[:2]
    assert module._UNCOMPARED._value.get() == before + 1


def test_an_image_that_comes_by_its_name_keeps_its_cells(folder: Any) -> None:
    sender = Sender(folder, budget=1000).with_cache()
    before = sender.send([page()], ["x"], cells="flat")
    assert sender.send([None], ["x"], cells="flat") == replace(before, data=[None])
    with pytest.raises(ValueError, match="data is not provided"):
        sender.send([None], ["x"], cells="predicted")


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"cells": "flattish"}, "no rule for cells"),
        ({"cells": "flat", "enabled": False}, "leave out 'enabled' or 'cells'"),
    ],
)
def test_a_request_for_what_cannot_be_is_refused(
    folder: Any, entry: dict[str, Any], problem: str
) -> None:
    with pytest.raises(RequestError, match=problem):
        Sender(folder, budget=8).send([page()], **entry)


@pytest.mark.parametrize("name", ["internvl", "glm_ocr"])
def test_models_that_encode_whole_images_refuse_rules(name: str, tmp_path: Path) -> None:
    """At start, and of requests; the resize control has no cells dropped anywhere."""
    sender = Sender(build(name, tmp_path), budget=1, placeholder="")
    with pytest.raises(RequestError, match="no cell can be dropped: this model"):
        sender.send([OTHER], cells="flat")
    architecture = next(a for a, row in BACKBONES.items() if row.name == name)
    state = load_state("divprune").model_dump(mode="json")
    with_cells = {**state, "cells": {"rule": "flat"}}
    for settings in ({"state": state, "cells": "flat"}, {"state": with_cells}):
        assert places(settings, vllm_config(architecture=architecture)) == [CELLS_FLAG]
    assert load_state(with_cells).digest != load_state(state).digest


# ---- cells that another process, or a client, has made ----

ANCHORS = torch.tensor([0, 0, 2, 3, 0, 5], dtype=torch.int32)
GRID = torch.tensor([1, 4, 6])
ROWS = torch.zeros(16, 12, dtype=torch.uint8)


def changed(at: int, value: int) -> torch.Tensor:
    anchors = ANCHORS.clone()
    anchors[at] = value
    return anchors


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
        (changed(2, -1), GRID, ROWS),
        (changed(2, 6), GRID, ROWS),
        (changed(2, 1), GRID, ROWS[4:]),  # an anchor that is dropped itself
        (ANCHORS, GRID, ROWS[4:]),
        (ANCHORS, GRID, ROWS.repeat(2, 1)),
    ],
)
def test_forged_cells_are_refused(anchors: Any, grid: Any, rows: Any) -> None:
    with pytest.raises(RequestError, match="not those of the image's grid and rows of pixels"):
        check_cells(anchors, grid, rows)
    check_cells(ANCHORS, GRID, ROWS)


@pytest.mark.parametrize(
    ("rows", "on_cpu", "whole_only", "problem"),
    [
        (ROWS, True, "", ""),
        (ROWS, False, "", "not batched on the CPU"),
        (ROWS[4:], True, "", "rows of pixels"),
        (ROWS, True, "encodes squares", "not dropped of this model's images"),
    ],
)
def test_cells_in_a_request_from_elsewhere_are_checked(
    rows: torch.Tensor, on_cpu: bool, whole_only: str, problem: str
) -> None:
    plan, anchors = ItemPlan(4, (1, 2), tokens=4).encode(), ANCHORS
    data = {FIELD: plan, CELLS_FIELD: anchors, "image_grid_thw": GRID, "pixel_values": rows}
    elements = {
        name: MultiModalFieldElem(
            value, MultiModalBatchedField(keep_on_cpu=on_cpu or name != CELLS_FIELD)
        )
        for name, value in data.items()
    }
    place = SimpleNamespace(get_num_embeds=lambda: 4)
    item = MultiModalKwargsItem(elements)
    feature: Any = SimpleNamespace(data=item, mm_position=place, modality="image")
    rules = PlanRules(replace(served(), whole_only=whole_only), 100)
    with pytest.raises(RequestError, match=problem) if problem else nullcontext():
        engine_requests._check_features(rules, [feature], "", "blake3")
