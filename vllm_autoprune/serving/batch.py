"""From images with plans to rows for the language model, in as few selections as possible.

Knows nothing about any one model: features come in, K rows an image go out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_autoprune.serving.config import ServedState
from vllm_autoprune.serving.features import ImageFeatures
from vllm_autoprune.serving.plan import ItemPlan
from vllm_autoprune.serving.prune import FallbackMeter, keep_at_random, prune
from vllm_autoprune.serving.relevance import Relevance
from vllm_autoprune.tpdsl.materialize import PruningPolicy
from vllm_autoprune.tpdsl.refine import keep_evenly
from vllm_autoprune.tpdsl.tokens import Grid, Instruction, VisualTokens


def prune_images(
    served: ServedState,
    plans: Sequence[ItemPlan],
    images: Sequence[ImageFeatures],
    grid: Grid,
    relevance: Relevance | None,
    meter: FallbackMeter,
) -> list[Tensor]:
    """``(K_i, D)`` rows of every image, in the order given.

    Images of one budget are selected together; different budgets make one selection each. All
    images share one grid.
    """
    rows: list[Tensor | None] = [None] * len(plans)
    for budget, keep in sorted({(plan.budget, plan.keep) for plan in plans}):
        members = [i for i, p in enumerate(plans) if (p.budget, p.keep) == (budget, keep)]
        if budget >= grid.tokens:
            for i in members:
                rows[i] = images[i].projected
            continue
        batch = [images[i] for i in members]
        if keep == "random":
            features = torch.stack([image.projected for image in batch])
            keys = [plans[i].key for i in members]
            refined = keep_at_random(budget, VisualTokens(features, grid), keys)
        else:
            policy = served.policy(budget, keep)
            asked = [plans[i].instruction for i in members]
            try:
                tokens = _tokens(policy, batch, asked, grid, relevance)
            except Exception as error:  # as in prune(): the engine has to live
                meter.error(error)
                plain = VisualTokens(torch.stack([image.projected for image in batch]), grid)
                refined = keep_evenly(budget, plain)
            else:
                refined = prune(policy, tokens, meter)
        for row, i in enumerate(members):
            # Profiling is told the unpruned size, and has paid for the selection by now.
            rows[i] = images[i].projected if plans[i].profile else refined.features[row]
    done = [row for row in rows if row is not None]
    _assert_sizes(plans, done, grid)
    return done


def _tokens(
    policy: PruningPolicy,
    images: Sequence[ImageFeatures],
    asked: Sequence[tuple[int, ...]],
    grid: Grid,
    relevance: Relevance | None,
) -> VisualTokens:
    features = torch.stack([image.projected for image in images])
    attention = _stacked([image.cls_attention for image in images])
    patches = _stacked([image.patches for image in images])
    cosine = _stacked([image.cosine for image in images])
    instruction = None
    if policy.reads_instruction and relevance is not None:
        text, segments = relevance.instructions(asked)
        instruction = Instruction(
            features if patches is None else patches,
            text,
            segments,
            relevance.sign,
        )
    return VisualTokens(features, grid, attention, instruction, cosine)


def _stacked(parts: Sequence[Tensor | None]) -> Tensor | None:
    """One tensor of what every image has; None where it was not made."""
    made = [part for part in parts if part is not None]
    return torch.stack(made) if len(made) == len(parts) else None


def _assert_sizes(plans: Sequence[ItemPlan], rows: Sequence[Tensor], grid: Grid) -> None:
    # vLLM's runners slice what they get to the placeholder's length, so a row too many would
    # be cut off in silence.
    for plan, row in zip(plans, rows, strict=True):
        wanted = grid.tokens if plan.profile else min(plan.budget, grid.tokens)
        if row.shape[0] != wanted:
            raise AssertionError(f"{row.shape[0]} rows for a placeholder of {wanted}")
