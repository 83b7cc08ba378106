"""Base policies that maximise the determinant of a kernel of the kept tokens."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.base_policies.greedy import SCOPE, Sets, greedy_policy
from vllm_autoprune.ops.rowwise import min_max_normalise
from vllm_autoprune.tpdsl.base_policy import Given, PolicyParams
from vllm_autoprune.tpdsl.tokens import TileScope, VisualTokens


class _PivotedQRParams(PolicyParams):
    """Parameters of pivoted QR."""

    relevance: float = Field(
        0.0,
        ge=0.0,
        le=16.0,
        description="weight of relevance, by which lengths grow; 0: the question is not read",
    )
    tile_scope: TileScope = Field("per_tile", description=SCOPE)


class _PivotedQRCoreParams(_PivotedQRParams):
    """Parameters of pivoted QR without the question."""

    relevance: Literal[0] = Field(0, description="a core reads no question")


@greedy_policy(
    _PivotedQRParams,
    needs=frozenset({"instruction"}),
    reads=lambda params: frozenset({"instruction"} if params.relevance else ()),
    core=_PivotedQRCoreParams,
    cost=27.5,
)
def _pivoted_qr(
    params: _PivotedQRParams, tokens: VisualTokens, budget: int, start: Given
) -> Tensor:
    """Pivots of a QR decomposition: the token of longest residual after projection on the picks.

    Source: Businger and Golub, "Linear least squares solutions by Householder transformations"
    (1965), here as greedy MAP on L = diag(l) S diag(l) with the lengths l and cosines S of the
    tokens. As a pruning method it is this project's. A length is multiplied by 1 + relevance * r,
    with r normalised over all tiles.
    """
    sets = Sets(tokens, budget, start, params.tile_scope == "global")
    norm = tokens.norm[:, :, 0].float()
    longest = norm.amax(dim=1, keepdim=True).clamp_min(torch.finfo(norm.dtype).tiny)
    length = norm / longest
    if params.relevance:
        relevance = min_max_normalise(tokens.require_instruction().relevance())
        length = length * (1 + params.relevance * relevance)
    similarity = tokens.cosine if sets.across else tokens.tile_cosine
    return sets.pick_by_map(similarity, sets.of(length))


class _OTPruneParams(PolicyParams):
    """Parameters of OTPrune."""

    gamma: float = Field(
        0.01,
        gt=0.0,
        le=100.0,
        description="weight of the tokens' kernel beside identity",
    )


@greedy_policy(_OTPruneParams, cost=42.0)
def _otprune(
    params: _OTPruneParams, tokens: VisualTokens, budget: int, start: Given
) -> Tensor:
    """Greedy log-determinant of I + gamma S S, with S = Y Y^T and channels of Y of norm 1.

    Source: Chen et al., "OTPrune" (CVPR 2026, arXiv 2602.20205), and its published code.
    """
    sets = Sets(tokens, budget, start)
    rows = sets.of(tokens.features).float()
    units = rows / rows.norm(dim=1, keepdim=True).clamp_min(
        torch.finfo(rows.dtype).tiny
    )
    kernels = []
    # One set at a time: in a batched product a sum may be rounded differently.
    for unit in units.unbind():
        gram = unit @ unit.T
        kernel = (gram @ gram).mul_(params.gamma)
        kernel.diagonal().add_(1)
        kernels.append(kernel)
    kernel = torch.stack(kernels)
    quality = kernel.diagonal(dim1=1, dim2=2).sqrt()
    similarity = kernel.div_(quality[:, :, None]).div_(quality[:, None, :])
    return sets.pick_by_map(similarity, quality)
