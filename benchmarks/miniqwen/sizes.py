"""Image sizes in visual tokens, and the size that the processor gives a smaller pixel budget."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from benchmarks.minillava.layout import PATCH

MERGE = 2
TOKEN = PATCH * MERGE
"""Pixels per side that one visual token covers."""

MAX_TOKENS = 1024
"""Tokens of the largest image that the processor does not shrink."""


@dataclass(frozen=True)
class Size:
    """An image of `rows` x `columns` visual tokens of 28 x 28 pixels each."""

    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        """Visual tokens in total, N."""
        return self.rows * self.columns

    @property
    def height(self) -> int:
        """Height in pixels."""
        return self.rows * TOKEN

    @property
    def width(self) -> int:
        """Width in pixels."""
        return self.columns * TOKEN


# Multiples of three tokens, so that scenes are whole cells of three patches.
SIZES = (Size(6, 6), Size(6, 9), Size(9, 6), Size(6, 12), Size(12, 6), Size(9, 9), Size(9, 12))

# Sizes that occur in the test split only.
UNSEEN_SIZES = (Size(12, 9), Size(6, 15))


def shrink_size(size: Size, budget: int) -> Size:
    """The size that the image processor gives an image of `size` limited to `budget` tokens."""
    height, width = smart_resize(
        size.height, size.width, TOKEN, TOKEN * TOKEN, budget * TOKEN * TOKEN
    )
    return Size(height // TOKEN, width // TOKEN)
