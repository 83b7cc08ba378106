"""A worker's model without an engine: what it computes of images, keeps of them, and survives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.stand_in_device import DEVICE, forbid_waiting
from vllm_autoprune import PruningPolicy, VisualTokens, load_state
from vllm_autoprune.ops import similarity
from vllm_autoprune.serving.models import pruned_model
from vllm_autoprune.serving.models.grid import GridVision
from vllm_autoprune.serving.models.pruned_model import PrunedModel
from vllm_autoprune.serving.plan import ItemPlan
from vllm_autoprune.serving.served_state import ServedState
from vllm_autoprune.serving.worker import selection
from vllm_autoprune.tpdsl import refine
from vllm_autoprune.tpdsl import tokens as visual_tokens
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.base_policy import Given, TokenSelection
from vllm_autoprune.tpdsl.refine import select_tokens

WIDTH = 3584
"""Of Qwen2.5-VL-7B, whose largest image has 16,384 tokens."""

CACHE_BYTES = 250_000_000
"""The default of the feature cache."""

Picture = tuple[int, Tensor]
"""The key of an image, and its patches ``(height, width, D)``."""


class LanguageModel(nn.Embedding):
    """The input embeddings alone."""

    config = SimpleNamespace(hidden_size=WIDTH)

    def embed_input_ids(self, ids: Tensor) -> Tensor:
        rows: Tensor = self(ids)
        return rows


class StockModel(nn.Module):
    """A model class of vLLM, as far as a pruned one builds on it."""

    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=1))

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.visual = nn.Linear(1, 1, device=vllm_config.device)
        self.language_model = LanguageModel(8, WIDTH, device=vllm_config.device)

    def get_language_model(self) -> nn.Module:
        return self.language_model


class PatchVision(GridVision):
    """A vision side whose tower hands on the patches of every image."""

    encoded: int = 0

    def rows(self, pixels: Tensor | Sequence[Tensor], grids: Tensor) -> Sequence[Tensor]:
        assert isinstance(pixels, Tensor)
        self.encoded += len(grids)
        return pixels.split(grids.prod(-1).tolist())


class Model(PrunedModel, StockModel):
    autoprune_vision = PatchVision


@pytest.fixture
def make_model(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Model]:
    """A function that builds a model for a state on a device; vLLM is not patched."""
    for patch in ("clear_with_worker_caches", "bound_encoder_calls"):
        monkeypatch.setattr(pruned_model, patch, lambda *_: None)

    def make(state: ServedState, device: torch.device = DEVICE) -> Model:
        model_config = SimpleNamespace(
            autoprune=state, get_vocab_size=lambda: 32_000, max_model_len=32_768
        )
        scheduler = SimpleNamespace(max_num_encoder_input_tokens=16_384)
        config: Any = SimpleNamespace(
            model_config=model_config, scheduler_config=scheduler, device=device
        )
        return Model(vllm_config=config)

    return make


def serve(name: str, budget: int | str = 8, cache_bytes: int = CACHE_BYTES) -> ServedState:
    """A shipped state under the default size of the feature cache."""
    return ServedState("Model", load_state(name), BudgetCall.parse(budget), None, cache_bytes)


def select_rows(model: Model, *pictures: Picture, budget: int = 8) -> list[Tensor]:
    """Rows of images of one call, selected without waiting for their device."""
    plans = [ItemPlan(budget, (key, key)) for key, _ in pictures]
    grids = torch.tensor([[1, *patches.shape[:2]] for _, patches in pictures])
    pixels = torch.cat([patches.flatten(0, 1) for _, patches in pictures])
    with torch.inference_mode(), forbid_waiting():
        return model.autoprune_rows(plans, {"pixel_values": pixels, "image_grid_thw": grids})


def empty(height: int, width: int) -> Tensor:
    return torch.empty(height, width, WIDTH, dtype=torch.bfloat16, device=DEVICE)


# ---- the bounds of a state ----


def test_images_of_five_hundred_sizes_are_selected_from_once_each(
    make_model: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share as budget gives most sizes a K of their own, and none makes the host wait."""
    selected: list[int] = []

    def count(policy: PruningPolicy, tokens: VisualTokens, earlier: Given | None) -> TokenSelection:
        selected.append(policy.budget)
        return select_tokens(policy, tokens, earlier)

    monkeypatch.setattr(selection, "select_tokens", count)
    monkeypatch.setattr(refine, "select_tokens", count)
    model, random = make_model(serve("norm", "1/8")), Random(0)
    sizes = [(random.randrange(8, 96), random.randrange(8, 96)) for _ in range(500)]
    for key, (height, width) in enumerate(sizes, 1):
        select_rows(model, (key, empty(height, width)), budget=height * width // 8)
    assert model.autoprune_reporter.errors == {}
    assert selected == [height * width // 8 for height, width in sizes]
    assert len(set(selected)) > 300


# ---- cosines ----


@pytest.fixture
def cosines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the cosines that are computed between all tokens of images."""
    shapes: list[tuple[int, ...]] = []

    def count(features: Tensor, norm: Tensor) -> Tensor:
        computed = similarity.cosines(features, norm)
        shapes.append(tuple(computed.shape))
        return computed

    monkeypatch.setattr(visual_tokens, "cosines", count)
    return shapes


@pytest.mark.parametrize("base", ["cen_divprune", "cen_cdpruner", "norm", "vidcom2"])
def test_cosines_that_no_policy_reads_are_not_computed(
    base: str, make_model: Callable[..., Model], cosines: list[tuple[int, ...]]
) -> None:
    """The largest image of Qwen2.5-VL-7B: its cosines would take 1 GiB."""
    model = make_model(serve(base))
    for _ in range(2):
        select_rows(model, (1, empty(128, 128)))
    assert model.autoprune is not None
    cache = model.autoprune.cache
    assert cosines == []
    assert cache.used_bytes == 128 * 128 * WIDTH * 2
    assert (cache.hits, cache.misses) == (1, 1)
    assert model.autoprune_reporter.errors == {}


def test_cosines_that_a_policy_reads_are_computed_once_an_image(
    make_model: Callable[..., Model], cosines: list[tuple[int, ...]]
) -> None:
    model = make_model(serve("divprune"))
    for budget in (8, 8, 4):
        for key in (1, 2):
            select_rows(model, (key, empty(6, 6)), budget=budget)
    assert model.autoprune is not None
    assert cosines == [(1, 36, 36)] * 2
    assert model.autoprune.cache.used_bytes == 2 * (36 * WIDTH * 2 + 36 * 36 * 4)


def test_an_image_whose_cosines_do_not_fit_is_cached_without_them(
    make_model: Callable[..., Model], cosines: list[tuple[int, ...]]
) -> None:
    features = 36 * WIDTH * 2
    model = make_model(serve("divprune", cache_bytes=features))
    for _ in range(2):
        select_rows(model, (1, empty(6, 6)))
    assert model.autoprune is not None
    cache = model.autoprune.cache
    assert cosines == [(1, 36, 36)] * 2
    assert (cache.used_bytes, cache.hits) == (features, 1)
