"""Pictures and videos, as vLLM reads them: decoded once, and read again for each request.

Every picture is a file, so that none is held in memory and all cases see the same bytes; one in
base64 or at a URL is written to a temporary file.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
import stat
import tempfile
import time
import warnings
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple
from urllib.parse import unquote

import httpx
from PIL import Image, ImageOps, UnidentifiedImageError
from pydantic import SecretStr

from vllm_autoprune.connection import Connection, make_client
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.journal import EVENLY, EvaluationError

_FRAMES = 32
"""Frames that vLLM samples of a video by default."""
_FRAME_FILES = "video/jpeg"
"""vLLM's MIME type for frames in base64 with commas between them, whatever their format."""


class Picture(NamedTuple):
    """A picture or video that was checked by decoding it, a video by 32 frames.

    ``name`` is the path as the data has it, or a digest if the data has the content itself.
    """

    name: str
    path: Path
    digest: str
    kind: str
    """Its MIME type."""
    frames: int = 0
    """Number of frames of a video; 0 for a picture."""

    @property
    def is_video(self) -> bool:
        """Whether it is a video."""
        return self.kind.startswith("video/")

    def read(self) -> bytes:
        """Content of the file; raises :class:`EvaluationError` if it changed after the check."""
        with contextlib.suppress(OSError):
            content = self.path.read_bytes()
            if hashlib.sha256(content).hexdigest() == self.digest:
                return content
        what = "has changed since it was read"
        fix = "restore it and add --resume"
        raise EvaluationError.of(str(self.path), what, fix)

    def part(self, frames: int = 0) -> dict[str, object]:
        """The part of a chat message that holds the content as a data URL.

        For a folder of frames, ``frames`` limits their number (0: 32 frames); a video file is sent
        whole, and the server samples it.
        """
        part = "video_url" if self.is_video else "image_url"
        contents = list[bytes]()
        if self.path.is_dir():
            with contextlib.suppress(OSError):
                files = _sample(_list_frames(self.path), frames or _FRAMES)
                contents = [file.read_bytes() for file in files]
        return {
            "type": part,
            part: {"url": encode(self.kind, contents or [self.read()])},
        }

    def refer(self, folder: Path) -> str:
        """The picture as a file of questions in ``folder`` names it.

        It is a path, or a data URL if the picture's file ends with the process.
        """
        if self.path.is_relative_to(_temporary_folder().name):
            return encode(self.kind, [self.read()])
        return os.path.relpath(self.path.resolve(), folder.resolve())

    def image(self) -> Image.Image:
        """The picture, or the first frame of a video, in RGB as a model sees it."""
        if self.is_video and (video := read_video(self.path)) is not None:
            return video.frames[0]
        return _decode(self.read())[1]


class Video(NamedTuple):
    """A video: the data URL that a server is sent, and the frames that vLLM samples of it.

    ``decoding_seconds`` is processor time; ``note`` says which of ``total`` frames were left
    out.
    """

    url: str
    frames: Sequence[Image.Image]
    decoding_seconds: float
    total: int
    note: str = ""


VIDEOS = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm")
"""File name endings of videos."""


