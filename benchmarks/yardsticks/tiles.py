"""Pictures that mini-InternVL's processor cuts into square tiles, followed by a thumbnail.

A tile has six by six visual tokens. The sides of a picture are multiples of a tile, so its tiles
are not resized. Texts and shapes lie within one tile each.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.yardsticks.pages import MERGE, NUMBERS, TOKEN, Page, PageStyle, Size
from benchmarks.yardsticks.scenes import WORDS, normalize_pixels

SIDE = 6
"""Side of a tile in tokens."""
TILE = SIDE * TOKEN
"""Side of a tile in pixels."""
TILE_TOKENS = SIDE**2


@dataclass(frozen=True)
class TiledSize(Size):
    """The size of a picture of tiles; ``rows`` and ``columns`` are those of its tiles' tokens.

    Tokens are in raster order within a tile. Tiles are in raster order, and the thumbnail, which
    shows the whole picture in one tile, is the last. A picture of a single tile has no thumbnail.
    """

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        return self.rows // SIDE, self.columns // SIDE

    @property
    def views(self) -> int:
        """Number of tiles and thumbnails."""
        rows, columns = self.tiles
        return rows * columns + self.copies - 1

    @property
    def tokens(self) -> int:
        """Visual tokens in total, N."""
        return self.views * TILE_TOKENS

    @property
    def copies(self) -> int:
        """Number of tokens that show the same place: in a tile and in the thumbnail."""
        return 1 if self.tiles == (1, 1) else 2

    def token(self, row: int, column: int) -> int:
        """Index of the token of a tile that shows a place."""
        tile = row // SIDE * self.tiles[1] + column // SIDE
        return tile * TILE_TOKENS + row % SIDE * SIDE + column % SIDE

    def tokens_at(self, row: int, column: int) -> Sequence[int]:
        """Indices of the tokens of a tile and of the thumbnail that show a place."""
        rows, columns = self.tiles
        thumbnail = (
            (self.views - 1) * TILE_TOKENS + row // rows * SIDE + column // columns
        )
        return (self.token(row, column), thumbnail)[: self.copies]

    def draw_page(
        self, rng: random.Random, style: PageStyle, max_words: int = len(WORDS)
    ) -> Page:
        """Draw a page of one list or table in each tile, of words and numbers of its own."""
        tiles = [*product(*map(range, self.tiles))]
        names = rng.sample(range(len(WORDS)), len(WORDS))
        values = rng.sample(NUMBERS, len(NUMBERS))
        parts = [
            Page.draw(
                rng,
                style,
                Size(SIDE, SIDE),
                max_words // len(tiles),
                names[index :: len(tiles)],
                values[index :: len(tiles)],
            ).move(row * SIDE, column * SIDE)
            for index, (row, column) in enumerate(tiles)
        ]
        return Page(
            style,
            self,
            tuple(word for part in parts for word in part.words),
            tuple(number for part in parts for number in part.numbers),
            tuple(other for part in parts for other in part.nonsense),
        )

    def split_tiles(self, images: Tensor) -> Tensor:
        """Normalised tiles and thumbnails (B, V, 3, TILE, TILE) of images (B, 3, H, W) uint8."""
        rows, columns = self.tiles
        view = images.view(len(images), 3, rows, TILE, columns, TILE)
        tiles = view.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
        if self.copies > 1:
            resized = F.interpolate(
                images.float(), (TILE, TILE), mode="bicubic", antialias=True
            )
            thumbnail = resized.round().clamp(0, 255).to(torch.uint8)
            tiles = torch.cat((tiles, thumbnail[:, None]), 1)
        return normalize_pixels(tiles.flatten(0, 1)).unflatten(0, tiles.shape[:2])

    def frames(self) -> list[tuple[tuple[float, float], tuple[float, float]]]:
        """Scale (x, y) and offset (x, y) from pixels of the picture to those of every view."""
        rows, columns = self.tiles
        frames = [
            ((1.0, 1.0), (float(column * TILE), float(row * TILE)))
            for row, column in product(range(rows), range(columns))
        ]
        if self.copies > 1:
            frames.append(((1 / columns, 1 / rows), (0.0, 0.0)))
        return frames


SIZES = (TiledSize(SIDE, SIDE), TiledSize(SIDE, 2 * SIDE), TiledSize(2 * SIDE, SIDE))
"""Sizes of all pictures: one tile, two side by side, two one above the other."""


def order_patches(states: Tensor) -> Tensor:
    """Raster patches (M, n · MERGE², C) of tiles by token: (M, n, MERGE², C).

    The patches of a token are in the order in which pixel shuffle joins their channels.
    """
    view = states.unflatten(1, (SIDE, MERGE, SIDE, MERGE))
    return view.transpose(2, 3).flatten(3, 4).flatten(1, 2)
