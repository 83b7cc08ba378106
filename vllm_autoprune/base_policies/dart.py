"""DART: keep a few pivot tokens and, for each, the tokens that are least similar to it.

Source: Wen et al., "Stop Looking for Important Tokens in Multimodal Language Models: Duplication
Matters More" (EMNLP 2025). The authors' repository contains no code; this follows the port in
LightCompress. Here tokens are selected before prefill [ours], by the states of an early layer or by
the input embeddings alone.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.rowwise import gather_rows, rank_descending
from vllm_autoprune.ops.similarity import cosines_with
from vllm_autoprune.tpdsl.base_policy import (
    PolicyParams,
    PublishedSelection,
    ReferenceSelection,
    base_policy,
)
from vllm_autoprune.tpdsl.prefix import MOST_LAYERS
from vllm_autoprune.tpdsl.tokens import VisualTokens

_VISUAL_PIVOTS = 4
_TEXT_PIVOTS = 4

_SLOTS = 32
"""Size of CPython's hash table for a set of five to eight small integers."""


class _DartParams(PolicyParams):
    """Parameters of DART."""

    space: Literal["layer", "embeddings"] = Field(
        "layer",
        description="layer: keys and normed states of a layer, as published; embeddings: what "
        "enters the language model, which needs no layer",
    )
    layer: int = Field(
        2,
        ge=1,
        le=MOST_LAYERS,
        description="layer before which DART prunes, counted from 0; the layer before it is read",
    )


def _native(params: _DartParams, tokens: VisualTokens, budget: int) -> PublishedSelection:
    """4 + 8 floor(K / 8) tokens in raster order: the visual pivots are added to the budget.

    Pivots are processed in the iteration order of a CPython set of their positions, as in the
    port; the order affects which tokens are kept.
    """
    each = budget // (_VISUAL_PIVOTS + _TEXT_PIVOTS)
    start = tokens.require_language().start
    length, states = _pivot_norms_and_states(params, tokens)
    visual, words = _pivots(params, tokens, length)
    kept = []
    for image in range(tokens.batch):
        positions = {*(visual[image] + start).tolist(), *words[image].tolist()}
        turns = torch.tensor([list(positions)], device=visual.device)
        row = slice(image, image + 1)
        shares = [each] * len(positions)
        picks = _least_similar(states[row], visual[row], turns, shares, start, tokens.count)
        kept.append(picks[0].sort().values)
    return PublishedSelection(tuple(kept))


@base_policy(
    _DartParams,
    needs=frozenset({"language"}),
    native=_native,
    # States of a layer need that layer as well.
    ranking_layers=lambda params, layers: params.layer if params.space == "layer" else 0,
)
def dart(params: _DartParams, tokens: VisualTokens, budget: int) -> ReferenceSelection:
    """Four visual pivots, then the tokens least similar to each visual and text pivot."""
    start = tokens.require_language().start
    length, states = _pivot_norms_and_states(params, tokens)
    visual, words = _pivots(params, tokens, length)
    visual = visual[:, :budget]
    turns = torch.cat([visual + start, words], dim=1)
    # Iteration order of a CPython set without hash collisions; else the lower comes first.
    by_slot = (turns % _SLOTS) * states.shape[1] + turns
    turns = turns.gather(1, by_slot.argsort(dim=1, stable=True))
    each, rest = divmod(budget - visual.shape[1], turns.shape[1])
    shares = [each + (turn < rest) for turn in range(turns.shape[1])]
    return ReferenceSelection(_least_similar(states, visual, turns, shares, start, tokens.count))


def _pivot_norms_and_states(params: _DartParams, tokens: VisualTokens) -> tuple[Tensor, Tensor]:
    """L1 norms ``(B, L)`` that rank pivots, and states ``(B, L, D)`` that are compared."""
    language = tokens.require_language()
    if params.space == "embeddings":
        entering = language.embeddings().float()
        return entering.abs().sum(dim=2), entering
    layer = params.layer - 1
    # The L1 norm over all heads together.
    return language.keys(layer).float().abs().sum(dim=(1, 3)), language.normed(layer)


def _pivots(params: _DartParams, tokens: VisualTokens, length: Tensor) -> tuple[Tensor, Tensor]:
    """Visual pivots ``(B, 4)`` as image indices, and text pivots ``(B, 4)`` as absolute positions.

    Fewer if there are fewer tokens. If only some instructions of the batch are that short, their
    strongest token is repeated [ours].
    """
    language = tokens.require_language()
    visual = rank_descending(language.visual(length, tokens.count))[:, :_VISUAL_PIVOTS]
    text = language.text
    strength = language.textual(length, tokens.count).masked_fill(~text, -torch.inf)
    words = rank_descending(strength)[:, :_TEXT_PIVOTS]
    words = torch.where(text.gather(1, words), words, words[:, :1])
    return visual, words + language.start + tokens.count


def _least_similar(
    states: Tensor, visual: Tensor, turns: Tensor, shares: list[int], start: int, count: int
) -> Tensor:
    """Visual pivots, then for each pivot its share of the remaining tokens, least similar first."""
    dissimilarity = -cosines_with(gather_rows(states, turns), states.narrow(1, start, count))
    taken = torch.zeros(dissimilarity.shape[0], count, dtype=torch.bool, device=states.device)
    taken.scatter_(1, visual, True)
    picks = [visual]
    for turn, share in enumerate(shares):
        # NaN ranks last among the remaining tokens, but before those already taken.
        score = dissimilarity[:, turn].nan_to_num(nan=-2.0).masked_fill(taken, -torch.inf)
        chosen = rank_descending(score)[:, :share]
        taken.scatter_(1, chosen, True)
        picks.append(chosen)
    return torch.cat(picks, dim=1)
