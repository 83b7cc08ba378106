"""Random visual tokens of a given number, and the sizes that are measured. Needs torch only.

Tokens are clustered like those of a picture, so that the kernel does not have full rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WIDTH, CLIP_WIDTH = 4096, 768
"""D of LLaVA-1.5-7B, and the width of CLIP's joint space."""

CLUSTERS = 48


@dataclass(frozen=True)
class Size:
    """A batch of images: n tokens in each of T tiles, K kept tokens over all tiles."""

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


def size_keeping(per_tile: int, tiles: int = 1, batch: int = 1, share: int = 9) -> Size:
    """The size where one token in ``share`` is kept (9: LLaVA-1.5's 64 of 576)."""
    return Size(per_tile, tiles, batch, tiles * max(1, per_tile // share))


LLAVA = (Size(576, 1, 1, 32), Size(576, 1, 1, 64))
LLAVA_NEXT = (Size(576, 5, 1, 160), Size(576, 5, 1, 320), Size(576, 5, 1, 640))


def draw_images(
    size: Size, *, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", seed: int = 0
) -> Images:
    """Random images: features in the server's dtype, patches and text in float32."""
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source)

    owner = torch.randint(CLUSTERS, (size.batch, size.tokens), generator=source)
    features = normal(CLUSTERS, WIDTH)[owner] + normal(size.batch, size.tokens, WIDTH)
    patches = normal(CLUSTERS, CLIP_WIDTH)[owner] + normal(size.batch, size.tokens, CLIP_WIDTH)
    return Images(
        features.to(device, dtype),
        patches.to(device),
        normal(size.batch, 1, CLIP_WIDTH).to(device),
        normal(size.batch, size.tokens).softmax(dim=1).to(device),
    )
