"""Recorder of what the plugin does inside an engine: which tokens are kept, in which batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from unittest.mock import patch

from torch import Tensor, nn

from vllm_autoprune.serving.plan import ItemPlan
from vllm_autoprune.serving.worker import batch, regions, selection
from vllm_autoprune.serving.worker.features import ImageFeatures
from vllm_autoprune.serving.worker.regions import RegionShare, SelectionContext
from vllm_autoprune.tpdsl.base_policy import RefinedTokens, TokenSelection


@dataclass
class Watch:
    """Record of selections: kept tokens and rows of each plan, budgets of each batch."""

    kept: dict[ItemPlan, list[int]] = field(default_factory=dict)
    rows: dict[ItemPlan, Tensor] = field(default_factory=dict)
    budgets: list[list[int]] = field(default_factory=list)
    before_broadcast: list[list[list[int]]] = field(default_factory=list)
    vision_batches: list[int] = field(default_factory=list)


def watch(tower: nn.Module | None = None) -> Watch:
    """Start recording; with ``tower``, the sizes of its batches as well."""
    seen = Watch()
    prune, agree = batch.prune_images, selection._broadcast_selection
    select = regions.select_region

    def images(
        context: SelectionContext, plans: Sequence[ItemPlan], images: Sequence[ImageFeatures]
    ) -> list[Tensor]:
        seen.budgets.append([plan.budget for plan in plans])
        return prune(context, plans, images)

    def selected(
        context: SelectionContext,
        plans: Sequence[ItemPlan],
        images: Sequence[ImageFeatures],
        at: int,
        share: RegionShare,
    ) -> RefinedTokens:
        tokens = select(context, plans, images, at, share)
        for plan, kept, rows in zip(plans, tokens.indices.tolist(), tokens.features, strict=True):
            seen.kept[plan] = kept
            seen.rows[plan] = rows
        return tokens

    def agreed(chosen: TokenSelection) -> TokenSelection:
        seen.before_broadcast.append(chosen.indices.tolist())
        return agree(chosen)

    from vllm_autoprune.serving.models import pruned_model

    patch.object(pruned_model, "prune_images", images).start()
    patch.object(batch, "select_region", selected).start()
    patch.object(selection, "_broadcast_selection", agreed).start()
    if tower is not None:
        tower.register_forward_pre_hook(
            lambda module, args: seen.vision_batches.append(args[0].shape[0])
        )
    return seen
