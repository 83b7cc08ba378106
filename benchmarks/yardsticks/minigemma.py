"""mini-Gemma with transformers: one square of pooled tokens, pruned before the language model.

Kept tokens see each other, as in vLLM on a GPU; on a CPU its attention has no such mask, and each
sees those before it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.yardsticks.tiled_yardstick import TiledYardstick
from benchmarks.yardsticks.tiles import SQUARE


class MiniGemma(TiledYardstick):
    """mini-Gemma: any rows can take the place of an image.

    Rows are always packed, as in a server: some layers have sliding windows, which reach back by
    tokens and not by positions.
    """

    name = "mini-Gemma"
    key = "minigemma"
    usual_tokens = SQUARE.tokens
    available = frozenset(("cls_attention", "instruction", "words"))

    def project(self, patches: Tensor) -> Tensor:
        """Rows (N, D) of the mean state of a token's patches."""
        rows: Tensor = self.network.model.multi_modal_projector(patches)
        return rows.flatten(0, 1)

    def arrange(
        self, places: Tensor | None, count: int, kept: int, lead: int, tail: int
    ) -> Mapping[str, object]:
        """Mask (1, 1, T, T) of all layers: text sees what is before it, rows each other as well.

        No prompt is as long as a sliding window.
        """
        length = lead + kept + tail
        allowed = torch.ones(length, length, dtype=torch.bool).tril()
        allowed[lead : lead + kept, lead : lead + kept] = True
        mask = torch.zeros(length, length).masked_fill_(~allowed, -torch.inf)
        return {"attention_mask": mask[None, None]}
