"""Identities: digests of everything that decides an item's tokens, used as cache keys."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

import numpy
from PIL import Image

from vllm_autoprune.errors import RequestError
from vllm_autoprune.serving.plan import ENTRY, Chooser, Ids, ItemPlan, Key
from vllm_autoprune.tpdsl.tokens import Positions
from vllm_autoprune.tpdsl.tower import VERSION

if TYPE_CHECKING:
    from vllm_autoprune.serving.served_state import ServedState


def make_feature_key(content: str, salt: str = "", seed: str = "") -> Key:
    """Feature key of an image: a digest of its content, then one of content and cache salt.

    Images with different salts have different keys. The first half seeds a random keep. ``seed``
    replaces it then, so that a picture gets the same draw under every salt and on any server.
    """
    texts = (seed or content, repr((content, salt)))
    digests = [sha256(text.encode()).digest()[:8] for text in texts]
    high, low = (int.from_bytes(digest, "little", signed=True) for digest in digests)
    return high, low


def make_identity(*parts: object) -> str:
    """SHA-256 of these parts in lower-case hexadecimal; the first part names what is identified.

    KV connectors read identities as hexadecimal numbers, and some keep only the last 16 bits; a
    digest mixes every part into every bit.
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

    ``image`` identifies the pixels, and ``served`` the state and text tower. ``read`` is the plan's
    (instruction, language), or None if the policy reads neither. For a part that was chosen given a
    core, ``core`` is K_c and ``budget`` is K of the image.
    """
    return make_identity(image, served, budget, keep, read, core, positions)


def identify_encoded(content: str, plan: ItemPlan) -> str:
    """Identity of what a tower encodes of an item, whose pixels ``content`` identifies."""
    if plan.tower is None:
        return content
    return make_identity("tower", content, plan.tower, plan.tokens, VERSION)


def identify_item(
    served: ServedState,
    plan: ItemPlan,
    content: str,
    reads: bool,
    size: tuple[int, int] | None,
) -> str:
    """Cache identity of an item, by everything that decides its tokens.

    ``content`` identifies its pixels. ``reads`` says whether the policy reads the instruction.
    ``size`` is the width and height that the item is resized to, or None.
    """
    state = served.state_for_plan(plan)
    content = identify_encoded(content, plan)
    if plan.part == "core":
        # A core is shared by all questions, K and states that choose it alike.
        return make_identity(
            "core", content, state.core_digest, plan.core, plan.positions
        )
    chosen_by = served.selection_identity(state)
    if size is not None:
        # Two budgets may give the same number of tokens by two sizes, and these are two images.
        chosen_by += f"|{size}"
    return make_cache_identity(
        content,
        chosen_by,
        plan.image_budget,
        plan.keep,
        plan.read if reads else None,
        plan.core,
        plan.positions,
    )


def hash_pixels(item: object, modality: str) -> str:
    """SHA-256 of an image's or video's decoded pixels, which seeds a random keep.

    Only pixels count, so that the draw is the same under every name and salt, on any server and
    model. Raises :class:`RequestError` for an item that was sent by its name alone.
    """
    if item is None:
        what = f'"random" is drawn from pixels, and this {modality} comes by its name alone'
        raise RequestError.of(f"{ENTRY}/keep", what, f"send the {modality}")
    # A video comes as a tuple with its metadata.
    frames = item[0] if isinstance(item, tuple) else item
    image = frames.convert("RGB") if isinstance(frames, Image.Image) else frames
    pixels = numpy.ascontiguousarray(image)
    return sha256(repr(pixels.shape).encode() + pixels.tobytes()).hexdigest()
