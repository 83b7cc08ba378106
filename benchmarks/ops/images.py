"""Random images of a given size, and the sizes that are measured.

Knows nothing about what is measured. Torch alone.

Tokens are clustered, as those of a picture are, so that a kernel's rank is not all of N.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WIDTH, CLIP_WIDTH = 4096, 768
"""D of LLaVA-1.5-7B, and the width in which CLIP measures relevance."""

CLUSTERS = 48


@dataclass(frozen=True)
class Size:
    """A batch of images: n tokens in each of T tiles, of which K are kept in all tiles together."""

    per_tile: int
    tiles: int
    batch: int
    kept: int

    @property
    def tokens(self) -> int:
        """N, over all tiles."""
        return self.per_tile * self.tiles

    def __str__(self) -> str:
        tiles = "" if self.tiles == 1 else f" ({self.tiles} x {self.per_tile})"
        return f"{self.tokens}{tiles} → {self.kept}, batch {self.batch}"


@dataclass(frozen=True)
class Images:
    """Features ``(B, N, D)``, patches ``(B, N, C)``, text ``(B, 1, C)``, attention ``(B, N)``."""

    features: Tensor
    patches: Tensor
    text: Tensor
    cls_attention: Tensor


def size(per_tile: int, tiles: int = 1, batch: int = 1, share: int = 9) -> Size:
    """One token in ``share`` is kept; 9 is LLaVA-1.5's 64 of 576."""
    return Size(per_tile, tiles, batch, tiles * max(1, per_tile // share))


LLAVA = (Size(576, 1, 1, 32), Size(576, 1, 1, 64))
LLAVA_NEXT = (Size(576, 5, 1, 160), Size(576, 5, 1, 320), Size(576, 5, 1, 640))


def make(
    of: Size, *, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", seed: int = 0
) -> Images:
    """Images of that size: features as the server holds them, patches and text in float32."""
    source = torch.Generator().manual_seed(seed)

    def bell(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source)

    owner = torch.randint(CLUSTERS, (of.batch, of.tokens), generator=source)
    features = bell(CLUSTERS, WIDTH)[owner] + bell(of.batch, of.tokens, WIDTH)
    patches = bell(CLUSTERS, CLIP_WIDTH)[owner] + bell(of.batch, of.tokens, CLIP_WIDTH)
    return Images(
        features.to(device, dtype),
        patches.to(device),
        bell(of.batch, 1, CLIP_WIDTH).to(device),
        bell(of.batch, of.tokens).softmax(dim=1).to(device),
    )
