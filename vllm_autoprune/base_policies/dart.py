"""DART: keep a few pivots, and for each of them the tokens that repeat it least.

Knows nothing about how the language model's first layers are run.

Source: Wen et al., "Stop Looking for Important Tokens in Multimodal Language Models: Duplication
Matters More" (EMNLP 2025). The authors' repository holds no code; the rule is that of the
LightCompress port. Here it selects before the model runs [ours], by the states of an early layer
or by the input embeddings alone.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.base_policies.attended import (
    MOST_LAYERS,
    checked_layer,
    text_span,
    visual_span,
)
from vllm_autoprune.ops.products import cosines_with
from vllm_autoprune.tpdsl.base_policy import (
    BasePolicyParams,
    Native,
    Reference,
    base_policy,
    counted,
)
from vllm_autoprune.tpdsl.numerics import ranked
from vllm_autoprune.tpdsl.reassembly import gather_rows
from vllm_autoprune.tpdsl.tokens import VisualTokens

VISUAL_PIVOTS = 4
TEXT_PIVOTS = 4

_SLOTS = 32
"""Size of the hash table that CPython makes for a set of five to eight small integers."""


class DartParams(BasePolicyParams):
    """Parameters of DART."""

    space: Literal["layer", "embeddings"] = Field(
        "layer",
        description="layer: keys and normed states of a layer, as published; embeddings: what "
        "enters the language model, for which no layer has to run",
    )
    layer: int = Field(
        2,
        ge=1,
        le=MOST_LAYERS,
        description="layer before which DART prunes: the one before it is read, counted from 0",
    )


def native(params: DartParams, tokens: VisualTokens, budget: int | None) -> Native:
    """4 + 8 floor(K / 8) tokens in raster order: pivots come on top of the budget.

    Pivots take their turns as CPython walks a set of their positions, which the port does and
    which changes what is kept.
    """
    each = counted("dart", budget) // (VISUAL_PIVOTS + TEXT_PIVOTS)
    start = tokens.require_language().start
    length, states = _read(params, tokens)
    visual, words = _pivots(params, tokens, length)
    kept = []
    for image in range(tokens.batch):
        positions = {*(visual[image] + start).tolist(), *words[image].tolist()}
        turns = torch.tensor([list(positions)], device=visual.device)
        one = slice(image, image + 1)
        shares = [each] * len(positions)
        picks = _least_alike(states[one], visual[one], turns, shares, start, tokens.count)
        kept.append(picks[0].sort().values)
    return Native(tuple(kept))


@base_policy(DartParams, needs=frozenset({"language"}), native=native)
def dart(params: DartParams, tokens: VisualTokens, budget: int) -> Reference:
    """Four strong visual pivots, then the tokens least alike to each pivot, visual and text."""
    start = tokens.require_language().start
    length, states = _read(params, tokens)
    visual, words = _pivots(params, tokens, length)
    visual = visual[:, :budget]
    turns = torch.cat([visual + start, words], dim=1)
    # The order of CPython's set where no two pivots collide in its table; then the lower first.
    by_slot = (turns % _SLOTS) * states.shape[1] + turns
    turns = turns.gather(1, by_slot.argsort(dim=1, stable=True))
    each, rest = divmod(budget - visual.shape[1], turns.shape[1])
    shares = [each + (turn < rest) for turn in range(turns.shape[1])]
    return Reference(_least_alike(states, visual, turns, shares, start, tokens.count))


def _read(params: DartParams, tokens: VisualTokens) -> tuple[Tensor, Tensor]:
    """L1 length ``(B, L)`` that pivots are chosen by, and states ``(B, L, D)`` to compare."""
    language = tokens.require_language()
    if params.space == "embeddings":
        entering = language.embeddings().float()
        return entering.abs().sum(dim=2), entering
    layer = checked_layer(language, params.layer - 1)
    # All heads side by side, so that one length is the sum of the heads' lengths.
    return language.keys(layer).float().abs().sum(dim=(1, 3)), language.normed(layer)


def _pivots(params: DartParams, tokens: VisualTokens, length: Tensor) -> tuple[Tensor, Tensor]:
    """Visual ``(B, 4)``, counted within the image, and text pivots ``(B, 4)``, absolute.

    Fewer where there are fewer tokens. Where an instruction is shorter than that, and others of
    the batch are not, its strongest token takes the turns that are left [ours].
    """
    language = tokens.require_language()
    visual = ranked(visual_span(language, length, tokens.count))[:, :VISUAL_PIVOTS]
    text = language.text
    strength = text_span(language, length, tokens.count).masked_fill(~text, -torch.inf)
    words = ranked(strength)[:, :TEXT_PIVOTS]
    words = torch.where(text.gather(1, words), words, words[:, :1])
    return visual, words + language.start + tokens.count


def _least_alike(
    states: Tensor, visual: Tensor, turns: Tensor, shares: list[int], start: int, count: int
) -> Tensor:
    """``(B, 4 + sum of shares)``: the visual pivots, then each turn's share of what is left."""
    unlike = -cosines_with(gather_rows(states, turns), states.narrow(1, start, count))
    taken = torch.zeros(unlike.shape[0], count, dtype=torch.bool, device=states.device)
    taken.scatter_(1, visual, True)
    picks = [visual]
    for turn, share in enumerate(shares):
        # A cosine that is not a number still comes before what is taken.
        worth = unlike[:, turn].nan_to_num(nan=-2.0).masked_fill(taken, -torch.inf)
        found = ranked(worth)[:, :share]
        taken.scatter_(1, found, True)
        picks.append(found)
    return torch.cat(picks, dim=1)
