"""Finite inputs: which images of a batch a policy can read, without a host sync."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_autoprune.tpdsl.atoms.scoring import instruction_relevance
from vllm_autoprune.tpdsl.executor.materialize import PruningPolicy
from vllm_autoprune.tpdsl.tokens import VisualTokens


def inputs_finite(policy: PruningPolicy, tokens: VisualTokens) -> Tensor:
    """Whether all inputs that the base policy reads are finite, ``(B,)`` bool."""
    # A norm is finite only if all components are, and the norms are computed anyway.
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
        following = tokens.require_next_layer()
        inputs += [following.attention[:, :, None], following.keys]
    if "language" in needs and tokens.language is not None:
        inputs.append(tokens.language.embeddings())
    for part in inputs:
        readable &= part.norm(dim=-1).isfinite().all(dim=1)
    return readable


def relevance_finite(policy: PruningPolicy, tokens: VisualTokens) -> Tensor:
    """Whether relevance, as read by scores and reassembly, is finite, ``(B,)`` bool."""
    instruction = tokens.instruction
    if "instruction" not in policy.needs or instruction is None:
        return torch.ones(tokens.batch, dtype=torch.bool, device=tokens.features.device)
    return instruction_relevance(instruction).isfinite().all(dim=1)
