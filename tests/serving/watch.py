"""Notes what the plugin does inside an engine: which tokens are kept, in which batches.

Knows nothing about why a test wants to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from unittest.mock import patch

from torch import Tensor, nn

from vllm_autoprune.serving import batch, prune
from vllm_autoprune.serving.plan import ItemPlan
from vllm_autoprune.tpdsl.outcome import RefinedTokens, TokenSelection


@dataclass
class Watch:
    """Everything noted so far."""

    kept: dict[ItemPlan, list[int]] = field(default_factory=dict)
    rows: dict[ItemPlan, Tensor] = field(default_factory=dict)
    budgets: list[list[int]] = field(default_factory=list)
    before_broadcast: list[list[list[int]]] = field(default_factory=list)
    vision_batches: list[int] = field(default_factory=list)


def watch(tower: nn.Module | None = None) -> Watch:
    """Note from now on; ``tower`` is the vision tower whose batches are to be noted."""
    seen = Watch()
    every, some, agree = batch.prune_images, batch._refined, prune._agreed

    def images(served: object, plans: Sequence[ItemPlan], *rest: object) -> list[Tensor]:
        seen.budgets.append([plan.budget for plan in plans])
        return every(served, plans, *rest)  # type: ignore[arg-type]

    def refined(served: object, plans: Sequence[ItemPlan], *rest: object) -> RefinedTokens:
        found = some(served, plans, *rest)  # type: ignore[arg-type]
        for plan, kept, rows in zip(plans, found.indices.tolist(), found.features, strict=True):
            seen.kept[plan] = kept
            seen.rows[plan] = rows
        return found

    def agreed(chosen: TokenSelection) -> TokenSelection:
        seen.before_broadcast.append(chosen.indices.tolist())
        return agree(chosen)

    from vllm_autoprune.serving.models import pruned

    patch.object(pruned, "prune_images", images).start()
    patch.object(batch, "_refined", refined).start()
    patch.object(prune, "_agreed", agreed).start()
    if tower is not None:
        tower.register_forward_pre_hook(
            lambda module, args: seen.vision_batches.append(args[0].shape[0])
        )
    return seen
