"""M-RoPE: positions of kept tokens in time, height and width, and the mixin that sets them.

Every kept token keeps its unpruned position, unless its item is packed. Text has the positions that
it has after unpruned images, so they are known when a request arrives. Positions of image tokens
are trailing channels of their rows, because they are known only after the selection.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from vllm_autoprune.ops.rowwise import upload
from vllm_autoprune.serving.inputs import IMAGE_GRID, VIDEO_GRID
from vllm_autoprune.serving.models.placed_model import PlacedModel, match_items
from vllm_autoprune.serving.models.vision import Vision
from vllm_autoprune.serving.plan import MAX_VIDEO_TOKENS, MROPE, ItemPlan, plan_error
from vllm_autoprune.serving.worker.rows import (
    count_channels,
    decode_offsets,
    encode_offsets,
    match_rows,
)

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec

    Stock = Callable[[list[int], list[MultiModalFeatureSpec]], tuple[Tensor, int]]

_CHANNELS = count_channels(MROPE)

_TEXT = -1
"""Replaces the ids of tokens that stand one after the other like text: no model has this id."""


def position_channels(
    height: int, width: int, device: torch.device, times: Sequence[int] = (0,)
) -> Tensor:
    """Channels ``(T * n, 6)`` float32 of the positions of frames at ``times``, in raster order."""
    sides = (torch.arange(side, device=device) for side in (height, width))
    return encode_offsets(
        torch.cartesian_prod(upload(torch.tensor(times), device), *sides)
    )


def set_times(rows: Tensor, times: Tensor) -> None:
    """Set the positions in time ``(M,)`` of rows ``(M, D + 6)``, in place."""
    channels = encode_offsets(times[:, None])
    rows[:, -_CHANNELS : channels.shape[1] - _CHANNELS] = channels.to(rows.dtype)


def _compute_input_positions(
    stock: Stock,
    ids: Sequence[int],
    features: Sequence[MultiModalFeatureSpec],
    unpruned: Mapping[int, Sequence[int]],
    firsts: Mapping[int, int],
    widths: Mapping[int, int] = MappingProxyType({}),
    packed: Collection[int] = (),
) -> tuple[Tensor, int]:
    """Positions ``(3, L)`` of a prompt, and their delta.

    The delta is added to the index of a generated token to get its position. ``unpruned`` has the
    tokens of every whole image or video by its index in ``features``; it lacks items whose rows
    have no positions. ``firsts`` maps every later item of an image to the image's first item
    (:func:`.match_items`). The model's own code places the whole images, and then the positions of
    missing placeholders are removed. The tokens of an item that lacks some, and those of later
    items of its image, all stand at their image's first position until :func:`_place_image_tokens`
    knows the kept tokens. Tokens of a video stand beyond that position in width, which
    distinguishes them from placed tokens; ``widths`` are the widths of videos. Tokens of ``packed``
    items stand one after the other, like text.
    """
    full: list[int] = []
    source: list[int] = []
    starts: dict[int, int] = {}
    moved = []
    done = 0
    for i in sorted(range(len(features)), key=lambda i: features[i].mm_position.offset):
        place = features[i].mm_position
        if i in packed:
            end = place.offset + place.length
            source += range(len(full), len(full) + end - done)
            full += [*ids[done : place.offset], *[_TEXT] * place.length]
            done = end
            continue
        if i not in unpruned:
            # Other items are never shortened; audio may stand within a video (Qwen-Omni).
            offset = len(full) + place.offset - done
            moved.append(
                replace(features[i], mm_position=replace(place, offset=offset))
            )
            continue
        source += range(len(full), len(full) + place.offset - done)
        full += ids[done : place.offset]
        done = place.offset + place.length
        if i in firsts:
            source += [starts[firsts[i]]] * place.length
            continue
        start = starts[i] = len(full)
        full += unpruned[i]
        length = len(unpruned[i])
        stretch = replace(place, offset=start, length=length)
        if i in widths:  # text may stand between the tokens of a video
            stretch = replace(
                stretch, is_embed=torch.tensor(unpruned[i]) == ids[place.offset]
            )
        moved.append(replace(features[i], mm_position=stretch))
        same = length == place.length
        source += range(start, start + length) if same else [start] * place.length
    source += range(len(full), len(full) + len(ids) - done)
    full += ids[done:]
    positions, delta = stock(full, moved)
    positions = positions[:, torch.tensor(source, dtype=torch.int64)]
    for i, width in widths.items():
        place = features[i].mm_position
        if place.length < len(unpruned[i]):
            positions[2, place.offset : place.offset + place.length] += width
    return positions, delta + len(full) - len(ids)


def _place_image_tokens(
    ids: Tensor,
    positions: Tensor,
    channels: Sequence[Tensor],
    images: Sequence[int],
    computed: int,
    moves_all: bool = False,
) -> Tensor:
    """Set the positions of the image tokens of one prefill step in ``(3, L)``.

    ``channels`` are those of the step's image rows, ``(m, 6)`` each, in prompt order. The step
    begins at token ``computed``. ``images`` are the token ids of images and videos. Every position
    is computed from the first position of its image, so repeating this changes nothing. With
    ``moves_all``, time is added on all axes. Rows with channels below 0 leave their tokens where
    they are. No host sync.
    """
    offsets, is_set = decode_offsets([part.to(positions.device) for part in channels])
    if moves_all:
        offsets = torch.cat([offsets[:1], offsets[0] + offsets[1:]])
    ids = ids.to(positions.device)
    is_image = functools.reduce(torch.logical_or, (ids == image for image in images))
    selected, row = match_rows(is_image, computed, len(is_set))
    selected &= is_set[row]
    offsets = offsets[:, row]
    # A token that was placed before, in a request that was preempted, has the same offset from the
    # first position on every axis. Other tokens are at the first position in time, and in width
    # never beyond their own grid.
    base = positions - offsets
    was_placed = (base[0] == base[1]) & (base[0] == base[2])
    placed = torch.where(was_placed, base[0], positions[0]) + offsets
    return torch.where(selected, placed.to(positions.dtype), positions)


class GridLayout(Vision):
    """Grids of a model's images, and the tokens that they consist of."""

    _model: Any
    grids: ClassVar[str] = IMAGE_GRID
    """Field with the patches: ``(B, 3)`` in time, height and width, or ``(B, 2)``, on the CPU."""
    image_token: ClassVar[str] = "image_token_id"
    """Configuration field with the id of an image's placeholder token."""
    videos_share_token: ClassVar[bool] = False
    """Whether frames of videos have that token too."""
    video_token: ClassVar[str] = ""
    """Configuration field with the id of a video's placeholder token; empty if videos are left
    whole."""
    dates_frames: ClassVar[bool] = False
    """Whether text stands between the frames of a video, so that positions restart at each frame.
    """

    @property
    def merge(self) -> int:
        """Side, in patches, of the square that becomes one token."""
        return int(self._model.config.vision_config.spatial_merge_size)

    def count(self, grid: Tensor) -> int:
        """Number of tokens N of an image, by its row of :attr:`grids`; raises RequestError."""
        tokens = prod(grid.tolist()) // self.merge**2
        if not 0 < tokens <= MAX_VIDEO_TOKENS:
            raise plan_error(f"is of a grid of {tokens} tokens")
        return tokens


