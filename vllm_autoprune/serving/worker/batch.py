"""Batched selection: from images with plans to rows for the language model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from vllm_autoprune.errors import SelectionError
from vllm_autoprune.ops.dpp_torch import Conditioned
from vllm_autoprune.serving.shared.plan import NO_KEY, Ids, ItemPlan, plan_error
from vllm_autoprune.serving.shared.served_state import ServedState
from vllm_autoprune.serving.worker.cores import CoreCache
from vllm_autoprune.serving.worker.fallbacks import FallbackReporter
from vllm_autoprune.serving.worker.features import ImageFeatures, Region
from vllm_autoprune.serving.worker.first_image_check import FirstImageCheck
from vllm_autoprune.serving.worker.region_shares import share_over_regions
from vllm_autoprune.serving.worker.relevance import RelevanceSpace
from vllm_autoprune.serving.worker.selection import select_at_random, select_with_fallback
from vllm_autoprune.tpdsl.atoms.reassembly import orders_by_quality
from vllm_autoprune.tpdsl.base_policy import Given
from vllm_autoprune.tpdsl.executor.materialize import PruningPolicy, core_policy, delta_policy
from vllm_autoprune.tpdsl.executor.refine import give_core, keep_evenly
from vllm_autoprune.tpdsl.language_prefix import LanguagePrefix
from vllm_autoprune.tpdsl.outcome import RefinedTokens
from vllm_autoprune.tpdsl.tokens import Instruction, NextLayer, TowerStates, VisualTokens

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelParts:
    """Parts of the model that a policy's inputs are made with, beside the image features.

    project maps rows of the vision tower ``(..., Dv)`` to ``(..., D)``; language reads the
    language model's first layers over one image ``(N, D)`` and its instruction. None where the
    served state needs none.
    """

    project: Callable[[Tensor], Tensor]
    relevance: RelevanceSpace | None = None
    language: Callable[[Tensor, Ids], LanguagePrefix] | None = None


@dataclass(frozen=True, slots=True)
class SelectionContext:
    """State, model parts and reporter for the selection of one batch.

    ``first_check`` is the safety check on a state's first real images; None skips it. ``cores``
    keeps what further questions about an image need.
    """

    served: ServedState
    parts: ModelParts
    reporter: FallbackReporter
    first_check: FirstImageCheck | None = None
    cores: CoreCache = field(default_factory=lambda: CoreCache(0))


def prune_images(
    context: SelectionContext, plans: Sequence[ItemPlan], images: Sequence[ImageFeatures]
) -> list[Tensor]:
    """``(K_i, D + E)`` rows of every image, in the order given.

    Images of one budget and one shape are selected together; others make selections of their own.
    """
    plans = [_possible(*one, context.reporter) for one in zip(plans, images, strict=True)]
    rows: list[Tensor | None] = [None] * len(plans)
    for members in _groups(context.served, plans, images):
        plan, first = plans[members[0]], images[members[0]]
        if plan.budget >= first.candidates:
            for i in members:
                rows[i] = images[i].rows(plan.budget)
            continue
        kept = _select_rows(context, [plans[i] for i in members], [images[i] for i in members])
        for row, i in enumerate(members):
            # Profiling gets the unpruned size, after the selection has used its memory.
            rows[i] = images[i].rows() if plans[i].profile else kept[row]
    selected = [row for row in rows if row is not None]
    return [_fit_rows(*one, context.reporter) for one in zip(selected, plans, images, strict=True)]


def _possible(plan: ItemPlan, image: ImageFeatures, reporter: FallbackReporter) -> ItemPlan:
    """The plan, or a random draw for a delta whose core would be all tokens of its image.

    Only a forged plan is like that: the API server, which checks it, does not know N for certain.
    """
    if plan.part != "delta" or plan.core < image.candidates:
        return plan
    error = plan_error(f"has K_c = {plan.core}, and its image has {image.candidates} tokens")
    reporter.report_refused_plan(error, image.regions[0].projected.device)
    return replace(plan, keep="random", state=b"", part="whole", core=0)


def _groups(
    served: ServedState, plans: Sequence[ItemPlan], images: Sequence[ImageFeatures]
) -> Iterator[list[int]]:
    """Positions of the images that are selected together, cores before deltas."""
    groups: dict[object, list[int]] = {}
    for i, (plan, image) in enumerate(zip(plans, images, strict=True)):
        groups.setdefault((plan.group, _shape(image)), []).append(i)
    for members in sorted(groups.values(), key=lambda group: plans[group[0]].part != "core"):
        plan = plans[members[0]]
        selects = plan.budget < images[members[0]].candidates and plan.keep != "random"
        if selects and "language" in served.policy_for_plan(plan).needs:
            # Instructions differ in length, and neither padding nor a batch may change a selection.
            yield from ([i] for i in members)
        else:
            yield members


def _shape(image: ImageFeatures) -> tuple[object, ...]:
    return (image.gaps, *((region.grid, region.share) for region in image.regions))


def _select_rows(
    context: SelectionContext, plans: Sequence[ItemPlan], images: Sequence[ImageFeatures]
) -> Tensor:
    """Select ``(B, K, D + E)`` rows of images of one budget, below N, and one shape."""
    plan = plans[0]
    policy = None if plan.keep == "random" else context.served.policy_for_plan(plan)
    rows, positions = [], []
    for at, share in enumerate(share_over_regions(plan, policy, images[0].regions)):
        if share.rows == 0:
            continue
        regions = [image.regions[at] for image in images]
        if policy is None:
            keys = [plan.key for plan in plans]
            refined = select_at_random(share.rows, _projected_only(regions), keys)
        else:
            own = share.policy(policy)
            refined = _refine_regions(context, own, plans, regions, at)
        rows.append(_append_extra_channels(refined, regions))
        positions.append(_row_positions(refined, regions))
    joined = torch.cat(rows, dim=1)
    by_quality = policy is not None and orders_by_quality(policy.state.reassembly)
    if not by_quality and images[0].regions[0].order is not None:
        order = torch.cat(positions, dim=1).argsort(dim=1, stable=True)
        joined = joined.gather(1, order[:, :, None].expand(-1, -1, joined.shape[2]))
    return _append_fillers(joined, plan, images)


def _append_fillers(rows: Tensor, plan: ItemPlan, images: Sequence[ImageFeatures]) -> Tensor:
    """Rows ``(B, K, D)``, with fillers where a delta is more than all tokens beside its core."""
    missing = min(plan.image_budget - images[0].candidates, images[0].gaps)
    fillers = [image.filler for image in images if image.filler is not None]
    if missing <= 0 or len(fillers) < len(images):
        return rows
    added = torch.stack(fillers)[:, None].expand(-1, missing, -1)
    return torch.cat([rows, added.to(rows.dtype)], dim=1)


def _append_extra_channels(refined: RefinedTokens, regions: Sequence[Region]) -> Tensor:
    """``(B, K, D + E)``: selected rows with the extra channels of their tokens appended.

    A row that stands for no single token takes the channels of the last one that is kept.
    """
    extra_channels = _stacked([region.extra_channels for region in regions])
    if extra_channels is None:
        return refined.features
    last = refined.indices[:, -1:].expand(-1, refined.extra)
    sources = torch.cat([refined.indices, last], dim=1)[:, :, None]
    extra = extra_channels.gather(1, sources.expand(-1, -1, extra_channels.shape[2]))
    return torch.cat([refined.features, extra.to(refined.features.dtype)], dim=2)


def _row_positions(refined: RefinedTokens, regions: Sequence[Region]) -> Tensor:
    """``(B, K)``: position of each row among all rows of its image; rows without a token last."""
    orders = _stacked([region.order for region in regions])
    positions = refined.indices if orders is None else orders.gather(1, refined.indices)
    shape, end = (positions.shape[0], refined.extra), torch.iinfo(positions.dtype).max
    return torch.cat([positions, positions.new_full(shape, end)], dim=1)


def _projected_only(regions: Sequence[Region]) -> VisualTokens:
    return VisualTokens(torch.stack([region.projected for region in regions]), regions[0].grid)


def _refine_regions(
    context: SelectionContext,
    policy: PruningPolicy,
    plans: Sequence[ItemPlan],
    regions: Sequence[Region],
    at: int,
) -> RefinedTokens:
    """One selection from the same region, number ``at``, of every image."""
    part = plans[0].part
    try:
        tokens = _tokens(policy, plans, regions, context.parts)
        if context.first_check is not None and not plans[0].profile:
            policy = context.first_check.replace_unsafe(policy, tokens)
        given = None
        if part == "delta" and policy.core:
            given = _given_cores(context, policy, plans, tokens, at)
    except Exception as error:  # as in select_with_fallback(): the engine has to live
        context.reporter.report_error(error)
        budget = policy.budget - policy.core if part == "delta" else policy.budget
        refined = keep_evenly(budget, _projected_only(regions))
        context.reporter.report(refined.fallback, "error")
        return refined
    if given is not None:
        return select_with_fallback(delta_policy(policy), tokens, context.reporter, given)
    refined = select_with_fallback(policy, tokens, context.reporter)
    if part == "core":
        _remember_cores(context, _core_keys(context, plans, at, policy.budget), refined.indices)
    return refined


def _given_cores(
    context: SelectionContext,
    policy: PruningPolicy,
    plans: Sequence[ItemPlan],
    tokens: VisualTokens,
    at: int,
) -> Given:
    """The cores of these images' regions, as they were chosen when their own items were computed.

    Those that were not, or too long ago, are chosen anew: the same tokens, since they follow from
    the image alone.
    """
    keys = _core_keys(context, plans, at, policy.core)
    known = [context.cores.indices(key) for key in keys]
    if any(one is None for one in known):
        alone = core_policy(policy.state, policy.core)
        chosen = select_with_fallback(alone, tokens, context.reporter).indices
        known = [chosen[i] if one is None else one for i, one in enumerate(known)]
        _remember_cores(context, keys, torch.stack(_present(known)))
    given = give_core(policy, tokens, torch.stack(_present(known)))
    condition = policy.base.condition
    if condition is None:
        return given
    conditioned = [context.cores.conditioned(key) for key in keys]
    if any(one is None for one in conditioned):
        fresh = condition(tokens, given.indices)
        for i, key in enumerate(keys):
            if conditioned[i] is None:
                conditioned[i] = own = fresh.select(i, len(plans))
                context.cores.put_conditioned(key, own)
    return replace(given, conditioned=Conditioned.join(_present(conditioned)))


def _remember_cores(context: SelectionContext, keys: Sequence[Hashable], indices: Tensor) -> None:
    for key, own in zip(keys, indices, strict=True):
        context.cores.put_indices(key, own)


def _core_keys(
    context: SelectionContext, plans: Sequence[ItemPlan], at: int, count: int
) -> list[Hashable]:
    """Keys of the cores of one region: which image, what chooses, how many tokens."""
    core = context.served.state_for_plan(plans[0]).core
    assert core is not None
    return [None if p.key == NO_KEY else (p.key, core.digest, at, count) for p in plans]


def _present(parts: Sequence[T | None]) -> list[T]:
    return [part for part in parts if part is not None]


def _tokens(
    policy: PruningPolicy,
    plans: Sequence[ItemPlan],
    regions: Sequence[Region],
    parts: ModelParts,
) -> VisualTokens:
    features = torch.stack([region.projected for region in regions])
    instruction, language = None, None
    if "instruction" in policy.needs and parts.relevance is not None:
        text, segments = parts.relevance.instructions([plan.instruction for plan in plans])
        patches = _stacked([region.patches for region in regions])
        instruction = Instruction(
            features if patches is None else patches, text, segments, parts.relevance.sign
        )
    if "language" in policy.needs and parts.language is not None:
        (plan,) = plans
        language = parts.language(features[0], plan.language)
    return VisualTokens(
        features,
        regions[0].grid,
        _stacked([region.cls_attention for region in regions]),
        instruction,
        _stacked([region.cosine for region in regions]),
        _tower(regions, parts.project),
        language,
    )


def _tower(regions: Sequence[Region], project: Callable[[Tensor], Tensor]) -> TowerStates | None:
    towers = [region.tower for region in regions if region.tower is not None]
    if len(towers) < len(regions):
        return None
    attention = _stacked([tower.next_attention for tower in towers])
    keys = _stacked([tower.next_keys for tower in towers])
    return TowerStates(
        patches=torch.stack([tower.patches for tower in towers]),
        keys=torch.stack([tower.keys for tower in towers]),
        project=project,
        cls=torch.stack([tower.cls for tower in towers]),
        next_layer=None if attention is None or keys is None else NextLayer(attention, keys),
    )


def _stacked(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Stack one tensor of every image; None where an image has none."""
    present = [part for part in parts if part is not None]
    return torch.stack(present) if len(present) == len(parts) else None


def _fit_rows(
    rows: Tensor, plan: ItemPlan, image: ImageFeatures, reporter: FallbackReporter
) -> Tensor:
    """Cut or extend rows to the number of the image's placeholders, the budget of its plan.

    vLLM silently drops surplus rows, and its engine crashes where rows are missing. Neither happens
    while the API server predicts N correctly; otherwise rows are dropped at the end or the last one
    is repeated, and the mismatch is counted.
    """
    wanted = image.tokens if plan.profile else plan.budget
    if rows.shape[0] == wanted:
        return rows
    reporter.report_error(
        SelectionError(f"{rows.shape[0]} rows for a placeholder of {wanted}"),
        "cutting its rows off, or repeating the last one",
    )
    return rows[torch.arange(wanted, device=rows.device).clamp(max=rows.shape[0] - 1)]
