"""ItemPlan: the API server's decision about one image, as the tensor that reaches the worker."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from vllm_autoprune.errors import Problem, RequestError
from vllm_autoprune.tpdsl.executor.materialize import MAX_BUDGET

FIELD = "autoprune_plan"
"""Name of the multi-modal field that carries a plan to the worker."""

Chooser = Literal["state", "reference", "random"]
"""What chooses an image's tokens: the state, its base policy alone, or a random draw. The latter
two are controls, so that a running server can be compared with them on its own traffic."""

CHOOSERS: tuple[Chooser, ...] = get_args(Chooser)

Part = Literal["whole", "core", "delta"]
"""Kept tokens of an image that one item of the prompt holds: all, those kept for every question, or
the others. An image that is split stands in the prompt as two items."""

PARTS: tuple[Part, ...] = get_args(Part)

Ids = tuple[int, ...]
"""Token ids of a text."""

Key = tuple[int, int]
"""Key of an image in the feature cache (:func:`make_feature_key`)."""

NO_KEY: Key = (0, 0)
"""The key of an image whose features are not cached."""

RELEVANCE_IDS = 1024
"""Token ids of an instruction that relevance reads: its last ones."""

LANGUAGE_IDS = 256
"""Token ids of an instruction that the language model's first layers read: its last ones.

