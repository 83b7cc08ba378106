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

Key = tuple[int, int]
"""What an image's features are kept under (:func:`make_feature_key`)."""

NO_KEY: Key = (0, 0)
"""The key of an image whose features are not kept."""


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """One image: its budget, the key of its pixels alone, and its instruction as token ids.

    The instruction comes once for each need that reads it, since their tokenizers differ:
    ``instruction`` for relevance, ``language`` for the language model's first layers. Empty
    where the policy does not read it. ``profile`` marks vLLM's memory profiling: the unpruned
    size is returned, after paying for a selection as well. ``state`` is one that the request
    brought (:func:`vllm_autoprune.serving.carried.packed`), empty where the server's own is meant.
    """

    budget: int
    key: Key
    instruction: Ids = ()
    language: Ids = ()
    keep: Keep = "state"
    profile: bool = False
    state: bytes = b""

    @property
    def group(self) -> tuple[int, Keep, bytes]:
        """Images that are alike in this are selected by one policy."""
        return self.budget, self.keep, self.state

    def encode(self) -> Tensor:
        """As int64 ``(7 + number of ids + bytes of the state / 8, rounded up,)``."""
        keep = KEEPS.index(self.keep)
        sizes = (len(self.instruction), len(self.state))
        head = (self.budget, keep, int(self.profile), *self.key, *sizes)
        padded = self.state.ljust(-(-len(self.state) // _WORD) * _WORD, b"\0")
        words = [
            int.from_bytes(padded[i : i + _WORD], "little", signed=True)
            for i in range(0, len(padded), _WORD)
        ]
        return torch.tensor([*head, *words, *self.instruction, *self.language])

    @staticmethod
    def decode(row: Tensor) -> ItemPlan:
        """Inverse of :meth:`encode`; the row must lie on the CPU."""
        budget, keep, profile, high, low, split, size, *rest = row.tolist()
        words = -(-size // _WORD)
        state = b"".join(w.to_bytes(_WORD, "little", signed=True) for w in rest[:words])[:size]
        ids = rest[words:]
        said, read = tuple(ids[:split]), tuple(ids[split:])
        return ItemPlan(budget, (high, low), said, read, KEEPS[keep], bool(profile), state)


def make_feature_key(content: str, salt: str = "") -> Key:
    """Key of an image's features: the digest of its pixels, then of pixels and cache salt.

    Images of two salts never have one key. The first half is what a random keep is drawn from,
    so that the same image gets the same draw whoever sends it.
    """
    return _int64(content), _int64(repr((content, salt)))


def _int64(text: str) -> int:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:_WORD], "little", signed=True)


def pruned_identity(
    image: str, served: str, budget: int, keep: Keep, read: tuple[Ids, Ids] | None
) -> str:
    """Cache identity of a pruned image: one SHA-256 digest in lower-case hexadecimal.

    ``image`` identifies the pixels, ``served`` the state and text tower; ``read`` is the plan's
    (instruction, language), None where the policy reads neither. KV connectors read identities
    as hexadecimal numbers and some keep only the last 16 bits, so every part is in every bit.
    """
    return hashlib.sha256(repr((image, served, budget, keep, read)).encode()).hexdigest()
