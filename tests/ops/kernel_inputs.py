"""Inputs on which a Triton kernel and its torch reference have to agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_autoprune.ops.farthest import distances
from vllm_autoprune.ops.farthest_torch import Walk
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


@dataclass(frozen=True)
class WalkInputs:
    """One call of a :class:`Walk`."""

    distance: Tensor
    nearest: Tensor
    first_scores: Tensor
    count: int
    weight: Tensor | None = None
    leading: Tensor | None = None

    def picks(self, walk: Walk, device: str = "cpu") -> list[list[int]]:
        """The picks of an implementation on a device."""
        optional = [
            None if part is None else part.to(device)
            for part in (self.weight, self.leading)
        ]
        picks, _ = walk(
            self.distance.to(device),
            self.nearest.to(device),
            self.first_scores.to(device),
            self.count,
            *optional,
        )
        chosen: list[list[int]] = picks.tolist()
        return chosen


def _walk_inputs() -> Iterator[tuple[str, WalkInputs]]:
    source = torch.Generator().manual_seed(11)
    similarity, weight = draw_kernel(12, 3, 40)
    similarity[:, 7] = similarity[:, 3]  # duplicates: ties at every step
    similarity[:, :, 7] = similarity[:, :, 3]
    distance = distances(similarity)
    taken = torch.rand(3, 40, generator=source) < 0.2
    nearest = torch.rand(3, 40, generator=source).masked_fill_(taken, -torch.inf)

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rounded = nearest.to(dtype)
        yield (
            f"distances in {dtype}",
            WalkInputs(distance.to(dtype), rounded, rounded, 20),
        )

    first_scores = (weight * nearest).masked_fill_(taken, -torch.inf)
    yield "weighted", WalkInputs(distance, nearest, first_scores, 20, weight)
    nothing = torch.full_like(nearest, torch.inf)
    apart = distance.amin(dim=1)
    yield "from nothing", WalkInputs(distance, nothing, apart, 40, weight)
    leading = torch.full((3, 9), -1)
    leading[:2, :4] = torch.tensor([8, 2, 30, 11])
    yield "led", WalkInputs(distance, nothing, apart, 9, weight, leading)
    none = torch.zeros_like(weight)
    yield "weights of zero", WalkInputs(distance, nearest, first_scores, 9, none)
    broken = weight.clone()
    broken[0, 5] = torch.nan
    yield "weight NaN", WalkInputs(distance, nearest, first_scores, 9, broken)
    unknown = distance.clone()
    unknown[1, 4] = torch.nan
    unknown[1, :, 4] = torch.nan
    yield "distance NaN", WalkInputs(unknown, nearest, first_scores, 20, weight)
    yield "one token", WalkInputs(distance[:, :1, :1], none[:, :1], none[:, :1], 1)


WALK = dict(_walk_inputs())