def _sample(frames: Sequence[Any], count: int) -> list[Any]:
    """At most ``count`` frames, evenly spaced from first to last, as vLLM samples a video."""
    count = min(count, len(frames))
    last = len(frames) - 1
    return [frames[i * last // max(count - 1, 1)] for i in range(count)]


def _list_frames(folder: Path) -> list[Path]:
    endings = picture_endings()
    files = sorted(
        file
        for file in folder.iterdir()
        if file.suffix.lower() in endings and file.name[0] != "."
    )
    return [file for file in files if file.is_file()]  # a pipe might never end


def encode(kind: str, contents: Sequence[bytes]) -> str:
    """The data URL of one file's content, or of several frames."""
    encoded = ",".join(base64.b64encode(content).decode() for content in contents)
    return f"data:{kind};base64,{encoded}"


def read_video(path: Path, processor: str | None = None) -> Video | None:
    """Read a video file, or a folder of frames in the order of their names.

    ``processor`` is the class of the model's video processor, which decides how vLLM samples a
    file: two frames a second for Qwen-VL, 32 in all for most others. Returns None if ``path`` is
    neither; it may be a picture. Raises :class:`ConfigError` with one problem.
    """
    is_folder = path.is_dir()
    if not is_folder and path.suffix.lower() not in VIDEOS:
        return None
    from vllm.multimodal.media import ImageMediaIO, VideoMediaIO
    from vllm.multimodal.video import get_video_loader_backend_for_processor

    loader = get_video_loader_backend_for_processor(processor) or EVENLY
    try:
        frame_files = _list_frames(path) if is_folder else []
        if is_folder:
            _check_frames(path, frame_files)
        kind = _FRAME_FILES if is_folder else "video/mp4"
        files = _sample(frame_files, _FRAMES) if is_folder else [path]
        url = encode(kind, [file.read_bytes() for file in files])
        start = time.process_time()
        reader = VideoMediaIO(ImageMediaIO(), _FRAMES, video_backend=loader)
        frames, metadata = reader.load_base64(kind, url.partition(",")[2]).media
        seconds = time.process_time() - start
    except ConfigError:
        raise
    except OSError as error:
        what = f"cannot be read ({_reason(error)})"
        fix = "give the path of a video, or of a folder of frames"
        raise _refuse(str(path), what, fix) from None
    except Exception as error:  # decoders raise anything for a broken file  # noqa: BLE001
        what = f"cannot be decoded as a video ({_reason(error)})"
        fix = "convert it to MP4, or give a folder of frames"
        raise _refuse(str(path), what, fix) from None
    images = [*map(Image.fromarray, frames)]
    note = ""
    if is_folder:
        total = len(frame_files)
        if total > _FRAMES:
            note = f"{_FRAMES} of {total} frames are read, evenly spaced"
    else:
        total = int(metadata["total_num_frames"])
        if len(images) < total:
            note = f"{len(images)} of {total} frames are read, as vLLM samples"
    return Video(url, images, seconds, total, note)


def _check_frames(folder: Path, files: Sequence[Path]) -> None:
    """Raise :class:`ConfigError` if frames are too few, broken, or of different sizes."""
    if len(files) < 2:
        fix = "name a folder with one picture a frame, or a single picture itself"
        raise _refuse(str(folder), "has fewer than 2 frames", fix)
    sizes = set[tuple[int, int]]()
    for file in _sample(files, _FRAMES):
        source = PictureSource(str(file), file.name, str(file))
        sizes.add(read_picture(source).image().size)
    for file in files:
        with Image.open(file) as frame:  # this reads only the header
            sizes.add(frame.size)
    if len(sizes) > 1:
        what = f"has frames of {len(sizes)} sizes"
        raise _refuse(str(folder), what, "give all frames one size")


_temporary_folder = cache(partial(tempfile.TemporaryDirectory, prefix="autoprune-"))
"""Folder, until the process ends, for pictures that have no file of their own."""
_HEIF = "HEIF"
"""Pillow's name for HEIC, which neither it nor a server reads without pillow-heif."""
_HEIC_BRANDS = (b"heic", b"heix", b"hevc", b"mif1", b"msf1")
"""Brands after ``ftyp`` that mark a file as HEIC."""
_NOT_DECODED = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}
"""Formats that vLLM does not open, because they need other programs (vllm/multimodal/image.py)."""
_MAX_BYTES = 64 << 20
_MAX_SECONDS = 60
"""Time limit of a download."""
_ENDINGS = ("", ".jpg", ".jpeg", ".png", ".webp")
"""Endings that are tried after a name, because some data sets leave them out."""


class PictureSource(NamedTuple):
    """A picture that is not read yet: where it is referred to, its name, and its file or URL."""

    where: str
    name: str
    address: str


def find_picture(where: str, text: str, *folders: Path) -> PictureSource:
    """The source of the picture ``text``: a path in one of ``folders``, a URL, data URL or base64.

    Raises :class:`ConfigError` with one problem, whose place is ``where``.
    """
    if text[:8].lower().startswith(("http://", "https://")):
        return PictureSource(
            where, text.partition("?")[0], text
        )  # a query may hold a key
    encoded = text.partition(",")[2] if text[:5].lower() == "data:" else ""
    if text[:16].lower() == f"data:{_FRAME_FILES};":
        raise _refuse(
            where, "is frames in a data URL", "write them to a folder, and name that"
        )
    if not encoded:
        path, reason = _find_file(text, folders)
        if path is not None:
            return PictureSource(where, text, str(path))
        is_name = len(text) <= 40 or "." in text or reason == _NO_FILE
        encoded = "" if is_name else text
    if not encoded:
        fix = "give the path of a PNG or JPEG file"
        if text.lower().endswith(VIDEOS):
            fix = "give the path of a video, or of a folder of frames"
        if folders != (Path(),):
            fix += (
                f", relative to {folders[0]}, or to another folder with eval --images"
            )
        raise _refuse(where, f"cannot be read ({reason})", fix)
    return _write_encoded(where, text, encoded)


def _write_encoded(where: str, text: str, encoded: str) -> PictureSource:
    """Write a picture that the data has in base64 or as a data URL to a temporary file."""
    encoded = "".join(encoded.split())
    try:
        content = base64.b64decode(
            encoded + "=" * (-len(encoded) % 4), b"-_", validate=True
        )
    except ValueError:
        fix = "give the path of a PNG or JPEG file, or its content in base64"
        raise _refuse(where, "is neither a file nor base64", fix) from None
    digest = hashlib.sha256(content).hexdigest()
    is_video = text[:11].lower() == "data:video/"
    address = _write_temporary(where, content, ".mp4" if is_video else "")
    return PictureSource(where, f"sha256:{digest[:16]}", address)


_CORRECT = "correct it, or download the picture and give its path"


def fetch(source: PictureSource, connection: Connection | None = None) -> PictureSource:
    """``source`` with a file; a URL is downloaded to one, without keys and headers.

    Raises :class:`ConfigError` with one problem.
    """
    where, name, address = source
    if "://" not in address:
        return source
    try:
        content = _download(address, connection or Connection())
    except ConfigError as error:
        raise _refuse(where, error.problems[0].what, error.problems[0].fix) from None
    except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
        raise _refuse(where, f"cannot be read ({_reason(error)})", _CORRECT) from None
    ending = next((end for end in VIDEOS if name.lower().endswith(end)), "")
    return source._replace(address=_write_temporary(where, content, ending))


_NO_FILE = "not a file"


def _find_file(text: str, folders: Sequence[Path]) -> tuple[Path | None, str]:
    """The file or folder that ``text`` names in ``folders``, or None and the reason why.

    ``text`` may be a ``file://`` URL or a path of Windows; if the latter does not exist, its last
    parts are tried as a relative path.
    """
    name = text.removeprefix("file://")
    names = [name]
    if name != text:
        names.append(unquote(name.removeprefix("localhost")))
    if "\\" in text and len(text) < 4096:
        windows = PureWindowsPath(names[-1])
        ends = range(1 if windows.anchor else 0, len(windows.parts))
        names += ["/".join(windows.parts[start:]) for start in ends]
    reason = _NO_FILE
    paths = (
        Path(f"{folder / name}{end}")
        for name in names
        for folder in folders
        for end in _ENDINGS
    )
    for path in paths:
        try:
            # A pipe is refused, because reading it might never end.
            if path.is_dir() or stat.S_ISREG(path.stat().st_mode):
                return path, ""
            return None, _NO_FILE
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            reason = _reason(error)
    return None, reason


def read_picture(
    source: PictureSource, connection: Connection | None = None
) -> Picture:
    """Check a picture by decoding it; one at a URL is downloaded, without keys and headers.

    Raises :class:`ConfigError` with one problem.
    """
    where, name, address = source = fetch(source, connection)
    path = Path(address)
    try:
        files = _list_frames(path) if path.is_dir() else [path]
        contents = [file.read_bytes() for file in files]
    except (OSError, ValueError) as error:
        raise _refuse(where, f"cannot be read ({_reason(error)})", _CORRECT) from None
    digest = hashlib.sha256(b"".join(contents)).hexdigest()
    try:
        if (video := read_video(path)) is not None:
            return Picture(
                name, path, digest, video.url[5:].partition(";")[0], video.total
            )
        kind, image = _decode(contents[0])
        if kind == _HEIF:
            return _convert_heif(where, name, image)
    except ConfigError as error:  # of the video, or of one of its frames
        problem = error.problems[0]
        frame = problem.where.removeprefix(address)[1:]
        if frame:
            where = f"{where}: {frame}"
        raise _refuse(where, problem.what, problem.fix) from None
    except UnidentifiedImageError:
        raise _refuse(where, *_explain_unidentified(contents[0])) from None
    except Exception as error:  # decoders raise anything for a broken file  # noqa: BLE001
        what = f"cannot be decoded ({_reason(error)})"
        raise _refuse(where, what, "export it again, or make it smaller") from None
    return Picture(name, path, digest, Image.MIME.get(kind, "image/png"))


def _convert_heif(where: str, name: str, image: Image.Image) -> Picture:
    """A HEIC picture as PNG, which every server reads."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    content = buffer.getvalue()
    path = Path(_write_temporary(where, content, ".png"))
    return Picture(name, path, hashlib.sha256(content).hexdigest(), "image/png")


def _explain_unidentified(content: bytes) -> tuple[str, str]:
    """Kind of a file that Pillow cannot identify, and what the user can do."""
    if content.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer", "git lfs pull"
    if content[4:8] == b"ftyp" and content[8:12] in _HEIC_BRANDS:
        fix = "convert it to PNG or JPEG"
        if ".heic" not in picture_endings():
            fix = f"pip install 'vllm-autoprune[data]', or {fix}"
        return "is a HEIC picture that cannot be decoded", fix
    what = "is not a picture that vLLM reads"
    fix = "convert it to PNG or JPEG, or download it whole; a video's name ends in .mp4"
    return what, fix


def _refuse(where: str, what: str, fix: str) -> ConfigError:
    return ConfigError.of(where, what, fix, subject="image")


def _write_temporary(where: str, content: bytes, ending: str) -> str:
    """Write ``content`` to a file that exists until the process ends, and return its path."""
    path = Path(
        _temporary_folder().name, f"{hashlib.sha256(content).hexdigest()}{ending}"
    )
    try:
        path.write_bytes(content)
    except OSError as error:
        fix = "make room, or name a folder that has some in TMPDIR"
        raise _refuse(
            where, f"cannot be written to {path} ({_reason(error)})", fix
        ) from None
    return str(path)


def _download(url: str, connection: Connection) -> bytes:
    """The content of a URL, within limits of size and time."""
    anonymous = connection.model_copy(update={"api_key": SecretStr(""), "header": []})
    settings: dict[str, Any] = {"follow_redirects": True, "timeout": 10.0}
    content = bytearray()
    start = time.monotonic()
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


@cache
def _register_formats() -> None:
    """Let Pillow open all formats that it has, and HEIC where pillow-heif is installed."""
    Image.init()
    with contextlib.suppress(ImportError):
        from pillow_heif import register_heif_opener

        register_heif_opener()


@cache
def picture_endings() -> frozenset[str]:
    """File name endings of all picture formats that can be read."""
    _register_formats()
    endings = Image.registered_extensions().items()
    return frozenset(
        ending
        for ending, kind in endings
        if kind in Image.OPEN and kind not in _NOT_DECODED
    )


def is_picture(path: Path) -> bool:
    """Whether ``path`` is a visible file with the ending of a readable picture or video format."""
    ending = path.suffix.lower()
    is_named = ending in picture_endings() or ending in VIDEOS
    return is_named and path.name[0] != "." and not path.is_dir()


def _decode(content: bytes) -> tuple[str, Image.Image]:
    """Format of a picture, and its first frame in RGB, as in vllm/multimodal/media/image.py."""
    _register_formats()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about many pixels or odd metadata
        image: Image.Image = Image.open(
            io.BytesIO(content),
            formats=[name for name in Image.ID if name not in _NOT_DECODED],
        )
        kind = image.format or ""
        image.load()  # decodes the pixels; `verify` would not
        with contextlib.suppress(Exception):
            image = ImageOps.exif_transpose(image)
        # vLLM returns RGB as it is, even with a transparent colour.
        if image.mode == "RGB":
            return kind, image
        if not (image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info):
            return kind, image.convert("RGB")
        white = Image.new("RGB", image.size, "white")
        image = image.convert("RGBA")
        white.paste(image, mask=image.getchannel("A"))
        return kind, white


def _reason(error: Exception) -> str:
    """An exception's message in one short line."""
    reason = (
        error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    )
    return " ".join(reason.split())[:160] or type(error).__name__
