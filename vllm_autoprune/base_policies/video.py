"""Base policies for videos, which compare a frame with the frames beside it.

All of them rank tokens by a score; the ``frames`` of a state decide how many each frame keeps. For
an image, each tile counts as the first frame of a video.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.ops.rowwise import rank_descending
from vllm_autoprune.ops.similarity import cosines_with
from vllm_autoprune.ops.videos import (
    cosine_to_previous,
    distance_from_mean,
    echo_of_previous,
    typicality,
)
from vllm_autoprune.tpdsl.base_policy import (
    P,
    PolicyParams,
    ReferenceSelection,
    base_policy,
)
from vllm_autoprune.tpdsl.tokens import Need, VisualTokens, split_over_tiles

_Score = Callable[[P, VisualTokens], Tensor]


def _scored_policy(
    params: type[P],
    *,
    cost: float,
    needs: frozenset[Need] = frozenset(),
    reads: Callable[[P], frozenset[Need]] | None = None,
    core: type[P] | None = None,
) -> Callable[[_Score[P]], _Score[P]]:
    """Decorator: register a policy by a function of its score ``(B, N)``.

    Of an image it keeps the tokens of largest score in each tile.
    """

    def register(function: _Score[P]) -> _Score[P]:
        @base_policy(
            params, cost=cost, needs=needs, reads=reads, core=core, score=function
        )
        @wraps(function)
        def select(params: P, tokens: VisualTokens, budget: int) -> ReferenceSelection:
            order = rank_descending(tokens.by_tile(function(params, tokens)))
            shares = split_over_tiles(budget, tokens.grid.tiles)
            return ReferenceSelection(tokens.join_tiles(order[:, : shares[0]], shares))

        return function

    return register


@_scored_policy(PolicyParams, cost=9.4)
def _evs(params: PolicyParams, tokens: VisualTokens) -> Tensor:
    """The tokens least similar to the one at their place in the frame before.

    Source: Efficient Video Sampling, as vLLM has it: the first frame comes before all others.
    """
    return tokens.map_videos(
        lambda video: 1 - cosine_to_previous(video, initial=-254.0)
    )


@_scored_policy(PolicyParams, cost=9.4)
def _vidcom2(params: PolicyParams, tokens: VisualTokens) -> Tensor:
    """The tokens farthest from the mean of the video and of their frame, in steady channels.

    Source: Liu et al., "Video Compression Commander" (EMNLP 2025), and its code in vLLM.
    """

    def score(video: Tensor) -> Tensor:
        common, within = typicality(video)
        return -(common + within)

    return tokens.map_videos(score)


@_scored_policy(PolicyParams, cost=9.4)
def _vcast(params: PolicyParams, tokens: VisualTokens) -> Tensor:
    """The tokens of large norm that are least similar to the mean of their frame.

    Source: V-CAST (arXiv 2603.27650), the paper's formulas. Its code hands what a rounded share
    leaves over to one frame; here the remainders decide [ours].
    """

    def score(video: Tensor) -> Tensor:
        norm: Tensor = video.norm(dim=-1)
        low = norm.amin(dim=1, keepdim=True)
        high = norm.amax(dim=1, keepdim=True)
        return distance_from_mean(video) + (norm - low) / (high - low + 1e-6)

    return tokens.map_videos(score)


class _EchoPruneParams(PolicyParams):
    """Parameters of EchoPrune."""

    tau: float = Field(
        0.5,
        ge=0.01,
        le=4.0,
        description="temperature of similarity to the frame before",
    )
    scope: Literal["frame", "local"] = Field(
        "frame",
        description="tokens of the frame before: all, or the 3 x 3 around the place",
    )
    words: bool = Field(
        True, description="false: what is new alone, without the question"
    )


class _EchoPruneCoreParams(_EchoPruneParams):
    """Parameters of EchoPrune without the question."""

    words: Literal[False] = Field(False, description="a core reads no question")


@_scored_policy(
    _EchoPruneParams,
    needs=frozenset({"words"}),
    reads=lambda params: frozenset({"words"} if params.words else ()),
    core=_EchoPruneCoreParams,
    cost=27.9,
)
def _echoprune(params: _EchoPruneParams, tokens: VisualTokens) -> Tensor:
    """The tokens most similar to a word of the question that the frame before does not have.

    Source: EchoPrune (arXiv 2605.10050), by its abstract and a port of it: there is no code.
    """
    width = tokens.grid.width if params.scope == "local" else 0

    def repeated(video: Tensor) -> Tensor:
        return cosine_to_previous(video, 0.0) + echo_of_previous(
            video, params.tau, 0.0, width
        )

    score: Tensor = -tokens.map_videos(repeated)
    words = tokens.require_words() if params.words else None
    if words is not None and words.used.shape[1] > 0:
        cosine = cosines_with(tokens.output, words.embeddings)
        best = cosine.masked_fill(~words.used[:, None], -torch.inf).amax(dim=2)
        score = score + torch.where(words.used.any(dim=1, keepdim=True), best, 0.0)
    return score
