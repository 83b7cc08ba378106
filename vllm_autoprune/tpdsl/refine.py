"""Algorithm 1: TPDSL-guided residual refinement, for a batch of images at once.

base selection -> scores -> pool -> residual exchange | reassembly
 ---------------------- choose ---------------------- | assemble -

A state that ranks before the patch merger chooses by the tokens there; rows are always assembled
from the tokens after it.

A policy with a core runs this twice: for the core, which reads no question, and then for the other
tokens, the delta, given the core.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from vllm_autoprune.ops.rowwise import (
    gather_rows,
    indices_from_mask,
    mask_from_indices,
    rank_descending,
    upload,
)
from vllm_autoprune.tpdsl.atoms.pools import build_pool
from vllm_autoprune.tpdsl.atoms.reassembly import RECIPES
from vllm_autoprune.tpdsl.atoms.scoring import run_fusion
from vllm_autoprune.tpdsl.atoms.selectors import SelectorInputs
from vllm_autoprune.tpdsl.atoms.signals import run_signal
from vllm_autoprune.tpdsl.atoms.source import PriorInputs
from vllm_autoprune.tpdsl.base_policy import (
    Given,
    ReferenceSelection,
    RefinedTokens,
    TokenSelection,
)
from vllm_autoprune.tpdsl.frames import pick_from_frames
from vllm_autoprune.tpdsl.materialize import PruningPolicy, materialize
from vllm_autoprune.tpdsl.registry import run
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import Grid, VisualTokens, split_over_tiles


def refine(policy: PruningPolicy, tokens: VisualTokens) -> RefinedTokens:
    """Refined tokens T_v* of every image: exactly K finite rows of unique tokens.

    If K >= N all tokens are kept unchanged. If the scores of an image are not finite, its reference
    selection is kept; if the inputs of the base policy are not finite either, K evenly spaced
    tokens are kept. :attr:`RefinedTokens.fallback` records this per image, without a host sync.
    """
    policy = policy.at(tokens.count, tokens.grid.tiles)
    if policy.budget >= tokens.count:
        return RefinedTokens.keep_all(tokens)
    if policy.core == 0:
        return assemble_rows(policy, tokens, select_tokens(policy, tokens))
    core = refine(materialize(policy.state, policy.core, part="core"), tokens)
    if policy.core == policy.budget:
        return core
    start = give_core(policy, tokens, core.indices)
    delta = policy.delta
    return core.joined(
        assemble_rows(delta, tokens, select_tokens(delta, tokens, start))
    )


def give_core(policy: PruningPolicy, tokens: VisualTokens, core: Tensor) -> Given:
    """The core at indices ``(B, A)`` as given tokens for the delta of the policy.

    Tokens that are merged into the core are closed to the delta, unless that leaves it too few. The
    core must not depend on K, so they stay merged into it even where the delta keeps them too.
    """
    of_state = policy.state.possible_core
    assert of_state is not None
    tokens = policy.state.ranked(tokens)
    tiles = tokens.grid.tiles
    per_tile = tokens.grid.per_tile
    count = int(of_state.cover * per_tile)
    covered = _most_similar(tokens, core, count)
    delta = policy.budget - policy.core
    # The core covers `count` tokens in each tile, or all core tokens in it if there are more.
    closed = count * (tiles - 1) + max(count, policy.core)
    if count + -(-delta // tiles) > per_tile or closed + delta > tokens.count:
        return Given(core, mask_from_indices(core, tokens.count), covered, policy.core)
    return Given(core, covered, covered, closed)


@torch.no_grad()
def select_tokens(
    policy: PruningPolicy, tokens: VisualTokens, start: Given | None = None
) -> TokenSelection:
    """Select the tokens to keep of every image, besides the given ones, without gradients.

    Needs K < N, and at least K tokens that ``start`` does not close.
    """
    if "instruction" in policy.needs:
        tokens.require_instruction()
    state = policy.state
    tokens = state.ranked(tokens)
    readable = _inputs_finite(policy, tokens)
    reference = _select_base(policy, tokens, start, readable)
    picks = reference.picks
    selected = mask_from_indices(picks, tokens.count)
    scored = torch.ones_like(readable)
    if "instruction" in policy.needs and tokens.instruction is not None:
        scored = tokens.instruction.relevance().isfinite().all(dim=1)
    quality = None
    if policy.reads_quality:
        view = run(VisualTokens, state.source.tokens, tokens)
        picked = picks
        budget = policy.budget
        if start is not None:  # given tokens count as picks
            picked = torch.cat([start.indices, picks], dim=1)
            budget += start.indices.shape[1]
        inputs = PriorInputs(state.shared(tokens), state.base_policy, budget, picked)
        quality = _score(state, view, inputs)
        scored = scored & quality.isfinite().all(dim=1)
        if view.features is not tokens.features:
            scored = scored & view.norm.isfinite().flatten(1).all(dim=1)
        sound = (readable & scored)[:, None]
        quality = torch.where(sound, quality, torch.zeros_like(quality))
        if policy.refines:
            pool = build_pool(state.constraints.pool, view, quality, picked)
            selector_inputs = SelectorInputs(
                tokens=view,
                picks=picks,
                pool=pool if start is None else pool & ~start.closed,
                g=quality,
                quota=min(policy.quota, picks.shape[1]),
                kernel_call=state.scoring.kernel,
                partition_call=state.constraints.partition,
                start=start,
            )
            exchanged = run(Tensor, state.constraints.selector, selector_inputs)
            selected = torch.where(sound, exchanged, selected)

    code = torch.where(readable, torch.where(scored, 0, 1), 2).to(torch.uint8)
    indices = indices_from_mask(selected, picks.shape[1])
    selection = TokenSelection(indices, reference, code, quality)
    if start is not None:
        return replace(selection, mergeable=~start.covered)
    if policy.is_core:
        count = int(policy.cover * tokens.grid.per_tile)
        mergeable = _most_similar(tokens, selection.indices, count)
        return replace(selection, mergeable=mergeable)
    return selection


def _select_base(
    policy: PruningPolicy, tokens: VisualTokens, start: Given | None, readable: Tensor
) -> ReferenceSelection:
    """The base policy's selection, or evenly spaced tokens where its inputs are not finite."""
    reference = _reference(policy, tokens, start)
    spread = _spread(reference.picks.shape[1], tokens, start)
    picks = torch.where(readable[:, None], reference.picks, spread)
    merged = reference.merged
    if merged is not None:
        unmerged = gather_rows(tokens.output, picks).to(merged.dtype)
        merged = torch.where(readable[:, None, None], merged, unmerged)
    return replace(reference, picks=picks, merged=merged)


