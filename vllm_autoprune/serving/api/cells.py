"""Cells of an image that are dropped before the vision tower, found when the image is planned.

An image is processed as soon as its number of tokens M has to be known. Its tensors are kept until
the request ends, because vLLM asks for them a moment later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import sha256
from threading import Lock

import torch
from cachetools import LRUCache
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
from vllm_autoprune.tpdsl.cells import VERSION, Cells, kept_cells

_PIXELS = "pixel_values"

_CHANNELS = 3

_UNCOMPARED = Counter(
    "autoprune_cells_uncompared",
    "Images encoded whole because their pixels cannot be compared: no bytes, or several frames.",
)

Process = Callable[[object, Mapping[str, object]], BatchFeature]
"""Processes one picture by itself, as vLLM does, with the processor arguments of a request."""


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """What the tower encodes of an image: the identity of its pixels, and its number of tokens.

    ``tokens`` is None for an image that is encoded whole, whose identity is that of the picture.
    """

    digest: str
    tokens: int | None = None


@dataclass
class Trimming:
    """Dropped cells of one request's images.

    Pictures are kept alive, so that ``id()`` of one cannot be reused for another.
    """

    rule: Cells
    _tensors: dict[int, tuple[object, BatchFeature]] = field(default_factory=dict)

    def process(
        self, picture: object, arguments: Mapping[str, object], process: Process
    ) -> BatchFeature:
        """The tensors of a picture without its dropped cells, computed once."""
        _, tensors = self._tensors.get(id(picture), (None, None))
        if tensors is None:
            tensors = _drop_cells(process(picture, arguments), self.rule)
            self._tensors[id(picture)] = picture, tensors
        return tensors

    def find_encoded(self, digest: str, tensors: BatchFeature) -> EncodedImage:
        """What is encoded of the picture with this digest, by its tensors.

        The identity contains which cells are kept, and so depends on everything that decides that,
        such as libraries that resize. Nothing is shared with a process that would keep other cells.
        """
        if CELLS_FIELD not in tensors:
            return EncodedImage(digest)
        (anchors,) = tensors[CELLS_FIELD].numpy()
        cells = sha256(anchors.tobytes()).hexdigest()
        identity = make_identity("cells", digest, str(self.rule), VERSION, cells)
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
        self._images: LRUCache[tuple[str, Cells], EncodedImage] = LRUCache(size)
        self._lock = Lock()

    def find(
        self,
        trimming: Trimming,
        digest: str,
        picture: object,
        arguments: Mapping[str, object],
    ) -> EncodedImage:
        """What is encoded of a picture; unless that is remembered, the picture is processed."""
        key = digest, trimming.rule
        with self._lock:
            encoded = self._images.get(key)
        if encoded is not None:
            return encoded
        if picture is None:
            # The picture itself is not sent and its cells are forgotten, so its tensors cannot be
            # found.
            return EncodedImage(f"unknown {digest}")
        tensors = trimming.process(picture, arguments, self._process)
        encoded = trimming.find_encoded(digest, tensors)
        with self._lock:
            self._images[key] = encoded
        return encoded


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


def _drop_cells(data: BatchFeature, rule: Cells) -> BatchFeature:
    """The tensors of one image with pixel rows of kept cells only, and its anchors ``(1, N)``."""
    pixels = data[_PIXELS]
    ((frames, height, width),) = data[IMAGE_GRID].tolist()
    if pixels.dtype != torch.uint8 or frames != 1 or pixels.shape[1] % _CHANNELS:
        _UNCOMPARED.inc()
        return data
    shape = height // CELL, width // CELL, CELL**2
    anchors = rule.find_anchors(pixels.numpy().reshape(*shape, _CHANNELS, -1))
    if anchors is None:
        return data
    is_kept = torch.from_numpy(kept_cells(anchors))
    rows = pixels.unflatten(0, (-1, CELL**2))[is_kept].flatten(0, 1)
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
