"""mini-InternVL with transformers: tiles and a thumbnail, pruned before the language model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from benchmarks.yardsticks.tiled_yardstick import TiledYardstick
from benchmarks.yardsticks.tiles import TILE_TOKENS, order_patches
from benchmarks.yardsticks.yardstick import place_on_line


class MiniIntern(TiledYardstick):
    """mini-InternVL: any rows can take the place of an image of one or three tiles."""

    name = "mini-InternVL"
    key = "miniintern"
    usual_tokens = 3 * TILE_TOKENS
    available = frozenset(
        ("cls_attention", "instruction", "encoder", "merger_input", "words")
    )
    has_one_axis = True
    before_patches = 1  # [CLS]

    def project(self, patches: Tensor) -> Tensor:
        """Rows (N, D) of the states of a token's patches, joined."""
        joined = order_patches(patches).flatten(2).flatten(0, 1)
        rows: Tensor = self.network.model.multi_modal_projector(joined)
        return rows

    def arrange(
        self, places: Tensor | None, count: int, kept: int, lead: int, tail: int
    ) -> Mapping[str, object]:
        """Positions of rows at their places, if they have any."""
        return {} if places is None else place_on_line(places, count, lead, tail)