def _score(state: PruningState, view: VisualTokens, inputs: PriorInputs) -> Tensor:
    """Token quality g ``(B, N)``: the fused signals of the view, 1 if none, times priors."""
    calls = [call for call in state.scoring.signals if call.weight > 0]
    quality = view.features.new_ones(view.batch, view.count, dtype=torch.float32)
    if calls:
        signals = [run_signal(call, view, inputs.picks) for call in calls]
        weights = [call.weight for call in calls]
        quality = run_fusion(state.scoring.fusion, signals, weights, inputs.picks)
    for prior in state.source.priors:
        if not prior.idle:
            quality = quality * run(Tensor, prior, inputs)
    return quality


def _inputs_finite(policy: PruningPolicy, tokens: VisualTokens) -> Tensor:
    """Whether all inputs that the base policy reads are finite, ``(B,)`` bool."""
    # A norm is finite only if all components are, and the norms are computed in any case.
    readable = tokens.norm.isfinite().flatten(1).all(dim=1)
    inputs: list[Tensor] = [] if tokens.merged is None else [tokens.merged]
    needs = policy.base.needs_of(policy.state.base_policy.params)
    if "instruction" in needs and tokens.instruction is not None:
        if tokens.instruction.patches is not tokens.output:
            inputs.append(tokens.instruction.patches)
        used = tokens.instruction.segments[:, :, None]
        inputs.append(torch.where(used, tokens.instruction.text, 0.0))
    if "cls_attention" in needs and tokens.cls_attention is not None:
        inputs.append(tokens.cls_attention[:, :, None])
    if "encoder" in needs and tokens.encoder is not None and tokens.merged is None:
        inputs.append(tokens.encoder)
    if "words" in needs and tokens.words is not None:
        used = tokens.words.used[:, :, None]
        inputs.append(torch.where(used, tokens.words.embeddings, 0.0))
    if "tower" in needs and tokens.tower is not None:
        inputs += [tokens.tower.patches, tokens.tower.keys]
    if "next_layer" in needs and tokens.tower is not None:
        next_layer = tokens.require_next_layer()
        inputs += [next_layer.attention[:, :, None], next_layer.keys]
    if "language" in needs and tokens.language is not None:
        inputs.append(tokens.language.embeddings())
    for part in inputs:
        readable &= part.norm(dim=-1).isfinite().all(dim=1)
    return readable


