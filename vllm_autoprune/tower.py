"""Vision towers: their sizes, and the FLOPs of encoding an image."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NO_MATRIX = re.compile(
    r"language_model|text_model|lm_head|pos_embed|position|cls_token"
)
"""Names of weights that are not counted: the language model's, position and [CLS] embeddings."""
_OF_PATCHES = re.compile(r"\.(?:blocks|layers?)\.(\d+)\.|patch_(?:embed|conv)")
"""Names of weights that are applied to each patch; others are applied to each visual token."""


@dataclass(frozen=True, slots=True)
class VisionTower:
    """Sizes of a vision tower with its projector."""

    layers: int
    """Number of layers that are run; all have attention between patches."""
    width: int
    weights: int
    """Number of weights that are applied to each patch, over all layers."""
    projector: int
    """Number of weights that are applied to each visual token, in projector or patch mergers."""
    patches: int = 4
    """Patches that become one visual token, in a tower that takes images of any size."""
    tile_side: int = 0
    """Side of a tile in patches, in a tower that takes tiles of one size; 0 in other towers."""
    cls_tokens: int = 0
    """[CLS] tokens of a tile."""
    window: int = 0
    """Patches in an attention window; 0 if all layers attend to the whole image."""
    full_layers: int = 0
    """Number of layers that attend to the whole image, in a tower with windows."""

    def count_flops(self, tokens: int, tiles: int = 1) -> int:
        """FLOPs of encoding an image of N = ``tokens`` visual tokens in ``tiles`` tiles."""
        runs = 1
        patches = self.patches * tokens
        if self.tile_side:
            runs = tiles
            patches = self.tile_side**2 + self.cls_tokens
        full = self.full_layers if self.window else self.layers
        attended = full * patches + (self.layers - full) * self.window
        macs = patches * (self.weights + 2 * attended * self.width)
        return 2 * (runs * macs + tokens * self.projector)

    @classmethod
    def of_config(
        cls, config: PretrainedConfig, like: VisionTower | None = None
    ) -> VisionTower:
        """Count the weights of a checkpoint's tower, without allocating them.

        ``like`` is the tower of another checkpoint of the family; how images become patches,
        tiles and [CLS] tokens is taken from it.
        """
        import torch
        from transformers import AutoModelForImageTextToText

        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config)
        vision = config.vision_config
        layers = vars(vision).get("depth") or vision.num_hidden_layers
        # -2 selects the output of the last layer but one, so the last layer is not run.
        feature = vars(config).get("vision_feature_layer", -1)
        layers += min(0, feature + 1) if isinstance(feature, int) else 0
        weights = 0
        projector = 0
        for name, weight in model.named_parameters():
            if weight.dim() < 2 or _NO_MATRIX.search(name):
                continue
            if found := _OF_PATCHES.search(name):
                is_run = found[1] is None or int(found[1]) < layers
                weights += weight.numel() * is_run
            else:
                projector += weight.numel()
        window = vars(vision).get("window_size", 0)
        tile_side = 0
        if like is not None and like.tile_side:
            tile_side = _find_side(vision.image_size) // _find_side(vision.patch_size)
        return cls(
            layers=layers,
            width=vars(vision).get("embed_dim") or vision.hidden_size,
            weights=weights,
            projector=projector,
            patches=like.patches if like else 4,
            tile_side=tile_side,
            cls_tokens=like.cls_tokens if like else 0,
            window=(window // vision.patch_size) ** 2 if window else 0,
            full_layers=len(vars(vision).get("fullatt_block_indexes", ())),
        )


def _find_side(size: int | Sequence[int]) -> int:
    """Side of a square; some configurations give it as height and width."""
    return size if isinstance(size, int) else size[0]
