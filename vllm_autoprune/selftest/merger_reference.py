"""What enters the patch merger in transformers, to compare with what the plugin reads in vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from vllm_autoprune.serving.worker.features import ImageFeatures


def has_merger(llm: Any) -> bool:
    """Whether the plugin can rank tokens before a patch merger of the engine's model."""
    from vllm_autoprune.serving.models import BACKBONES

    config = llm.llm_engine.model_config
    backbone = BACKBONES[config.architecture]
    return not backbone.input_problems(config.hf_config, ["merger_input"])


@torch.no_grad()
def measure_merger_error(folder: Path, image: Image.Image, features: ImageFeatures) -> float:
    """Largest error of a token's row or norms, relative to how much tokens differ.

    Of the features that an engine made of the image, against transformers in float32.
    """
    rows = [region.encoder for region in features.regions if region.encoder is not None]
    norms = [region.merger_norms for region in features.regions if region.merger_norms is not None]
    errors = []
    for parts, expected in zip((rows, norms), _read_merger_input(folder, image), strict=True):
        found = torch.cat(parts)
        deviation = (expected - expected.mean(dim=0)).pow(2).mean(dim=0).sum().sqrt()
        errors.append((found - expected).norm(dim=1).max() / deviation)
    return float(torch.stack(errors).max())


def _read_merger_input(folder: Path, image: Image.Image) -> tuple[Tensor, Tensor]:
    """Rows ``(N, C)`` and norms ``(N, 2)`` of one image, in raster order."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).model
    processor = AutoProcessor.from_pretrained(folder).image_processor
    inputs = processor(images=[image], return_tensors="pt")
    entering: dict[str, Tensor] = {}

    def record(name: str, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda _, args: entering.update({name: args[0]}))

    if not hasattr(model, "visual"):  # InternVL and Idefics3: shuffled tiles (T, n, patches * C)
        shuffled = (
            model.multi_modal_projector
            if hasattr(model, "multi_modal_projector")
            else model.connector.modality_projection
        )
        record("merger", shuffled)
        model.get_image_features(pixel_values=inputs["pixel_values"])
        tokens = entering["merger"].flatten(0, 1)
        norms = torch.stack([tokens.abs().sum(dim=1), tokens.pow(2).sum(dim=1).sqrt()], dim=1)
        width = model.config.vision_config.hidden_size
        return tokens.unflatten(1, (-1, width)).mean(dim=1), norms

    visual, grid = model.visual, inputs["image_grid_thw"]
    # GLM-4.xV merges by a convolution behind a norm.
    record("merger", visual.post_layernorm if hasattr(visual, "downsample") else visual.merger)
    first = "merger"
    if hasattr(visual, "deepstack_merger_list"):
        first = "deepstack"
        record(first, visual.deepstack_merger_list[0])
    visual(inputs["pixel_values"], grid_thw=grid)
    width = entering["merger"].shape[-1]
    rows, scored = (entering[name].reshape(-1, 4, width) for name in ("merger", first))
    if window := getattr(visual.config, "window_size", 0):  # Qwen2.5-VL works in window order
        _, height, width = (grid[0] // visual.config.spatial_merge_size).tolist()
        side = window // (visual.config.spatial_merge_size * visual.config.patch_size)
        order = _window_order(height, width, side).argsort()
        rows, scored = rows[order], scored[order]
    sizes = torch.stack([scored.abs().sum(dim=2), scored.pow(2).sum(dim=2).sqrt()], dim=2)
    return rows.mean(dim=1), sizes.mean(dim=1)


def _window_order(height: int, width: int, side: int) -> Tensor:
    """Raster places of a grid's tokens, window by window."""
    return torch.tensor(
        [
            row * width + column
            for top in range(0, height, side)
            for left in range(0, width, side)
            for row in range(top, min(top + side, height))
            for column in range(left, min(left + side, width))
        ]
    )
