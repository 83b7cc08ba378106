"""From images with plans to rows for the language model, in as few selections as possible.

Knows nothing about any one model: features come in, K rows an image go out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_autoprune.serving.config import ServedState
from vllm_autoprune.serving.features import ImageFeatures
from vllm_autoprune.serving.plan import Ids, ItemPlan
from vllm_autoprune.serving.prune import FallbackMeter, keep_at_random, prune
from vllm_autoprune.serving.relevance import Relevance
from vllm_autoprune.tpdsl.language import LanguagePrefix
from vllm_autoprune.tpdsl.materialize import PruningPolicy
from vllm_autoprune.tpdsl.outcome import Refined
from vllm_autoprune.tpdsl.refine import keep_evenly
from vllm_autoprune.tpdsl.tokens import Grid, Instruction, VisualTokens
from vllm_autoprune.tpdsl.tower import NextLayer, TowerStates


@dataclass(frozen=True, slots=True)
class ModelParts:
    """What of the model a policy's inputs are made with, beside the features of each image.

    project maps rows of the vision tower ``(..., Dv)`` to ``(..., D)``; language reads the
    language model's first layers over one image ``(N, D)`` and its instruction. None where the
    served state needs none.
    """

    grid: Grid
    project: Callable[[Tensor], Tensor]
    relevance: Relevance | None = None
    language: Callable[[Tensor, Ids], LanguagePrefix] | None = None


def prune_images(
    served: ServedState,
    plans: Sequence[ItemPlan],
    images: Sequence[ImageFeatures],
    parts: ModelParts,
    meter: FallbackMeter,
) -> list[Tensor]:
    """``(K_i, D)`` rows of every image, in the order given.

    Images of one budget are selected together; different budgets make one selection each. All
    images share one grid.
    """
    rows: list[Tensor | None] = [None] * len(plans)
    for members in _groups(served, plans, parts.grid):
        plan = plans[members[0]]
        if plan.budget >= parts.grid.tokens:
            for i in members:
                rows[i] = images[i].projected
            continue
        refined = _refined(
            served, [plans[i] for i in members], [images[i] for i in members], parts, meter
        )
        for row, i in enumerate(members):
            # Profiling is told the unpruned size, and has paid for the selection by now.
            rows[i] = images[i].projected if plans[i].profile else refined.features[row]
    done = [row for row in rows if row is not None]
    _assert_sizes(plans, done, parts.grid)
    return done


def _groups(served: ServedState, plans: Sequence[ItemPlan], grid: Grid) -> Iterator[list[int]]:
    """Positions of the images that are selected together."""
    for budget, keep in sorted({(plan.budget, plan.keep) for plan in plans}):
        members = [i for i, p in enumerate(plans) if (p.budget, p.keep) == (budget, keep)]
        chosen = budget < grid.tokens and keep != "random"
        if chosen and "language" in served.policy(budget, keep).needs:
            # Instructions differ in length, and neither padding nor a batch may change a choice.
            yield from ([i] for i in members)
        else:
            yield members


def _refined(
    served: ServedState,
    plans: Sequence[ItemPlan],
    images: Sequence[ImageFeatures],
    parts: ModelParts,
    meter: FallbackMeter,
) -> Refined:
    """One selection for images of one budget, below N."""
    features = torch.stack([image.projected for image in images])
    budget, keep = plans[0].budget, plans[0].keep
    if keep == "random":
        tokens = VisualTokens(features, parts.grid)
        return keep_at_random(budget, tokens, [plan.key for plan in plans])
    policy = served.policy(budget, keep)
    try:
        tokens = _tokens(policy, features, plans, images, parts)
    except Exception as error:  # as in prune(): the engine has to live
        meter.error(error)
        return keep_evenly(budget, VisualTokens(features, parts.grid))
    return prune(policy, tokens, meter)


def _tokens(
    policy: PruningPolicy,
    features: Tensor,
    plans: Sequence[ItemPlan],
    images: Sequence[ImageFeatures],
    parts: ModelParts,
) -> VisualTokens:
    instruction, language = None, None
    if "instruction" in policy.needs and parts.relevance is not None:
        text, segments = parts.relevance.instructions([plan.instruction for plan in plans])
        patches = _stacked([image.patches for image in images])
        instruction = Instruction(
            features if patches is None else patches, text, segments, parts.relevance.sign
        )
    if "language" in policy.needs and parts.language is not None:
        (plan,) = plans
        language = parts.language(features[0], plan.language)
    return VisualTokens(
        features,
        parts.grid,
        _stacked([image.cls_attention for image in images]),
        instruction,
        _stacked([image.cosine for image in images]),
        _tower(images, parts.project),
        language,
    )


def _tower(
    images: Sequence[ImageFeatures], project: Callable[[Tensor], Tensor]
) -> TowerStates | None:
    seen = [image.tower for image in images if image.tower is not None]
    if len(seen) < len(images):
        return None
    attention = _stacked([tower.next_attention for tower in seen])
    keys = _stacked([tower.next_keys for tower in seen])
    return TowerStates(
        patches=torch.stack([tower.patches for tower in seen]),
        keys=torch.stack([tower.keys for tower in seen]),
        project=project,
        cls=torch.stack([tower.cls for tower in seen]),
        next_layer=None if attention is None or keys is None else NextLayer(attention, keys),
    )


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
