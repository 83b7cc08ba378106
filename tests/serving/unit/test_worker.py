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
from vllm_autoprune import Grid, PruningPolicy, VisualTokens, load_state
from vllm_autoprune.serving.models import pruned_model
from vllm_autoprune.serving.models.pruned_model import (
    EncoderInputs,
    ImageInputs,
    ModelImage,
    PrunedModel,
    Vision,
)
from vllm_autoprune.serving.plan import ItemPlan
from vllm_autoprune.serving.served_state import ServedState
from vllm_autoprune.serving.worker import selection
from vllm_autoprune.serving.worker.features import ImageFeatures, Region
from vllm_autoprune.tpdsl import refine
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.base_policy import Given, TokenSelection
from vllm_autoprune.tpdsl.refine import select_tokens

WIDTH = 16
GIGABYTES = 10**9


class StockModel(nn.Module):
    """A model class of vLLM, as far as a pruned one builds on it."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.vision_tower = nn.Linear(1, 1, device=vllm_config.device)


class PixelVision(Vision):
    """A vision side whose tower hands on the pixels ``(height, width, D)`` of every image."""

    def images(self, inputs: EncoderInputs) -> list[ModelImage]:
        pixels = inputs["pixels"]
        return [ModelImage({"pixels": p}, p.shape[0] * p.shape[1]) for p in pixels]

    def encode(self, images: Sequence[ImageInputs]) -> list[ImageFeatures]:
        return [
            ImageFeatures((Region(Grid(*pixels.shape[:2]), pixels.flatten(0, 1)),))
            for image in images
            for pixels in [image["pixels"]]
        ]


class Model(PrunedModel, StockModel):
    autoprune_vision = PixelVision


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


def serve(name: str, budget: int | str = 8, cache_bytes: int = GIGABYTES // 4) -> ServedState:
    """A shipped state under the default size of the feature cache."""
    return ServedState("Model", load_state(name), BudgetCall.parse(budget), None, cache_bytes)


def select_rows(model: Model, key: int, pixels: Tensor, budget: int = 8) -> Tensor:
    """Rows of one image, selected without waiting for its device."""
    with torch.inference_mode(), forbid_waiting():
        (rows,) = model.autoprune_rows([ItemPlan(budget, (key, key))], {"pixels": [pixels]})
    assert model.autoprune_reporter.errors == {}
    return rows


def empty(height: int, width: int, channels: int = WIDTH) -> Tensor:
    return torch.empty(height, width, channels, dtype=torch.bfloat16, device=DEVICE)


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
        select_rows(model, key, empty(height, width), height * width // 8)
    assert selected == [height * width // 8 for height, width in sizes]
    assert len(set(selected)) > 300
