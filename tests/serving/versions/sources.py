"""Python sources of a package: as they are installed, or within a wheel that stays where it is."""

from __future__ import annotations

import http.client
import io
import json
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Sources = Callable[[str], str | None]
"""Path of a file relative to what is imported from, "/" between -> its text, None without one."""


def installed(package: Path) -> Sources:
    """Sources of one package, by its folder; others beside it are not read."""

    @cache
    def read(path: str) -> str | None:
        file = package.parent / path
        within = path.startswith(f"{package.name}/") and file.is_file()
        return file.read_text(encoding="utf-8") if within else None

    return read


@dataclass(frozen=True, slots=True)
class Wheel:
    """Where a wheel is, as the package index tells it."""

    url: str
    sha256: str

    @property
    def name(self) -> str:
        """File name."""
        return self.url.rsplit("/", 1)[-1]


def wheel_of(requirement: str) -> Wheel:
    """The wheel that pip would install; only its metadata is fetched.

    Raises OSError where the index cannot be reached or has no such release.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
    command += ["--ignore-installed", "--only-binary", ":all:", "--report", "-", requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"pip does not answer about {requirement}") from error
    if done.returncode:
        raise OSError(f"pip does not find {requirement}: {done.stderr.strip()[-500:]}")
    (item,) = json.loads(done.stdout)["install"]
    archive = item["download_info"]
    return Wheel(archive["url"], archive["archive_info"]["hashes"]["sha256"])


def within(wheel: Wheel) -> Sources:
    """Sources in a wheel of hundreds of megabytes, of which only what is read is fetched."""
    archive = zipfile.ZipFile(io.BufferedReader(_Remote(wheel.url), 1 << 18))
    names = frozenset(archive.namelist())

    @cache
    def read(path: str) -> str | None:
        return archive.read(path).decode("utf-8") if path in names else None

    return read


class _Remote(io.RawIOBase):
    """A file behind HTTP, a range at a time."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url, self._at = url, 0
        with urllib.request.urlopen(
            urllib.request.Request(url, method="HEAD"), timeout=60
        ) as response:
            self._size = int(response.headers["Content-Length"])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        last = min(self._at + len(buffer), self._size) - 1
        if last < self._at:
            return 0
        request = urllib.request.Request(self._url, headers={"Range": f"bytes={self._at}-{last}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            if answer.status != 206:
                raise OSError(f"no ranges of {self._url}: HTTP {answer.status}")
            try:
                chunk = answer.read()
            except http.client.IncompleteRead as error:
                raise OSError(f"{self._url} broke off") from error
        buffer[: len(chunk)] = chunk
        self._at += len(chunk)
        return len(chunk)
