"""What a base policy selects, and images of a recorded language prefix."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_autoprune import Grid, VisualTokens
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, PublishedSelection, ReferenceSelection
from vllm_autoprune.tpdsl.prefix import RecordedPrefix
from vllm_autoprune.tpdsl.tokens import TowerStates


def tower_of(tokens: VisualTokens) -> TowerStates:
    """Tower states of these images; fails if there are none."""
    assert tokens.tower is not None
    return tokens.tower


def select(name: str, tokens: VisualTokens, budget: int, **params: object) -> ReferenceSelection:
    """A policy's reference selection with these parameters and the defaults of the others."""
    policy = BASE_POLICIES[name]
    call = policy.call.model_validate({"name": name, "params": params})
    return policy.select(call.params, tokens, budget)


def native(
    name: str, tokens: VisualTokens, budget: int | None = None, **params: object
) -> PublishedSelection:
    """Output of the published code on these inputs."""
    policy = BASE_POLICIES[name]
    call = policy.call.model_validate({"name": name, "params": params})
    return policy.native(call.params, tokens, budget)


def prefix(
    count: int,
    text: list[bool],
    *,
    start: int = 1,
    embeddings: Tensor | None = None,
    states: Tensor | None = None,
    normed: Tensor | None = None,
    keys: Tensor | None = None,
    attention: Tensor | None = None,
    layers: int = 32,
) -> VisualTokens:
    """One image of ``count`` tokens with what is recorded of its sequence, no batch axis given."""

    def one(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[None]

    return VisualTokens(
        torch.eye(count)[None],
        Grid(1, count),
        language=RecordedPrefix(
            start,
            torch.tensor([text]),
            layers,
            one(embeddings),
            one(states),
            one(normed),
            one(keys),
            one(attention),
        ),
    )
