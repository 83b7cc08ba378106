"""Selection with fallback: a policy over a batch, whose failure never stops the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vllm_autoprune.ops.rowwise import upload
from vllm_autoprune.serving.shared.plan import Key
from vllm_autoprune.serving.worker.fallbacks import FallbackReason, FallbackReporter
from vllm_autoprune.serving.worker.tensor_parallel import broadcast_rank_zero, world_size
from vllm_autoprune.tpdsl.base_policy import Given, RefinedTokens, TokenSelection
from vllm_autoprune.tpdsl.materialize import PruningPolicy, core_policy, delta_policy
from vllm_autoprune.tpdsl.refine import (
    assemble_rows,
    give_core,
    join_parts,
    keep_all,
    keep_evenly,
    keep_indices,
    keep_reference,
    order_rows,
    select_tokens,
)
from vllm_autoprune.tpdsl.tokens import VisualTokens


@torch.no_grad()
def select_with_fallback(
    policy: PruningPolicy,
    tokens: VisualTokens,
    reporter: FallbackReporter,
    given: Given | None = None,
    known: Sequence[Tensor | None] = (),
) -> RefinedTokens:
    """Run :func:`vllm_autoprune.refine`; after an exception fall back instead of raising.

    Order: the policy, its base policy's selection, evenly spaced tokens, which read no input. With
    ``given`` tokens, the selection is the delta beside them. An image keeps the tokens ``(P,)``
    that are ``known`` of it, in their order, in place of those selected. Without derivatives,
    because vLLM warms up on a CPU outside of its inference mode.
    """
    policy = policy.at(tokens.count, tokens.grid.tiles)
    if policy.core and policy.budget < tokens.count:
        return _select_parts(policy, tokens, reporter, known)
    any_known = any(one is not None for one in known)
    reason: FallbackReason = "scores"
    try:
        if policy.budget >= tokens.count:
            refined = keep_all(tokens)
        else:
            chosen = select_tokens(policy, tokens, given)
            if any_known:
                chosen = replace(chosen, indices=_prefer(known, chosen.indices).sort(dim=1).values)
            refined = assemble_rows(policy, tokens, _broadcast_selection(chosen))
            if any_known:
                refined = order_rows(refined, _prefer(known, refined.indices), tokens.count)
    except Exception as error:  # the engine must survive any failure of a policy
        reporter.report_error(error)
        reason = "error"
        try:
            refined = keep_reference(policy, tokens, given)
        except Exception as second:
            reporter.report_error(second)
            refined = keep_evenly(policy.budget, tokens, given)
    reporter.report(refined.fallback, reason)
    return refined


def _prefer(known: Sequence[Tensor | None], indices: Tensor) -> Tensor:
    """Indices ``(B, P)`` with those of images of which as many are known replaced by them."""
    rows = zip(indices.unbind(), known, strict=True)
    return torch.stack([a if b is None or len(b) != len(a) else b for a, b in rows])


def _select_parts(
    policy: PruningPolicy,
    tokens: VisualTokens,
    reporter: FallbackReporter,
    known: Sequence[Tensor | None],
) -> RefinedTokens:
    """Core and delta of images that are one item of their prompts each."""
    first = [None if one is None else one[: policy.core] for one in known]
    rest = [None if one is None else one[policy.core :] for one in known]
    core = select_with_fallback(
        core_policy(policy.state, policy.core), tokens, reporter, known=first
    )
    if policy.core == policy.budget:
        return core
    try:
        given = give_core(policy, tokens, core.indices)
    except Exception as error:  # the engine must survive any failure of a policy
        reporter.report_error(error)
        return keep_evenly(policy.budget, tokens)
    delta = select_with_fallback(delta_policy(policy), tokens, reporter, given, rest)
    return join_parts(core, delta)


def select_at_random(
    budget: int, tokens: VisualTokens, keys: Sequence[Key], before: int = 0
) -> RefinedTokens:
    """Draw K random tokens an image, seeded by its pixels' key: a control, not a policy.

    ``before`` tokens were drawn by earlier items of the image, and the next ones are kept.

    The draw depends on nothing else, so it is the same on every rank, in every batch and under
    every name of the image.
    """
    picks = []
    for high, _ in keys:
        generator = torch.Generator().manual_seed(high & 0x7FFF_FFFF_FFFF_FFFF)
        picks.append(torch.randperm(tokens.count, generator=generator)[before : before + budget])
    return keep_indices(tokens, upload(torch.stack(picks), tokens.features.device))


def _broadcast_selection(chosen: TokenSelection) -> TokenSelection:
    """Broadcast rank 0's selection to all tensor-parallel ranks.

    Inputs are bit-equal on all ranks and so are the selections; but ranks that disagreed would
    serve garbage without any error, and K indices are little to send.
    """
    if world_size() == 1:
        return chosen
    packed = torch.cat([chosen.indices, chosen.fallback[:, None].to(torch.int64)], dim=1)
    packed = broadcast_rank_zero(packed)
    indices, fallback = packed[:, :-1].contiguous(), packed[:, -1].to(torch.uint8)
    return replace(chosen, indices=indices, fallback=fallback)
