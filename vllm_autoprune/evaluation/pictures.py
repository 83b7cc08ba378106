"""Pictures and clips, as vLLM reads them: decoded once, and read again for each request.

A picture is a file: one in base64 or at a URL gets a temporary one, so that none is held in memory
and all cases see the same bytes.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import stat
import tempfile
import time
import warnings
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from PIL import Image, ImageOps, UnidentifiedImageError
from pydantic import SecretStr

from vllm_autoprune.connection import Connection, make_client
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


class Clip(NamedTuple):
    """A video: the data URL that a server is sent, and the frames that vLLM samples of it.

    ``seconds`` are processor time of decoding it; ``note`` says which frames were left out.
    """

    url: str
    frames: Sequence[Image.Image]
    seconds: float
    note: str = ""


_VIDEOS = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm")
_FRAMES = 32
"""Frames that vLLM samples of a video by default."""


def read_clip(path: Path) -> Clip | None:
    """The clip of a video file, or of a folder of frames in the order of their names.

    None for another path, which may be a picture. Raises :class:`ConfigError` with one problem.
    """
    if not path.is_dir() and path.suffix.lower() not in _VIDEOS:
        return None
    from vllm.multimodal.media import ImageMediaIO, VideoMediaIO

    kind, note = "video/mp4", ""
    try:
        if path.is_dir():
            endings = Image.registered_extensions()
            files = sorted(file for file in path.iterdir() if file.suffix.lower() in endings)
            if len(files) < 2:
                fix = "name a folder with one picture a frame, or a single picture itself"
                raise _refuse(str(path), "has fewer than 2 frames", fix)
            if len(files) > _FRAMES:
                note = f"{_FRAMES} of {len(files)} frames are read, evenly spaced"
                last = len(files) - 1
                files = [files[round(i * last / (_FRAMES - 1))] for i in range(_FRAMES)]
            sizes = {
                read_picture(PictureSource(str(f), f.name, str(f))).image().size for f in files
            }
            if len(sizes) > 1:
                what = f"has frames of {len(sizes)} sizes"
                raise _refuse(str(path), what, "give all frames one size")
            kind = "video/jpeg"  # vLLM's name for frames, each of any format
            contents = [file.read_bytes() for file in files]
        else:
            contents = [path.read_bytes()]
        data = ",".join(base64.b64encode(content).decode() for content in contents)
        start = time.process_time()
        frames, metadata = VideoMediaIO(ImageMediaIO(), _FRAMES).load_base64(kind, data).media
        seconds = time.process_time() - start
    except ConfigError:
        raise
    except OSError as error:
        what = f"cannot be read ({_reason(error)})"
        raise _refuse(
            str(path), what, "give the path of a video, or of a folder of frames"
        ) from None
    except Exception as error:  # decoders raise anything for a broken file
        what = f"cannot be decoded as a video ({_reason(error)})"
        raise _refuse(str(path), what, "convert it to MP4, or give a folder of frames") from None
    if kind == "video/mp4" and len(frames) < metadata["total_num_frames"]:
        note = f"{len(frames)} of {metadata['total_num_frames']} frames are read, as vLLM samples"
    return Clip(f"data:{kind};base64,{data}", [*map(Image.fromarray, frames)], seconds, note)


_temporary_folder = cache(partial(tempfile.TemporaryDirectory, prefix="autoprune-"))
"""For the pictures that are in no file, until the process ends."""
_NOT_DECODED = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}
"""Formats that vLLM does not open, because they need other programs (vllm/multimodal/image.py)."""
_MAX_BYTES, _MAX_SECONDS = 64 << 20, 60
"""Of a download."""
_ENDINGS = ("", ".jpg", ".jpeg", ".png", ".webp")
"""Tried after a name; annotations of data sets leave them out."""


class PictureSource(NamedTuple):
    """A picture that is not read yet: where it is asked for, its name, and its file or URL."""

    where: str
    name: str
    address: str


def find_picture(where: str, text: str, *folders: Path) -> PictureSource:
    """The file of a path relative to one of ``folders``; URLs, data URLs and base64 are taken too.

    Raises :class:`ConfigError` with one problem, which is at ``where``.
    """
    if text[:8].lower().startswith(("http://", "https://")):
        return PictureSource(where, text.partition("?")[0], text)  # a query may hold a key
    encoded = text.partition(",")[2] if text[:5].lower() == "data:" else ""
    reason, name = "not a file", text.removeprefix("file://")
    for path in (Path(f"{folder / name}{end}") for folder in folders for end in _ENDINGS):
        try:
            if encoded:
                break
            if stat.S_ISREG(path.stat().st_mode):  # a pipe might never end
                return PictureSource(where, text, str(path))
            break
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            reason = _reason(error)
    else:
        encoded = "" if len(text) <= 40 or "." in text else text
    if not encoded:
        fix = "give the path of a PNG or JPEG file"
        if folders != (Path(),):
            fix += f", relative to {folders[0]}, or to another folder with eval --images"
        raise _refuse(where, f"cannot be read ({reason})", fix)
    encoded = "".join(encoded.split())
    try:
        content = base64.b64decode(encoded + "=" * (-len(encoded) % 4), b"-_", validate=True)
    except ValueError:
        fix = "give the path of a PNG or JPEG file, or its content in base64"
        raise _refuse(where, "is neither a file nor base64", fix) from None
    digest = hashlib.sha256(content).hexdigest()
    return PictureSource(where, f"sha256:{digest[:16]}", _write_temporary(where, content))


def read_picture(source: PictureSource, connection: Connection | None = None) -> Picture:
    """Check a picture by decoding it; one at a URL is downloaded, without keys and headers.

    Raises :class:`ConfigError` with one problem.
    """
    where, name, address = source
    try:
        if "://" in address:
            address = _write_temporary(where, _download(address, connection or Connection()))
        content = Path(address).read_bytes()
    except ConfigError as error:
        raise _refuse(where, error.problems[0].what, error.problems[0].fix) from None
    except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
        fix = "correct it, or download the picture and give its path"
        raise _refuse(where, f"cannot be read ({_reason(error)})", fix) from None
    try:
        kind, _ = _decode(content)
    except UnidentifiedImageError:
        if content.startswith(b"version https://git-lfs"):
            raise _refuse(where, "is a Git LFS pointer", "git lfs pull") from None
        what = "is not a picture that vLLM reads"
        raise _refuse(where, what, "convert it to PNG or JPEG, or download it whole") from None
    except Exception as error:  # decoders raise anything for a broken file
        what = f"cannot be decoded ({_reason(error)})"
        raise _refuse(where, what, "export it again, or make it smaller") from None
    digest = hashlib.sha256(content).hexdigest()
    return Picture(name, Path(address), digest, Image.MIME.get(kind, "image/png"))


def _refuse(where: str, what: str, fix: str) -> ConfigError:
    return ConfigError("image", [Problem(where, what, fix)])


def _write_temporary(where: str, content: bytes) -> str:
    """A file with this content until the process ends."""
    path = Path(_temporary_folder().name, hashlib.sha256(content).hexdigest())
    try:
        path.write_bytes(content)
    except OSError as error:
        fix = "make room, or name a folder that has some in TMPDIR"
        raise _refuse(where, f"cannot be written to {path} ({_reason(error)})", fix) from None
    return str(path)


def _download(url: str, connection: Connection) -> bytes:
    """The content of a URL, within limits of size and time."""
    anonymous = connection.model_copy(update={"api_key": SecretStr(""), "header": []})
    settings: dict[str, Any] = {"follow_redirects": True, "timeout": 10.0}
    content, start = bytearray(), time.monotonic()
    with (
        make_client(httpx.Client, url, anonymous, **settings) as client,
        client.stream("GET", url) as response,
    ):
        if response.is_error:
            raise ValueError(f"status {response.status_code}")
        for chunk in response.iter_bytes():
            content += chunk
            if len(content) > _MAX_BYTES:
                raise ValueError(f"more than {_MAX_BYTES >> 20} MiB")
            if time.monotonic() - start > _MAX_SECONDS:
                raise ValueError(f"takes more than {_MAX_SECONDS} seconds")
    return bytes(content)


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