class PrunedMRope(PlacedModel):
    """Mixin for stock classes with M-RoPE."""

    autoprune_vision: ClassVar[type[GridLayout]]

    @property
    def _layout(self) -> GridLayout:
        vision = self.autoprune
        assert isinstance(vision, GridLayout)
        return vision

    @property
    def autoprune_counts_all(self) -> bool:
        """Whether videos share the token of images, or are pruned too."""
        return self._layout.videos_share_token or bool(self._layout.video_token)

    def autoprune_consecutive(self, length: int) -> Tensor:
        """Positions ``(3, L)`` of tokens that follow each other."""
        return torch.arange(length).expand(MROPE, -1).clone()

    def autoprune_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[Tensor, int]:
        """Positions ``(3, L)`` of the prompt with whole images; raises for grids of no image."""
        vision = self._layout
        stock = super(PlacedModel, self).get_mrope_input_positions
        unpruned = dict[int, Sequence[int]]()
        plans = dict[int, ItemPlan]()
        widths = dict[int, int]()
        packed = set[int]()
        for i, feature in enumerate(mm_features):
            is_image = feature.modality == "image"
            plan = self.autoprune_read_plan(feature)
            if not is_image and (plan is None or plan.keeps_all):
                continue
            if plan is not None and plan.positions == "packed":
                packed.add(i)
                continue
            data = feature.data or {}
            grid = data[vision.grids if is_image else VIDEO_GRID].data
            assert isinstance(grid, Tensor)
            token = input_tokens[feature.mm_position.offset]
            unpruned[i] = [token] * vision.count(grid)
            if plan is not None and is_image:
                plans[i] = plan
            elif plan is not None:
                unpruned[i] = plan.write_text(unpruned[i])
                widths[i] = int(grid[2]) // vision.merge
        starts = match_items(plans)
        return _compute_input_positions(
            stock, input_tokens, mm_features, unpruned, starts, widths, packed
        )

    def autoprune_place(
        self, ids: Tensor, positions: Tensor, channels: Sequence[Tensor], computed: int
    ) -> Tensor:
        """Set the positions of the image tokens of one prefill step in ``(3, L)``."""
        names = (self._layout.image_token, self._layout.video_token)
        tokens = [int(attrgetter(name)(self.config)) for name in names if name]
        dates = self._layout.dates_frames
        return _place_image_tokens(ids, positions, channels, tokens, computed, dates)

    def autoprune_delta(self, positions: Tensor) -> int:
        """The delta of the prompt's positions.

        Model Runner V1 cannot keep the delta that was known before, so there a prompt that ends in
        an image, without a closing token, continues after the last kept token.
        """
        return int(positions.max()) + 1 - positions.shape[1]
