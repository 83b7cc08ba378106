"""Images and videos of a request whose tokens are chosen: their content, whatever their names.

A client may name an input (``uuid``); it is known by the digest of its content all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from hashlib import sha256
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

import numpy
import torch
from cachetools import LRUCache
from PIL import Image
from vllm.multimodal.parse import ImageProcessorItems

from vllm_autoprune.serving.api.budgets import RequestBudgets
from vllm_autoprune.serving.compat import depends_on
from vllm_autoprune.serving.identities import identify_item, make_identity
from vllm_autoprune.serving.plan import Ids, ItemPlan
from vllm_autoprune.tpdsl.tokens import Need

if TYPE_CHECKING:
    from vllm.inputs import MultiModalHashes
    from vllm.multimodal.parse import (
        ImageSize,
        ModalityDataItems,
        MultiModalDataItems,
    )
    from vllm.multimodal.processing import ProcessorInputs

_PICTURES = (Image.Image, numpy.ndarray, torch.Tensor)
"""Types of an image whose size vLLM can tell."""

MAX_NAMES = 1 << 15
"""Names that a process remembers, the least recently used dropped first: about 15 MB."""

Size = tuple[int, int]
"""Width and height of an image."""

Modality = Literal["image", "video"]

Tokenize = Callable[[str, AbstractSet[Need]], tuple[Ids, Ids]]
"""Token ids of an instruction as policies with these needs read it."""


@dataclass(frozen=True, slots=True)
class PlannedItem:
    """An item of a request: its image or video and plan, and what caches hold it by.

    ``identity`` is that of its tokens, ``key`` that of its processed tensors, which all items of an
    image have in common.
    """

    image: int
    plan: ItemPlan
    identity: str
    key: str


@dataclass(frozen=True, slots=True)
class Media:
    """Images, or videos, of one request whose tokens are chosen, and what is asked of them."""

    modality: Modality

    items: ModalityDataItems[Any, Any]
    """The images or videos as vLLM has parsed them."""

    digests: Sequence[str]
    """Digest of each one's content; of an image, of what is encoded of it."""

    sizes: Sequence[ImageSize | None]
    """Width and height of each image; None where they are not known, and of videos."""

    salt: str
    """The request's cache salt."""

    budgets: RequestBudgets

    tokenize: Tokenize
    """Tokenizer of instructions, each text once, however often it is read."""

    texts: Sequence[str] = ()
    """The question about each one; empty where no policy reads it."""

    limit: int | None = None
    """Tokens that all of them may keep."""

    def content(self, i: int) -> str:
        """What identifies the pixels of one item."""
        return repr((self.digests[i], self.salt))

    def key(self, i: int, size: Size | None = None) -> str:
        """Identity of one item's processed tensors; ``size`` is what it is resized to.

        Neither a question nor a state nor K is part of it: all of them share the tensors.
        """
        return make_identity("pixels", self.content(i), size)

    @property
    def keys(self) -> list[str]:
        """Those of all items."""
        return [self.key(i) for i in range(len(self.digests))]

    def ask(self, plan: ItemPlan, text: str) -> ItemPlan:
        """A plan with the question, where its policy reads one."""
        needs = self.budgets.served.find_needs(plan)
        return plan.ask(*self.tokenize(text, needs))

    def plan_item(
        self, i: int, plan: ItemPlan, reads: bool, size: Size | None = None
    ) -> PlannedItem:
        """One item that is pruned, or resized; ``reads`` says whether the question matters."""
        served = self.budgets.served
        identity = identify_item(served, plan, self.content(i), reads, size)
        return PlannedItem(i, plan, identity, self.key(i, size))


def can_prune(mm_items: MultiModalDataItems) -> bool:
    """False for embeddings, and what is no picture, which vLLM's own processor refuses."""
    images = mm_items.get("image")
    if not isinstance(images, ImageProcessorItems):
        return False
    return all(
        image is None or isinstance(image, _PICTURES) for image in images.get_all()
    )


@depends_on("vllm.multimodal.parse:ImageProcessorItems", "get_image_size")
class MediaReader:
    """Reads the images and videos of requests by content.

    ``hash_inputs`` is the stock processor's ``_get_mm_hashes``. Safe for several threads: renderers
    may share one processor.
    """

    def __init__(
        self, hash_inputs: Callable[[ProcessorInputs], MultiModalHashes]
    ) -> None:
        self._hash_inputs = hash_inputs
        self._named: LRUCache[bytes, tuple[str, ImageSize | None]] = LRUCache(MAX_NAMES)
        """Content and size of the image last sent under a name, by the name and its cache salt."""
        self._lock = Lock()

    def identify(
        self, inputs: ProcessorInputs, prunes_images: bool, prunes_videos: bool
    ) -> dict[str, list[str]]:
        """Identities as in stock vLLM, but that a client's ``uuid`` is none.

        Under one name two requests may send two pictures. Other inputs than those that are pruned
        have names in a domain of their own, so that no name is the identity of an image.
        """
        by_content = {"image": prunes_images, "video": prunes_videos}
        names = {
            modality: [
                None
                if name is None or by_content.get(modality)
                else make_identity("name", modality, name)
                for name in of_modality
            ]
            for modality, of_modality in (inputs.mm_uuid_items or {}).items()
        }
        return dict(self._hash_inputs(replace(inputs, mm_uuid_items=names or None)))

    def read(
        self,
        inputs: ProcessorInputs,
        modality: Modality,
        digests: Sequence[str],
        salt: str,
        budgets: RequestBudgets,
        tokenize: Tokenize,
    ) -> Media:
        """The images or videos of a request; one that comes by its name alone is the last sent so.

        A later request may send the name alone (``"image_url": null``). Cache identities are made
        of content, so the name has to be resolved before a cache is looked up. An unknown name gets
        a content that no image has.
        """
        names = (inputs.mm_uuid_items or {}).get(modality) or [None] * len(digests)
        items = inputs.mm_data_items[modality]
        contents: list[tuple[str, ImageSize | None]] = []
        for i, (name, digest) in enumerate(zip(names, digests, strict=True)):
            # A name may have megabytes.
            key = sha256(repr((modality, name or "", salt)).encode()).digest()
            is_named_alone = items.get(i) is None
            content = f"unknown {key.hex()}", None
            if not is_named_alone:
                size = items.get_image_size(i) if modality == "image" else None
                content = digest, size
            with self._lock:
                if is_named_alone:
                    content = self._named.get(key, content)
                elif name is not None and inputs.cache is not None:
                    self._named[key] = content
            contents.append(content)
        return Media(
            modality,
            items,
            [digest for digest, _ in contents],
            [size for _, size in contents],
            salt,
            budgets,
            tokenize,
        )
