"""From picks within tiles to picks within the image.

Knows nothing about how tiles are laid out in the picture.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_autoprune.tpdsl.tokens import VisualTokens


def join_tiles(picks: Tensor, tokens: VisualTokens, shares: Sequence[int]) -> Tensor:
    """Picks ``(B * T, max share)`` within tiles as picks ``(B, K)`` within images.

    Selection is nested (the first k picks do not depend on how many follow), so a tile with a
    smaller share drops its last pick. Picks interleave over tiles by rank, so that the order
    still means confidence.
    """
    tiles, size = tokens.grid.tiles, tokens.grid.per_tile
    if tiles == 1:
        return picks
    offset = torch.arange(tiles, device=picks.device)[:, None] * size
    by_rank = (picks.reshape(tokens.batch, tiles, -1) + offset).transpose(1, 2)
    flat = by_rank.reshape(tokens.batch, -1)
    return flat[:, : sum(shares)]
