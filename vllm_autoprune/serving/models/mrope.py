"""M-RoPE: positions of kept tokens in time, height and width, and the mixin that sets them.

Every kept token keeps its unpruned position. Text has the positions it has after unpruned images,
so they are known when a request arrives. Positions of image tokens are trailing channels of their
rows, because they are known only after the selection.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from vllm_autoprune.ops.rowwise import upload
from vllm_autoprune.serving.compat.worker import UNCHANGED_DELTA, request_positions
from vllm_autoprune.serving.models.pruned_model import PrunedModel, Vision
from vllm_autoprune.serving.plan import FIELD, MAX_CLIP_TOKENS, ItemPlan, Key, plan_error
from vllm_autoprune.serving.served_state import served_state

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as _Stock
    from vllm.multimodal.inputs import MultiModalFeatureSpec

    Stock = Callable[[list[int], list[MultiModalFeatureSpec]], tuple[Tensor, int]]
else:
    _Stock = object

VIDEO_GRIDS = "video_grid_thw"
"""Field of the patches of clips, as :attr:`GridLayout.grids`."""

CHANNELS = 6
"""Time, height and width within the image or clip, each as two digits of base 256, to which
bfloat16 is exact."""

_BASE = 256

_UNBOUNDED = (1 << 31) - 1
"""Positions of a model without a table of rotations."""


def position_channels(
    height: int, width: int, device: torch.device, times: Sequence[int] = (0,)
) -> Tensor:
    """Positions of the tokens of frames at these times, in raster order, ``(T * n, 6)`` float32."""
    sides = (torch.arange(side, device=device) for side in (height, width))
    places = torch.cartesian_prod(upload(torch.tensor(times), device), *sides)
    return torch.stack([places // _BASE, places % _BASE], dim=2).flatten(1).float()


def set_times(rows: Tensor, times: Tensor) -> None:
    """Set the positions in time ``(M,)`` of rows ``(M, D + 6)``, in place."""
    rows[:, -CHANNELS] = times // _BASE
    rows[:, 1 - CHANNELS] = times % _BASE


def _compute_input_positions(
    stock: Stock,
    ids: Sequence[int],
    features: Sequence[MultiModalFeatureSpec],
    unpruned: Mapping[int, Sequence[int]],
    firsts: Mapping[int, int],
    widths: Mapping[int, int] = MappingProxyType({}),
) -> tuple[Tensor, int]:
    """Positions ``(3, L)`` of a prompt, and what decoding adds to its length.

    ``unpruned`` are the tokens of every whole image or clip, by its index in ``features``; those
    whose rows have no positions are left out. ``firsts`` gives the index of the first item of its
    image for every other one (:func:`_match_items`). The model's own code places the whole images;
    then placeholders that are not there are left out. Tokens of an item of which some are missing,
    and those of later items, all stand at their image's first position until
    :func:`_place_image_tokens` knows the kept ones; in width beyond it, where they are of a clip,
    by which these can be told from tokens that are placed. ``widths`` are those of clips.
    """
    full: list[int] = []
    source: list[int] = []
    starts: dict[int, int] = {}
    moved = []
    done = 0
    for i in sorted(range(len(features)), key=lambda i: features[i].mm_position.offset):
        place = features[i].mm_position
        if i not in unpruned:
            # Others are never shortened; audio may stand within a video (Qwen-Omni).
            offset = len(full) + place.offset - done
            moved.append(replace(features[i], mm_position=replace(place, offset=offset)))
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
        if i in widths:  # text may stand between its tokens
            stretch = replace(stretch, is_embed=torch.tensor(unpruned[i]) == ids[place.offset])
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


def _match_items(plans: Mapping[int, ItemPlan]) -> dict[int, int]:
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


def _place_image_tokens(
    ids: Tensor,
    positions: Tensor,
    channels: Sequence[Tensor],
    images: Sequence[int],
    computed: int,
    moves_all: bool = False,
) -> Tensor:
    """Set the positions of the image tokens of one prefill step in ``(3, L)``.

    ``channels`` are those of the step's image rows, ``(m, 6)`` each, in prompt order; the
    step begins at token ``computed``; ``images`` are the ids of the tokens of images and clips. All
    count from the first position of their image, however often this is done. With ``moves_all``
    time moves a token on all axes. Rows with channels below 0 leave their tokens where they are. No
    host sync.
    """
    joined = torch.cat([part.float() for part in channels])
    digits = joined.long().unflatten(1, (3, 2))
    # Time, height and width from the image's first position, (3, M).
    offsets = (digits[:, :, 0] * _BASE + digits[:, :, 1]).T.to(positions.device)
    if moves_all:
        offsets = torch.cat([offsets[:1], offsets[0] + offsets[1:]])
    at = torch.arange(len(ids), device=positions.device)
    ids = ids.to(positions.device)
    is_image = functools.reduce(torch.logical_or, (ids == image for image in images))
    is_image = is_image & (at >= computed)
    rank = is_image.cumsum(0) - 1
    selected = is_image & (rank < offsets.shape[1])
    row = rank.clamp(0, offsets.shape[1] - 1)
    selected &= (joined[:, 0] >= 0).to(positions.device)[row]
    offsets = offsets[:, row]
    # A token that was placed before (of a request that was preempted) is as far from the first
    # position on every axis; others are there in time, and no width is beyond its own grid's.
    base = positions - offsets
    was_placed = (base[0] == base[1]) & (base[0] == base[2])
    placed = torch.where(was_placed, base[0], positions[0]) + offsets
    return torch.where(selected, placed.to(positions.dtype), positions)


class GridLayout(Vision):
    """What is said of the grids of a model's images, and of the rows of their tokens."""

    _model: Any
    grids: ClassVar[str] = "image_grid_thw"
    """Field of patches: ``(B, 3)`` in time, height and width, or ``(B, 2)``, on the CPU."""
    image_token: ClassVar[str] = "image_token_id"
    """Field of the configuration with the id of an image's token."""
    videos_share_token: ClassVar[bool] = False
    """Whether frames of videos have that token too."""
    video_token: ClassVar[str] = ""
    """Field with the id of the token of clips; empty where they are left whole."""
    dates_frames: ClassVar[bool] = False
    """Whether text stands between the frames of a clip, behind which each begins anew."""

    @property
    def merge(self) -> int:
        """Patches on each side of a token."""
        return int(self._model.config.vision_config.spatial_merge_size)

    def count(self, grid: Tensor) -> int:
        """Tokens N of an image, by its row of :attr:`grids`; raises RequestError for too many."""
        tokens = prod(grid.tolist()) // self.merge**2
        if not 0 < tokens <= MAX_CLIP_TOKENS:
            raise plan_error(f"is of a grid of {tokens} tokens")
        return tokens


