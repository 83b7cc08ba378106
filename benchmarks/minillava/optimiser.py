"""AdamW on one flat fp32 copy of bf16 weights, with gradients averaged between ranks.

Knows nothing about the models whose weights it holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


def schedule(step: int, steps: int, warmup: int) -> float:
    """Share of the peak learning rate: linear warm-up, then a cosine down to 2 %."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class FlatAdamW:
    """Turns the modules' parameters into views of one bf16 buffer and steps them together.

    Small models spend more time between kernels than inside them; one flat update and one
    flat all-reduce cost less than hundreds of small ones.
    """

    def __init__(self, modules: Sequence[nn.Module], peak: float, decay: float = 0.01) -> None:
        parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
        sizes = [parameter.numel() for parameter in parameters]
        self.peak = peak
        self._master = nn.Parameter(
            torch.cat([parameter.detach().float().flatten() for parameter in parameters])
        )
        self._weights = self._master.detach().to(torch.bfloat16)
        self._gradients = torch.zeros_like(self._weights)
        places = zip(
            parameters, self._weights.split(sizes), self._gradients.split(sizes), strict=True
        )
        for parameter, weight, gradient in places:
            parameter.data = weight.view(parameter.shape)
            parameter.grad = gradient.view(parameter.shape)
        self._adam = torch.optim.AdamW(
            [self._master], lr=peak, betas=(0.9, 0.98), weight_decay=decay, fused=True
        )

    def step(self, share: float) -> float:
        """Average gradients over the ranks, clip to norm 1, update; returns the norm."""
        gradient = self._gradients.float()
        if dist.is_initialized():
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        norm = float(gradient.norm())
        if math.isfinite(norm):
            if norm > 1.0:
                gradient /= norm
            self._master.grad = gradient
            self._adam.param_groups[0]["lr"] = self.peak * share
            self._adam.step()
            self._weights.copy_(self._master.detach())
        self._gradients.zero_()
        return norm

    def state(self) -> dict[str, object]:
        """What `restore` needs to go on exactly here."""
        return {"master": self._master.detach(), "adam": self._adam.state_dict()}

    def restore(self, state: dict[str, object]) -> None:
        """Go on from what `state` returned."""
        master, adam = state["master"], state["adam"]
        assert isinstance(master, Tensor) and isinstance(adam, dict)
        with torch.no_grad():
            self._master.copy_(master)
        self._weights.copy_(self._master.detach())
        self._adam.load_state_dict(adam)
