"""Identities: digests of what decides the tokens of an item, by which caches hold it."""

from __future__ import annotations

from hashlib import sha256

import numpy
from PIL import Image

from vllm_autoprune.errors import RequestError
from vllm_autoprune.serving.plan import ENTRY, Chooser, Ids, Key
from vllm_autoprune.tpdsl.tokens import Positions


def make_feature_key(content: str, salt: str = "", seed: str = "") -> Key:
    """Key of an image's features: the digest of its content, then of content and cache salt.

    Images with different salts have different keys. The first half seeds a random keep; ``seed``
    takes its place then, so that a picture gets the same draw under every salt and on any server.
    """
    texts = (seed or content, repr((content, salt)))
    digests = [sha256(text.encode()).digest()[:8] for text in texts]
    high, low = (int.from_bytes(digest, "little", signed=True) for digest in digests)
    return high, low


def make_identity(*parts: object) -> str:
    """SHA-256 of these parts in lower-case hexadecimal; the first names what is identified.

    KV connectors read identities as hexadecimal numbers and some keep only the last 16 bits, so
    every part is in every bit.
    """
    return sha256(repr(parts).encode()).hexdigest()


def make_cache_identity(
    image: str,
    served: str,
    budget: int,
    keep: Chooser,
    read: tuple[Ids, Ids] | None,
    core: int = 0,
    positions: Positions = "true",
) -> str:
    """Cache identity of a pruned image.

    ``image`` identifies the pixels, ``served`` the state and text tower; ``read`` is the plan's
    (instruction, language), None where the policy reads neither. ``core`` is K_c where this is the
    part that was chosen given a core, ``budget`` then K of the image.
    """
    return make_identity(image, served, budget, keep, read, core, positions)


def hash_pixels(item: object, modality: str) -> str:
    """Digest of an image's or video's decoded pixels, of which a random keep is drawn.

    Of nothing else, so that the draw is the same under every name and salt, on any server and
    model. Raises :class:`RequestError` for an item that comes by its name alone.
    """
    if item is None:
        what = f'"random" is drawn from pixels, and this {modality} comes by its name alone'
        raise RequestError.of(f"{ENTRY}/keep", what, f"send the {modality}")
    # A video comes with its metadata.
    frames = item[0] if isinstance(item, tuple) else item
    image = frames.convert("RGB") if isinstance(frames, Image.Image) else frames
    pixels = numpy.ascontiguousarray(image)
    return sha256(repr(pixels.shape).encode() + pixels.tobytes()).hexdigest()
