"""Token selections to compare: all, a random subset, pooled cells, evidence, base policies."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.minillava.split import Example
from vllm_autoprune.ops.rowwise import gather_rows
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, BasePolicy
from vllm_autoprune.tpdsl.refine import pool_tokens
from vllm_autoprune.tpdsl.tokens import VisualTokens

Selection = Callable[[Sequence[Example], VisualTokens, int], Tensor]
"""(M examples, their tokens, K) → rows (M, K, D) for the language model, in raster order."""

RANDOM, RESIZED, ORACLE = "random", "resized", "oracle"


def keep_all(examples: Sequence[Example], tokens: VisualTokens, count: int) -> Tensor:
    """Keep every token."""
    return tokens.features


def _shuffled_patches(examples: Sequence[Example], tokens: VisualTokens) -> list[list[int]]:
    """All raster indices in an order that is random but fixed for each question."""
    return [
        random.Random(f"{example.image_id} {example.question}").sample(
            range(tokens.count), tokens.count
        )
        for example in examples
    ]


def keep_random(examples: Sequence[Example], tokens: VisualTokens, count: int) -> Tensor:
    """Keep a seeded random subset for each question."""
    picks = torch.tensor([order[:count] for order in _shuffled_patches(examples, tokens)])
    return gather_rows(tokens.features, picks.sort(1).values)


def pool_cells(examples: Sequence[Example], tokens: VisualTokens, count: int) -> Tensor:
    """Pool the tokens to K cells: the resize control of a fixed grid."""
    return pool_tokens(count, tokens).features


def keep_evidence(examples: Sequence[Example], tokens: VisualTokens, count: int) -> Tensor:
    """Keep the question's evidence and fill up with random tokens: the oracle."""
    orders = _shuffled_patches(examples, tokens)
    rows = [
        list(dict.fromkeys((*example.evidence, *order)))[:count]
        for example, order in zip(examples, orders, strict=True)
    ]
    return gather_rows(tokens.features, torch.tensor(rows).sort(1).values)


EQUAL_POLICIES = {"pyramiddrop": "fastv"}
"""Base policies that keep the tokens of another one on this model, and have no row beside it.

A quarter of its six layers, where PyramidDrop's first stage ranks, is the layer that FastV reads.
"""


def _policy_selection(policy: BasePolicy) -> Selection:
    params = policy.call(name=policy.name).params

    def keep(examples: Sequence[Example], tokens: VisualTokens, count: int) -> Tensor:
        reference = policy.select(params, tokens, count)
        rows = gather_rows(reference.rows(tokens), reference.picks.sort(1).values)
        extra = reference.extra
        return rows if extra is None else torch.cat((rows, extra.to(rows.dtype)), 1)

    return keep


def selections() -> dict[str, Selection]:
    """Random, resize control, oracle, and every registered base policy at its defaults."""
    controls: dict[str, Selection] = {
        RANDOM: keep_random,
        RESIZED: pool_cells,
        ORACLE: keep_evidence,
    }
    return controls | {name: _policy_selection(policy) for name, policy in BASE_POLICIES.items()}
