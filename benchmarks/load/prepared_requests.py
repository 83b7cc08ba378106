"""A workload as bytes on a disk, ready to be sent: nothing is drawn or encoded once a clock runs.

A folder holds ``workload.json``, ``requests.jsonl`` (one line a request) and ``bodies.bin``, the
request bodies one after the other. All servers that are compared are sent the same folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pydantic import ValidationError

from benchmarks.common import BenchmarkError, StrictModel
from benchmarks.common.client import build_body, build_content
from benchmarks.common.pictures import draw_picture, encode_picture
from benchmarks.load.own_data import as_data_url, open_data
from benchmarks.load.requests import OwnPicture, PictureSpec, Request, draw_requests
from benchmarks.load.workload import Workload

WORKLOAD, REQUESTS, BODIES = "workload.json", "requests.jsonl", "bodies.bin"


class Line(StrictModel):
    """One request of the folder, and the place of its body."""

    ask: Request
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
        """Requests that are measured."""
        return tuple(line for line in self.lines if not line.warm_up)

    @property
    def warm_up(self) -> tuple[Line, ...]:
        """Requests of the warm-up, on images of their own."""
        return tuple(line for line in self.lines if line.warm_up)

    def body(self, line: Line) -> bytes:
        """The body that is sent."""
        return self.bodies[line.offset : line.offset + line.size]


def prepare(workload: Workload, folder: Path) -> Prepared:
    """Draw and encode all requests, unless the folder contains this workload already."""
    try:
        if (folder / WORKLOAD).is_file() and load_prepared(folder).workload == workload:
            return load_prepared(folder)
    except BenchmarkError:
        pass  # incomplete, or of another version: written again
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / WORKLOAD).unlink(missing_ok=True)
        _write(workload, folder)
    except OSError as error:
        raise BenchmarkError(f"workload {folder}: cannot be written: {error}") from error
    return load_prepared(folder)


def load_prepared(folder: Path) -> Prepared:
    """Read a prepared folder; raises :class:`BenchmarkError` where it is none, or incomplete."""
    try:
        workload = Workload.model_validate_json((folder / WORKLOAD).read_text())
        text = (folder / REQUESTS).read_text()
        lines = tuple(Line.model_validate_json(line) for line in text.splitlines())
        bodies = (folder / BODIES).read_bytes()
    except (OSError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise BenchmarkError(
            f"workload {folder}: {reason} -> create one: "
            "python -m benchmarks.load prepare --out DIR"
        ) from error
    if sum(line.size for line in lines) != len(bodies):
        raise BenchmarkError(
            f"workload {folder}: {BODIES} is incomplete -> delete the folder, prepare it again"
        )
    return Prepared(workload, lines, bodies, hashlib.sha256(bodies).hexdigest()[:16])


def build_request_body(workload: Workload, request: Request) -> bytes:
    """The JSON body of one request."""
    fields: dict[str, object] = {}
    if workload.dialect == "vllm":
        # Without it, special tokens have no text, and their deltas would not be counted.
        fields = {"ignore_eos": True, "skip_special_tokens": False}
    content = build_request_content(workload, request)
    return build_body(workload.model, content, tokens=workload.output_tokens, fields=fields)


def build_request_content(workload: Workload, request: Request) -> list[Mapping[str, object]]:
    """The parts of the user's message, with encoded pictures."""
    urls = [_image_url(workload.data, picture) for picture in request.pictures]
    return build_content(request.question, urls)


@lru_cache(maxsize=64)
def _image_url(data: str, spec: PictureSpec | OwnPicture) -> str:
    if isinstance(spec, OwnPicture):
        return as_data_url(open_data(Path(data)).items[spec.item].images[spec.number]())
    return encode_picture(draw_picture(spec.seed, spec.width, spec.height), spec.format)


def _write(workload: Workload, folder: Path) -> None:
    measured, warm_up = draw_requests(workload)
    offset, lines = 0, []
    with (folder / BODIES).open("wb") as out:
        for number, request in enumerate((*measured, *warm_up)):
            data = build_request_body(workload, request)
            out.write(data)
            is_warm_up = number >= len(measured)
            lines.append(Line(ask=request, offset=offset, size=len(data), warm_up=is_warm_up))
            offset += len(data)
    text = "".join(line.model_dump_json() + "\n" for line in lines)
    (folder / REQUESTS).write_text(text)
    # Written last: where it exists, the folder is complete.
    (folder / WORKLOAD).write_text(workload.model_dump_json(indent=1) + "\n")
