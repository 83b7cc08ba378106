"""Registry of images that requests name by ``uuid``: what was last sent under each name.

A later request may send the name alone (``"image_url": null``). Cache identities are made of
content, so the name has to be resolved before a cache is looked up.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import sha256
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.multimodal.parse import ImageSize

MAX_NAMES = 1 << 15
"""Names that a process remembers, the least recently used dropped first: about 15 MB."""

NamedImage = tuple[str, "ImageSize | None"]
"""Digest of an image's content, and its size; no size where the name is not known."""


class NamedImages:
    """LRU map from name to content and size; names of one cache salt are unknown under another."""

    def __init__(self) -> None:
        self._images: OrderedDict[bytes, NamedImage] = OrderedDict()
        self._lock = Lock()  # several renderer threads may share one processor

    def remember(self, name: str, salt: str, image: NamedImage) -> None:
        """Store the image sent under a name, replacing the one sent before."""
        key = _hash_name(name, salt)
        with self._lock:
            self._images[key] = image
            self._images.move_to_end(key)
            if len(self._images) > MAX_NAMES:
                self._images.popitem(last=False)

    def find(self, name: str, salt: str) -> NamedImage:
        """The image last sent under a name; unknown names get a content that no image has."""
        key = _hash_name(name, salt)
        with self._lock:
            image = self._images.get(key)
            if image is None:
                return f"unknown {key.hex()}", None
            self._images.move_to_end(key)
            return image


def _hash_name(name: str, salt: str) -> bytes:
    """Fixed-length key of a name, because a client may send one of megabytes."""
    return sha256(repr((name, salt)).encode()).digest()
