"""What is kept of an image: everything, a random share, the evidence, or a base policy's choice.

Knows nothing about answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.minillava.split import Example
from vllm_autoprune.base_policies import __all__ as _policies_are_loaded
from vllm_autoprune.ops.rowwise import gather_rows
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, BasePolicy
from vllm_autoprune.tpdsl.tokens import VisualTokens

Selection = Callable[[Sequence[Example], VisualTokens, int], Tensor]
"""(M examples, their tokens, K) -> rows (M, K, D) that enter the language model, in order."""

RANDOM, ORACLE = "random", "oracle"


def keep_all(examples: Sequence[Example], tokens: VisualTokens, count: int) -> Tensor:
    """Every token."""
    return tokens.features


def _samples(examples: Sequence[Example], tokens: VisualTokens) -> list[list[int]]:
    """All raster indices in an order that is random but the same for the same question."""
    return [
        random.Random(f"{example.image_id} {example.question}").sample(
            range(tokens.count), tokens.count
        )
        for example in examples
    ]


def keep_random(examples: Sequence[Example], tokens: VisualTokens, count: int) -> Tensor:
    """A seeded random sample for each question."""
    picks = torch.tensor([sample[:count] for sample in _samples(examples, tokens)])
    return gather_rows(tokens.features, picks.sort(1).values)


def keep_evidence(examples: Sequence[Example], tokens: VisualTokens, count: int) -> Tensor:
    """The oracle: the question's evidence, what tells most first, then a random rest."""
    rows = [
        list(dict.fromkeys((*example.evidence, *sample)))[:count]
        for example, sample in zip(examples, _samples(examples, tokens), strict=True)
    ]
    return gather_rows(tokens.features, torch.tensor(rows).sort(1).values)


def _of_policy(policy: BasePolicy) -> Selection:
    params = policy.call(name=policy.name).params

    def keep(examples: Sequence[Example], tokens: VisualTokens, count: int) -> Tensor:
        reference = policy.select(params, tokens, count)
        rows = gather_rows(reference.rows(tokens), reference.picks.sort(1).values)
        extra = reference.extra
        return rows if extra is None else torch.cat((rows, extra.to(rows.dtype)), 1)

    return keep


def selections() -> dict[str, Selection]:
    """Random, oracle, and every base policy that the package registers, at its defaults."""
    assert _policies_are_loaded, "importing the package is what registers its policies"
    found: dict[str, Selection] = {RANDOM: keep_random, ORACLE: keep_evidence}
    return found | {name: _of_policy(policy) for name, policy in BASE_POLICIES.items()}
