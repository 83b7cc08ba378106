"""Digests of what decides the tokens of an item: the keys under which caches hold it."""

from __future__ import annotations

import hashlib

import numpy
from PIL.Image import Image

from vllm_autoprune.serving.shared.plan import Chooser, Ids, Key


def make_feature_key(content: str, salt: str = "", seed: str = "") -> Key:
    """Key of an image's features: the digest of its content, then of content and cache salt.

    Images with different salts have different keys. The first half seeds a random keep; ``seed``
    takes its place then, so that a picture gets the same draw under every salt and on any server.
    """
    return _int64(seed or content), _int64(repr((content, salt)))


def hash_picture(image: object) -> str:
    """Digest of the decoded pixels of a picture or array: of nothing else, not even the model."""
    pixels = numpy.ascontiguousarray(image.convert("RGB") if isinstance(image, Image) else image)
    return hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).hexdigest()


def _int64(text: str) -> int:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def make_name_identity(modality: str, name: str) -> str:
    """Cache identity of an input that is known by its ``uuid``, which a client may choose freely.

    A name equals no other identity, whatever it says.
    """
    return hashlib.sha256(repr(("name", modality, name)).encode()).hexdigest()


def make_pixels_key(image: str, size: tuple[int, int] | None) -> str:
    """Key of an image's processed tensors in vLLM's processor cache: content and size it is given.

    Neither a question nor a state nor K is part of it, so that all of them share the tensors.
    """
    return hashlib.sha256(repr(("pixels", image, size)).encode()).hexdigest()


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


def make_recall_identity(before: str, budget: int, read: tuple[Ids, Ids]) -> str:
    """Cache identity of tokens that a later turn recalls.

    ``before`` identifies the image's tokens that are chosen last before these: all earlier choices,
    down to the pixels, are part of it.
    """
    return hashlib.sha256(repr(("recall", before, budget, read)).encode()).hexdigest()
