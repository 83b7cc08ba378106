"""Cells of an image that are dropped before the vision tower, found when the image is planned.

An image is processed as soon as its number of tokens M has to be known. Its tensors are kept until
the request ends, because vLLM asks for them a moment later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from hashlib import sha256
from operator import attrgetter
from threading import Lock

import numpy
import torch
from cachetools import LRUCache
from numpy.typing import NDArray
from prometheus_client import Counter
from transformers import BatchFeature
from vllm.multimodal.inputs import MultiModalFieldConfig

from vllm_autoprune.errors import Refusal, RequestError
from vllm_autoprune.serving.api.budgets import RequestBudgets
from vllm_autoprune.serving.identities import make_identity
from vllm_autoprune.serving.inputs import (
    CELL,
    CELLS_FIELD,
    IMAGE_GRID,
    count_patches,
)
from vllm_autoprune.serving.plan import ENTRY
from vllm_autoprune.tpdsl.cells import (
    VERSION,
    Cells,
    Digests,
    digest_cells,
    kept_cells,
)

_PIXELS = "pixel_values"

_CHANNELS = 3

_DIGEST_BYTES = 1 << 26
"""Bytes of digests of cells that a process remembers: those of 4,000 images of 1,000 tokens."""

_UNCOMPARED = Counter(
    "autoprune_cells_uncompared",
    "Images encoded whole because their pixels cannot be compared: no bytes, or several frames.",
)

Process = Callable[[object, Mapping[str, object]], BatchFeature]
"""Processes one picture by itself, as vLLM does, with the processor arguments of a request."""


_UNKNOWN = "unknown "
"""Beginning of the identity of an image that was sent by a name that is forgotten."""


@dataclass(frozen=True, slots=True)
class SentImage:
    """An image of a request: the digest of its content, and its picture, None if only named."""

    digest: str
    picture: object


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """What the tower encodes of an image: the identity of its pixels, and its number of tokens.

    ``tokens`` is None for an image that is encoded whole, whose identity is that of the picture.
    ``unchanged`` has a bit for each cell, which is 1 if the image before has the same cell; None if
    they were not compared.
    """

    digest: str
    tokens: int | None = None
    unchanged: bytes | None = None

    @property
    def is_known(self) -> bool:
        """Whether it could be found: not of a picture that was not sent and is forgotten."""
        return not self.digest.startswith(_UNKNOWN)


@dataclass
class Trimming:
    """Dropped cells of one request's images.

    Pictures are kept alive, so that ``id()`` of one cannot be reused for another.
    """

    rule: Cells
    _tensors: dict[int, tuple[object, BatchFeature]] = field(default_factory=dict)
    _unchanged: dict[int, tuple[object, bytes]] = field(default_factory=dict)

    def compare(self, picture: object, unchanged: bytes | None) -> None:
        """Say which cells of a picture are as in the image before it."""
        if unchanged is not None:
            self._unchanged[id(picture)] = picture, unchanged

    def process(
        self, picture: object, arguments: Mapping[str, object], process: Process
    ) -> BatchFeature:
        """The tensors of a picture without its dropped cells, computed once."""
        _, tensors = self._tensors.get(id(picture), (None, None))
        if tensors is None:
            _, unchanged = self._unchanged.get(id(picture), (None, None))
            tensors = _drop_cells(process(picture, arguments), self.rule, unchanged)
            self._tensors[id(picture)] = picture, tensors
        return tensors

    def find_encoded(
        self, digest: str, tensors: BatchFeature, before: str = ""
    ) -> EncodedImage:
        """What is encoded of the picture with this digest, by its tensors.

        The identity contains which cells are kept, and so depends on everything that decides that,
        such as libraries that resize. Nothing is shared with a process that would keep other cells.
        ``before`` is the digest of the image that it is compared with.
        """
        if CELLS_FIELD not in tensors:
            return EncodedImage(digest)
        (anchors,) = tensors[CELLS_FIELD].numpy()
        cells = sha256(anchors.tobytes()).hexdigest()
        rule = f"{self.rule} {before}" if before else str(self.rule)
        identity = make_identity("cells", digest, rule, VERSION, cells)
        return EncodedImage(identity, len(kept_cells(anchors)))


def find_trimming(budgets: RequestBudgets) -> Trimming | None:
    """The trimming of a request's images, or None if no cells are dropped.

    The resize control drops no cells, because it stands for what a client would do instead. Raises
    :class:`RequestError` for a model that encodes images whole.
    """
    request = budgets.request
    served = budgets.served
    rule = request.cells
    if rule is None:
        rule = served.cells if budgets.state is None else budgets.state.cells
    if rule is None or rule == "none":
        return None
    if not request.enabled or request.keep == "resized":
        return None
    if served.capabilities.whole_only:
        what = f"no cell can be dropped: this model {served.capabilities.whole_only}"
        fix = "leave it out, also of a state"
        raise RequestError.of(f"{ENTRY}/cells", what, fix, kind=Refusal.UNSUPPORTED)
    return Trimming(rule)


class EncodedImages:
    """What was encoded of recently seen images, by content and rule.

    Safe for several threads, because renderers may share one processor.
    """

    def __init__(self, process: Process, size: int) -> None:
        self._process = process
        self._images: LRUCache[tuple[str, str, Cells], EncodedImage] = LRUCache(size)
        self._digests: LRUCache[str, Digests] = LRUCache(
            _DIGEST_BYTES, attrgetter("nbytes")
        )
        self._lock = Lock()

    def find(
        self,
        trimming: Trimming,
        image: SentImage,
        before: SentImage | None,
        arguments: Mapping[str, object],
    ) -> EncodedImage:
        """What is encoded of an image; unless that is remembered, the picture is processed.

        ``before`` is the image before it in the prompt. Raises :class:`RequestError` if the two
        have to be compared and that one is not known.
        """
        if not trimming.rule.compares:
            before = None
        key = image.digest, before.digest if before else "", trimming.rule
        with self._lock:
            encoded = self._images.get(key)
        if encoded is None and image.picture is None:
            # The picture itself is not sent and its cells are forgotten, so its tensors cannot be
            # found.
            return EncodedImage(_UNKNOWN + image.digest)
        if encoded is None:
            encoded = self._encode(trimming, image, before, arguments)
            with self._lock:
                self._images[key] = encoded
        trimming.compare(image.picture, encoded.unchanged)
        return encoded

    def _encode(
        self,
        trimming: Trimming,
        image: SentImage,
        before: SentImage | None,
        arguments: Mapping[str, object],
    ) -> EncodedImage:
        """What is encoded of a picture, which is processed once."""
        processed = self._process(image.picture, arguments)
        unchanged = None
        if trimming.rule.compares:
            digests = self._digest(image.digest, processed)
            if before is not None:
                unchanged = _find_unchanged(
                    digests, self._find_digests(before, arguments)
                )
        trimming.compare(image.picture, unchanged)
        tensors = trimming.process(image.picture, arguments, lambda *_: processed)
        encoded = trimming.find_encoded(
            image.digest, tensors, before.digest if before else ""
        )
        return replace(encoded, unchanged=unchanged)

    def _find_digests(
        self, image: SentImage, arguments: Mapping[str, object]
    ) -> Digests:
        """Digests of an image's cells, remembered or of its picture."""
        with self._lock:
            digests = self._digests.get(image.digest)
        if digests is not None:
            return digests
        if image.picture is None:
            what = "is not known, and the image after it is compared with it"
            raise RequestError.of("image_url", what, "send the picture")
        return self._digest(image.digest, self._process(image.picture, arguments))

    def _digest(self, digest: str, processed: BatchFeature) -> Digests:
        """Digests of an image's cells by all its tensors, remembered from then on."""
        cells = _read_cells(processed)
        digests = numpy.zeros((0, 0, 16), numpy.uint8)
        if cells is not None:
            digests = digest_cells(cells)
        with self._lock:
            self._digests[digest] = digests
        return digests