class PrunedMRope(PrunedModel, _Stock):
    """Mixin before stock classes with M-RoPE: rows carry the positions of their tokens."""

    autoprune_vision: ClassVar[type[GridLayout]]
    supports_multimodal_pruning: ClassVar[Literal[True]] = True
    """vLLM asks a model for positions anew only where it says this."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        if served_state(vllm_config.model_config) is not None:
            request_positions(vllm_config.model_config.multimodal_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # Some classes serve checkpoints with positions of one axis too.
        self.autoprune_places: bool = vllm_config.model_config.uses_mrope
        if self.autoprune is not None:
            # Videos are handled by the stock model.
            self.is_multimodal_pruning_enabled = False
            self.autoprune_context: int = vllm_config.model_config.max_model_len
            layers = self.get_language_model().modules()
            tables = [
                len(layer.cos_sin_cache) for layer in layers if hasattr(layer, "cos_sin_cache")
            ]
            self.autoprune_table: int = min(tables, default=_UNBOUNDED)

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[Tensor, int]:
        """Positions of the prompt with whole images, as stock (``SupportsMRoPE``).

        Where there are none, of grids and text that no server makes, tokens follow each other.
        """
        stock = super().get_mrope_input_positions
        vision = self.autoprune
        if vision is None:
            return stock(input_tokens, mm_features)
        assert isinstance(vision, GridLayout)
        length = len(input_tokens)
        try:
            positions, delta = self.autoprune_positions(vision, stock, input_tokens, mm_features)
            # Beyond the table of rotations an index is out of range, which ends the engine. The API
            # server keeps generated tokens within the context, unless it cannot foresee them.
            start, end = int(positions.min()), max(int(positions.max()) + 1, length + delta)
            if delta > self.autoprune_context:
                end += self.autoprune_context - length
            if positions.shape != (3, length) or start < 0 or end > self.autoprune_table:
                raise plan_error(f"gives {tuple(positions.shape)} positions, {start} to {end}")
            return positions, delta
        except Exception as error:  # the engine must survive any input
            self.autoprune_reporter.report_error(error, "counting its tokens as positions")
            return torch.arange(length).expand(3, -1).clone(), 0

    def autoprune_positions(
        self,
        vision: GridLayout,
        stock: Stock,
        input_tokens: list[int],
        mm_features: list[MultiModalFeatureSpec],
    ) -> tuple[Tensor, int]:
        """Positions of the prompt with whole images; raises for what its grids cannot be."""
        unpruned, plans, widths = dict[int, Sequence[int]](), dict[int, ItemPlan](), {}
        for i, feature in enumerate(mm_features):
            data, is_image = feature.data or {}, feature.modality == "image"
            plan = None
            if FIELD in data:
                (plan,) = self.autoprune_plan_reader.read([data[FIELD].data])
            if not is_image and (plan is None or plan.keeps_all):
                continue
            grid = data[vision.grids if is_image else VIDEO_GRIDS].data
            assert isinstance(grid, Tensor)
            token = input_tokens[feature.mm_position.offset]
            unpruned[i] = [token] * vision.count(grid)
            if plan is not None and is_image:
                plans[i] = plan
            elif plan is not None:
                unpruned[i] = plan.write_text(unpruned[i])
                widths[i] = int(grid[2]) // vision.merge
        firsts = _match_items(plans)
        return _compute_input_positions(stock, input_tokens, mm_features, unpruned, firsts, widths)

    def autoprune_blank(self, plan: ItemPlan, error: Exception) -> Tensor:
        """Rows of zeros, whose tokens stay where they are."""
        rows = super().autoprune_blank(plan, error)
        if not self.autoprune_places:
            return rows
        return torch.cat([rows, rows.new_full((len(rows), CHANNELS), -1.0)], dim=1)

    def recompute_mrope_positions(
        self,
        input_ids: list[int] | Tensor,
        multimodal_embeddings: Sequence[Tensor],
        mrope_positions: Tensor,
        num_computed_tokens: int,
    ) -> tuple[Sequence[Tensor], Tensor, int]:
        """Split position channels off the rows, and set the positions of this step's image tokens.

        None is beyond the model's table, whatever channels an image has. Not by the stock method
        (``SupportsMultiModalPruning``): it moves text on by an image's width, which is wrong for
        one that is higher than wide. What decoding adds to the prompt's length was known before.
        Model Runner V1 has no way to leave it as it is, so there a prompt that ends in an image,
        without the token that closes it, goes on after the last kept token.
        """
        vision = self.autoprune
        if vision is None:  # vLLM's own pruning of videos
            return super().recompute_mrope_positions(
                input_ids, multimodal_embeddings, mrope_positions, num_computed_tokens
            )
        assert isinstance(vision, GridLayout)
        wide = vision.row_width + CHANNELS
        rows: list[Tensor] = []
        channels: list[Tensor] = []
        for embedding in multimodal_embeddings:
            if embedding.shape[1] == wide:
                channels.append(embedding[:, -CHANNELS:])
                embedding = embedding[:, :-CHANNELS]
            elif vision.videos_share_token or vision.video_token:
                # These tokens stay where they are.
                unplaced = embedding.new_full((len(embedding), CHANNELS), -1, dtype=torch.float32)
                channels.append(unplaced)
            rows.append(embedding)
        positions = mrope_positions
        if channels:
            ids = input_ids if isinstance(input_ids, Tensor) else torch.tensor(input_ids)
            names = (vision.image_token, vision.video_token)
            tokens = [int(attrgetter(name)(self.config)) for name in names if name]
            positions = _place_image_tokens(
                ids, positions, channels, tokens, num_computed_tokens, vision.dates_frames
            ).clamp(max=self.autoprune_table - 1)
        if isinstance(input_ids, Tensor):
            return rows, positions, UNCHANGED_DELTA
        return rows, positions, int(positions.max()) + 1 - len(input_ids)
