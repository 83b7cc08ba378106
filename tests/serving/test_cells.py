"""Dropped cells on real towers and engines: rows of kept cells, identities, ranks.

That positions are those of the whole image, in small steps too: the selftest. That company changes
nothing: ``test_equivalence.py``, whose requests have pages and rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.serving.engine import (
    Engine,
    assert_same,
    built,
    page,
    said,
    start,
    turn,
    watch,
)
from tests.serving.masked_tower import attending_to
from tests.serving.runners import in_engine
from vllm_autoprune.selftest.questions import picture
from vllm_autoprune.selftest.run import BLOCK
from vllm_autoprune.serving.api.cells import EncodedImage, Trimming
from vllm_autoprune.serving.models.cells import CellGrid, CellTower

pytestmark = pytest.mark.engine

TOWERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v")
GRIDS = ([1, 16, 12], [1, 2, 30], [1, 18, 22], [1, 2, 2])
"""A page, a thin strip, one with ragged windows, one cell."""


def start_tiny(
    backbone: str = "qwen3_vl", dtype: str = "float32", **more: Any
) -> Engine:
    settings = {"state": "divprune", "budget": 6, "requests": "states"}
    limits = {"image": 2, "video": 0}
    return start(
        settings, built(backbone), dtype=dtype, limit_mm_per_prompt=limits, **more
    )


@pytest.mark.only("v1")
@pytest.mark.parametrize("backbone", TOWERS)
@in_engine
def test_kept_cells_are_encoded_as_by_a_tower_that_sees_no_others(
    backbone: str,
) -> None:
    """All cells: vLLM's own rows to the bit. Some: those of masked attention; batched as alone."""
    # bfloat16 is all that vLLM's linear attention takes; its packed weights are of no other type.
    dtype, tolerance = (
        ("bfloat16", 5e-2) if backbone == "qwen3_5" else ("float32", 1e-4)
    )
    tower = (engine := start_tiny(backbone, dtype)).model.visual
    source = torch.Generator().manual_seed(0)
    vision = engine.llm.llm_engine.model_config.hf_config.vision_config
    width = 3 * 2 * vision.patch_size**2
    pixels = [
        torch.randint(
            0, 255, (grid[1] * grid[2], width), generator=source, dtype=torch.uint8
        )
        for grid in GRIDS
    ]
    sizes = [len(rows) // 4 for rows in pixels]
    some = [torch.rand(size, generator=source) < 0.4 for size in sizes]
    for mask in some:
        mask[0] = True
    some[2][:] = False
    some[2][[40, 41, 98]] = True  # most windows are empty

    def encode(masks: Sequence[Tensor], of: Sequence[int]) -> Tensor:
        grids = [CellGrid(GRIDS[i], masks[i].nonzero()[:, 0], 2) for i in of]
        rows = [pixels[i].unflatten(0, (-1, 4))[masks[i]].flatten(0, 1) for i in of]
        return CellTower(tower)(torch.cat(rows), grids)

    with torch.inference_mode():
        every = range(len(GRIDS))
        stock = tower(torch.cat(pixels), [*GRIDS])
        assert torch.equal(
            encode([torch.ones_like(mask) for mask in some], every), stock
        )
        batched = encode(some, every)
        singly = torch.cat([encode(some, [i]) for i in every])
        torch.testing.assert_close(batched, singly, rtol=tolerance, atol=tolerance)
        cells = torch.cat(some)
        order = tower.prepare_encoder_metadata([*GRIDS]).get("window_index")
        in_tower = cells if order is None else cells[order]
        with attending_to(tower, in_tower.repeat_interleave(4)):
            masked = tower(torch.cat(pixels), [*GRIDS])
        torch.testing.assert_close(
            batched, masked[cells], rtol=tolerance, atol=tolerance
        )
        assert not torch.allclose(batched, stock[cells], rtol=5e-2, atol=5e-2)


LONG = "what colour is the cat" + " and the sky is blue on the right" * 6
"""Fills a block of the prefix cache."""


def ask(engine: Engine, image: Image.Image, **entry: object) -> dict[str, Any]:
    return engine.chat([turn(LONG, image)], tokens=8, entry=entry)[0]


@pytest.mark.both
@in_engine
def test_pages_with_and_without_a_rule_share_nothing() -> None:
    """At equal K; negative control: under one identity the second gets the answer of the first."""
    engine = start_tiny()
    image = page(224, 256, 0)
    plain, flat = (ask(engine, image, cells=rule) for rule in ("none", "flat"))
    assert plain["prompt_tokens"] == flat["prompt_tokens"]
    assert (
        plain["logprob"] != flat["logprob"] and plain["cached"] == flat["cached"] == 0
    )
    again = ask(engine, image, cells="flat")
    assert again["cached"] >= BLOCK
    assert_same([again], [flat], tolerance=2e-2)
    engine.empty_caches()
    find = Trimming.find_encoded

    def without(self: Trimming, digest: str, *rest: Any) -> EncodedImage:
        return replace(find(self, digest, *rest), digest=digest)

    with patch.object(Trimming, "find_encoded", without):
        ask(engine, image, cells="none")
        wrong = ask(engine, image, cells="flat:1")
    assert wrong["cached"] >= BLOCK
    assert_same([wrong], [plain], tolerance=2e-2)


@pytest.mark.both
@in_engine
def test_a_screen_after_another_one_is_answered_as_in_that_conversation_alone() -> None:
    """Two keep as many cells of it; under one identity the second gets the features of the other.

    The rule of the control is another one, because a server remembers what it compared.
    """
    engine = start_tiny()
    screen = picture(224, 256, 0)

    def ask_after(place: tuple[int, int], rule: str) -> dict[str, Any]:
        before = screen.copy()
        before.paste(picture(32, 32, 1), place)
        talk = [turn(LONG, before), said("red"), turn(LONG, screen)]
        return engine.chat(talk, tokens=8, entry={"cells": rule})[0]

    def ask_both(rule: str) -> list[dict[str, Any]]:
        engine.empty_caches()
        return [ask_after(place, rule) for place in ((64, 32), (160, 192))]

    others = ask_both("changed")
    assert others[0]["logprob"] != others[1]["logprob"]
    for place, answer in zip(((64, 32), (160, 192)), others, strict=True):
        engine.empty_caches()
        assert_same([ask_after(place, "changed")], [answer])
    find = Trimming.find_encoded

    def without(self: Trimming, digest: str, *rest: Any) -> EncodedImage:
        return replace(find(self, digest, *rest), digest=digest)

    with patch.object(Trimming, "find_encoded", without):
        wrong = ask_both("changed+flat")
    assert_same(wrong[:1], others[:1])
    assert abs(wrong[1]["logprob"] - others[1]["logprob"]) > 1e-2


@pytest.mark.both
@in_engine
def test_selection_chooses_among_the_cells_that_are_left() -> None:
    """For policies that compare tokens, for signals that read their places, and for controls."""
    engine = start_tiny()
    record = watch()
    image = page(224, 256, 0)
    for entry in (
        {},
        {"state": "miniqwen"},
        {"keep": "random"},
        {"state": "autoprune"},
    ):
        ask(engine, image, cells="flat", budget=5, **entry)
        ((plan, indices),) = record.take().items()
        assert len(set(indices)) == 5 and max(indices) < plan.tokens < 56
    assert engine.model.autoprune_reporter.errors == {}


@pytest.mark.exhaustive
@pytest.mark.only("v1")
@in_engine
def test_a_compiled_tower_encodes_what_is_left_as_an_eager_one() -> None:
    answers = []
    compiler = {"mode": 3, "compile_mm_encoder": True}
    modes: list[dict[str, Any]] = [
        {},
        {"enforce_eager": False, "compilation_config": compiler},
    ]
    for more in modes:
        engine = start_tiny(**more)
        # On a CPU stock vLLM cannot compile what gradients are asked of.
        engine.model.visual.requires_grad_(False)
        pages = [page(*size, 1) for size in ((224, 256), (112, 140), (196, 84))]
        rules = ("none", "flat", "predicted")
        answers.append(
            [ask(engine, image, cells=rule) for image in pages for rule in rules]
        )
        engine.stop()
    assert_same(answers[1], answers[0])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
