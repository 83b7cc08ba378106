"""Images and videos of a request whose tokens are chosen, identified by content.

A client may name an input (``uuid``), but the input is identified by its digest all the same.
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
from vllm_autoprune.serving.api.sized_pictures import (
    SizedPicture,
    find_sized_picture,
    is_planned,
)
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
"""Types of an image whose size vLLM can determine."""

MAX_NAMES = 1 << 15
"""Number of names that a process remembers, about 15 MB; the least recently used is dropped."""

Size = tuple[int, int]
"""Width and height of an image."""

Modality = Literal["image", "video"]

Tokenize = Callable[[str, AbstractSet[Need]], tuple[Ids, Ids]]
"""Maps an instruction and a policy's needs to the token ids that the policy reads."""


@dataclass(frozen=True, slots=True)
class PlannedItem:
    """An item of a request: its image or video, its plan, and its keys in caches.

    ``identity`` is that of its tokens. ``key`` is that of its processed tensors, which all items of
    an image share.
    """

    image: int
    plan: ItemPlan
    identity: str
    key: str


@dataclass(frozen=True, slots=True)
class Media:
    """Images, or videos, of one request whose tokens are chosen, and the questions about them."""

    modality: Modality

    items: ModalityDataItems[Any, Any]
    """The images or videos as vLLM has parsed them."""

    digests: Sequence[str]
    """Digest of the content of each item; for an image, of what is encoded of it."""

    sizes: Sequence[ImageSize | None]
    """Width and height of each image; None if unknown, and for videos."""

    salt: str
    """The request's cache salt."""

    budgets: RequestBudgets

    tokenize: Tokenize
    """Tokenizer of instructions, which tokenizes each text once."""

    texts: Sequence[str] = ()
    """The question about each item; empty if no policy reads it."""

    limit: int | None = None
    """Maximum number of tokens that all items together may keep."""

    planned: bool = False
    """Whether the request is planned alone; pictures are then known by size and digest."""

    @property
    def pictures(self) -> list[SizedPicture]:
        """Size and digest of each image of a request that is planned alone."""
        return [
            SizedPicture(size.width, size.height, digest)
            for size, digest in zip(self.sizes, self.digests, strict=True)
            if size is not None
        ]

    def content(self, i: int) -> str:
        """Identity of the pixels of item ``i``."""
        return repr((self.digests[i], self.salt))

    def key(self, i: int, size: Size | None = None) -> str:
        """Identity of the processed tensors of item ``i``; ``size`` is the size it is resized to.

        It does not depend on question, state or K, so all of them share the tensors.
        """
        return make_identity("pixels", self.content(i), size)

    @property
    def keys(self) -> list[str]:
        """:meth:`key` of every item."""
        return [self.key(i) for i in range(len(self.digests))]

    def ask(self, plan: ItemPlan, text: str) -> ItemPlan:
        """The plan with the question, if its policy reads it."""
        needs = self.budgets.served.find_needs(plan)
        return plan.ask(*self.tokenize(text, needs))

    def plan_item(
        self, i: int, plan: ItemPlan, reads: bool, size: Size | None = None
    ) -> PlannedItem:
        """Item ``i`` pruned or resized; ``reads`` says whether its policy reads the question."""
        served = self.budgets.served
        identity = identify_item(served, plan, self.content(i), reads, size)
        return PlannedItem(i, plan, identity, self.key(i, size))


def can_prune(mm_items: MultiModalDataItems) -> bool:
    """Whether there are images, and all are pictures or names of pictures.

    False for embeddings, and for other inputs, which vLLM itself refuses.
    """
    images = mm_items.get("image")
    if not isinstance(images, ImageProcessorItems):
        return False
    return all(
        image is None or isinstance(image, _PICTURES) for image in images.get_all()
    )


@depends_on("vllm.multimodal.parse:ImageProcessorItems", "get_image_size")
class MediaReader:
    """Reads the images and videos of requests by content.

    ``hash_inputs`` is the stock processor's ``_get_mm_hashes``. Safe for several threads, because
    renderers may share one processor.
    """

    def __init__(
        self, hash_inputs: Callable[[ProcessorInputs], MultiModalHashes]
    ) -> None:
        self._hash_inputs = hash_inputs
        self._named: LRUCache[bytes, tuple[str, ImageSize | None]] = LRUCache(MAX_NAMES)
        """Content and size of the image last sent under a name, by hash of the name and the cache
        salt."""
        self._lock = Lock()

    def identify(
        self, inputs: ProcessorInputs, prunes_images: bool, prunes_videos: bool
    ) -> dict[str, list[str]]:
        """Identities as in stock vLLM, except that a client's ``uuid`` is never an identity.

        Two requests may send two pictures under one name. The names of inputs that are not pruned
        are hashed in a separate domain, so that no name can equal the identity of an image.
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
        """The images or videos of a request, also of those that it sends by name alone.

        An earlier request has sent the item with that name, and this one sends ``"image_url":
        null``. The latest item of the name is meant. Cache identities are made of content, so the
        name has to be resolved before a cache is read. An unknown name gets a content that no image
        has.
        """
        names = (inputs.mm_uuid_items or {}).get(modality) or [None] * len(digests)
        items = inputs.mm_data_items[modality]
        contents: list[tuple[str, ImageSize | None]] = []
        for i, (name, digest) in enumerate(zip(names, digests, strict=True)):
            if (sized := find_sized_picture(name)) is not None:
                contents.append((sized.digest, sized.size))
                continue
            # Hashed, because a name may have megabytes.
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
            planned=any(map(is_planned, names)),
        )
