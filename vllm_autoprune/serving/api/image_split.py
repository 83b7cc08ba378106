"""Split of a request's images into cores, which questions share, and deltas behind them.

An image becomes two items of the prompt. vLLM's prefix cache keys a block by the items that overlap
it (``kv_cache_utils._gen_mm_extra_hash_keys``), so every block that ends within the cores is shared
by all questions about the images::

    one item    [text][      K tokens chosen by the question      ][question]
    two items   [text][ K_c for every question ][ K - K_c by this one ][question]

Cores of several images come first, where the images stand; all deltas follow the last of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

from vllm_autoprune.serving.shared.plan import Part


@dataclass(frozen=True, slots=True)
class SplitImage:
    """One image before it is split: K of N tokens, K_c of them core, 0 where it cannot be split.

    ``turn`` is equal for images of one user turn, which one question follows, and for no others.
    """

    budget: int
    core: int
    turn: Hashable


@dataclass(frozen=True, slots=True)
class Slot:
    """One item of the prompt: which image, what of it, and K_c where it is a part."""

    image: int
    part: Part = "whole"
    core: int = 0


@dataclass(frozen=True, slots=True)
class SplitPrompt:
    """Token ids with one image token an item, and the items in their order."""

    ids: list[int]
    slots: tuple[Slot, ...]


def split_images(
    ids: Sequence[int], image_token: int, images: Sequence[SplitImage], block: int
) -> SplitPrompt | None:
    """Split images of a prompt, or None where that shares nothing.

    ``ids`` has one image token an image. The last core of a turn ends on the edge of a KV block of
    ``block`` tokens, so its K_c may differ from the state's; an image without such an edge inside
    stays whole.
    """
    places = [at for at, token in enumerate(ids) if token == image_token]
    if len(places) != len(images) or not any(image.core for image in images):
        return None
    new_ids: list[int] = []
    slots: list[Slot] = []
    position, done = 0, 0  # in the prompt that the model sees; in ids
    for _, turn in groupby(range(len(images)), key=lambda i: images[i].turn):
        deltas: list[Slot] = []
        members = list(turn)
        for i in members:
            position += places[i] - done
            new_ids += ids[done : places[i] + 1]
            done = places[i] + 1
            core = images[i].core
            if i == members[-1] and core:
                core = align_core(position, images[i], block)
            slots.append(Slot(i, "core", core) if core else Slot(i))
            position += core or images[i].budget
            if core:
                deltas.append(Slot(i, "delta", core))
        new_ids += [image_token] * len(deltas)
        slots += deltas
        position += sum(images[slot.image].budget - slot.core for slot in deltas)
    if not any(slot.core for slot in slots):
        return None
    return SplitPrompt(new_ids + list(ids[done:]), tuple(slots))


def align_core(start: int, image: SplitImage, block: int) -> int:
    """K_c for which a core that begins at token ``start`` ends on a block's edge, 0 without one.

    The edge nearest to the state's own K_c, inside the image.
    """
    first = -(-(start + 1) // block) * block
    edges = range(first, start + image.budget, block)
    return min((edge - start for edge in edges), key=lambda core: abs(core - image.core), default=0)
