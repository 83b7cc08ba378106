"""Runs the Triton kernel without a GPU, in a process of its own, because Triton reads its
environment when a kernel is declared.

`python -m tests.ops.triton_cases compare` needs ``TRITON_INTERPRET=1`` and prints, as JSON, the
picks of both implementations by case; `compile-80` builds the kernel for compute capability 8.0
(no GPU is needed) and prints the size of each binary.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vllm_autoprune.ops.greedy import condition, greedy_map_torch
from vllm_autoprune.ops.similarity import cosines

GPUS = (90, 100, 120, 80)
"""Compute capabilities of an H100, a B200, an RTX 5090 and an A100."""


@dataclass(frozen=True)
class Inputs:
    """One call of greedy MAP; core ``(B, A)`` are tokens that the similarity is conditioned on."""

    similarity: Tensor
    quality: Tensor
    count: int
    anchors: Tensor | None = None
    eligible: Tensor | None = None
    core: Tensor | None = None

    def to(self, device: str) -> Inputs:
        """The same call on another device."""
        tensors = {name: part for name, part in vars(self).items() if isinstance(part, Tensor)}
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in tensors.items()}
        return replace(self, **moved)

    def in_torch(self) -> list[list[int]]:
        """Picks of the torch implementation."""
        return self._run(greedy_map_torch)

    def in_triton(self) -> list[list[int]]:
        """Picks of the kernel."""
        from vllm_autoprune.ops.dpp_triton import greedy_map_triton

        return self._run(greedy_map_triton)

    def _run(self, implementation: Callable[..., Tensor]) -> list[list[int]]:
        conditioned = None if self.core is None else condition(self.similarity, self.core)
        arguments = (self.similarity, self.quality, self.count, self.anchors, self.eligible)
        picks: list[list[int]] = implementation(*arguments, conditioned).tolist()
        return picks


def _random(seed: int, batch: int, tokens: int, count: int, width: int) -> Inputs:
    source = torch.Generator().manual_seed(seed)
    rows = torch.randn(batch, tokens, width, generator=source)
    unit = rows / rows.norm(dim=-1, keepdim=True)
    quality = 0.2 + 0.8 * torch.rand(batch, tokens, generator=source)
    return Inputs(unit @ unit.transpose(1, 2), quality, count)


def cases() -> Iterator[tuple[str, Inputs]]:
    """Inputs on which both implementations must agree: gains are far apart or bit-identical."""
    yield "one token", _random(1, 1, 1, 1, 4)
    yield "every token", _random(3, 2, 12, 12, 32)
    yield "five tiles", _random(4, 5, 130, 24, 96)
    yield "true shape", _random(5, 1, 576, 24, 256)

    plain = _random(6, 3, 40, 12, 48)
    source = torch.Generator().manual_seed(7)
    anchors = torch.stack([torch.randperm(40, generator=source)[:4] for _ in range(3)])
    eligible = torch.rand(3, 40, generator=source) > 0.4
    yield "both", Inputs(plain.similarity, plain.quality, 12, anchors, eligible)
    apart = eligible.scatter(1, anchors, False)
    yield "conditioned, some", Inputs(plain.similarity, plain.quality, 9, None, apart, anchors)

    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.randn(3, 40, 512, generator=source).to(dtype)
        similarity = cosines(rows, rows.norm(dim=-1, keepdim=True))
        yield f"rounded 1 in {dtype}", Inputs(similarity, torch.ones(3, 40), 12)

    yield "ties", Inputs(torch.eye(9)[None], torch.ones(1, 9), 6)
    # Every token the same: the rank is 1, and all but the first pick go by quality.
    scores = torch.tensor([[0.25, 0.5, 1.0, 0.5, 0.25, 2.0]])
    some = torch.tensor([[True, True, False, True, True, True]])
    yield "rank 1, some", Inputs(torch.ones(1, 6, 6), scores, 5, None, some)
    yield "same anchors", Inputs(torch.ones(1, 6, 6), scores, 4, torch.tensor([[0, 3]]))
    yield "zero rows", Inputs(torch.zeros(2, 5, 5), scores[:, :5].repeat(2, 1), 5)

    bad = plain.quality.clone()
    bad[1, 5] = torch.nan
    bad[2, 0], bad[2, 3], bad[2, 4] = torch.inf, torch.nan, -torch.inf
    yield "quality not finite", Inputs(plain.similarity, bad, 40)
    broken = plain.similarity.clone()
    broken[0, 3], broken[0, :, 3], broken[2] = torch.nan, torch.nan, torch.nan
    yield "similarity NaN, anchors", Inputs(broken, plain.quality, 12, anchors, eligible)


def _compare() -> dict[str, list[list[list[int]]]]:
    return {name: [inputs.in_torch(), inputs.in_triton()] for name, inputs in cases()}


def _compile(gpu: int) -> dict[str, int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vllm_autoprune.ops.dpp_triton import _greedy_map, _launch_options

    types = dict.fromkeys(("similarity", "quality", "residuals", "factors"), "*fp32")
    types |= {"eligible": "*i1", "anchors": "*i64", "picks": "*i64"}
    types |= dict.fromkeys(("tokens", "count", "forced", "fixed"), "i32")
    types |= dict.fromkeys(("exhausted", "divisor", "huge", "unit", "tie"), "fp32")
    actual = {}
    for tokens, masked in ((64, False), (576, True), (2880, False)):
        block, rows, warps = _launch_options(tokens)
        fixed = {"has_eligible": masked, "block": block, "rows": rows}
        signature = {n: types.get(n, "constexpr") for n in _greedy_map.arg_names}
        built = triton.compile(
            ASTSource(fn=_greedy_map, signature=signature, constexprs=fixed),
            target=GPUTarget("cuda", gpu, 32),
            options={"num_warps": warps},
        )
        actual[f"sm_{gpu}, N = {tokens}"] = len(built.asm["cubin"])
    return actual


if __name__ == "__main__":
    command, _, gpu = sys.argv[1].partition("-")
    print(json.dumps(_compare() if command == "compare" else _compile(int(gpu))))
