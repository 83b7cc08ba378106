"""Features that rank tokens before the patch merger, against what enters it in transformers."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from vllm_autoprune.selftest.backbones import ORIGINAL
from vllm_autoprune.serving.worker.features import ImageFeatures, Signal
from vllm_autoprune.tpdsl.tokens import Grid

_MERGER_INPUT: tuple[Signal, Signal] = ("encoder", "merger_norms")
_TOWER_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "image_sizes",
    "image_position_ids",
    "spatial_shapes",
    "pixel_attention_mask",
)
"""Inputs of ``get_image_features``, for models that take them."""


@torch.no_grad()
def measure_merger_error(
    folder: Path, image: Image.Image, features: ImageFeatures, merger: Mapping[str, Any]
) -> float:
    """Largest error of a token's row or norms, relative to how much tokens differ.

    ``features`` are those that an engine made of the image; the reference is transformers in
    float32. ``merger`` is the model's entry in ``tiny_models.toml``.
    """
    orders = [region.order for region in features.regions if region.order is not None]
    expected = _read_merger_input(folder, image, merger, features.regions[0].grid)
    errors = []
    for signal, rows in zip(_MERGER_INPUT, expected, strict=True):
        ranked = torch.cat([region.signals[signal] for region in features.regions])
        if orders:
            ranked = ranked[torch.cat(orders).argsort()]
        deviation = (rows - rows.mean(dim=0)).pow(2).mean(dim=0).sum().sqrt()
        errors.append((ranked - rows).norm(dim=1).max() / deviation)
    return float(torch.stack(errors).max())


def _read_merger_input(
    folder: Path, image: Image.Image, merger: Mapping[str, Any], grid: Grid
) -> tuple[Tensor, Tensor]:
    """Rows ``(N, C)`` and norms ``(N, 2)`` of one image, in raster order, by transformers.

    ``grid`` is the grid of an image without tiles.
    """
    import transformers

    if (folder / ORIGINAL).exists():
        folder = folder / ORIGINAL
    # By name, because vLLM puts configurations of its own in the place of transformers'.
    config = json.loads((folder / "config.json").read_text())
    architecture = getattr(transformers, config["architectures"][0])
    model = architecture.from_pretrained(folder, dtype=torch.float32)
    inputs = transformers.AutoProcessor.from_pretrained(folder).image_processor(
        [image], return_tensors="pt"
    )
    inputs = inputs.to(torch.float32)  # Llama 4's are in bfloat16
    entering = defaultdict[str, list[Tensor]](list)
    for part in merger.keys() & {"module", "scored"}:

        def record(
            _: nn.Module,
            args: Sequence[Tensor],
            named: Mapping[str, Tensor],
            part: str = part,
        ) -> None:
            patches = [*args, *named.values()][0].flatten(0, -2)
            entering[part].append(patches)  # some models call it for each tile

        module = attrgetter(merger[part])(model)
        module.register_forward_pre_hook(record, with_kwargs=True)
    model.get_image_features(
        **{name: inputs[name] for name in _TOWER_INPUTS if name in inputs}
    )
    order = merger.get("order", "cells")
    vision = model.config.vision_config

    def split(patches: Tensor) -> Tensor:
        """Patches of each token ``(N, patches, C)``, in raster order."""
        cells: Tensor
        if order == "joined":
            cells = patches.unflatten(1, (-1, vision.hidden_size))
        elif order == "channels":
            cells = patches.unflatten(1, (vision.hidden_size, -1)).transpose(1, 2)
        elif order == "raster":
            side = merger.get("side", 2)
            patches = patches[: grid.tokens * side**2]  # without what fills them up
            squares = patches.unflatten(0, (grid.height, side, -1, side))
            cells = squares.transpose(1, 2).flatten(0, 1).flatten(1, 2)
        else:
            cells = patches.unflatten(0, (-1, 4))
        if order == "windows":
            from transformers.vision_utils import get_vision_window_index

            unit = (vision.spatial_merge_size, vision.window_size, vision.patch_size)
            window_index = get_vision_window_index(inputs["image_grid_thw"], *unit)[0]
            cells = cells[window_index.argsort()]
        return cells

    entered = {part: torch.cat(patches) for part, patches in entering.items()}
    scored = entered.get("scored", entered["module"])
    # A token whose patches are joined has the norms of its single row.
    rows = scored[:, None] if order in ("joined", "channels") else split(scored)
    norms = torch.stack([rows.norm(1, dim=2), rows.norm(dim=2)], dim=2).mean(dim=1)
    return split(entered["module"]).mean(dim=1), norms
