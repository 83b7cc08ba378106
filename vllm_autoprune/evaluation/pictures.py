"""Pictures of questions, as vLLM reads them: decoded once, and read again for each request.

A picture is a file: one that is written in base64 gets a temporary one, so that none is held in
memory.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import stat
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageOps, UnidentifiedImageError

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.journal import EvaluationError


class Picture(NamedTuple):
    """A picture file that was decoded whole when it was read.

    ``name`` is its path as written, or a digest where its content was written.
    """

    name: str
    path: Path
    digest: str
    kind: str
    """Its MIME type."""

    def read(self) -> bytes:
        """Its content; raises :class:`EvaluationError` if that is no longer what was checked."""
        with contextlib.suppress(OSError):
            content = self.path.read_bytes()
            if hashlib.sha256(content).hexdigest() == self.digest:
                return content
        what = "has changed since it was read"
        raise EvaluationError(f"{self.path}: {what} -> restore it and add --resume")

    def part(self) -> dict[str, object]:
        """The part of a chat message that has its content, as a data URL."""
        url = f"data:{self.kind};base64,{base64.b64encode(self.read()).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}

    def image(self) -> Image.Image:
        """What a model sees of it, in RGB."""
        return _decode(self.read())[1]


@cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for the pictures that are in no file, until the process ends."""
    return tempfile.TemporaryDirectory(prefix="autoprune-")


_NOT_DECODED = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}
"""Formats that vLLM does not open, because they need other programs (vllm/multimodal/image.py)."""


def read_picture(where: str, folder: Path, text: str) -> Picture:
    """The picture at a path relative to ``folder``, or that a data URL or base64 holds.

    Raises :class:`ConfigError` with one problem, which is at ``where``.
    """

    def refusal(what: str, fix: str) -> ConfigError:
        return ConfigError("image", [Problem(where, what, fix)])

    name, path = text, folder / text
    encoded = text.partition(",")[2] if text[:5].lower() == "data:" else ""
    try:
        if not encoded:
            if not stat.S_ISREG(path.stat().st_mode):  # a pipe might never end
                raise IsADirectoryError(0, "not a file")
            content = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        if len(text) <= 40 or "." in text or isinstance(error, IsADirectoryError):
            fix = "give the path of a PNG or JPEG file"
            fix += "" if folder == Path() else f", relative to {folder}"
            raise refusal(f"cannot be read ({_reason(error)})", fix) from None
        encoded = text
    if encoded:
        encoded = "".join(encoded.split())
        try:
            content = base64.b64decode(encoded + "=" * (-len(encoded) % 4), b"-_", validate=True)
        except ValueError:
            fix = "give the path of a PNG or JPEG file, or its content in base64"
            raise refusal("is neither a file nor base64", fix) from None
    digest = hashlib.sha256(content).hexdigest()
    try:
        if encoded:
            name, path = f"sha256:{digest[:16]}", Path(_temporary_folder().name, digest)
            path.write_bytes(content)
        kind, _ = _decode(content)
    except UnidentifiedImageError:
        if content.startswith(b"version https://git-lfs"):
            raise refusal("is a Git LFS pointer", "git lfs pull") from None
        what = "is not a picture that vLLM reads"
        raise refusal(what, "convert it to PNG or JPEG, or download it whole") from None
    except Exception as error:  # decoders raise anything for a broken file
        what = f"cannot be decoded ({_reason(error)})"
        raise refusal(what, "export it again, or make it smaller") from None
    return Picture(name, path, digest, Image.MIME.get(kind, "image/png"))


def _decode(content: bytes) -> tuple[str, Image.Image]:
    """Format of a picture, and its first frame in RGB, as in vllm/multimodal/media/image.py."""
    Image.init()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of many pixels, and of odd metadata
        image: Image.Image = Image.open(
            io.BytesIO(content), formats=[name for name in Image.ID if name not in _NOT_DECODED]
        )
        kind = image.format or ""
        image.load()  # whole: `verify` looks at no pixel
        with contextlib.suppress(Exception):
            image = ImageOps.exif_transpose(image)
        if image.mode == "RGB":  # where vLLM leaves a transparent colour as it is
            return kind, image
        if not (image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info):
            return kind, image.convert("RGB")
        white = Image.new("RGB", image.size, "white")
        image = image.convert("RGBA")
        white.paste(image, mask=image.getchannel("A"))
        return kind, white


def _reason(error: Exception) -> str:
    """An exception's message in one short line."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(reason.split())[:160] or type(error).__name__
