"""Algorithm 1: TPDSL-guided residual refinement, for a batch of images at once.

Knows nothing about files, servers or devices; nothing in it waits for the device.

    base selection -> scores -> pool -> residual exchange -> reassembly
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_autoprune.tpdsl.constraints import run_selector
from vllm_autoprune.tpdsl.fusion import run_fusion
from vllm_autoprune.tpdsl.kernels import run_kernel
from vllm_autoprune.tpdsl.materialize import PruningPolicy
from vllm_autoprune.tpdsl.numerics import evenly, mask_of, raster
from vllm_autoprune.tpdsl.pools import build_pool
from vllm_autoprune.tpdsl.reassembly import gather_rows, run_reassembly
from vllm_autoprune.tpdsl.safety import Refined
from vllm_autoprune.tpdsl.scoring import run_signal
from vllm_autoprune.tpdsl.tokens import VisualTokens


def refine(policy: PruningPolicy, tokens: VisualTokens) -> Refined:
    """T_v* of every image: exactly K rows, ascending unique indices, finite.

    Where K >= N every token is kept untouched. Where an image's features or signals are not
    finite its reference selection is kept, or an even spread where the base policy has nothing
    finite to read either; :attr:`Refined.fallback` says so, per image, without a host sync.
    """
    if policy.budget >= tokens.count:
        return _everything(tokens)
    if policy.reads_instruction:
        tokens.require_instruction()

    reference = policy.base.select(policy.state.base_policy.params, tokens, policy.budget)
    readable = _readable(policy, tokens)
    spread = evenly(tokens.batch, tokens.count, policy.budget, reference.device)
    reference = torch.where(readable[:, None], reference, spread)
    kept = mask_of(reference, tokens.count)
    if not policy.refines:
        indices = raster(kept, policy.budget)
        return _result(policy, tokens, indices, reference, readable, readable, None)

    g = _quality(policy, tokens)
    scored = readable & g.isfinite().all(dim=1)
    g = torch.where(scored[:, None], g, torch.zeros_like(g))
    pool = build_pool(policy.state.constraints.pool, tokens, g, reference)
    kernel = run_kernel(policy.state.scoring.kernel, tokens, g)
    refined = run_selector(
        policy.state.constraints.selector, reference, pool, g, kernel, policy.quota
    )
    chosen = torch.where(scored[:, None], refined, kept)
    indices = raster(chosen, policy.budget)
    return _result(policy, tokens, indices, reference, readable, scored, g)


def keep_reference(policy: PruningPolicy, tokens: VisualTokens) -> Refined:
    """The base policy's selection alone, features untouched: pi_P(T_v, X_q; K)."""
    if policy.budget >= tokens.count:
        return _everything(tokens)
    reference = policy.base.select(policy.state.base_policy.params, tokens, policy.budget)
    return keep_these(tokens, reference, fallback=1)


def keep_evenly(budget: int, tokens: VisualTokens) -> Refined:
    """An even spread of K tokens that reads nothing: what is left when all else failed."""
    if budget >= tokens.count:
        return _everything(tokens)
    spread = evenly(tokens.batch, tokens.count, budget, tokens.features.device)
    return keep_these(tokens, spread, fallback=2)


def reassemble(
    policy: PruningPolicy, tokens: VisualTokens, indices: Tensor, fallback: Tensor
) -> Tensor:
    """Rows ``(B, K, D)`` of the kept tokens, finite; as they came where an image fell back.

    What made an image fall back may be in a discarded token, which must not reach kept ones.
    """
    rows = run_reassembly(policy.state.reassembly, tokens, indices)
    untouched = gather_rows(tokens.features, indices)
    rows = torch.where((fallback == 0)[:, None, None], rows, untouched)
    return rows.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _readable(policy: PruningPolicy, tokens: VisualTokens) -> Tensor:
    """``(B,)``: everything that the base policy reads is finite."""
    # A token's length is finite only where all of it is: one pass over the features, not three.
    readable = tokens.norm.isfinite().flatten(1).all(dim=1)
    if tokens.instruction is not None and "instruction" in policy.base.needs:
        if tokens.instruction.patches is not tokens.features:
            readable &= tokens.instruction.patches.norm(dim=-1).isfinite().all(dim=1)
        said = tokens.instruction.text.isfinite().all(dim=2) | ~tokens.instruction.segments
        readable &= said.all(dim=1)
    return readable


def _quality(policy: PruningPolicy, tokens: VisualTokens) -> Tensor:
    """Token quality g ``(B, N)``; the same for every token where no signal has any weight."""
    calls = [call for call in policy.state.scoring.signals if call.weight > 0]
    if not calls:
        return tokens.features.new_ones(tokens.batch, tokens.count, dtype=torch.float32)
    signals = [run_signal(call, tokens) for call in calls]
    return run_fusion(policy.state.scoring.fusion, signals, [call.weight for call in calls])


def _result(
    policy: PruningPolicy,
    tokens: VisualTokens,
    indices: Tensor,
    reference: Tensor,
    readable: Tensor,
    scored: Tensor,
    g: Tensor | None,
) -> Refined:
    kept = mask_of(indices, tokens.count).gather(1, reference).sum(dim=1)
    fallback = torch.where(readable, torch.where(scored, 0, 1), 2).to(torch.uint8)
    return Refined(
        features=reassemble(policy, tokens, indices, fallback),
        indices=indices,
        reference=reference,
        exchanged=policy.budget - kept,
        fallback=fallback,
        quality=g,
    )


def keep_these(tokens: VisualTokens, picks: Tensor, fallback: int = 0) -> Refined:
    """A given selection ``(B, K)`` in any order, features untouched but finite."""
    indices = raster(mask_of(picks, tokens.count), picks.shape[1])
    batch, device = tokens.batch, tokens.features.device
    return Refined(
        features=gather_rows(tokens.features, indices).nan_to_num(0.0, 0.0, 0.0),
        indices=indices,
        reference=picks,
        exchanged=torch.zeros(batch, dtype=torch.int64, device=device),
        fallback=torch.full((batch,), fallback, dtype=torch.uint8, device=device),
        quality=None,
    )


def _everything(tokens: VisualTokens) -> Refined:
    device = tokens.features.device
    indices = torch.arange(tokens.count, device=device).expand(tokens.batch, -1)
    none = torch.zeros(tokens.batch, dtype=torch.int64, device=device)
    return Refined(tokens.features, indices, indices, none, none.to(torch.uint8), quality=None)
