"""Optional inputs of :class:`VisualTokens`: instruction, words, tower states, merger input.

Shapes as in :mod:`vllm_autoprune.tpdsl.tokens`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vllm_autoprune.ops.similarity import cosines_with


@dataclass(frozen=True)
class Instruction:
    """Embeddings of tokens and instruction in the space where relevance is measured.

    patches ``(B, N, C)``; text ``(B, M, C)``, one row per text segment; segments ``(B, M)`` bool,
    false for padding; sign +1 or -1, the sign of the cosine that means relevance (-1 for OpenAI's
    CLIP as LLaVA uses it, +1 for a language model's embedding space).
    """

    patches: Tensor
    text: Tensor
    segments: Tensor
    sign: int

    @cached_property
    def cosines(self) -> Tensor:
        """Unsigned cosines ``(B, N, M)`` of each token with each segment.

        Computed in float32, as the published policies do with CLIP's projections.
        """
        return cosines_with(self.patches, self.text)


@dataclass(frozen=True)
class Words:
    """Input embeddings of the instruction's words in the language model.

    embeddings ``(B, W, D)``, one row per token of a word; used ``(B, W)`` bool, false for padding.
    """

    embeddings: Tensor
    used: Tensor


@dataclass(frozen=True)
class NextLayer:
    """Attention of the layer after the one that the projector reads, computed as a single head.

    attention ``(B, N)``: the [CLS] row of softmax(q k^T / sqrt(Dv)) over [CLS] and the patches of
    a tile, without the entry of [CLS]; for towers without [CLS] the mean over all queries. keys
    ``(B, N, Dv)``: the keys of all heads, concatenated.
    """

    attention: Tensor
    keys: Tensor


@dataclass(frozen=True)
class TowerStates:
    """Output of the vision-tower layer that the projector reads.

    patches ``(B, N, Dv)``; cls ``(B, T, Dv)``, None if the tower has no [CLS]; keys ``(B, N, dk)``,
    the attention keys of that layer averaged over heads; project is the model's projector, from
    rows ``(..., Dv)`` to ``(..., D)``.
    """

    patches: Tensor
    keys: Tensor
    project: Callable[[Tensor], Tensor]
    cls: Tensor | None = None
    next_layer: NextLayer | None = None

    def projected(self, rows: Tensor) -> Tensor:
        """Project rows ``(R, m, Dv)`` to ``(R, m, D)``.

        One of the R at a time, so that results are bit-identical alone and in a batch.
        """
        return torch.stack([self.project(part) for part in rows])


@dataclass(frozen=True)
class MergerInput:
    """What only a backbone with a patch merger has of the tokens that enter it.

    norms ``(B, N, 2)`` float32: the sum of absolute values and the Euclidean norm of each token,
    the mean over its patches; known_cosine ``(B, N, N)`` is a precomputed cosine between the
    encoder's tokens, where there is one.
    """

    norms: Tensor
    known_cosine: Tensor | None = None
