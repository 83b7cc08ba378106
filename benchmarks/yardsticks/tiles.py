"""Pictures of one or more square tiles, which processors do not resize.

mini-InternVL's processor cuts pictures into tiles of six by six visual tokens, followed by a
thumbnail; texts and shapes lie within one tile each. A picture of mini-Gemma is a single tile of
nine by nine tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import isqrt

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.yardsticks.pages import MERGE, NUMBERS, TOKEN, Page, PageStyle, Size
from benchmarks.yardsticks.scenes import CELL_PATCHES, WORDS, normalize_pixels

SIDE = 6
"""Side of mini-InternVL's tiles in tokens."""
TILE = SIDE * TOKEN
"""Side of mini-InternVL's tiles in pixels."""
TILE_TOKENS = SIDE**2


@dataclass(frozen=True)
class TiledSize(Size):
    """The size of a picture of tiles; ``rows`` and ``columns`` are those of its tiles' tokens.

    ``side`` is that of a tile, in tokens.
    Tokens are in raster order within a tile. Tiles are in raster order, and the thumbnail, which
    shows the whole picture in one tile, is the last. A picture of a single tile has no thumbnail.
    """

    side: int = SIDE

    @property
    def tile_pixels(self) -> int:
        """Side of a tile in pixels."""
        return self.side * TOKEN

    @property
    def tile_cells(self) -> int:
        """Rows, and columns, of a scene's cells in a tile."""
        return self.side * MERGE // CELL_PATCHES

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        return self.rows // self.side, self.columns // self.side

    @property
    def views(self) -> int:
        """Number of tiles and thumbnails."""
        rows, columns = self.tiles
        return rows * columns + self.copies - 1

    @property
    def tokens(self) -> int:
        """Visual tokens in total, N."""
        return self.views * self.side**2

    @property
    def copies(self) -> int:
        """Number of tokens that show the same place: in a tile and in the thumbnail."""
        return 1 if self.tiles == (1, 1) else 2

    def token(self, row: int, column: int) -> int:
        """Index of the token of a tile that shows a place."""
        side = self.side
        tile = row // side * self.tiles[1] + column // side
        return tile * side**2 + row % side * side + column % side

    def tokens_at(self, row: int, column: int) -> Sequence[int]:
        """Indices of the tokens of a tile and of the thumbnail that show a place."""
        rows, columns = self.tiles
        row_of_thumbnail = (self.views - 1) * self.side + row // rows
        thumbnail = row_of_thumbnail * self.side + column // columns
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
                Size(self.side, self.side),
                max_words // len(tiles),
                names[index :: len(tiles)],
                values[index :: len(tiles)],
            ).move(row * self.side, column * self.side)
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
        """Normalised tiles and thumbnails (B, V, 3, S, S) of images (B, 3, H, W) uint8."""
        rows, columns = self.tiles
        side = self.tile_pixels
        view = images.view(len(images), 3, rows, side, columns, side)
        tiles = view.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
        if self.copies > 1:
            resized = F.interpolate(
                images.float(), (side, side), mode="bicubic", antialias=True
            )
            thumbnail = resized.round().clamp(0, 255).to(torch.uint8)
            tiles = torch.cat((tiles, thumbnail[:, None]), 1)
        return normalize_pixels(tiles.flatten(0, 1)).unflatten(0, tiles.shape[:2])

    def frames(self) -> list[tuple[tuple[float, float], tuple[float, float]]]:
        """Scale (x, y) and offset (x, y) from pixels of the picture to those of every view."""
        rows, columns = self.tiles
        side = float(self.tile_pixels)
        frames = [
            ((1.0, 1.0), (column * side, row * side))
            for row, column in product(range(rows), range(columns))
        ]
        if self.copies > 1:
            frames.append(((1 / columns, 1 / rows), (0.0, 0.0)))
        return frames


SIZES = (TiledSize(SIDE, SIDE), TiledSize(SIDE, 2 * SIDE), TiledSize(2 * SIDE, SIDE))
"""Sizes of mini-InternVL's pictures: one tile, two side by side, two one above the other."""
SQUARE = TiledSize(9, 9, side=9)
"""Size of all of mini-Gemma's pictures."""


def order_patches(states: Tensor) -> Tensor:
    """Raster patches (M, n · MERGE², C) of tiles by token: (M, n, MERGE², C).

    The patches of a token are in the order in which pixel shuffle joins their channels.
    """
    side = isqrt(states.shape[1]) // MERGE
    view = states.unflatten(1, (side, MERGE, side, MERGE))
    return view.transpose(2, 3).flatten(3, 4).flatten(1, 2)
