"""Optimiser: Muon for matrices and AdamW for the rest, on flat buffers shared by all ranks.

Muon: Jordan et al. 2024, kellerjordan.github.io/posts/muon; its step is scaled as in Liu et al.,
arXiv 2502.16982, so that both take the same learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

_MOMENTUM = 0.95
# Newton-Schulz coefficients of the Muon post, which drive singular values to about one.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5
# Matrices that AdamW updates: orthogonal steps do not help embeddings and classifier heads.
_TABLES = ("embed", "lm_head", "heads")


def schedule(step: int, steps: int, warmup: int, fall: float = 0.4) -> float:
    """Share of the peak learning rate: linear warm-up, constant, then a linear fall to 2 %.

    The rate falls during the last `fall` of the steps, after the kinds of question that are learnt
    late have begun to improve.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = step / max(1, steps)
    return 1.0 if progress < 1 - fall else 0.02 + 0.98 * (1 - progress) / fall


def orthogonalise(matrices: Tensor) -> Tensor:
    """The matrices with singular values of about one that are nearest to (M, m, n) bf16."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(_ROUNDS):
        square = x @ x.transpose(1, 2)
        x = a * x + (b * square + c * square @ square) @ x
    return x.transpose(1, 2) if tall else x


@dataclass(frozen=True)
class _Stack:
    """Matrices of one shape and their offsets in the flat buffer of matrices."""

    shape: tuple[int, int]
    starts: tuple[int, ...]


class FlatMuon:
    """Muon and AdamW over all parameters as views of one bf16 buffer.

    In a small model, one flat update and one flat all-reduce cost less than hundreds of small ones.
    Every rank computes the Muon steps of its share of the matrices.
    """

    def __init__(self, modules: dict[str, nn.Module], peak: float, decay: float = 0.01) -> None:
        tables: list[nn.Parameter] = []
        matrices: list[nn.Parameter] = []
        for prefix, module in modules.items():
            for name, parameter in module.named_parameters(prefix):
                if parameter.requires_grad:
                    table = parameter.dim() != 2 or any(word in name for word in _TABLES)
                    (tables if table else matrices).append(parameter)
        parameters = tables + matrices
        sizes = [parameter.numel() for parameter in parameters]
        self.peak, self._decay = peak, decay
        self._split = sum(parameter.numel() for parameter in tables)
        self._master = torch.cat([p.detach().float().flatten() for p in parameters])
        self._weights = self._master.to(torch.bfloat16)
        self._gradients = torch.zeros_like(self._weights)
        places = zip(
            parameters, self._weights.split(sizes), self._gradients.split(sizes), strict=True
        )
        for parameter, weight, gradient in places:
            parameter.data = weight.view(parameter.shape)
            parameter.grad = gradient.view(parameter.shape)
        self._momentum = torch.zeros_like(self._master[self._split :])
        self._stacks = _stacks(matrices)
        # A parameter over the front of the master copy: AdamW steps it in place.
        self._tables = nn.Parameter(self._master[: self._split])
        self._adam = torch.optim.AdamW(
            [self._tables], lr=peak, betas=(0.9, 0.98), weight_decay=decay, fused=True
        )

    def step(self, share: float) -> float:
        """Average the gradients over ranks, clip to norm 1 and update; returns the norm.

        A gradient that is not finite changes nothing.
        """
        gradient = self._gradients.float()
        if dist.is_initialized():
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        norm = float(gradient.norm())
        if math.isfinite(norm):
            if norm > 1.0:
                gradient /= norm
            rate = self.peak * share
            self._tables.grad = gradient[: self._split]
            self._adam.param_groups[0]["lr"] = rate
            self._adam.step()
            self._step_matrices(gradient[self._split :], rate)
            self._weights.copy_(self._master)
        self._gradients.zero_()
        return norm

    def _step_matrices(self, gradient: Tensor, rate: float) -> None:
        self._momentum.mul_(_MOMENTUM).add_(gradient)
        direction = gradient.add(self._momentum, alpha=_MOMENTUM).to(torch.bfloat16)
        update = torch.zeros_like(direction)
        rank = dist.get_rank() if dist.is_initialized() else 0
        world = dist.get_world_size() if dist.is_initialized() else 1
        for stack in self._stacks:
            size = stack.shape[0] * stack.shape[1]
            starts = stack.starts[rank::world]
            if not starts:
                continue
            rows = torch.stack([direction[start : start + size] for start in starts])
            steps = orthogonalise(rows.view(len(starts), *stack.shape)).flatten(1)
            # Of about the size of AdamW's steps.
            steps = steps * (0.2 * math.sqrt(max(stack.shape)))
            for start, row in zip(starts, steps, strict=True):
                update[start : start + size] = row
        if dist.is_initialized():
            # On all ranks but one the addend is zero, so the sum is exact in bf16.
            dist.all_reduce(update)
        front = self._master[self._split :]
        front.mul_(1 - rate * self._decay).add_(update.float(), alpha=-rate)

    def state(self) -> dict[str, object]:
        """Snapshot for `restore`."""
        return {
            "master": self._master,
            "momentum": self._momentum,
            "adam": self._adam.state_dict(),
        }

    def restore(self, state: dict[str, object]) -> None:
        """Continue exactly from a snapshot of `state`."""
        master, momentum, adam = state["master"], state["momentum"], state["adam"]
        assert isinstance(master, Tensor) and isinstance(momentum, Tensor)
        assert isinstance(adam, dict)
        self._master.copy_(master)
        self._momentum.copy_(momentum)
        self._weights.copy_(self._master)
        self._adam.load_state_dict(adam)


def _stacks(matrices: Sequence[nn.Parameter]) -> list[_Stack]:
    offsets: dict[tuple[int, int], list[int]] = {}
    start = 0
    for matrix in matrices:
        offsets.setdefault((matrix.shape[0], matrix.shape[1]), []).append(start)
        start += matrix.numel()
    return [_Stack(shape, tuple(starts)) for shape, starts in offsets.items()]
