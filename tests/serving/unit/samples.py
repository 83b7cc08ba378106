"""States, features of images, plans and items of requests, small and made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import msgspec
import torch
from torch import Tensor
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
)

from tests.serving.unit.configurations import LLAVA
from tests.tpdsl.samples import state
from vllm_autoprune.serving.plan import FIELD, Ids, ItemPlan
from vllm_autoprune.serving.served_state import (
    ServedState,
)
from vllm_autoprune.serving.worker.batch import (
    ModelParts,
    SelectionContext,
    prune_images,
)
from vllm_autoprune.serving.worker.features import ImageFeatures, IndexCache, Region
from vllm_autoprune.serving.worker.selection import FallbackReporter
from vllm_autoprune.text_tower import TextTower
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.tokens import Grid

SIX = Grid(6, 6)


def served(
    changes: dict[str, object] | None = None,
    budget: int | str = 8,
    tower: TextTower | None = None,
    cache_bytes: int = 0,
) -> ServedState:
    """The shipped state with some fields changed, as a ServedState."""
    return ServedState(
        LLAVA, state(changes), BudgetCall.parse(budget), tower, cache_bytes
    )


def video_state(policy: str, **frames: object) -> dict[str, Any]:
    """Changes of a server's state: a base policy, and how it prunes videos."""
    per_frame = {"atom": "per_frame_budget", "k": 2}
    no_exchange = {"atom": "reference_strict_preservation_selector"}
    return {
        "base_policy": {"name": policy},
        "frames": {"tokens": per_frame, "budget": "global", **frames},
        "constraints/selector": no_exchange,
    }


def region(seed: int, grid: Grid, width: int = 16) -> Region:
    """Random features of tokens, without patches of their own."""
    source = torch.Generator().manual_seed(seed)
    return Region(
        grid,
        torch.randn(grid.tokens, width, generator=source),
        {"cls_attention": torch.rand(grid.tokens, generator=source)},
    )


def image(seed: int, grid: Grid = SIX, width: int = 16) -> ImageFeatures:
    """An image of one region."""
    return ImageFeatures((region(seed, grid, width),))


def rows_of(features: ImageFeatures, rows: Tensor) -> list[int]:
    """Indices of an image's tokens with these rows."""
    same = (rows[:, None] == features.rows()[None]).all(dim=2)
    assert bool((same.sum(dim=1) == 1).all()), "a row is no token of this image"
    return [int(i) for i in same.long().argmax(dim=1)]


N = SIX.tokens


class Space:
    """Relevance space without a model: token ids seed random directions."""

    sign = 1

    def patches(self, hidden: Tensor) -> None:
        return None

    def instructions(self, ids: Sequence[Ids]) -> tuple[Tensor, Tensor]:
        rows = [
            torch.randn(16, generator=torch.Generator().manual_seed(sum(i)))
            for i in ids
        ]
        return torch.stack(rows)[:, None], torch.ones(len(ids), 1, dtype=torch.bool)


def plan(budget: int, key: int = 0, ids: Ids = (7,), **fields: Any) -> ItemPlan:
    """A plan; both halves of its key are equal."""
    return ItemPlan(budget, (key, key), ids, **fields)


def as_row(text: bytes) -> Tensor:
    """Bytes as what carries a plan."""
    return torch.tensor([*text], dtype=torch.uint8)


def with_fields(row: Tensor, **fields: object) -> Tensor:
    """A plan's row with fields of any name and value, which no plan may have."""
    text = row.numpy().tobytes()
    return as_row(text[:1] + msgspec.msgpack.encode({**fields_of(row), **fields}))


def fields_of(row: Tensor) -> dict[str, Any]:
    """The fields in a plan's row."""
    fields: dict[str, Any] = msgspec.msgpack.decode(row.numpy().tobytes()[1:])
    return fields


def parts() -> ModelParts:
    """Model parts with an identity projector."""
    return ModelParts(
        lambda rows: rows, lambda ids: ids[:, None].expand(-1, 16), Space()
    )


def images(count: int) -> list[ImageFeatures]:
    """``count`` different images."""
    return [image(seed) for seed in range(count)]


def blind(base: str = "cdpruner") -> ServedState:
    """A state whose only signal reads no optional input."""
    signals = [{"atom": "spatial_centrality_prior", "weight": 1.0}]
    no_exchange = {"/scoring/signals": signals, "/constraints/selector/q_e": 0}
    return served({"/base_policy": {"name": base}, **no_exchange})


def prune(
    plans: Sequence[ItemPlan],
    image_list: Sequence[ImageFeatures],
    state: ServedState | None = None,
    indices: IndexCache | None = None,
    errors: Mapping[str, int] = MappingProxyType({}),
) -> list[Tensor]:
    """The rows of each image; policies raise so many exceptions of each type."""
    reporter = FallbackReporter()
    memory = IndexCache() if indices is None else indices
    context = SelectionContext(state or served(), parts(), reporter, memory)
    rows = prune_images(context, plans, image_list)
    assert reporter.errors == errors
    assert not any(
        count for (_, why), count in reporter.counts().items() if why == "unsafe"
    )
    return rows


PLAN = ItemPlan(8, (1, 2), (3,))
PIXELS = torch.arange(12.0).reshape(3, 2, 2)


def element(data: torch.Tensor, keep_on_cpu: bool = False) -> Any:
    return MultiModalFieldElem(data, MultiModalBatchedField(keep_on_cpu=keep_on_cpu))


def feature(
    row: object,
    placeholders: int = 8,
    *,
    pixels: str = "pixel_values",
    keep_on_cpu: bool = True,
    modality: str = "image",
    name: str = "a",
) -> Any:
    """One item of a request: a plan where ``row`` is one, and pixels."""
    data = {}
    if row is not None:
        field = MultiModalBatchedField(keep_on_cpu=keep_on_cpu)
        data[FIELD] = MultiModalFieldElem(cast("Any", row), field)
    if pixels:
        data[pixels] = MultiModalFieldElem(PIXELS, MultiModalBatchedField())
    return SimpleNamespace(
        data=MultiModalKwargsItem(data),
        mm_position=SimpleNamespace(
            offset=0, length=placeholders, get_num_embeds=lambda: placeholders
        ),
        mm_hash=name,
        identifier=name,
        modality=modality,
    )
