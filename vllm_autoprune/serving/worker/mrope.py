"""M-RoPE positions: every kept token keeps its unpruned position in time, height and width.

Text has the positions it has after unpruned images, so they are known when a request arrives.
Positions of image tokens are trailing channels of their rows, because they are known only after the
selection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_autoprune.serving.plan import ItemPlan, Key

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec

    Stock = Callable[[list[int], list[MultiModalFeatureSpec]], tuple[Tensor, int]]

CHANNELS = 4
"""Height and width within the image, each as two digits of base 128: bfloat16 is exact to 256."""

_BASE = 128


def position_channels(height: int, width: int, device: torch.device) -> Tensor:
    """Positions of the tokens of a grid in raster order, ``(N, 4)`` float32."""
    rows = torch.arange(height, device=device)[:, None].expand(height, width).flatten()
    columns = torch.arange(width, device=device).repeat(height)
    digits = [rows // _BASE, rows % _BASE, columns // _BASE, columns % _BASE]
    return torch.stack(digits, dim=1).float()


def unplaced_channels(rows: Tensor) -> Tensor:
    """Channels ``(m, 4)`` of rows whose tokens stay where they are."""
    return rows.new_full((rows.shape[0], CHANNELS), -1, dtype=torch.float32)


def compute_input_positions(
    stock: Stock,
    ids: Sequence[int],
    features: Sequence[MultiModalFeatureSpec],
    unpruned: Mapping[int, int],
    firsts: Mapping[int, int],
) -> tuple[Tensor, int]:
    """Positions ``(3, L)`` of a prompt, and what decoding adds to its length.

    ``unpruned`` is N of every image, by its index in ``features``; ``firsts`` gives the index of
    the first item of its image for every other one (:func:`match_items`). The model's own code
    places the whole images; then placeholders that are not there are left out. Image tokens of
    which some are missing, and those of later items, all stand at their image's first position
    until :func:`place_image_tokens` knows the kept ones.
    """
    full: list[int] = []
    source: list[int] = []
    starts: dict[int, int] = {}
    moved = []
    done = 0
    for i in sorted(range(len(features)), key=lambda i: features[i].mm_position.offset):
        place = features[i].mm_position
        source += range(len(full), len(full) + place.offset - done)
        full += ids[done : place.offset]
        done = place.offset + place.length
        if i in firsts:
            source += [starts[firsts[i]]] * place.length
            continue
        starts[i] = len(full)
        length = unpruned.get(i, place.length)
        moved.append(
            replace(features[i], mm_position=replace(place, offset=len(full), length=length))
        )
        if length == place.length:
            source += range(len(full), len(full) + length)
            full += ids[place.offset : place.offset + length]
        else:
            source += [len(full)] * place.length
            full += [ids[place.offset]] * length
    source += range(len(full), len(full) + len(ids) - done)
    full += ids[done:]
    positions, delta = stock(full, moved)
    return positions[:, torch.tensor(source, dtype=torch.int64)], delta + len(full) - len(ids)


def match_items(plans: Mapping[int, ItemPlan]) -> dict[int, int]:
    """Map each delta and each recall to the item that its image's positions begin at.

    ``plans`` by item, in prompt order. Deltas come in the order of their cores, and no core of
    another image has the same key. An image may be shown several times: a recall belongs to the
    last one.
    """
    waiting: dict[Key, list[int]] = {}
    last: dict[Key, int] = {}
    firsts = {}
    for i, plan in sorted(plans.items()):
        if plan.part == "recall":
            if plan.key in last:
                firsts[i] = last[plan.key]
        elif plan.part == "delta":
            if waiting.get(plan.key):
                firsts[i] = waiting[plan.key].pop(0)
        else:
            last[plan.key] = i
            if plan.part == "core":
                waiting.setdefault(plan.key, []).append(i)
    return firsts


def place_image_tokens(
    ids: Tensor, positions: Tensor, channels: Sequence[Tensor], image: int, computed: int
) -> Tensor:
    """Set the positions of the image tokens of one prefill step in ``(3, L)``.

    ``channels`` are those of the step's image rows, ``(m, 4)`` each, in prompt order; the
    step begins at token ``computed``. All tokens of an image have its first position in time, so
    that is what heights and widths count from, however often this is done. Rows with channels
    below 0 (:func:`unplaced_channels`) leave their tokens where they are. No host sync.
    """
    joined = torch.cat([part.float() for part in channels])
    digits = joined.long()
    rows, columns = digits[:, 0] * _BASE + digits[:, 1], digits[:, 2] * _BASE + digits[:, 3]
    # Time, height and width from the image's first position, (3, M).
    offsets = torch.stack([torch.zeros_like(rows), rows, columns]).to(positions.device)
    at = torch.arange(len(ids), device=positions.device)
    is_image = (ids.to(positions.device) == image) & (at >= computed)
    rank = is_image.cumsum(0) - 1
    selected = is_image & (rank < offsets.shape[1])
    row = rank.clamp(0, offsets.shape[1] - 1)
    selected &= (joined[:, 0] >= 0).to(positions.device)[row]
    placed = positions[:1] + offsets[:, row]
    return torch.where(selected, placed.to(positions.dtype), positions)
