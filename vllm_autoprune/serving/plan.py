"""ItemPlan: what the API server decides about one image and the worker carries out.

Knows nothing about vLLM; it only turns a decision into a tensor and back.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

FIELD = "autoprune_plan"
"""Name of the multi-modal field that carries a plan to the worker."""

Keep = Literal["state", "reference", "random"]
"""Who chooses: the state, its base policy alone, or a random keep. The latter two are controls,
so that a running server can be measured against them on its own traffic."""

KEEPS: tuple[Keep, ...] = get_args(Keep)

_WORD = 8
"""Bytes of an int64."""

Ids = tuple[int, ...]
"""Token ids of a text."""


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """One image: its budget, the identity of the image alone, and its instruction as token ids.

    The instruction comes once for each need that reads it, since their tokenizers differ:
    ``instruction`` for relevance, ``language`` for the language model's first layers. Empty
    where the policy does not read it. ``profile`` marks vLLM's memory profiling: the unpruned
    size is returned, after paying for a selection as well. ``state`` is one that the request
    brought (:func:`vllm_autoprune.serving.carried.packed`), empty where the server's own is meant.
    ``tokens`` is N by the image's size, which the scheduler counts the encoder's work by.
    """

    budget: int
    key: tuple[int, int]
    instruction: Ids = ()
    language: Ids = ()
    keep: Keep = "state"
    profile: bool = False
    state: bytes = b""
    tokens: int = 0

    @property
    def group(self) -> tuple[int, Keep, bytes]:
        """Images that are alike in this are selected by one policy."""
        return self.budget, self.keep, self.state

    def encode(self) -> Tensor:
        """As int64 ``(8 + number of ids + bytes of the state / 8, rounded up,)``."""
        keep = KEEPS.index(self.keep)
        sizes = (len(self.instruction), len(self.state))
        head = (self.tokens, self.budget, keep, int(self.profile), *self.key, *sizes)
        padded = self.state.ljust(-(-len(self.state) // _WORD) * _WORD, b"\0")
        words = [
            int.from_bytes(padded[i : i + _WORD], "little", signed=True)
            for i in range(0, len(padded), _WORD)
        ]
        return torch.tensor([*head, *words, *self.instruction, *self.language])

    @staticmethod
    def decode(row: Tensor) -> ItemPlan:
        """Inverse of :meth:`encode`; the row must lie on the CPU."""
        tokens, budget, keep, profile, high, low, split, size, *rest = row.tolist()
        words = -(-size // _WORD)
        state = b"".join(w.to_bytes(_WORD, "little", signed=True) for w in rest[:words])[:size]
        ids = rest[words:]
        said, read = tuple(ids[:split]), tuple(ids[split:])
        keeper = KEEPS[keep]
        return ItemPlan(budget, (high, low), said, read, keeper, bool(profile), state, tokens)


def unpruned_tokens(row: Tensor) -> int:
    """``tokens`` of an encoded plan."""
    return int(row[0])


def image_key(identity: str) -> tuple[int, int]:
    """128 bits of vLLM's own image hash, as two int64."""
    digest = hashlib.sha256(identity.encode()).digest()
    return (
        int.from_bytes(digest[:8], "little", signed=True),
        int.from_bytes(digest[8:16], "little", signed=True),
    )


def pruned_identity(
    identity: str, served: str, budget: int, keep: Keep, read: tuple[Ids, Ids] | None
) -> str:
    """Cache identity of image + state + K + instruction.

    ``read`` is the plan's (instruction, language), None where the policy reads neither.
    """
    said = hashlib.sha256(f"{served}|{budget}|{keep}|{read}".encode()).hexdigest()[:32]
    return f"{identity}-ap-{said}"
