"""A workload as bytes on a disk, ready to be sent: nothing is drawn or encoded once a clock runs.

Knows nothing about schedules or servers.

A folder holds ``workload.json``, ``requests.jsonl`` (one line a request) and ``bodies.bin``, the
request bodies one after the other. All servers that are compared are sent the same folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pydantic import ValidationError

from benchmarks.load.asks import Ask, Picture, asks
from benchmarks.load.errors import LoadError
from benchmarks.load.pictures import encoded, picture
from benchmarks.load.plain import Plain
from benchmarks.load.workload import Workload

WORKLOAD, REQUESTS, BODIES = "workload.json", "requests.jsonl", "bodies.bin"


class Line(Plain):
    """One request of the folder, and where its body lies."""

    ask: Ask
    offset: int
    size: int
    warm_up: bool = False


@dataclass(frozen=True)
class Prepared:
    """A workload in memory: bodies in the order in which they are due."""

    workload: Workload
    lines: tuple[Line, ...]
    bodies: bytes
    digest: str

    @property
    def measured(self) -> tuple[Line, ...]:
        """Requests that count."""
        return tuple(line for line in self.lines if not line.warm_up)

    @property
    def warm_up(self) -> tuple[Line, ...]:
        """Requests that do not, on images of their own."""
        return tuple(line for line in self.lines if line.warm_up)

    def body(self, line: Line) -> bytes:
        """What is sent."""
        return self.bodies[line.offset : line.offset + line.size]


def prepare(workload: Workload, folder: Path) -> Prepared:
    """Draw and encode everything; a folder that holds this workload already is used as it is."""
    try:
        if (folder / WORKLOAD).is_file() and load(folder).workload == workload:
            return load(folder)
    except LoadError:
        pass  # half written, or of another version: it is written anew
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / WORKLOAD).unlink(missing_ok=True)
        _write(workload, folder)
    except OSError as error:
        raise LoadError(f"workload {folder}: cannot be written: {error}") from error
    return load(folder)


def load(folder: Path) -> Prepared:
    """Read a prepared folder; raises :class:`LoadError` where it is not one, or not whole."""
    try:
        workload = Workload.model_validate_json((folder / WORKLOAD).read_text())
        text = (folder / REQUESTS).read_text()
        lines = tuple(Line.model_validate_json(line) for line in text.splitlines())
        bodies = (folder / BODIES).read_bytes()
    except (OSError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise LoadError(
            f"workload {folder}: {reason} -> make one: python -m benchmarks.load prepare --out DIR"
        ) from error
    if sum(line.size for line in lines) != len(bodies):
        raise LoadError(
            f"workload {folder}: {BODIES} is not whole -> delete the folder, prepare it"
        )
    return Prepared(workload, lines, bodies, hashlib.sha256(bodies).hexdigest()[:16])


def body(workload: Workload, ask: Ask) -> bytes:
    """The JSON body of one request: streamed, greedy, with usage at its end."""
    return json.dumps(_body(workload, content(ask))).encode()


def content(ask: Ask) -> list[Mapping[str, object]]:
    """The parts of the user's turn: pictures first, then the question."""
    urls = (_url(shown) for shown in ask.pictures)
    parts: list[Mapping[str, object]] = [
        {"type": "image_url", "image_url": {"url": url}} for url in urls
    ]
    return [*parts, {"type": "text", "text": ask.question}]


def _body(workload: Workload, parts: list[Mapping[str, object]]) -> dict[str, object]:
    asked: dict[str, object] = {
        "model": workload.model,
        "messages": [{"role": "user", "content": parts}],
        "temperature": 0,
        "max_tokens": workload.output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if workload.dialect == "vllm":
        # A special token would have no text, and its delta would not be seen.
        asked |= {"ignore_eos": True, "skip_special_tokens": False}
    return asked


@lru_cache(maxsize=64)
def _url(shown: Picture) -> str:
    return encoded(picture(shown.seed, shown.width, shown.height), shown.format)


def _write(workload: Workload, folder: Path) -> None:
    measured, warm_up = asks(workload)
    offset, lines = 0, []
    with (folder / BODIES).open("wb") as out:
        for ask, extra in (*_marked(measured, False), *_marked(warm_up, True)):
            data = body(workload, ask)
            out.write(data)
            lines.append(Line(ask=ask, offset=offset, size=len(data), warm_up=extra))
            offset += len(data)
    text = "".join(line.model_dump_json() + "\n" for line in lines)
    (folder / REQUESTS).write_text(text)
    # Last, so that its presence says that the rest is there.
    (folder / WORKLOAD).write_text(workload.model_dump_json(indent=1) + "\n")


def _marked(drawn: Iterable[Ask], warm_up: bool) -> Iterable[tuple[Ask, bool]]:
    return ((ask, warm_up) for ask in drawn)
