"""Algorithm 1: TPDSL-guided residual refinement, for a batch of images at once.

Knows nothing about files, servers or devices; nothing in it waits for the device.

    base selection -> scores -> pool -> residual exchange | reassembly
    ---------------------- choose ----------------------- | assemble -
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vllm_autoprune.tpdsl.base_policy import Reference
from vllm_autoprune.tpdsl.constraints import run_selector
from vllm_autoprune.tpdsl.fusion import run_fusion
from vllm_autoprune.tpdsl.kernels import run_kernel
from vllm_autoprune.tpdsl.materialize import PruningPolicy
from vllm_autoprune.tpdsl.numerics import evenly, mask_of, raster
from vllm_autoprune.tpdsl.outcome import Chosen, Refined
from vllm_autoprune.tpdsl.pools import build_pool
from vllm_autoprune.tpdsl.reassembly import gather_rows, run_reassembly
from vllm_autoprune.tpdsl.scoring import run_signal
from vllm_autoprune.tpdsl.tokens import VisualTokens


def refine(policy: PruningPolicy, tokens: VisualTokens) -> Refined:
    """T_v* of every image: exactly K rows, finite, of unique tokens.

    Where K >= N every token is kept untouched. Where an image's features or signals are not
    finite its reference selection is kept, or an even spread where the base policy has nothing
    finite to read either; :attr:`Refined.fallback` says so, per image, without a host sync.
    """
    if policy.budget >= tokens.count:
        return everything(tokens)
    return assemble(policy, tokens, choose(policy, tokens))


def choose(policy: PruningPolicy, tokens: VisualTokens) -> Chosen:
    """The tokens that are kept of every image; needs K < N."""
    if "instruction" in policy.needs:
        tokens.require_instruction()
    selected = policy.base.select(policy.state.base_policy.params, tokens, policy.budget)
    readable = _readable(policy, tokens)
    reference = _trusted(selected, readable, tokens)
    picks = reference.picks
    kept, count = mask_of(picks, tokens.count), picks.shape[1]
    if not policy.refines:
        code = torch.where(readable, 0, 2).to(torch.uint8)
        return Chosen(raster(kept, count), reference, code)

    g = _quality(policy, tokens)
    scored = readable & g.isfinite().all(dim=1)
    g = torch.where(scored[:, None], g, torch.zeros_like(g))
    pool = build_pool(policy.state.constraints.pool, tokens, g, picks)
    kernel = run_kernel(policy.state.scoring.kernel, tokens, g)
    quota = min(policy.quota, count)
    refined = run_selector(policy.state.constraints.selector, picks, pool, g, kernel, quota)
    chosen = raster(torch.where(scored[:, None], refined, kept), count)
    code = torch.where(readable, torch.where(scored, 0, 1), 2).to(torch.uint8)
    return Chosen(chosen, reference, code, g)


def assemble(policy: PruningPolicy, tokens: VisualTokens, chosen: Chosen) -> Refined:
    """Rows of the kept tokens, finite; as they came where an image fell back.

    What made an image fall back may be in a discarded token, which must not reach kept ones.
    """
    rows = run_reassembly(policy.state.reassembly, tokens, chosen)
    untouched = gather_rows(chosen.reference.rows(tokens), chosen.indices)
    held = (chosen.fallback == 0)[:, None, None]
    return _refined(tokens, chosen, torch.where(held, rows, untouched))


def keep_reference(policy: PruningPolicy, tokens: VisualTokens) -> Refined:
    """The base policy's selection alone: pi_P(T_v, X_q; K)."""
    if policy.budget >= tokens.count:
        return everything(tokens)
    reference = policy.base.select(policy.state.base_policy.params, tokens, policy.budget)
    return _keep(tokens, reference, fallback=1)


def keep_evenly(budget: int, tokens: VisualTokens) -> Refined:
    """An even spread of K tokens that reads nothing: what is left when all else failed."""
    if budget >= tokens.count:
        return everything(tokens)
    spread = evenly(tokens.batch, tokens.count, budget, tokens.features.device)
    return keep_these(tokens, spread, fallback=2)


