"""Vision side of Qwen-VL models: image features, attention, merger input."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration

from vllm_autoprune.serving.models.vision import EncoderInputs, ImageInputs, ModelImage, Vision
from vllm_autoprune.serving.worker.attention_hook import AttentionHook
from vllm_autoprune.serving.worker.features import ImageFeatures, Region
from vllm_autoprune.serving.worker.merger_hook import MergerHook
from vllm_autoprune.serving.worker.mrope import position_channels
from vllm_autoprune.tpdsl.tokens import Grid

if TYPE_CHECKING:
    from vllm_autoprune.serving.shared.served_state import ServedState

_DEEPSTACK = Qwen3VLForConditionalGeneration
"""Has rows for later layers beside those of the first; they are pruned alike."""


class QwenVision(Vision):
    """The vision side of all of them: tokens, deepstack levels and positions of each image."""

    _model: Qwen2_5_VLForConditionalGeneration

    def __init__(self, model: Qwen2_5_VLForConditionalGeneration, served: ServedState) -> None:
        super().__init__(model, served)
        self._merge: int = model.config.vision_config.spatial_merge_size
        self._width: int = model.get_language_model().config.hidden_size
        levels = model.deepstack_num_level if isinstance(model, _DEEPSTACK) else 0
        self.row_width = self._width * (1 + levels)
        reads = "cls_attention" in self.needs
        self._attention_hook = AttentionHook(_last_whole(model.visual).attn.attn) if reads else None
        self._merger_hook = self.merger_hook(self._merge**2) if self.reads_encoder else None

    @staticmethod
    def tower(model: Qwen2_5_VLForConditionalGeneration) -> nn.Module:
        """The model's vision tower."""
        tower: nn.Module = model.visual
        return tower

    def merger_hook(self, patches: int) -> MergerHook:
        """Hook on the merger of the last block; norms are taken at the first deepstack merger."""
        visual = self._model.visual
        if isinstance(self._model, _DEEPSTACK):
            first = next(iter(visual.deepstack_merger_list), visual.merger)
            return MergerHook(visual.merger, patches, first)
        # vLLM calls Qwen2.5-VL's merger past its hooks; its norm comes first, and sees the same.
        norm = visual.merger.ln_q
        return MergerHook(norm, patches, norm)

    def images(self, inputs: EncoderInputs) -> list[ModelImage]:
        """Split the images of one call, whose patches come in one tensor."""
        grids = inputs["image_grid_thw"]
        assert isinstance(grids, Tensor)
        sizes = grids.prod(-1).tolist()
        field = "pixel_values" if "pixel_values" in inputs else "image_embeds"
        rows = inputs[field]
        assert isinstance(rows, Tensor)
        unit = self._merge**2
        counts = sizes if field == "pixel_values" else [size // unit for size in sizes]
        return [
            ModelImage({field: part, "image_grid_thw": grid}, size // unit)
            for part, grid, size in zip(rows.split(counts), grids, sizes, strict=True)
        ]

    def encode(self, images: Sequence[ImageInputs]) -> list[ImageFeatures]:
        """Encode images; tokens are selected by the first D channels of each row."""
        grids = torch.stack([image["image_grid_thw"] for image in images])
        pixels = torch.cat([image["pixel_values"] for image in images])
        with ExitStack() as stack:
            for hook in (self._attention_hook, self._merger_hook):
                if hook is not None:
                    stack.enter_context(hook.recording())
            rows = self._encode_patches(pixels, grids)
        back = self._raster_order(grids)
        attention, merger_input = self._attention(grids, back), self._merger_input(grids, back)
        features = []
        for i, (whole, (_, height, width)) in enumerate(zip(rows, grids.tolist(), strict=True)):
            grid = Grid(height // self._merge, width // self._merge)
            tokens, levels = whole[:, : self._width].clone(), whole[:, self._width :]
            places = position_channels(grid.height, grid.width, whole.device).to(whole.dtype)
            encoder, norms = (None, None) if merger_input is None else merger_input[i]
            region = Region(
                grid,
                tokens,
                None if attention is None else attention[i],
                None,
                self.cosine(tokens, encoder, grid),
                extra_channels=torch.cat([levels, places], dim=1),
                encoder=encoder,
                merger_norms=norms if "merger_input" in self.needs else None,
            )
            features.append(ImageFeatures((region,)))
        return features

    def _encode_patches(self, pixels: Tensor, grids: Tensor) -> Sequence[Tensor]:
        """Rows of each image ``(N, D + E)``, by the stock model or its CUDA graphs."""
        if self.graphs is not None:
            return self.graphs({"pixel_values": pixels, "image_grid_thw": grids})
        checked = self._model._parse_and_validate_image_input(
            pixel_values=pixels, image_grid_thw=grids
        )
        assert checked is not None
        rows: Sequence[Tensor] = self._model._process_image_input(checked)
        return rows

    def embeddings_with_positions(self, inputs: EncoderInputs) -> list[Tensor]:
        """Precomputed embeddings, unpruned, with positions appended."""
        all_rows = []
        for image in self.images(inputs):
            rows = image.inputs["image_embeds"].to(self._model.visual.dtype)
            _, height, width = image.inputs["image_grid_thw"].tolist()
            places = position_channels(height // self._merge, width // self._merge, rows.device)
            all_rows.append(torch.cat([rows, places.to(rows.dtype)], dim=1))
        return all_rows

    def _attention(self, grids: Tensor, back: Tensor | None) -> list[Tensor] | None:
        """Attention that each merged token gets ``(N,)``: the mean of its patches."""
        if self._attention_hook is None:
            return None
        unit = self._merge**2
        received = [
            part.view(-1, unit).mean(dim=1)
            for part in self._attention_hook.take(grids.prod(-1).tolist())
        ]
        if back is None:
            return received
        joined = torch.cat(received)[back]
        return [own.clone() for own in joined.split([len(part) for part in received])]

    def _merger_input(
        self, grids: Tensor, back: Tensor | None
    ) -> list[tuple[Tensor, Tensor]] | None:
        """What enters the merger, of each image: rows ``(N, Dv)`` and norms ``(N, 2)``."""
        if self._merger_hook is None:
            return None
        sizes = (grids.prod(-1) // self._merge**2).tolist()
        parts = [part if back is None else part[back] for part in self._merger_hook.take()]
        rows, norms = ([own.clone() for own in part.split(sizes)] for part in parts)
        return list(zip(rows, norms, strict=True))

    def _raster_order(self, grids: Tensor) -> Tensor | None:
        """Places of the tokens in the tower's own order; None where that is the image's."""
        hooks = (self._attention_hook, self._merger_hook)
        if hooks == (None, None):
            return None
        if not isinstance(self._model, Qwen2_5_VLForConditionalGeneration):
            return None
        # This tower processes patches in window order.
        metadata = self._model.visual.prepare_encoder_metadata(grids.tolist())
        return metadata["reverse_indices"].to(self.sample_weight.device, non_blocking=True)


def _last_whole(tower: Any) -> Any:
    """The last block in which every patch of an image sees every other."""
    if "fullatt_block_indexes" in vars(tower):
        return tower.blocks[max(tower.fullatt_block_indexes)]
    return tower.blocks[-1]
