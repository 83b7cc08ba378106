"""Qwen-VL and GLM-4.xV: images of any size, patches merged four to one, M-RoPE.

Videos are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers.models.glm4v.image_processing_glm4v import smart_resize as glm_smart_resize
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
from vllm.model_executor.models.glm4_1v import (
    Glm4vForConditionalGeneration,
    Glm4vMoeForConditionalGeneration,
)
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration
from vllm.model_executor.models.qwen3_5 import (
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForConditionalGeneration,
)
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
from vllm.model_executor.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration

from vllm_autoprune.serving.api.layout import Placeholders, TokenCount
from vllm_autoprune.serving.compat.worker import UNCHANGED_DELTA, request_positions
from vllm_autoprune.serving.models.pruned_model import (
    EncoderInputs,
    ImageInputs,
    ModelImage,
    PrunedModel,
    Vision,
    prune_class,
)
from vllm_autoprune.serving.plan import FIELD, ItemPlan, Key
from vllm_autoprune.serving.served_state import served_state
from vllm_autoprune.serving.worker.features import ImageFeatures, Signal
from vllm_autoprune.serving.worker.tower_hooks import Merger
from vllm_autoprune.tpdsl.tokens import Grid

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.models.glm4_1v import Glm4vProcessingInfo
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as _Stock
    from vllm.model_executor.models.qwen2_vl import Qwen2VLProcessingInfo
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.multimodal.parse import ImageSize

    from vllm_autoprune.serving.served_state import ServedState

    Stock = Callable[[list[int], list[MultiModalFeatureSpec]], tuple[Tensor, int]]
else:
    _Stock = object

# M-RoPE: every kept token keeps its unpruned position in time, height and width.
#
# Text has the positions it has after unpruned images, so they are known when a request arrives.
# Positions of image tokens are trailing channels of their rows, because they are known only after
# the selection.

CHANNELS = 4
"""Height and width within the image, each as two digits of base 128: bfloat16 is exact to 256."""

_BASE = 128


def _position_channels(height: int, width: int, device: torch.device) -> Tensor:
    """Positions of the tokens of a grid in raster order, ``(N, 4)`` float32."""
    rows = torch.arange(height, device=device)[:, None].expand(height, width).flatten()
    columns = torch.arange(width, device=device).repeat(height)
    digits = [rows // _BASE, rows % _BASE, columns // _BASE, columns % _BASE]
    return torch.stack(digits, dim=1).float()


def _compute_input_positions(
    stock: Stock,
    ids: Sequence[int],
    features: Sequence[MultiModalFeatureSpec],
    unpruned: Mapping[int, int],
    firsts: Mapping[int, int],
) -> tuple[Tensor, int]:
    """Positions ``(3, L)`` of a prompt, and what decoding adds to its length.

    ``unpruned`` is N of every image, by its index in ``features``; ``firsts`` gives the index of
    the first item of its image for every other one (:func:`_match_items`). The model's own code
    places the whole images; then placeholders that are not there are left out. Image tokens of
    which some are missing, and those of later items, all stand at their image's first position
    until :func:`_place_image_tokens` knows the kept ones.
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
    ids: Tensor, positions: Tensor, channels: Sequence[Tensor], image: int, computed: int
) -> Tensor:
    """Set the positions of the image tokens of one prefill step in ``(3, L)``.

    ``channels`` are those of the step's image rows, ``(m, 4)`` each, in prompt order; the
    step begins at token ``computed``. All tokens of an image have its first position in time, so
    that is what heights and widths count from, however often this is done. Rows with channels
    below 0 leave their tokens where they are. No host sync.
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


# The vision side and the mixin of the models.

_DEEPSTACK = Qwen3VLForConditionalGeneration
"""Has rows for later layers beside those of the first; they are pruned alike."""


class _QwenVision(Vision):
    """The vision side of all of them: tokens, deepstack levels and positions of each image."""

    _model: Qwen2_5_VLForConditionalGeneration
    tower_name = "visual"

    def __init__(self, model: Qwen2_5_VLForConditionalGeneration, served: ServedState) -> None:
        super().__init__(model, served)
        self._merge: int = model.config.vision_config.spatial_merge_size
        self._width: int = model.get_language_model().config.hidden_size
        levels = model.deepstack_num_level if isinstance(model, _DEEPSTACK) else 0
        self.row_width = self._width * (1 + levels)

    def find_attention(self) -> Any:
        """Attention of the last block in which every patch of an image sees every other."""
        tower = self._model.visual
        return tower.blocks[max(vars(tower).get("fullatt_block_indexes", [-1]))].attn.attn

    def find_merger(self) -> Merger:
        """The merger of the last block; norms are taken at the first deepstack merger."""
        visual, patches = self._model.visual, self._model.config.vision_config.spatial_merge_size**2
        if isinstance(self._model, _DEEPSTACK):
            scored = next(iter(visual.deepstack_merger_list), visual.merger)
            return Merger(visual.merger, patches, scored)
        # vLLM calls Qwen2.5-VL's merger past its hooks; its norm comes first, and sees the same.
        return Merger(visual.merger.ln_q, patches, visual.merger.ln_q)

    def images(self, inputs: EncoderInputs) -> list[ModelImage]:
        """Split the images of one call, whose patches come in one tensor."""
        grids = inputs["image_grid_thw"]
        assert isinstance(grids, Tensor)
        sizes, unit = grids.prod(-1).tolist(), self._merge**2
        pixels = inputs["pixel_values"]
        assert isinstance(pixels, Tensor)
        return [
            ModelImage({"pixel_values": part, "image_grid_thw": grid}, size // unit)
            for part, grid, size in zip(pixels.split(sizes), grids, sizes, strict=True)
        ]

    def encode(self, images: Sequence[ImageInputs]) -> list[ImageFeatures]:
        """Encode images; tokens are selected by the first D channels of each row."""
        grids = torch.stack([image["image_grid_thw"] for image in images])
        pixels = torch.cat([image["pixel_values"] for image in images])
        with self.recording():
            checked = self._model._parse_and_validate_image_input(
                pixel_values=pixels, image_grid_thw=grids
            )
            assert checked is not None
            rows = self._model._process_image_input(checked)

        # What the hooks read, the tokens of each image in raster order.
        patches, unit = grids.prod(-1).tolist(), self._merge**2
        signals = {signal: hook.take() for signal, hook in self.merger.items()}
        if self.attention is not None:
            # A merged token gets the mean of what its patches get.
            received = torch.cat(self.attention.take().received(patches))
            signals["cls_attention"] = received.view(-1, unit).mean(dim=1)
        if signals and isinstance(self._model, Qwen2_5_VLForConditionalGeneration):
            # This tower processes patches in window order.
            metadata = self._model.visual.prepare_encoder_metadata(grids.tolist())
            back = metadata["reverse_indices"].to(self.sample_weight.device, non_blocking=True)
            signals = {signal: part[back] for signal, part in signals.items()}
        sizes = [count // unit for count in patches]
        split = {signal: part.split(sizes) for signal, part in signals.items()}

        features = []
        for i, (_, height, width) in enumerate(grids.tolist()):
            image_rows, grid = rows[i], Grid(height // self._merge, width // self._merge)
            tokens, levels = image_rows[:, : self._width].clone(), image_rows[:, self._width :]
            places = _position_channels(grid.height, grid.width, tokens.device).to(tokens.dtype)
            channels = torch.cat([levels, places], dim=1)
            of_image: dict[Signal, Tensor] = {s: parts[i].clone() for s, parts in split.items()}
            region = self.make_region(grid, tokens, of_image, extra_channels=channels)
            features.append(ImageFeatures((region,)))
        return features

    @staticmethod
    def count_tokens(
        info: Qwen2VLProcessingInfo, size: ImageSize, kwargs: Mapping[str, object]
    ) -> TokenCount:
        """Merged tokens of an image, resized as the processor resizes it."""
        tokens = info.get_num_image_tokens(
            image_width=size.width,
            image_height=size.height,
            image_processor=info.get_image_processor(**kwargs),
            mm_kwargs=kwargs,
        )
        return TokenCount(tokens)

    @staticmethod
    def shrink_to_budget(info: Qwen2VLProcessingInfo, size: ImageSize, budget: int) -> ImageSize:
        """The size that the processor's own arithmetic gives an image of at most K merged tokens.

        It leaves a very long and narrow image more than K tokens; the longer side of such an image
        is shortened further.
        """
        vision = info.get_hf_config().vision_config
        unit = vision.patch_size * vision.spatial_merge_size
        height, width = smart_resize(
            size.height, size.width, factor=unit, min_pixels=unit**2, max_pixels=budget * unit**2
        )
        return type(size)(width=min(width, budget * unit), height=min(height, budget * unit))


class _PrunedQwen(PrunedModel, _Stock):
    """Mixin before the stock classes: rows carry the positions of their tokens."""

    autoprune_vision: ClassVar[type[_QwenVision]] = _QwenVision
    supports_multimodal_pruning: ClassVar[Literal[True]] = True
    """vLLM asks a model for positions anew only where it says this."""
    videos_share_token: ClassVar[bool] = False
    """Whether frames of videos have the same placeholder token as images."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        if served_state(vllm_config.model_config) is not None:
            request_positions(vllm_config.model_config.multimodal_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if self.autoprune is not None:
            # Videos are handled by the stock model.
            self.is_multimodal_pruning_enabled = False

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[Tensor, int]:
        """Positions of the prompt with whole images, as stock (``SupportsMRoPE``)."""
        stock = super().get_mrope_input_positions
        if self.autoprune is None:
            return stock(input_tokens, mm_features)
        unpruned, plans = {}, {}
        for i, feature in enumerate(mm_features):
            if feature.modality == "image":
                assert feature.data is not None
                grid = feature.data["image_grid_thw"].data
                assert isinstance(grid, Tensor)
                unpruned[i] = int(grid.prod()) // self.config.vision_config.spatial_merge_size**2
                if FIELD in feature.data:
                    (plans[i],) = self.autoprune_plan_reader.read([feature.data[FIELD].data])
        firsts = _match_items(plans)
        return _compute_input_positions(stock, input_tokens, mm_features, unpruned, firsts)

    def recompute_mrope_positions(
        self,
        input_ids: list[int] | Tensor,
        multimodal_embeddings: Sequence[Tensor],
        mrope_positions: Tensor,
        num_computed_tokens: int,
    ) -> tuple[Sequence[Tensor], Tensor, int]:
        """Split position channels off the rows, and set the positions of this step's image tokens.

        Not by the stock method (``SupportsMultiModalPruning``): it moves text on by an image's
        width, which is wrong for one that is higher than wide. What decoding adds to the prompt's
        length was known before. Model Runner V1 has no way to leave it as it is, so there a prompt
        that ends in an image, without the token that closes it, goes on after the last kept token.
        """
        vision = self.autoprune
        assert isinstance(vision, _QwenVision)
        wide = vision.row_width + CHANNELS
        rows: list[Tensor] = []
        channels: list[Tensor] = []
        for embedding in multimodal_embeddings:
            if embedding.shape[1] == wide:
                channels.append(embedding[:, -CHANNELS:])
                embedding = embedding[:, :-CHANNELS]
            elif self.videos_share_token:
                # These tokens stay where they are.
                unplaced = embedding.new_full((len(embedding), CHANNELS), -1, dtype=torch.float32)
                channels.append(unplaced)
            rows.append(embedding)
        positions = mrope_positions
        if channels:
            ids = input_ids if isinstance(input_ids, Tensor) else torch.tensor(input_ids)
            image = self.config.image_token_id
            positions = _place_image_tokens(ids, positions, channels, image, num_computed_tokens)
        if isinstance(input_ids, Tensor):
            return rows, positions, UNCHANGED_DELTA
        return rows, positions, int(positions.max()) + 1 - len(input_ids)


# GLM-4.1V, GLM-4.5V and GLM-4.6V: as Qwen-VL, but for the processor's arithmetic and for videos,
# whose frames have the images' token.


class _GlmVision(_QwenVision):
    """The vision side of GLM-4.xV."""

    def find_merger(self) -> Merger:
        """The norm before the merger's convolution, which sees the last block's output."""
        norm = self._model.visual.post_layernorm
        return Merger(norm, self._model.config.vision_config.spatial_merge_size**2, norm)

    @staticmethod
    def count_tokens(
        info: Glm4vProcessingInfo, size: ImageSize, kwargs: Mapping[str, object]
    ) -> TokenCount:
        """Merged tokens of an image, resized as the processor resizes it."""
        processor = info.get_image_processor(**kwargs)
        options: dict[str, Any] = dict(info.ctx.get_merged_mm_kwargs(kwargs))
        patches = processor.get_number_of_image_patches(size.height, size.width, options)
        return TokenCount(patches // processor.merge_size**2)

    @staticmethod
    def shrink_to_budget(info: Glm4vProcessingInfo, size: ImageSize, budget: int) -> ImageSize:
        """The size that the processor's own arithmetic gives an image of at most K merged tokens.

        It counts the pixels of as many frames as one token spans, and leaves a very long and narrow
        image more than K tokens; the longer side of such an image is shortened further.
        """
        vision = info.get_hf_config().vision_config
        unit, frames = vision.patch_size * vision.spatial_merge_size, vision.temporal_patch_size
        height, width = glm_smart_resize(
            frames,
            size.height,
            size.width,
            temporal_factor=frames,
            factor=unit,
            min_pixels=unit**2,
            max_pixels=budget * frames * unit**2,
        )
        return type(size)(width=min(width, budget * unit), height=min(height, budget * unit))


class _PrunedGlm(_PrunedQwen):
    """Mixin before the stock classes."""

    autoprune_vision = _GlmVision
    videos_share_token = True


def _prune(stock: Any, *positions: str, merger: str = "", glm: bool = False) -> type[PrunedModel]:
    """The pruned form of one class; ``positions`` are names of its own beyond those of all."""
    calls = ("_parse_and_validate_image_input", "_process_image_input", "get_mrope_input_positions")
    vision, mixin = (_GlmVision, _PrunedGlm) if glm else (_QwenVision, _PrunedQwen)
    placeholders = Placeholders(
        vision.count_tokens,
        lambda info: TokenCount(info.get_max_image_tokens()),
        lambda info: info.get_hf_config().image_token_id,
        resize=vision.shrink_to_budget,
    )
    names = (*calls, *positions)
    return prune_class(stock, placeholders, vision, mixin, methods=names, merger=merger)


_ANEW = "recompute_mrope_positions"

AutopruneQwen2VLForConditionalGeneration = _prune(
    Qwen2VLForConditionalGeneration, merger="Qwen2VisionPatchMerger"
)
AutopruneQwen2_5_VLForConditionalGeneration = _prune(
    Qwen2_5_VLForConditionalGeneration, _ANEW, merger="Qwen2_5_VisionPatchMerger"
)
AutopruneQwen3VLForConditionalGeneration = _prune(
    Qwen3VLForConditionalGeneration, _ANEW, merger="Qwen3_VisionPatchMerger"
)
AutopruneQwen3VLMoeForConditionalGeneration = _prune(Qwen3VLMoeForConditionalGeneration, _ANEW)
AutopruneQwen3_5ForConditionalGeneration = _prune(Qwen3_5ForConditionalGeneration, _ANEW)
AutopruneQwen3_5MoeForConditionalGeneration = _prune(Qwen3_5MoeForConditionalGeneration, _ANEW)
AutopruneGlm4vForConditionalGeneration = _prune(Glm4vForConditionalGeneration, glm=True)
AutopruneGlm4vMoeForConditionalGeneration = _prune(Glm4vMoeForConditionalGeneration, glm=True)
