"""Any-resolution images: a base view, then crops stitched into one map with a newline a row.

Knows nothing about towers. The model's own code joins the crops; where each row came from is
learned by sending marks through it, so padding is cut off and rows are counted as the model does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_autoprune.serving.features import ImageFeatures, Region
from vllm_autoprune.tpdsl.tokens import Grid, VisualTokens

Join = Callable[[Tensor, Tensor], Tensor]
"""From tiles ``(T, n, C)`` and a newline ``(C,)`` to the rows ``(R, C)`` that the model makes."""


@dataclass(frozen=True, slots=True)
class Place:
    """A region of the joined rows: its layout, and the place ``(N,)`` of each token among them."""

    grid: Grid
    order: Tensor
    share: int


@dataclass(frozen=True, slots=True)
class Joined:
    """How an image's tiles become rows: the regions, and how many newlines there are."""

    places: tuple[Place, ...]
    newlines: int


def joined(join: Join, tiles: int, side: int) -> Joined:
    """What the model does with T tiles of ``side`` x ``side`` tokens.

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
        return Joined((Place(Grid(side, side), base, 1),), newlines)
    rows = size + torch.arange(height)[:, None] * (width + 1) + torch.arange(width)
    if height * width == (tiles - 1) * size and height % side == 0 and width % side == 0:
        cut = rows.view(height // side, side, width // side, side).transpose(1, 2)
        whole = torch.cat([base, cut.flatten()])
        return Joined((Place(Grid(side, side, tiles), whole, tiles),), newlines)
    first = Place(Grid(side, side), base, 1)
    return Joined((first, Place(Grid(height, width), rows.flatten(), tiles - 1)), newlines)


@dataclass(frozen=True, slots=True)
class Signals:
    """Of one image's T tiles: projected ``(T, n, D)``; attention ``(T, n)`` and patches
    ``(T, n, C)`` where somebody reads them."""

    projected: Tensor
    attention: Tensor | None = None
    patches: Tensor | None = None


def any_resolution(signals: Signals, join: Join, newline: Tensor, side: int) -> ImageFeatures:
    """One image of T tiles, with whatever is known of its tokens joined as the tokens are."""
    device = signals.projected.device
    layout = joined(join, signals.projected.shape[0], side)
    rows = join(signals.projected, newline)
    attention = None
    if signals.attention is not None:
        attention = join(signals.attention[:, :, None], signals.attention.new_zeros(1))[:, 0]
    patches = None
    if signals.patches is not None:
        patches = join(signals.patches, signals.patches.new_zeros(signals.patches.shape[2]))
    regions = []
    for place in layout.places:
        order = place.order.to(device, non_blocking=True)
        tokens = rows[order]
        regions.append(
            Region(
                place.grid,
                tokens,
                None if attention is None else attention[order],
                None if patches is None else patches[order],
                VisualTokens(tokens[None], place.grid).cosine[0],
                order=order,
                share=place.share,
            )
        )
    return ImageFeatures(tuple(regions), newline, layout.newlines)
