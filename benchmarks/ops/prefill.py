"""One decoder layer of Llama-2-7B's true widths, to know what a prefill costs on this machine.

Knows nothing about images. Weights are random; the time does not depend on them.

A prefill is taken as 32 such layers: embedding, final norm and the last token's logits are left
out, which makes it shorter and a selection's share larger.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from benchmarks.ops.alternate import alternately
from benchmarks.overhead.statistics import spread

WIDTH, INNER, HEADS, LAYERS = 4096, 11008, 32, 32
TEXT = 60
"""Text tokens around the image: template and question."""


class Layer(nn.Module):
    """Norm, attention with rotary positions, norm, gated MLP; ``(L, D) -> (L, D)``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=dtype)

        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, dtype=dtype) for _ in range(2))
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.gate_up, self.down = linear(WIDTH, 2 * INNER), linear(INNER, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        """One prompt."""
        length = rows.shape[0]
        q, k, v = self.qkv(self.norms[0](rows)).view(length, 3, HEADS, -1).permute(1, 2, 0, 3)
        q, k = _rotated(q), _rotated(k)
        mixed = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)
        rows = rows + self.out(mixed[0].transpose(0, 1).reshape(length, WIDTH))
        gate, up = self.gate_up(self.norms[1](rows)).chunk(2, dim=-1)
        after: Tensor = rows + self.down(functional.silu(gate) * up)
        return after


def _rotated(heads: Tensor) -> Tensor:
    """Rotary position embedding of ``(H, L, d)``."""
    length, width = heads.shape[1:]
    rate = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angle = torch.arange(length)[:, None] * rate
    cos, sin = (torch.cat([x, x], dim=-1).to(heads.dtype) for x in (angle.cos(), angle.sin()))
    low, high = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-high, low], dim=-1) * sin


def faster_dtype() -> tuple[torch.dtype, dict[str, float]]:
    """The dtype in which a layer is faster here, and the seconds of both at 124 tokens."""
    layers = {dtype: Layer(dtype) for dtype in (torch.bfloat16, torch.float32)}
    prompts = {dtype: torch.randn(64 + TEXT, WIDTH, dtype=dtype) for dtype in layers}
    taken = alternately(
        {str(dtype): partial(layer, prompts[dtype]) for dtype, layer in layers.items()},
        3,
        warm_up=1,
    )
    seconds = {name: spread(values).median for name, values in taken.items()}
    return min(layers, key=lambda dtype: seconds[str(dtype)]), seconds
