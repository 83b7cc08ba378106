"""Cells that leave real towers on the way: their rows, and answers of engines about the others.

That company changes nothing: ``test_equivalence.py``, whose requests have rules too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.serving.engine import Engine, assert_same, built, page, start, turn, watch
from tests.serving.masked_tower import attending_to
from tests.serving.runners import in_engine
from vllm_autoprune.selftest.questions import picture
from vllm_autoprune.selftest.run import BLOCK
from vllm_autoprune.serving.models.cells import CellGrid, CellTower
from vllm_autoprune.serving.models.cut_tower import Cut
from vllm_autoprune.serving.worker.rows import decode_offsets
from vllm_autoprune.tpdsl.tower import keep_cells

pytestmark = pytest.mark.engine

TOWERS = ("qwen2_vl", "qwen3_vl", "qwen3_5")
GRIDS = ([1, 16, 12], [1, 2, 30], [1, 18, 22])
SIZES = (48, 15, 99)
"""Cells of these grids."""


def start_tiny(
    backbone: str = "qwen3_vl", dtype: str = "float32", **more: Any
) -> Engine:
    settings = {"state": "divprune", "budget": 6, "requests": "states"}
    limits = {"image": 2, "video": 0}
    return start(
        settings, built(backbone), dtype=dtype, limit_mm_per_prompt=limits, **more
    )


class Tower:
    """A tower over the same pixels, whole or cut."""

    def __init__(self, engine: Engine) -> None:
        self.tower = engine.model.visual
        source = torch.Generator().manual_seed(0)
        vision = engine.llm.llm_engine.model_config.hf_config.vision_config
        shape = (4 * sum(SIZES), 3 * 2 * vision.patch_size**2)
        pixels = torch.randint(0, 255, shape, generator=source, dtype=torch.uint8)
        self.pixels = pixels.split([4 * size for size in SIZES])

    def encode(
        self, cuts: Sequence[Cut | None], of: Sequence[int] = range(3)
    ) -> tuple[Tensor, Tensor]:
        """Rows of the cells that stay, and their index among all cells of these images."""
        encoder = CellTower(self.tower)
        grids = [CellGrid(GRIDS[i], torch.arange(SIZES[i]), 2, cuts[i]) for i in of]
        rows = encoder(torch.cat([self.pixels[i] for i in of]), grids)
        assert encoder.cut is not None and encoder.cut.cells is not None
        return rows, encoder.cut.cells

    def encode_whole(self, layer: int = 0) -> tuple[Tensor, Tensor]:
        """Stock rows of all cells, and the states ``(N, D)`` of cells before a layer."""
        states: list[Tensor] = []
        # The block itself may be called without hooks; its norm comes first.
        handle = self.tower.blocks[layer].norm1.register_forward_pre_hook(
            lambda norm, inputs: states.append(inputs[0])
        )
        rows: Tensor = self.tower(torch.cat(self.pixels), [*GRIDS])
        handle.remove()
        width = states[0].shape[-1]
        return rows, states[0].reshape(-1, 4, width).mean(dim=1, dtype=torch.float32)


@pytest.mark.only("v1")
@pytest.mark.parametrize("backbone", TOWERS)
@in_engine
def test_a_tower_through_which_all_cells_pass_is_stock(backbone: str) -> None:
    """To the bit, though every layer after the first is entered by the cut."""
    dtype = "bfloat16" if backbone == "qwen3_5" else "float32"
    tower = Tower(start_tiny(backbone, dtype))
    with torch.inference_mode():
        stock, _ = tower.encode_whole()
        rows, cells = tower.encode([Cut(size, 1, 0) for size in SIZES])
    assert torch.equal(rows, stock) and cells.tolist() == [*range(sum(SIZES))]


@pytest.mark.only("v1")
@pytest.mark.parametrize("backbone", TOWERS)
@in_engine
def test_cells_that_stay_are_encoded_as_by_layers_that_see_no_others(
    backbone: str,
) -> None:
    """Those of masked attention from the layer on; batched as alone; a whole image beside them."""
    # bfloat16 is all that vLLM's linear attention takes; its packed weights are of no other type.
    dtype, tolerance = (
        ("bfloat16", 5e-2) if backbone == "qwen3_5" else ("float32", 1e-4)
    )
    tower = Tower(start_tiny(backbone, dtype))
    layers = len(tower.tower.blocks)
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    with torch.inference_mode():
        for layer in range(1, layers):
            cuts = [Cut(20, layer, 0), None, Cut(33, layer, 0)]
            rows, cells = tower.encode(cuts)
            stock, states = tower.encode_whole(layer)
            parts = states.split(SIZES)
            expected = [
                keep_cells(parts[0], 20, "difference"),
                48 + torch.arange(15),
                63 + keep_cells(parts[2], 33, "difference"),
            ]
            assert cells.tolist() == torch.cat(expected).tolist()
            kept = torch.zeros(sum(SIZES), dtype=torch.bool)
            kept[cells] = True
            with attending_to(tower.tower, kept.repeat_interleave(4), layer):
                masked, _ = tower.encode_whole()
            close(rows, masked[cells])
            close(rows[20:35], stock[48:63])
            assert not torch.allclose(rows, stock[cells], rtol=5e-2, atol=5e-2)
            alone = [tower.encode(cuts, [i])[0] for i in (0, 2)]
            close(torch.cat([rows[:20], rows[35:]]), torch.cat(alone))


@pytest.mark.only("v1")
@in_engine
def test_images_of_one_call_are_cut_at_different_layers() -> None:
    tower = Tower(start_tiny())
    cuts = [Cut(20, 2, 0), Cut(9, 1, 0), Cut(33, 1, 0)]
    with torch.inference_mode():
        rows, cells = tower.encode(cuts)
        alone = [tower.encode(cuts, [i]) for i in range(3)]
    torch.testing.assert_close(rows, torch.cat([part for part, _ in alone]))
    starts = (0, 48, 63)
    expected = [part + start for (_, part), start in zip(alone, starts, strict=True)]
    assert cells.tolist() == torch.cat(expected).tolist()


LONG = "what colour is the cat" + " and the sky is blue on the right" * 6
"""Fills a block of the prefix cache."""
RULE = "1/2@1/2"


def ask(
    engine: Engine, image: Any, question: str = LONG, **entry: object
) -> dict[str, Any]:
    return engine.chat([turn(question, image)], tokens=8, entry=entry)[0]


@pytest.mark.both
@in_engine
def test_pictures_with_and_without_a_rule_share_nothing() -> None:
    """At equal K; negative control: under one identity the second gets the answer of the first."""
    engine = start_tiny()
    image = picture(224, 256, 0)
    plain, cut = (ask(engine, image, tower=rule) for rule in ("none", RULE))
    assert plain["prompt_tokens"] == cut["prompt_tokens"]
    assert plain["logprob"] != cut["logprob"] and plain["cached"] == cut["cached"] == 0
    again = ask(engine, image, tower=RULE)
    assert again["cached"] >= BLOCK
    assert_same([again], [cut], tolerance=2e-2)
    engine.empty_caches()
    with patch("vllm_autoprune.serving.identities.identify_encoded", lambda c, p: c):
        ask(engine, image, tower="none")
        wrong = ask(engine, image, tower=RULE)
    assert wrong["cached"] >= BLOCK
    assert_same([wrong], [plain], tolerance=2e-2)


@pytest.mark.both
@in_engine
def test_questions_share_one_pass_of_a_tower_that_is_cut() -> None:
    """Asked together or one by one, with small steps: the same."""
    requests: list[tuple[Any, str, str]] = [
        (picture(224, 256, 0), LONG, RULE),
        (picture(224, 256, 0), "how many", RULE),
        (picture(224, 256, 0), LONG, "none"),
        (picture(160, 256, 1), LONG, "1/3@2/3"),
        (page(224, 256, 2), LONG, RULE),
    ]
    engine = start_tiny()
    runs = engine.runs
    answers = [
        ask(engine, i, q, tower=t, budget=6, state="autoprune") for i, q, t in requests
    ]
    assert engine.runs - runs == 4
    engine.stop()
    small = start_tiny(max_num_batched_tokens=64, enable_chunked_prefill=True)
    chunked = [
        ask(small, i, q, tower=t, budget=6, state="autoprune") for i, q, t in requests
    ]
    assert_same(chunked, answers, tolerance=2e-2)
    small.empty_caches()
    talks = [
        [turn(question, image)] for image, question, rule in requests if rule == RULE
    ]
    together = small.chat(
        *talks, tokens=8, entry={"tower": RULE, "budget": 6, "state": "autoprune"}
    )
    rules = [rule for *_, rule in requests]
    alone = [
        answer for answer, rule in zip(answers, rules, strict=True) if rule == RULE
    ]
    assert_same(together, alone, tolerance=2e-2)


@pytest.mark.both
@in_engine
def test_selection_chooses_among_the_cells_that_stay_at_their_places() -> None:
    """Before the tower ``flat`` drops some, and half of the others leave it."""
    engine = start_tiny()
    record = watch()
    features: list[Any] = []
    keep = type(engine.model.autoprune).keep

    def remember(vision: Any, entries: Any, images: Any) -> None:
        features.extend(images)
        keep(vision, entries, images)

    image = page(224, 256, 0)
    with patch.object(type(engine.model.autoprune), "keep", remember):
        for entry in (
            {},
            {"state": "miniqwen"},
            {"keep": "random"},
            {"state": "autoprune"},
            {"cells": "flat"},
        ):
            ask(engine, image, tower=RULE, budget=5, **entry)
            ((plan, indices),) = record.take().items()
            assert plan.tower is not None
            assert plan.tokens == plan.tower.encoded // 2
            assert len(set(indices)) == 5 and max(indices) < plan.tokens
            region = features[-1].regions[0]
            cells = region.grid.at_encoded(torch.arange(56))[region.places].tolist()
            offsets, _ = decode_offsets([region.extra_channels[:, -6:]])
            assert offsets.T.tolist() == [[0, cell // 7, cell % 7] for cell in cells]
    assert engine.model.autoprune_reporter.errors == {}
