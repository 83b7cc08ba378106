"""TowerStates: hidden states of the vision tower, before the projector.

Shapes as in :mod:`vllm_autoprune.tpdsl.tokens`; Dv is the tower's width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class NextLayer:
    """Attention of the layer after the one that the projector reads, computed as a single head.

    attention ``(B, N)``: the [CLS] row of softmax(q k^T / sqrt(Dv)) over [CLS] and the patches of
    a tile, without the entry of [CLS]; for towers without [CLS] the mean over all queries. keys
    ``(B, N, Dv)``: the keys of all heads, concatenated.
    """

    attention: Tensor
    keys: Tensor


@dataclass(frozen=True)
class TowerStates:
    """Output of the vision-tower layer that the projector reads.

    patches ``(B, N, Dv)``; cls ``(B, T, Dv)``, None if the tower has no [CLS]; keys ``(B, N, dk)``,
    the attention keys of that layer averaged over heads; project is the model's projector, from
    rows ``(..., Dv)`` to ``(..., D)``.
    """

    patches: Tensor
    keys: Tensor
    project: Callable[[Tensor], Tensor]
    cls: Tensor | None = None
    next_layer: NextLayer | None = None

    def projected(self, rows: Tensor) -> Tensor:
        """Project rows ``(R, m, Dv)`` to ``(R, m, D)``.

        One of the R at a time, so that results are bit-identical alone and in a batch.
        """
        return torch.stack([self.project(part) for part in rows])