Their attention to all earlier tokens is stored, which would take gigabytes for a long document.
"""

MAX_STATE = 1 << 14
"""Bytes of the state that a plan carries; those that ship take 1,200."""

_VERSION = 3
"""First number of an encoded plan."""

_HEAD = 12
"""Numbers of an encoded plan before the state and the ids."""

_WORD = 8
"""Bytes of an int64."""


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """Plan of one item: its budget, the key of its image's pixels, its instruction as token ids.

    An item is an image, or one part of it. ``budget`` is the number of tokens that the item keeps;
    ``core`` is that of its image's core where it is a part of it, else 0.

    The instruction comes once for each need that reads it, since their tokenizers differ:
    ``instruction`` for relevance, ``language`` for the language model's first layers. Empty
    where the policy does not read it. ``profile`` marks vLLM's memory profiling: the unpruned
    size is returned, after paying for a selection as well. ``state`` is one that the request
    names or holds, as :mod:`~vllm_autoprune.serving.shared.state_codec` encodes it; empty for the
    server's own.
    ``tokens`` is N by the image's size, which the scheduler counts the encoder's work by.
    """

    budget: int
    key: Key
    instruction: Ids = ()
    language: Ids = ()
    keep: Chooser = "state"
    profile: bool = False
    state: bytes = b""
    tokens: int = 0
    part: Part = "whole"
    core: int = 0

    @property
    def group(self) -> tuple[object, ...]:
        """Grouping key: images with the same group are selected by one policy."""
        return self.budget, self.keep, self.state, self.part, self.core

    @property
    def keeps_all(self) -> bool:
        """Whether every token of the image is kept, which is then what it is in stock vLLM."""
        return self.part == "whole" and self.budget >= self.tokens

    @property
    def image_budget(self) -> int:
        """K of the whole image: of a delta, its own tokens and those of its core."""
        return self.budget + self.core if self.part == "delta" else self.budget

    def encode(self) -> Tensor:
        """Encode as int64 ``(12 + bytes of the state / 8, rounded up, + number of ids,)``."""
        keep = CHOOSERS.index(self.keep)
        sizes = (len(self.state), len(self.instruction), len(self.language))
        part = (PARTS.index(self.part), self.core)
        flags = (keep, int(self.profile))
        head = (_VERSION, self.budget, *flags, *self.key, *sizes, *part, self.tokens)
        padded = self.state.ljust(-(-len(self.state) // _WORD) * _WORD, b"\0")
        words = [
            int.from_bytes(padded[i : i + _WORD], "little", signed=True)
            for i in range(0, len(padded), _WORD)
        ]
        return torch.tensor([*head, *words, *self.instruction, *self.language])

    @staticmethod
    def decode(row: object) -> ItemPlan:
        """Inverse of :meth:`encode`; raises :class:`RequestError` for any other input.

        Plans may come from a client (vLLM's ``/inference/v1/generate`` takes processed inputs),
        so every number is checked. The row has to lie on the CPU.
        """
        if not isinstance(row, Tensor) or row.dtype != torch.int64 or row.dim() != 1:
            raise plan_error("is not a row of 64-bit integers")
        if row.device.type != "cpu" or not _HEAD <= row.shape[0] <= _MOST:
            raise plan_error(f"has {row.shape[0]} numbers on {row.device.type}")
        version, budget, keep, profile, high, low, *sizes, part, core, tokens = row[:_HEAD].tolist()
        if version != _VERSION:
            raise plan_error(f"has format version {version}, and this server reads {_VERSION}")
        _require(1 <= budget <= MAX_BUDGET, f"keeps K = {budget} tokens")
        _require(0 <= keep < len(CHOOSERS), f"has keep = {keep}")
        _require(profile in (0, 1), f"has profile = {profile}")
        _require(0 <= tokens <= MAX_BUDGET, f"has N = {tokens}")
        _require(0 <= part < len(PARTS), f"has part = {part}")
        # A core is the tokens of its own item; the other part has one beside its own.
        cores = {"whole": 0, "core": budget}.get(PARTS[part])
        _require(1 <= core <= MAX_BUDGET if cores is None else core == cores, f"has K_c = {core}")
        for size, most in zip(sizes, (MAX_STATE, RELEVANCE_IDS, LANGUAGE_IDS), strict=True):
            _require(0 <= size <= most, f"has a part of {size}, and at most {most} are allowed")
        size, instruction, language = sizes
        words = -(-size // _WORD)
        _require(
            row.shape[0] == _HEAD + words + instruction + language, f"has {row.shape[0]} numbers"
        )
        rest = row[_HEAD:].tolist()
        padded = b"".join(word.to_bytes(_WORD, "little", signed=True) for word in rest[:words])
        _require(not any(padded[size:]), "carries more than its state")
        ids = rest[words:]
        _require(min(ids, default=0) >= 0, "has a negative token id")
        return ItemPlan(
            budget=budget,
            key=(high, low),
            instruction=tuple(ids[:instruction]),
            language=tuple(ids[instruction:]),
            keep=CHOOSERS[keep],
            profile=bool(profile),
            state=padded[:size],
            tokens=tokens,
            part=PARTS[part],
            core=core,
        )


def unpruned_tokens(row: Tensor) -> int:
    """``tokens`` of an encoded plan."""
    return int(row[_HEAD - 1])


_MOST = _HEAD + MAX_STATE // _WORD + RELEVANCE_IDS + LANGUAGE_IDS


def plan_error(what: str) -> RequestError:
    """Error for a plan that this server refuses."""
    fix = "send images, or inputs that a server with the same settings has rendered"
    return RequestError("request", [Problem(FIELD, what, fix)])


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise plan_error(problem)


def make_feature_key(content: str, salt: str = "") -> Key:
    """Key of an image's features: the digest of its pixels, then of pixels and cache salt.

    Images with different salts have different keys. The first half seeds a random keep, so that the
    same image gets the same draw under every salt.
    """
    return _int64(content), _int64(repr((content, salt)))


def _int64(text: str) -> int:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:_WORD], "little", signed=True)


def make_cache_identity(
    image: str,
    served: str,
    budget: int,
    keep: Chooser,
    read: tuple[Ids, Ids] | None,
    core: int = 0,
) -> str:
    """Cache identity of a pruned image: one SHA-256 digest in lower-case hexadecimal.

    ``image`` identifies the pixels, ``served`` the state and text tower; ``read`` is the plan's
    (instruction, language), None where the policy reads neither. ``core`` is K_c where this is the
    part that was chosen given a core, ``budget`` then K of the image. KV connectors read identities
    as hexadecimal numbers and some keep only the last 16 bits, so every part is in every bit.
    """
    parts = (image, served, budget, keep, read, core)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def make_core_identity(image: str, chosen_by: str, core: int) -> str:
    """Cache identity of the core of an image: its K_c and the digest of what chooses it.

    Neither a question nor K nor the rest of a state is part of it, so that all of them share it.
    """
    return hashlib.sha256(repr(("core", image, chosen_by, core)).encode()).hexdigest()