def _find_unchanged(cells: Digests, before: Digests) -> bytes | None:
    """A bit for each cell, 1 if it is unchanged; None for images of unlike size."""
    if cells.shape != before.shape:
        return None
    return numpy.packbits((cells == before).all(axis=2)).tobytes()


TRIMMING: ContextVar[Trimming | None] = ContextVar("autoprune_trimming", default=None)
"""The trimming of the request that this thread processes."""


@contextmanager
def trim_images(trimming: Trimming | None) -> Iterator[None]:
    """Trim the images that vLLM processes in this context.

    A context variable, because vLLM's processing steps have no argument that could pass it on.
    """
    token = TRIMMING.set(trimming)
    try:
        yield
    finally:
        TRIMMING.reset(token)


def _read_cells(data: BatchFeature) -> NDArray[numpy.uint8] | None:
    """Cells ``(H, W, patches, channels, pixels)`` of an image; None if they cannot be compared."""
    pixels = data[_PIXELS]
    ((frames, height, width),) = data[IMAGE_GRID].tolist()
    if pixels.dtype != torch.uint8 or frames != 1 or pixels.shape[1] % _CHANNELS:
        return None
    shape = height // CELL, width // CELL, CELL**2
    cells: NDArray[numpy.uint8] = pixels.numpy().reshape(*shape, _CHANNELS, -1)
    return cells


def _drop_cells(
    data: BatchFeature, rule: Cells, unchanged: bytes | None = None
) -> BatchFeature:
    """The tensors of one image with pixel rows of kept cells only, and its anchors ``(1, N)``."""
    cells = _read_cells(data)
    if cells is None:
        _UNCOMPARED.inc()
        return data
    mask = None
    if unchanged is not None:
        bits = numpy.frombuffer(unchanged, numpy.uint8)
        count = cells.shape[0] * cells.shape[1]
        mask = numpy.unpackbits(bits, count=count).astype(bool)
    anchors = rule.find_anchors(cells, mask)
    if anchors is None:
        return data
    is_kept = torch.from_numpy(kept_cells(anchors))
    rows = data[_PIXELS].unflatten(0, (-1, CELL**2))[is_kept].flatten(0, 1)
    return BatchFeature(
        {**data, _PIXELS: rows, CELLS_FIELD: torch.from_numpy(anchors)[None]}
    )


def align_fields(images: Sequence[BatchFeature]) -> list[BatchFeature]:
    """The tensors of each image, all with the same fields; a whole image gets empty anchors."""
    if not any(CELLS_FIELD in data for data in images):
        return list(images)
    none = torch.zeros(1, 0, dtype=torch.int32)
    return [BatchFeature({CELLS_FIELD: none, **data}) for data in images]


def trimmed_fields(
    fields: Mapping[str, MultiModalFieldConfig], data: BatchFeature
) -> Mapping[str, MultiModalFieldConfig]:
    """vLLM's fields of processed images, with the number of pixel rows adapted to kept cells."""
    if CELLS_FIELD not in data:
        return fields
    rows = [
        count_patches(anchors, grid)
        for anchors, grid in zip(data[CELLS_FIELD], data[IMAGE_GRID], strict=True)
    ]
    return {
        **fields,
        _PIXELS: MultiModalFieldConfig.flat_from_sizes("image", torch.tensor(rows)),
        CELLS_FIELD: MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
