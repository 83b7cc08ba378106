"""Any-resolution images: a base view, then crops stitched into one map with a newline a row.

The model's own code joins the crops. The origin of each row is determined by sending marked tiles
through it, so padding is cut off and rows are counted as the model does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape

from vllm_autoprune.serving.models.vision import (
    EncoderInputs,
    ImageInputs,
    ModelImage,
    Tiles,
    split_by_image,
)
from vllm_autoprune.serving.worker.features import ImageFeatures, Region, TowerFeatures
from vllm_autoprune.tpdsl.tokens import Grid, VisualTokens

if TYPE_CHECKING:
    from vllm.model_executor.models.llava_next import LlavaNextLikeConfig

Join = Callable[[Tensor, Tensor], Tensor]
"""From tiles ``(T, n, C)`` and a newline ``(C,)`` to the rows ``(R, C)`` that the model makes."""

JoinOf = Callable[[ImageInputs], Join]
"""How the model joins the tiles of one image."""


@dataclass(frozen=True, slots=True)
class RegionLayout:
    """A region of the joined rows: its layout, and the position ``(N,)`` of each token."""

    grid: Grid
    order: Tensor
    share: int


@dataclass(frozen=True, slots=True)
class JoinedLayout:
    """Order of an image's rows: the regions, and the number of newlines."""

    places: tuple[RegionLayout, ...]
    newlines: int


def compute_joined_layout(join: Join, tiles: int, side: int) -> JoinedLayout:
    """Layout of the rows that the model makes of T tiles of ``side`` x ``side`` tokens.

    Where no padding was cut off, base view and crops are the T equal tiles that published
    policies split a budget over. Otherwise crops are one region of the shape that is left, and
    its share of a budget is that of the tiles it came from.
    """
    size = side * side
    marks = join(torch.zeros(tiles, size, 1), -torch.ones(1))[:, 0]
    newlines = int((marks < 0).sum())
    height = newlines
    width = (len(marks) - size) // newlines - 1 if newlines else 0
    base = torch.arange(size)
    if width < 1:
        return JoinedLayout((RegionLayout(Grid(side, side), base, 1),), newlines)
    rows = size + torch.arange(height)[:, None] * (width + 1) + torch.arange(width)
    if height * width == (tiles - 1) * size and height % side == 0 and width % side == 0:
        cut = rows.view(height // side, side, width // side, side).transpose(1, 2)
        whole = torch.cat([base, cut.flatten()])
        return JoinedLayout((RegionLayout(Grid(side, side, tiles), whole, tiles),), newlines)
    first = RegionLayout(Grid(side, side), base, 1)
    return JoinedLayout(
        (first, RegionLayout(Grid(height, width), rows.flatten(), tiles - 1)), newlines
    )


def count_tiles(config: LlavaNextLikeConfig, height: int, width: int) -> int:
    """Count the tiles of an image of this size: the base view and its crops."""
    rows, columns = get_anyres_image_grid_shape(
        (height, width), config.image_grid_pinpoints, config.vision_config.image_size
    )
    return 1 + int(rows * columns)


def _compute_layout(image: ImageInputs, join: Join, config: LlavaNextLikeConfig) -> JoinedLayout:
    """Layout of one image, by its size: processed beside a larger one, it has blank tiles as well.

    Those go through the tower, as in the stock model, and ``join`` leaves them out.
    """
    vision = config.vision_config
    tiles = count_tiles(config, *image["image_sizes"].tolist())
    return compute_joined_layout(join, tiles, vision.image_size // vision.patch_size)


def split_joined_images(
    inputs: EncoderInputs, join_of: JoinOf, config: LlavaNextLikeConfig
) -> list[ModelImage]:
    """The images of one call, each with its tiles, its size and its number of rows."""
    fields = {name: inputs[name] for name in ("pixel_values", "image_sizes")}
    split = []
    for one in split_by_image(fields):
        layout = _compute_layout(one, join_of(one), config)
        tokens = sum(place.grid.tokens for place in layout.places)
        split.append(ModelImage(one, tokens + layout.newlines))
    return split


def join_features(
    tiles: Tiles, image: ImageInputs, join_of: JoinOf, newline: Tensor, config: LlavaNextLikeConfig
) -> ImageFeatures:
    """Join the T tiles of one image; all per-token tensors are joined like the tokens."""
    join = join_of(image)
    layout = _compute_layout(image, join, config)
    rows = join(tiles.projected, newline)
    regions, first = [], 0
    for place in layout.places:
        order = place.order.to(rows.device, non_blocking=True)
        tokens = rows[order]
        regions.append(
            Region(
                place.grid,
                tokens,
                None if tiles.attention is None else _row(tiles.attention, join)[order],
                None if tiles.patches is None else _rows(tiles.patches, join)[order],
                VisualTokens(tokens[None], place.grid).cosine[0],
                None if tiles.tower is None else _tower(tiles.tower, join, place, order, first),
                order=order,
                share=place.share,
                encoder=None if tiles.encoder is None else _rows(tiles.encoder, join)[order],
            )
        )
        first += place.share
    return ImageFeatures(tuple(regions), newline, layout.newlines)


def _rows(tiles: Tensor, join: Join) -> Tensor:
    """Join a per-token tensor ``(T, n, C)`` like the tokens."""
    return join(tiles, tiles.new_zeros(tiles.shape[2]))


def _row(tiles: Tensor, join: Join) -> Tensor:
    return _rows(tiles[:, :, None], join)[:, 0]


def _tower(
    tower: TowerFeatures, join: Join, place: RegionLayout, order: Tensor, first: int
) -> TowerFeatures:
    """The tower's states of one region, whose tiles begin at ``first``."""
    cls = tower.cls[first : first + place.share, 0]
    # Crops that form one grid share one [CLS].
    cls = cls if place.grid.tiles == place.share else cls.mean(dim=0, keepdim=True)
    attention, keys = tower.next_attention, tower.next_keys
    return TowerFeatures(
        _rows(tower.patches, join)[order],
        cls.clone(),
        _rows(tower.keys, join)[order],
        None if attention is None else _row(attention, join)[order],
        None if keys is None else _rows(keys, join)[order],
    )
