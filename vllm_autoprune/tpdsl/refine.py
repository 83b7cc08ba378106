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
from vllm_autoprune.tpdsl.constraints import Revision, run_selector
from vllm_autoprune.tpdsl.fusion import run_fusion
from vllm_autoprune.tpdsl.materialize import PruningPolicy
from vllm_autoprune.tpdsl.numerics import evenly, mask_of, raster
from vllm_autoprune.tpdsl.outcome import Chosen, Refined
from vllm_autoprune.tpdsl.pools import build_pool
from vllm_autoprune.tpdsl.reassembly import gather_rows, run_reassembly
from vllm_autoprune.tpdsl.scoring import relevance, run_signal
from vllm_autoprune.tpdsl.source import Known, is_idle, run_prior, view_of
from vllm_autoprune.tpdsl.tokens import VisualTokens


def refine(policy: PruningPolicy, tokens: VisualTokens) -> Refined:
    """T_v* of every image: exactly K rows, finite, of unique tokens.

    Where K >= N every token is kept untouched. Where an image's features or signals are not
    finite its reference selection is kept, or an even spread where the base policy has nothing
    finite to read either; :attr:`Refined.fallback` says so, per image, without a host sync.
    """
    policy = policy.at(tokens.count, tokens.grid.tiles)
    if policy.budget >= tokens.count:
        return everything(tokens)
    return assemble(policy, tokens, choose(policy, tokens))


@torch.no_grad()
def choose(policy: PruningPolicy, tokens: VisualTokens) -> Chosen:
    """The tokens that are kept of every image; needs K < N. A choice has no derivative."""
    if "instruction" in policy.needs:
        tokens.require_instruction()
    selected = policy.base.select(policy.state.base_policy.params, tokens, policy.budget)
    readable = _readable(policy, tokens)
    reference = _trusted(selected, readable, tokens)
    picks = reference.picks
    kept, scored, g = mask_of(picks, tokens.count), _mergeable(policy, tokens), None
    if policy.scores:
        view = view_of(policy.state.source.tokens, tokens)
        g = _quality(policy, tokens, view, picks)
        scored = scored & g.isfinite().all(dim=1)
        if view.features is not tokens.features:
            scored = scored & view.norm.isfinite().flatten(1).all(dim=1)
        g = torch.where((readable & scored)[:, None], g, torch.zeros_like(g))
        if policy.refines:
            refined = _exchange(policy, view, g, picks)
            kept = torch.where((readable & scored)[:, None], refined, kept)
    code = torch.where(readable, torch.where(scored, 0, 1), 2).to(torch.uint8)
    return Chosen(raster(kept, picks.shape[1]), reference, code, g)


def assemble(policy: PruningPolicy, tokens: VisualTokens, chosen: Chosen) -> Refined:
    """Rows of the kept tokens, finite; as they came where an image fell back.

    What made an image fall back may be in a discarded token, which must not reach kept ones.
    """
    rows, indices = run_reassembly(policy.state.reassembly, tokens, chosen)
    untouched = gather_rows(chosen.reference.rows(tokens), chosen.indices)
    held = (chosen.fallback == 0)[:, None]
    ordered = replace(chosen, indices=torch.where(held, indices, chosen.indices))
    return _refined(tokens, ordered, torch.where(held[:, :, None], rows, untouched))


def keep_reference(policy: PruningPolicy, tokens: VisualTokens) -> Refined:
    """The base policy's selection alone: pi_P(T_v, X_q; K)."""
    policy = policy.at(tokens.count, tokens.grid.tiles)
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


def _quality(
    policy: PruningPolicy, tokens: VisualTokens, view: VisualTokens, picks: Tensor
) -> Tensor:
    """Token quality g ``(B, N)``; the same for every token where no signal has any weight."""
    state = policy.state
    calls = [call for call in state.scoring.signals if call.weight > 0]
    g = tokens.features.new_ones(tokens.batch, tokens.count, dtype=torch.float32)
    if calls:
        signals = [run_signal(call, view, picks) for call in calls]
        g = run_fusion(state.scoring.fusion, signals, [call.weight for call in calls], picks)
    known = Known(tokens, state.base_policy, policy.budget, picks)
    for prior in state.source.priors:
        if not is_idle(prior):
            g = g * run_prior(prior, known)
    return g


def _exchange(policy: PruningPolicy, view: VisualTokens, g: Tensor, picks: Tensor) -> Tensor:
    """Refined subset as a mask ``(B, N)``."""
    scoring, constraints = policy.state.scoring, policy.state.constraints
    revision = Revision(
        tokens=view,
        picks=picks,
        pool=build_pool(constraints.pool, view, g, picks),
        g=g,
        quota=min(policy.quota, picks.shape[1]),
        kernel_call=scoring.kernel,
        partition_call=constraints.partition,
    )
    return run_selector(constraints.selector, revision)


def _mergeable(policy: PruningPolicy, tokens: VisualTokens) -> Tensor:
    """``(B,)``: what the residual and the reassembly read of the instruction is finite."""
    instruction = tokens.instruction
    if "instruction" not in policy.needs or instruction is None:
        return torch.ones(tokens.batch, dtype=torch.bool, device=tokens.features.device)
    return relevance(instruction).isfinite().all(dim=1)