def _reference(
    policy: PruningPolicy, tokens: VisualTokens, start: Given | None
) -> ReferenceSelection:
    """The base policy's selection, which for a core or delta merges no tokens."""
    params = policy.state.base_policy.params
    frames = policy.state.frames
    if frames is not None and tokens.grid.video:
        start = Given.none(tokens) if start is None else start
        picks = pick_from_frames(
            frames, policy.base, params, tokens, policy.budget, start
        )
        return ReferenceSelection(picks)
    tokens = policy.state.shared(tokens)
    if start is not None:
        picks = policy.base.select_given(params, tokens, policy.budget, start)
    elif policy.is_core:
        picks = policy.base.select_picks(params, tokens, policy.budget)
    else:
        return policy.base.select(params, tokens, policy.budget)
    return ReferenceSelection(picks)


def _most_similar(tokens: VisualTokens, indices: Tensor, count: int) -> Tensor:
    """Mask ``(B, N)`` of the tokens at indices ``(B, A)`` and of those most similar to them.

    The mask has ``count`` tokens in each tile, or all tokens at the indices if these are more.
    """
    member = mask_from_indices(indices, tokens.count)
    if count == 0:
        return member
    inside = tokens.by_tile(member)
    nearest = tokens.tile_cosine.masked_fill(~inside[:, :, None], -torch.inf).amax(
        dim=1
    )
    order = rank_descending(nearest.masked_fill(inside, torch.inf))
    return tokens.by_image(
        mask_from_indices(order[:, :count], inside.shape[1]) | inside
    )


def assemble_rows(
    policy: PruningPolicy, tokens: VisualTokens, chosen: TokenSelection
) -> RefinedTokens:
    """Compute the finite rows of the kept tokens, without merging for images with a fallback.

    The value that caused a fallback may belong to a discarded token, so then no token may be
    merged.
    """
    call = policy.state.reassembly
    rows, indices = RECIPES[call.atom](call, tokens, chosen)
    untouched = gather_rows(chosen.reference.rows(tokens), chosen.indices)
    sound = (chosen.fallback == 0)[:, None]
    ordered = replace(chosen, indices=torch.where(sound, indices, chosen.indices))
    return _refined(tokens, ordered, torch.where(sound[:, :, None], rows, untouched))


def keep_reference(
    policy: PruningPolicy, tokens: VisualTokens, start: Given | None = None
) -> RefinedTokens:
    """Keep the base policy's selection, pi_P(T_v, X_q; K), besides the given tokens."""
    policy = policy.at(tokens.count, tokens.grid.tiles)
    if policy.budget >= tokens.count:
        return RefinedTokens.keep_all(tokens)
    return keep_unmerged(tokens, select_reference(policy, tokens, start))


def select_reference(
    policy: PruningPolicy, tokens: VisualTokens, start: Given | None = None
) -> TokenSelection:
    """The base policy's selection alone, as a fallback; needs K < N."""
    reference = _reference(policy, policy.state.ranked(tokens), start)
    return _keep_picks(reference, tokens, 1)


def select_evenly(
    budget: int, tokens: VisualTokens, start: Given | None = None
) -> TokenSelection:
    """K evenly spaced tokens, without reading any input: the last fallback; needs K < N."""
    return _keep_picks(ReferenceSelection(_spread(budget, tokens, start)), tokens, 2)


def _spread(budget: int, tokens: VisualTokens, start: Given | None) -> Tensor:
    """K evenly spaced tokens ``(B, K)`` among those that are not given."""
    device = tokens.features.device
    if start is None:
        return _evenly_spaced(tokens.batch, tokens.count, budget, device)
    remaining = tokens.count - start.indices.shape[1]
    is_given = mask_from_indices(start.indices, tokens.count)
    positions = _evenly_spaced(tokens.batch, remaining, budget, device)
    return indices_from_mask(~is_given, remaining).gather(1, positions)


