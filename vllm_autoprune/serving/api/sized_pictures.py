"""Pictures of requests that are planned alone, by size and digest: for routers, which hash prompts.

A router that matches prefixes has to know the token ids and the cache identities of a request. Both
follow from the sizes and digests of its pictures, so that none is processed, and none that was
planned before is sent again. Pictures of such a request go through vLLM's renderer under names that
no other request can have, because they are secret.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

from cachetools import LRUCache
from PIL import Image
from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems
from vllm.multimodal.parse import ImageSize
from vllm.multimodal.processing.processor import MultiModalProcessingResult

from vllm_autoprune.errors import Refusal, RequestError
from vllm_autoprune.serving.api.request import shorten

if TYPE_CHECKING:
    from vllm.multimodal.processing import ProcessorInputs
    from vllm.multimodal.processing.processor import ResolvedPromptUpdate

_SCHEME = "picture:"
_FORM = re.compile(rf"{_SCHEME}([1-9]\d{{0,4}})x([1-9]\d{{0,4}});([0-9a-f]{{64,128}})")

_MAX_SIZES = 1024
"""Number of sizes whose prompt text is remembered; a text of 16,384 tokens takes 128 kB."""

_MAX_PIXELS = 1 << 26
"""Number of pixels of a picture that is planned; a blank one of each new size is processed."""


@dataclass(frozen=True, slots=True)
class SizedPicture:
    """Size in pixels of a picture, and its digest: vLLM's identity of an image kept whole."""

    width: int
    height: int
    digest: str

    @classmethod
    def parse(cls, url: str) -> SizedPicture:
        """Read :attr:`url`; raises :class:`RequestError`."""
        form = _FORM.fullmatch(url)
        if form is None:
            what = f"{shorten(url)} is not {_SCHEME}WIDTHxHEIGHT;DIGEST"
            fix = "send it as an earlier plan has named it, or send the picture"
            raise RequestError.of("image_url", what, fix)
        picture = cls(int(form[1]), int(form[2]), form[3])
        if picture.width * picture.height > _MAX_PIXELS:
            what = f"has more than {_MAX_PIXELS} pixels"
            fix = "send a smaller one"
            raise RequestError.of("image_url", what, fix, kind=Refusal.OUT_OF_RANGE)
        return picture

    @property
    def size(self) -> ImageSize:
        """Width and height."""
        return ImageSize(self.width, self.height)

    @property
    def url(self) -> str:
        """What a client sends instead of the picture: ``picture:WIDTHxHEIGHT;DIGEST``."""
        return f"{_SCHEME}{self.width}x{self.height};{self.digest}"

    @property
    def name(self) -> str:
        """The name under which vLLM's renderer passes the picture on."""
        return PLANNED + self.url


PLANNED = f"{secrets.token_hex(16)}:"
"""Name of a picture that is sent to be planned, and beginning of the names of those that are not.
"""


def is_planned(name: str | None) -> bool:
    """Whether a picture of this name belongs to a request that is planned alone."""
    return name is not None and name.startswith(PLANNED)


def find_sized_picture(name: str | None) -> SizedPicture | None:
    """The picture that :attr:`SizedPicture.name` stands for, or None for any other name."""
    if name is None or not is_planned(name) or name == PLANNED:
        return None
    return SizedPicture.parse(name.removeprefix(PLANNED))


def name_pictures(messages: Sequence[Any]) -> list[Any]:
    """Chat messages with each picture named, of a request that is planned alone.

    Raises :class:`RequestError` for videos, audio and embeddings.
    """
    named = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            message = {**message, "content": [_name_part(part) for part in content]}
        named.append(message)
    return named


def _name_part(part: Any) -> Any:
    if not isinstance(part, Mapping) or part.get("type") == "text":
        return part
    if part.get("type") != "image_url":
        what = f"a part {part.get('type')!r} cannot be planned"
        raise RequestError.of("messages", what, "send texts and images")
    image = part.get("image_url")
    if not isinstance(image, Mapping) or not isinstance(image.get("url"), str):
        raise RequestError.of("image_url", "has no url", "send the picture")
    if not image["url"].startswith(_SCHEME):
        return {**part, "uuid": PLANNED}
    name = SizedPicture.parse(image["url"]).name
    # An image's "detail" stays, because a budget may follow from it.
    return {**part, "image_url": {**image, "url": None}, "uuid": name}


Outline = Callable[
    [Image.Image, Mapping[str, object]], "Sequence[ResolvedPromptUpdate]"
]
"""Prompt text of one picture under these processor arguments."""


class SizedTexts:
    """Prompt text of pictures by size: what vLLM's processor makes of a blank one.

    Safe for several threads, because renderers may share one processor.
    """

    def __init__(self, outline: Outline) -> None:
        self._outline = outline
        self._texts: LRUCache[object, Sequence[ResolvedPromptUpdate]] = LRUCache(
            _MAX_SIZES
        )
        self._lock = Lock()

    def process(
        self, inputs: ProcessorInputs, sizes: Sequence[ImageSize]
    ) -> MultiModalProcessingResult:
        """Result of vLLM's processing of pictures of these sizes, without tensors."""
        kwargs = inputs.hf_processor_mm_kwargs
        texts = [self._find(size, kwargs) for size in sizes]
        tensors = [MultiModalKwargsItem() for _ in sizes]
        return MultiModalProcessingResult(
            list(inputs.prompt),
            MultiModalKwargsItems({"image": tensors}),
            {},
            {"image": texts},
        )

    def _find(
        self, size: ImageSize, kwargs: Mapping[str, object]
    ) -> Sequence[ResolvedPromptUpdate]:
        key = size, repr(sorted(kwargs.items()))
        with self._lock:
            text = self._texts.get(key)
        if text is None:
            blank = Image.new("RGB", (size.width, size.height))
            text = self._outline(blank, kwargs)
            with self._lock:
                self._texts[key] = text
        return text
