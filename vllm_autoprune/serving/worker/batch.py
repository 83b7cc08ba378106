"""Batched selection: from images with plans to rows for the language model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vllm_autoprune.errors import SelectionError
from vllm_autoprune.serving.plan import ItemPlan, plan_error, runs_policy
from vllm_autoprune.serving.served_state import ServedState
from vllm_autoprune.serving.worker.features import ImageFeatures, Region, stack
from vllm_autoprune.serving.worker.regions import (
    SelectionContext,
    select_region,
    share_over_regions,
)
from vllm_autoprune.serving.worker.selection import FallbackReporter
from vllm_autoprune.tpdsl.atoms.reassembly import orders_by_quality
from vllm_autoprune.tpdsl.base_policy import RefinedTokens
from vllm_autoprune.tpdsl.tokens import Need


def prune_images(
    context: SelectionContext, plans: Sequence[ItemPlan], images: Sequence[ImageFeatures]
) -> list[Tensor]:
    """``(K_i, D + E)`` rows of every image, in the order given.

    Images of one budget and one shape are selected together; others make selections of their own.
    """
    plans = [
        _replace_impossible(*item, context.reporter) for item in zip(plans, images, strict=True)
    ]
    rows: list[Tensor | None] = [None] * len(plans)
    for members in _groups(context.served, plans, images):
        plan, image = plans[members[0]], images[members[0]]
        if _all_kept(plan, image):
            for i in members:
                rows[i] = images[i].rows(plan.budget)
            continue
        kept = _select_rows(context, [plans[i] for i in members], [images[i] for i in members])
        for row, i in enumerate(members):
            # Profiling gets the unpruned size, after the selection has used its memory.
            rows[i] = images[i].rows() if plans[i].profile else kept[row]
    selected = [row for row in rows if row is not None]
    return [
        _fit_rows(*item, context.reporter) for item in zip(selected, plans, images, strict=True)
    ]


def _replace_impossible(
    plan: ItemPlan, image: ImageFeatures, reporter: FallbackReporter
) -> ItemPlan:
    """The plan, or a random draw where the items before it keep all tokens of the image.

    Only a forged plan is like that: the API server, which checks it, does not know N for certain.
    """
    most = image.tokens if plan.part == "recall" else image.candidates
    if plan.kept_before < most:
        return plan
    error = plan_error(f"comes after {plan.kept_before} tokens, and its image has {most}")
    reporter.report_refused_plan(error, image.regions[0].projected.device)
    return replace(plan, keep="random", state=b"", part="whole", core=0, earlier=())


_VARIABLE_LENGTH: frozenset[Need] = frozenset({"language", "words"})
"""Inputs whose length depends on the instruction: images that need them are selected one by one."""


def _groups(
    served: ServedState, plans: Sequence[ItemPlan], images: Sequence[ImageFeatures]
) -> Iterator[list[int]]:
    """Positions of the images that are selected together, in the order of their parts.

    What an item is chosen after is then remembered when its own turn comes.
    """
    groups: dict[object, list[int]] = {}
    for i, (plan, image) in enumerate(zip(plans, images, strict=True)):
        groups.setdefault((plan.group, _shape(image)), []).append(i)
    for members in sorted(groups.values(), key=lambda group: plans[group[0]].kept_before):
        plan = plans[members[0]]
        selects = not _all_kept(plan, images[members[0]]) and runs_policy(plan.keep)
        if selects and _VARIABLE_LENGTH & served.policy_for_plan(plan).needs:
            # Instructions differ in length, and neither padding nor a batch may change a selection.
            yield from ([i] for i in members)
        else:
            yield members


def _all_kept(plan: ItemPlan, image: ImageFeatures) -> bool:
    return plan.kept_before == 0 and plan.budget >= image.candidates


def _shape(image: ImageFeatures) -> tuple[object, ...]:
    return (image.gaps, *((region.grid, region.share) for region in image.regions))


def _select_rows(
    context: SelectionContext, plans: Sequence[ItemPlan], images: Sequence[ImageFeatures]
) -> Tensor:
    """Select ``(B, K, D + E)`` rows of images of one group and shape, of which not all are kept."""
    plan = plans[0]
    rows, positions = [], []
    for at, share in enumerate(share_over_regions(context.served, plan, images[0])):
        if share.rows == 0:
            continue
        regions = [image.regions[at] for image in images]
        refined = select_region(context, plans, images, at, share)
        rows.append(_append_extra_channels(refined, regions))
        positions.append(_row_positions(refined, regions))
    if not rows:  # all tokens are kept already
        return _append_fillers(torch.stack([image.rows()[:0] for image in images]), plan, images)
    joined = torch.cat(rows, dim=1)
    by_quality = runs_policy(plan.keep) and orders_by_quality(
        context.served.policy_for_plan(plan).state.reassembly
    )
    if images[0].regions[0].order is not None and not by_quality:
        order = torch.cat(positions, dim=1).argsort(dim=1, stable=True)
        joined = joined.gather(1, order[:, :, None].expand(-1, -1, joined.shape[2]))
    return _append_fillers(joined, plan, images)


def _append_fillers(rows: Tensor, plan: ItemPlan, images: Sequence[ImageFeatures]) -> Tensor:
    """Rows ``(B, K, D)``, with fillers where all tokens are kept and the plan asks for more."""
    image = images[0]
    missing = min(plan.image_budget - image.candidates, image.gaps)
    missing -= max(0, plan.kept_before - image.candidates)
    fillers = [image.filler for image in images if image.filler is not None]
    if missing <= 0 or len(fillers) < len(images):
        return rows
    added = torch.stack(fillers)[:, None].expand(-1, missing, -1)
    return torch.cat([rows, added.to(rows.dtype)], dim=1)


def _append_extra_channels(refined: RefinedTokens, regions: Sequence[Region]) -> Tensor:
    """``(B, K, D + E)``: selected rows with the extra channels of their tokens appended.

    A row that stands for no single token takes the channels of the last one that is kept.
    """
    channels = [r.extra_channels for r in regions if r.extra_channels is not None]
    if not channels:
        return refined.features
    extra_channels = stack(channels)
    last = refined.indices[:, -1:].expand(-1, refined.extra)
    sources = torch.cat([refined.indices, last], dim=1)[:, :, None]
    extra = extra_channels.gather(1, sources.expand(-1, -1, extra_channels.shape[2]))
    return torch.cat([refined.features, extra.to(refined.features.dtype)], dim=2)


def _row_positions(refined: RefinedTokens, regions: Sequence[Region]) -> Tensor:
    """``(B, K)``: position of each row among all rows of its image; rows without a token last."""
    orders = [region.order for region in regions if region.order is not None]
    positions = stack(orders).gather(1, refined.indices) if orders else refined.indices
    shape, end = (positions.shape[0], refined.extra), torch.iinfo(positions.dtype).max
    return torch.cat([positions, positions.new_full(shape, end)], dim=1)


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