def _evenly_spaced(batch: int, tokens: int, count: int, device: torch.device) -> Tensor:
    """``count`` evenly spaced positions in ``0..tokens - 1``, ``(batch, count)``."""
    spread = (torch.arange(count, device=device) * tokens + tokens // 2) // count
    return spread.clamp_max(tokens - 1).expand(batch, count)


def keep_indices(tokens: VisualTokens, picks: Tensor) -> RefinedTokens:
    """Keep the tokens at indices ``(B, K)``, in any order, with unmerged finite rows."""
    return keep_unmerged(tokens, _keep_picks(ReferenceSelection(picks), tokens, 0))


def keep_unmerged(tokens: VisualTokens, chosen: TokenSelection) -> RefinedTokens:
    """Keep a selection without reassembly: what its base policy merged stays merged."""
    return _refined(
        tokens, chosen, gather_rows(chosen.reference.rows(tokens), chosen.indices)
    )


def _keep_picks(
    reference: ReferenceSelection, tokens: VisualTokens, fallback: int
) -> TokenSelection:
    """The selection of a reference's picks, with one code of :data:`FALLBACKS` for all images."""
    picks = reference.picks
    indices = indices_from_mask(mask_from_indices(picks, tokens.count), picks.shape[1])
    code = torch.full((tokens.batch,), fallback, dtype=torch.uint8, device=picks.device)
    return TokenSelection(indices, reference, code)


def _refined(
    tokens: VisualTokens, chosen: TokenSelection, rows: Tensor
) -> RefinedTokens:
    """The result of a selection with these rows ``(B, P, D)``; values not finite become 0."""
    extra = chosen.reference.extra
    picks = chosen.reference.picks
    if extra is not None:
        rows = torch.cat([rows, extra.to(rows.dtype)], dim=1)
    remaining = (
        mask_from_indices(chosen.indices, tokens.count).gather(1, picks).sum(dim=1)
    )
    return RefinedTokens(
        features=rows.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0),
        indices=chosen.indices,
        reference=picks,
        exchanged=picks.shape[1] - remaining,
        fallback=chosen.fallback,
        quality=chosen.quality,
    )


def pool_tokens(budget: int, tokens: VisualTokens) -> RefinedTokens:
    """Replace the tokens of each image by the means of K cells ``(B, K, D)``, in raster order.

    The cells of a tile cover it without overlap. A token on a border counts in each cell in
    proportion to its area inside, so every token has the same total weight over all cells. The
    index of a row is the token at the centre of its cell, which gives positions and other values
    that cannot be averaged.
    """
    if budget >= tokens.count:
        return RefinedTokens.keep_all(tokens)
    device = tokens.features.device
    weights, centres = (upload(part, device) for part in _cells(budget, tokens.grid))
    finite = tokens.features.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    # One image at a time: a batched product may round differently.
    rows = torch.stack([weights @ image for image in finite])
    refined = keep_indices(tokens, centres.expand(tokens.batch, -1))
    return replace(refined, features=rows.to(tokens.features.dtype))


@lru_cache(maxsize=64)
def _cells(budget: int, grid: Grid) -> tuple[Tensor, Tensor]:
    """Weights ``(K, N)`` of all tokens in each cell, and the token ``(K,)`` at its centre."""
    weights = []
    centres = []
    for tile, share in enumerate(split_over_tiles(budget, grid.tiles)):
        # Horizontal bands of cells, so that cells are about as high as wide.
        bands = min(
            round((share * grid.height / grid.width) ** 0.5), grid.height, share
        )
        bands = max(-(-share // grid.width), bands)
        vertical = _overlaps(bands, grid.height)
        for band, cells in enumerate(split_over_tiles(share, bands) if share else ()):
            row = int((band + 0.5) * grid.height / bands)
            horizontal = _overlaps(cells, grid.width)
            for cell in range(cells):
                column = int((cell + 0.5) * grid.width / cells)
                centres.append(tile * grid.per_tile + row * grid.width + column)
                cell_weights = torch.zeros(grid.tokens, dtype=torch.float64)
                area = torch.outer(vertical[band], horizontal[cell]).flatten()
                cell_weights[tile * grid.per_tile : (tile + 1) * grid.per_tile] = area
                weights.append(cell_weights)
    return torch.stack(weights).float(), torch.tensor(centres)


def _overlaps(parts: int, length: int) -> Tensor:
    """Share of each of ``length`` units in each of ``parts`` equal parts, ``(parts, length)``.

    The shares of a part sum to 1.
    """
    edges = torch.arange(parts + 1, dtype=torch.float64) * length / max(parts, 1)
    units = torch.arange(length, dtype=torch.float64)
    upper = torch.minimum(edges[1:, None], units + 1)
    lower = torch.maximum(edges[:-1, None], units)
    return (upper - lower).clamp_min(0) * parts / length
