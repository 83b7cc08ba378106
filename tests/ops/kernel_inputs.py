"""Inputs on which a Triton kernel and its torch reference have to agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from vllm_autoprune.ops.exchange_torch import Exchange
from vllm_autoprune.ops.farthest import distances
from vllm_autoprune.ops.farthest_torch import Chosen, Walk, Weighting
from vllm_autoprune.ops.greedy import Conditioned
from vllm_autoprune.ops.similarity import cosines


def draw_kernel(
    seed: int, batch: int, size: int, rank: int = 24
) -> tuple[Tensor, Tensor]:
    """Cosines of random directions, and qualities between 0.2 and 1."""
    source = torch.Generator().manual_seed(seed)
    rows = torch.randn(batch, size, rank, generator=source)
    unit = rows / rows.norm(dim=-1, keepdim=True)
    return unit @ unit.transpose(1, 2), 0.2 + 0.8 * torch.rand(
        batch, size, generator=source
    )


@dataclass(frozen=True)
class GreedyMapInputs:
    """One call of greedy MAP; core ``(B, A)`` are tokens that the similarity is conditioned on."""

    similarity: Tensor
    quality: Tensor
    count: int
    anchors: Tensor | None = None
    eligible: Tensor | None = None
    core: Tensor | None = None

    def picks(
        self, implementation: Callable[..., Tensor], device: str = "cpu"
    ) -> list[list[int]]:
        def moved(part: Tensor | None) -> Tensor | None:
            return None if part is None else part.to(device)

        similarity = self.similarity.to(device)
        known = (
            None
            if self.core is None
            else Conditioned.on(similarity, self.core.to(device))
        )
        optional = (moved(self.anchors), moved(self.eligible), known)
        quality = self.quality.to(device)
        picks: list[list[int]] = implementation(
            similarity, quality, self.count, *optional
        ).tolist()
        return picks


def _greedy_map_inputs() -> Iterator[tuple[str, GreedyMapInputs]]:
    """Inputs on which both implementations must agree: gains are far apart or bit-identical."""
    yield "one token", GreedyMapInputs(*draw_kernel(1, 1, 1, 4), 1)
    yield "every token", GreedyMapInputs(*draw_kernel(3, 2, 12, 32), 12)
    yield "five tiles", GreedyMapInputs(*draw_kernel(4, 5, 130, 96), 24)
    yield "true shape", GreedyMapInputs(*draw_kernel(5, 1, 576, 256), 24)

    plain = GreedyMapInputs(*draw_kernel(6, 3, 40, 48), 12)
    source = torch.Generator().manual_seed(7)
    anchors = torch.stack([torch.randperm(40, generator=source)[:4] for _ in range(3)])
    eligible = torch.rand(3, 40, generator=source) > 0.4
    yield (
        "both",
        GreedyMapInputs(plain.similarity, plain.quality, 12, anchors, eligible),
    )
    apart = eligible.scatter(1, anchors, False)
    yield (
        "conditioned, some",
        GreedyMapInputs(plain.similarity, plain.quality, 9, None, apart, anchors),
    )

    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.randn(3, 40, 512, generator=source).to(dtype)
        similarity = cosines(rows, rows.norm(dim=-1, keepdim=True))
        yield (
            f"rounded 1 in {dtype}",
            GreedyMapInputs(similarity, torch.ones(3, 40), 12),
        )

    yield "ties", GreedyMapInputs(torch.eye(9)[None], torch.ones(1, 9), 6)
    # Every token the same: the rank is 1, and all but the first pick go by quality.
    scores = torch.tensor([[0.25, 0.5, 1.0, 0.5, 0.25, 2.0]])
    some = torch.tensor([[True, True, False, True, True, True]])
    yield "rank 1, some", GreedyMapInputs(torch.ones(1, 6, 6), scores, 5, None, some)
    yield (
        "same anchors",
        GreedyMapInputs(torch.ones(1, 6, 6), scores, 4, torch.tensor([[0, 3]])),
    )
    yield (
        "zero rows",
        GreedyMapInputs(torch.zeros(2, 5, 5), scores[:, :5].repeat(2, 1), 5),
    )

    bad = plain.quality.clone()
    bad[1, 5] = torch.nan
    bad[2, 0], bad[2, 3], bad[2, 4] = torch.inf, torch.nan, -torch.inf
    yield "quality not finite", GreedyMapInputs(plain.similarity, bad, 40)
    broken = plain.similarity.clone()
    broken[0, 3], broken[0, :, 3], broken[2] = torch.nan, torch.nan, torch.nan
    yield (
        "similarity NaN, anchors",
        GreedyMapInputs(broken, plain.quality, 12, anchors, eligible),
    )


GREEDY_MAP = dict(_greedy_map_inputs())


def _move(part: Any, device: str) -> Any:
    """The tensors of a call on a device."""
    if isinstance(part, Tensor):
        return part.to(device)
    if isinstance(part, (Walk, Chosen, Weighting, Exchange)):
        names = [field.name for field in fields(part)]
        moved = {name: _move(getattr(part, name), device) for name in names}
        return replace(part, **moved)
    return part


def walk_picks(
    walk: Walk, implementation: Callable[[Walk], Tensor], device: str = "cpu"
) -> list[list[int]]:
    """The picks of an implementation on a device."""
    picks: list[list[int]] = implementation(_move(walk, device)).tolist()
    return picks


def _walks() -> Iterator[tuple[str, Walk]]:
    source = torch.Generator().manual_seed(11)
    similarity, weight = draw_kernel(12, 3, 40)
    similarity[:, 7] = similarity[:, 3]  # duplicates: ties at every step
    similarity[:, :, 7] = similarity[:, :, 3]
    distance = distances(similarity)
    taken = torch.rand(3, 40, generator=source) < 0.2
    chosen = Chosen(torch.rand(3, 40, generator=source), taken)

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rounded = replace(chosen, nearest=chosen.nearest.to(dtype))
        yield f"distances in {dtype}", Walk(distance.to(dtype), rounded, 20)

    apart = distance.amin(dim=1)
    weighting = Weighting(weight, apart, weight, 1e-6)
    yield "weighted", Walk(distance, chosen, 20, weighting)
    nothing = Chosen.none(weight)
    yield "from nothing", Walk(distance, nothing, 40, weighting)
    fill = torch.rand(3, 40, generator=source)
    fill[0, 3], fill[1, 5], fill[2, 7] = torch.nan, torch.inf, -torch.inf
    fill[:, 20:30] = 0.5
    high = replace(weighting, fill=fill, floor=0.3)
    yield "a fill of its own", Walk(distance, nothing, 40, high)
    yield "a fill beside taken tokens", Walk(distance, chosen, 20, high)
    leading = torch.full((3, 9), -1)
    leading[:2, :4] = torch.tensor([8, 2, 30, 11])
    yield "led", Walk(distance, nothing, 9, weighting, leading)
    yield "led below the floor", Walk(distance, nothing, 9, high, leading)
    none = torch.zeros_like(weight)
    yield "weights of zero", Walk(distance, chosen, 9, replace(weighting, weight=none))
    broken = weight.clone()
    broken[0, 5] = torch.nan
    yield "weight NaN", Walk(distance, chosen, 9, replace(weighting, weight=broken))
    unknown = distance.clone()
    unknown[1, 4] = torch.nan
    unknown[1, :, 4] = torch.nan
    yield "distance NaN", Walk(unknown, chosen, 20, weighting)
    far = replace(chosen, nearest=chosen.nearest.clone())
    far.nearest[0, 9], far.nearest[2, :5] = torch.nan, torch.inf
    yield "nearest NaN", Walk(distance, far, 20)
    single = Chosen(none[:, :1], none[:, :1] > 0)
    yield "one token", Walk(distance[:, :1, :1], single, 1)


WALK = dict(_walks())


def entering_tokens(
    call: Exchange, implementation: Callable[[Exchange], Tensor], device: str = "cpu"
) -> list[list[int]]:
    """The tokens that enter by an implementation on a device."""
    entering: list[list[int]] = implementation(_move(call, device)).tolist()
    return entering


def draw_exchange(seed: int, size: int, count: int, batch: int = 1) -> Exchange:
    """Exchange of the ``count`` lowest of twice as many kept tokens, in ascending quality."""
    cosine, quality = draw_kernel(seed, batch, size)
    kept = quality[:, : 2 * count].argsort(dim=1)
    leaving = kept[:, :count]
    staying = torch.zeros_like(quality, dtype=torch.bool).scatter(
        1, kept[:, count:], True
    )
    return Exchange(
        cosine=cosine,
        nearest=cosine.masked_fill(~staying[:, :, None], -torch.inf).amax(dim=1),
        quality=quality,
        pool=~staying.scatter(1, leaving, True),
        leaving=leaving,
        least=1.1 * quality.gather(1, leaving),
        most_similar=0.5,
    )


def _exchanges() -> Iterator[tuple[str, Exchange]]:
    strict = draw_exchange(21, 40, 9, batch=3)
    yield "strict margin", strict
    yield "never like a kept one", replace(strict, most_similar=0.2)
    anything = torch.full_like(strict.least, -torch.inf)
    marginal = replace(strict, least=anything, most_similar=torch.inf)
    yield "marginal relevance", replace(marginal, relevance=0.7, diversity=0.3)
    yield "diversity alone", replace(marginal, relevance=0.0, diversity=1.0)
    yield "large margin", replace(strict, least=4 * strict.least)
    yield "empty pool", replace(strict, pool=torch.zeros_like(strict.pool))
    yield "equal qualities", replace(strict, quality=torch.ones_like(strict.quality))
    tied = strict.quality.clone()
    tied[:, 18:] = 2.0
    yield "ties", replace(strict, quality=tied)
    yield "negative scores", replace(marginal, quality=tied - 5)
    alone = torch.full_like(strict.nearest, -torch.inf)
    yield "all leave", replace(marginal, nearest=alone, diversity=0.5)
    broken = strict.quality.clone()
    broken[0, 25], broken[1, 30] = torch.nan, torch.inf
    broken[2].scatter_(0, strict.leaving[2, 3:4], torch.nan)
    yield "quality NaN", replace(marginal, quality=broken, diversity=0.5)
    unknown = strict.cosine.clone()
    unknown[1, 30], unknown[1, :, 30] = torch.nan, torch.nan
    unknown[2, int(strict.leaving[2, 5])] = torch.nan
    yield "cosine NaN", replace(marginal, cosine=unknown, diversity=0.5)
    yield "one token", draw_exchange(22, 3, 1)


EXCHANGE = dict(_exchanges())