def keep_these(tokens: VisualTokens, picks: Tensor, fallback: int = 0) -> Refined:
    """A given selection ``(B, K)`` in any order, features untouched but finite."""
    return _keep(tokens, Reference(picks), fallback)


def everything(tokens: VisualTokens) -> Refined:
    """All N tokens as they came."""
    device = tokens.features.device
    indices = torch.arange(tokens.count, device=device).expand(tokens.batch, -1)
    none = torch.zeros(tokens.batch, dtype=torch.int64, device=device)
    return Refined(tokens.features, indices, indices, none, none.to(torch.uint8), quality=None)


def _keep(tokens: VisualTokens, reference: Reference, fallback: int) -> Refined:
    picks = reference.picks
    indices = raster(mask_of(picks, tokens.count), picks.shape[1])
    code = torch.full((tokens.batch,), fallback, dtype=torch.uint8, device=picks.device)
    rows = gather_rows(reference.rows(tokens), indices)
    return _refined(tokens, Chosen(indices, reference, code), rows)


def _refined(tokens: VisualTokens, chosen: Chosen, rows: Tensor) -> Refined:
    extra, picks = chosen.reference.extra, chosen.reference.picks
    if extra is not None:
        rows = torch.cat([rows, extra.to(rows.dtype)], dim=1)
    still = mask_of(chosen.indices, tokens.count).gather(1, picks).sum(dim=1)
    return Refined(
        features=rows.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0),
        indices=chosen.indices,
        reference=picks,
        exchanged=picks.shape[1] - still,
        fallback=chosen.fallback,
        quality=chosen.quality,
    )


def _trusted(reference: Reference, readable: Tensor, tokens: VisualTokens) -> Reference:
    """The reference selection, an even spread for images of which nothing could be read."""
    count = reference.picks.shape[1]
    spread = evenly(tokens.batch, tokens.count, count, reference.picks.device)
    trusted = replace(reference, picks=torch.where(readable[:, None], reference.picks, spread))
    if reference.merged is None:
        return trusted
    plain = gather_rows(tokens.features, trusted.picks).to(reference.merged.dtype)
    merged = torch.where(readable[:, None, None], reference.merged, plain)
    return replace(trusted, merged=merged)


def _readable(policy: PruningPolicy, tokens: VisualTokens) -> Tensor:
    """``(B,)``: everything that the base policy reads is finite."""
    # A token's length is finite only where all of it is: one pass over the features, not three.
    readable = tokens.norm.isfinite().flatten(1).all(dim=1)
    read: list[Tensor] = []
    needs = policy.base.needs
    if "instruction" in needs and tokens.instruction is not None:
        if tokens.instruction.patches is not tokens.features:
            read.append(tokens.instruction.patches)
        used = tokens.instruction.segments[:, :, None]
        read.append(torch.where(used, tokens.instruction.text, 0.0))
    if "cls_attention" in needs and tokens.cls_attention is not None:
        read.append(tokens.cls_attention[:, :, None])
    if "tower" in needs and tokens.tower is not None:
        read += [tokens.tower.patches, tokens.tower.keys]
    if "next_layer" in needs and tokens.tower is not None:
        following = tokens.require_next_layer()
        read += [following.attention[:, :, None], following.keys]
    if "language" in needs and tokens.language is not None:
        read.append(tokens.language.embeddings())
    for part in read:
        readable &= part.norm(dim=-1).isfinite().all(dim=1)
    return readable


def _quality(policy: PruningPolicy, tokens: VisualTokens) -> Tensor:
    """Token quality g ``(B, N)``; the same for every token where no signal has any weight."""
    calls = [call for call in policy.state.scoring.signals if call.weight > 0]
    if not calls:
        return tokens.features.new_ones(tokens.batch, tokens.count, dtype=torch.float32)
    signals = [run_signal(call, tokens) for call in calls]
    return run_fusion(policy.state.scoring.fusion, signals, [call.weight for call in calls])
