"""Plans, images and a model without weights, to test batches of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.serving.unit.samples import image, served
from vllm_autoprune import Grid
from vllm_autoprune.serving.shared.plan import Ids, ItemPlan
from vllm_autoprune.serving.shared.served_state import ServedState
from vllm_autoprune.serving.worker.batch import prune_images
from vllm_autoprune.serving.worker.fallbacks import FallbackReporter
from vllm_autoprune.serving.worker.features import ImageFeatures
from vllm_autoprune.serving.worker.region_selection import ModelParts, SelectionContext

GRID = Grid(6, 6)
N = GRID.tokens


class Space:
    """Relevance space without a model: token ids seed random directions."""

    sign = 1

    def __init__(self) -> None:
        self.asked: list[tuple[Ids, ...]] = []

    def patches(self, hidden: Tensor) -> None:
        return None

    def instructions(self, ids: Sequence[Ids]) -> tuple[Tensor, Tensor]:
        self.asked.append(tuple(ids))
        rows = [torch.randn(16, generator=torch.Generator().manual_seed(sum(i))) for i in ids]
        return torch.stack(rows)[:, None], torch.ones(len(ids), 1, dtype=torch.bool)


def plan(budget: int, key: int = 0, ids: Ids = (7,), **fields: Any) -> ItemPlan:
    """A plan; both halves of its key are equal."""
    return ItemPlan(budget, (key, key), ids, **fields)


def parts(space: Space | None = None) -> ModelParts:
    """Model parts with an identity projector."""
    return ModelParts(lambda rows: rows, space or Space())


def images(count: int) -> list[ImageFeatures]:
    """``count`` different images."""
    return [image(seed) for seed in range(count)]


def blind(base: str = "cdpruner") -> ServedState:
    """A state whose only signal reads no optional input."""
    signals = [{"atom": "spatial_centrality_prior", "weight": 1.0}]
    no_exchange = {"/scoring/signals": signals, "/constraints/selector/q_e": 0}
    return served({"/base_policy": {"name": base}, **no_exchange})


def pruned(
    plans: Sequence[ItemPlan], image_list: Sequence[ImageFeatures], state: ServedState | None = None
) -> list[Tensor]:
    """The rows of each image; fails if a policy raised."""
    reporter = FallbackReporter()
    rows = prune_images(SelectionContext(state or served(), parts(), reporter), plans, image_list)
    assert reporter.meter.errors == {}, "the policy failed"
    return rows
