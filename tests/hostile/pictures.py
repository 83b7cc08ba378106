"""Pictures of any size as parts of a chat message, optionally with a uuid."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from PIL import Image

from benchmarks.common.pictures import draw_picture, encode_picture


@dataclass(frozen=True)
class Picture:
    """A picture drawn from a seed; ``uuid`` is sent where it is given, ``detail`` too.

    With ``sent`` false only the uuid is sent, as clients do for what a server has cached. A
    ``flat`` one has a single colour.
    """

    seed: int
    width: int
    height: int
    uuid: str | None = None
    detail: str | None = None
    sent: bool = True
    flat: bool = False

    def named(self, uuid: str) -> Picture:
        """The same picture with a uuid."""
        return replace(self, uuid=uuid)

    @property
    def url(self) -> str:
        """A data URL."""
        return _url(self.seed, self.width, self.height, self.flat)

    @property
    def part(self) -> dict[str, object]:
        """The picture as a part of a message."""
        image: dict[str, object] | None = {"url": self.url} if self.sent else None
        if image is not None and self.detail is not None:
            image["detail"] = self.detail
        part: dict[str, object] = {"type": "image_url", "image_url": image}
        return part if self.uuid is None else {**part, "uuid": self.uuid}


@cache
def _url(seed: int, width: int, height: int, flat: bool) -> str:
    if flat:
        return encode_picture(Image.new("RGB", (width, height), (seed % 256,) * 3), "png")
    return encode_picture(draw_picture(seed, width, height), "png")
