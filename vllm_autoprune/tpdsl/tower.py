"""TowerStates: what a vision tower knows of its tokens before the projector.

Knows nothing about how a tower is run; policies that merge tokens or read keys ask for it.

Shapes as in :mod:`vllm_autoprune.tpdsl.tokens`; Dv is the tower's width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class NextLayer:
    """Attention of the layer after the one that the model reads, taken as a single head.

    attention ``(B, N)``: the [CLS] row of softmax(q k^T / sqrt(Dv)) over [CLS] and the patches of
    a tile, patches only; keys ``(B, N, Dv)``, all heads side by side. Without a [CLS] token the
    row is the mean over queries.
    """

    attention: Tensor
    keys: Tensor


@dataclass(frozen=True)
class TowerStates:
    """States of the layer that the model reads.

    patches ``(B, N, Dv)``; cls ``(B, T, Dv)``, None where the tower has no [CLS]; keys
    ``(B, N, dk)``, that layer's attention keys averaged over heads; project maps rows
    ``(..., Dv)`` to ``(..., D)``, as the model's projector does.
    """

    patches: Tensor
    keys: Tensor
    project: Callable[[Tensor], Tensor]
    cls: Tensor | None = None
    next_layer: NextLayer | None = None

    def projected(self, rows: Tensor) -> Tensor:
        """Rows ``(R, m, Dv)`` through the projector, ``(R, m, D)``.

        One of the R at a time, so that its bits do not depend on what else is in the batch.
        """
        return torch.stack([self.project(part) for part in rows])
