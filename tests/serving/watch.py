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
from vllm_autoprune.tpdsl.materialize import PruningPolicy
from vllm_autoprune.tpdsl.outcome import Chosen, Refined
from vllm_autoprune.tpdsl.tokens import VisualTokens


@dataclass
class Watch:
    """Everything noted so far."""

    kept: dict[ItemPlan, list[int]] = field(default_factory=dict)
    budgets: list[list[int]] = field(default_factory=list)
    selections: list[int] = field(default_factory=list)
    before_broadcast: list[list[list[int]]] = field(default_factory=list)
    vision_batches: list[int] = field(default_factory=list)


def watch(tower: nn.Module | None = None) -> Watch:
    """Note from now on; ``tower`` is the vision tower whose batches are to be noted."""
    seen = Watch()
    refine_batch, pick, agree = batch.prune_images, prune.prune, prune._agreed
    current: list[ItemPlan] = []

    def images(served: object, plans: Sequence[ItemPlan], *rest: object) -> list[Tensor]:
        current[:] = plans
        seen.budgets.append([plan.budget for plan in plans])
        return refine_batch(served, plans, *rest)  # type: ignore[arg-type]

    def one(policy: PruningPolicy, tokens: VisualTokens, meter: prune.FallbackMeter) -> Refined:
        refined = pick(policy, tokens, meter)
        seen.selections.append(tokens.batch)
        members = [plan for plan in current if plan.budget == policy.budget]
        for plan, row in zip(members, refined.indices.tolist(), strict=False):
            seen.kept[plan] = row
        return refined

    def agreed(chosen: Chosen) -> Chosen:
        seen.before_broadcast.append(chosen.indices.tolist())
        return agree(chosen)

    from vllm_autoprune.serving.models import llava

    patch.object(llava, "prune_images", images).start()
    patch.object(batch, "prune", one).start()
    patch.object(prune, "_agreed", agreed).start()
    if tower is not None:
        tower.register_forward_pre_hook(
            lambda module, args: seen.vision_batches.append(args[0].shape[0])
        )
    return seen
