"""Files and JSON text, read within bounds: whatever they hold, memory and time stay small.

Knows nothing about states: any JSON value that keeps the rules passes.
"""

from __future__ import annotations

import codecs
import json
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from pydantic import JsonValue

from vllm_autoprune.errors import Problem, StateError
from vllm_autoprune.tpdsl.shown import pointer, shown

MAX_BYTES = 1 << 20
"""States are a few kilobytes; anything near this size is not one."""

MAX_DEPTH = 32
"""A state itself is five levels deep; the rest is room for what provenance records."""

MAX_VALUES = 10_000
"""Values in one state, counting lists and objects: bounds what the worst text can cost."""

_SIZE = Problem("", f"larger than {MAX_BYTES} bytes", "a state is a few kilobytes of JSON", "size")

_WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def read_text(path: Path, subject: str) -> str:
    """The text of a regular file of at most MAX_BYTES; raises :class:`StateError`.

    The bound holds while reading, so a file that grows, or that lies about its size, is no way
    around it; and nothing that could block or act when opened (a pipe, a device) is opened.
    """
    try:
        _require_regular(path.stat().st_mode, subject)
        # The path may name something else by now: ask again what was opened, without waiting.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _require_regular(os.fstat(handle).st_mode, subject)
            content = _read_at_most(handle, MAX_BYTES + 1)
        finally:
            os.close(handle)
    except OSError as error:
        raise unreadable(subject, error) from None
    if len(content) > MAX_BYTES:
        raise StateError(subject, [_SIZE])
    return _decode(content, subject)


def unreadable(subject: str, error: OSError) -> StateError:
    """The error for a path that the system will not read."""
    reason = error.strerror or type(error).__name__
    mend = "check the path and its permissions"
    return StateError(subject, [Problem("", f"cannot be read ({reason})", mend, "file")])


def _require_regular(mode: int, subject: str) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "no regular file")
        raise StateError(subject, [Problem("", f"is {kind}", "name a JSON file", "file")])


def _read_at_most(handle: int, limit: int) -> bytes:
    content = b""
    while len(content) < limit and (more := os.read(handle, limit - len(content))):
        content += more
    return content


def _decode(content: bytes, subject: str) -> str:
    try:
        # UTF-16 without its mark is valid UTF-8 as far as that goes, but full of zeros.
        if not content.startswith(_WIDE_MARKS) and b"\0" not in content[:4]:
            return content.decode("utf-8")
        what = "not UTF-8 text (it looks like UTF-16 or UTF-32)"
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text ({error.reason} at byte {error.start})"
    raise StateError(subject, [Problem("", what, "save it as UTF-8", "encoding")])


@dataclass(frozen=True, slots=True)
class _Odd:
    """A number that no 64-bit float holds, as it was written."""

    text: str


class _Object(dict[str, object]):
    """An object, and the keys that it was given more than once."""

    twice: tuple[str, ...] = ()


def parse(text: str, subject: str) -> tuple[JsonValue, list[Problem]]:
    """A JSON text as a value, and what is wrong with it.

    Numbers without a fractional part become whole numbers (``2.0`` is 2, as in JSON Schema).
    A key that occurs twice holds its last value, an impossible number null; both are told, each
    with its JSON pointer. Raises :class:`StateError` where there is no value to speak of.
    """
    if hopeless := list(_hopeless(text)):
        raise StateError(subject, hopeless)
    try:
        found: object = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_Odd,
            parse_float=_number,
            parse_int=_whole,
        )
    except json.JSONDecodeError as error:
        what = f"not JSON: {error.msg} at line {error.lineno} col {error.colno}"
        mend = "write one JSON object as `vllm-autoprune schema` describes it"
        raise StateError(subject, [Problem("", what, mend, "syntax")]) from None
    if isinstance(found, _Odd):
        raise StateError(subject, [_odd(found, "")])
    problems = list(_problems(found, ""))
    value: JsonValue = found  # type: ignore[assignment]  # only what is in `problems` is not
    return value, problems


def _hopeless(text: str) -> Iterator[Problem]:
    """What must be known before a parser may see the text."""
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        yield _SIZE
    elif text.startswith("\ufeff"):
        yield Problem(
            "", "begins with a byte order mark", "save it as UTF-8 without one", "encoding"
        )
    elif not text.strip():
        yield Problem("", "is empty", "write one JSON object", "syntax")
    else:
        yield from _too_much(text)


def _too_much(text: str) -> Iterator[Problem]:
    """Depth and number of values, counted before anything is built from the text.

    Not left to the parser: how deep it gets before it gives up, or dies, is up to the process.
    """
    # Right up to the first mistake, should there be one: a parser gets no further either.
    outside = "".join(text.replace("\\\\", "").replace('\\"', "").split('"')[::2])
    steps = (1 if char in "[{" else -1 for char in outside if char in "[]{}")
    depth = max(accumulate(steps), default=0)
    if depth > MAX_DEPTH:
        what = f"nested too deeply: {depth} levels, at most {MAX_DEPTH} are read"
        yield Problem("", what, "a state is five levels deep: take the nesting out", "depth")
    values = 1 + sum(outside.count(char) for char in ",[{")
    if values > MAX_VALUES:
        what = f"about {values} values, at most {MAX_VALUES} are read"
        yield Problem("", what, "a state has some dozens: shorten its lists", "values")


def _object(pairs: list[tuple[str, object]]) -> _Object:
    found = _Object(pairs)
    if len(found) < len(pairs):
        times = Counter(key for key, _ in pairs)
        found.twice = tuple(key for key, count in times.items() if count > 1)
    return found


def _number(text: str) -> float | _Odd:
    value = float(text)
    if abs(value) > sys.float_info.max:
        return _Odd(text)
    # Larger ones stay as they are: no field of a state takes a whole number as large as that.
    return int(value) if value.is_integer() and abs(value) < 2**63 else value


def _whole(text: str) -> int | _Odd:
    if len(text) > 310:  # before int(), which is slow for, or refuses, what is longer still
        return _Odd(text)
    value = int(text)
    return value if abs(value) <= sys.float_info.max else _Odd(text)


def _problems(value: object, where: str) -> Iterator[Problem]:
    """Problems below one place, in reading order; impossible numbers are replaced by null."""
    if isinstance(value, str) and not _encodable(value):
        what = f"{shown(value)} holds half of a surrogate pair"
        yield Problem(where, what, "write the whole character", "surrogate")
    if isinstance(value, _Object):
        for key in value.twice:
            what = f"key {shown(key)} occurs twice in one object"
            yield Problem(pointer(where, key), what, "keep one of them", "duplicate_key")
    if not isinstance(value, _Object | list):
        return
    items = value.items() if isinstance(value, _Object) else enumerate(value)
    for step, inner in items:
        below = pointer(where, step)
        if isinstance(step, str) and not _encodable(step):
            what = f"key {shown(step)} holds half of a surrogate pair"
            yield Problem(below, what, "write the whole character", "surrogate")
        if isinstance(inner, _Odd):
            yield _odd(inner, below)
            value[step] = None  # type: ignore[index]  # a key of this very container
        else:
            yield from _problems(inner, below)


def _odd(number: _Odd, where: str) -> Problem:
    said = number.text if len(number.text) <= 20 else f"{number.text[:17]}..."
    if number.text.lstrip("-")[0].isdigit():
        what = f"{said} is larger than any 64-bit float"
        return Problem(where, what, "write a smaller number", "number")
    return Problem(where, f"{said} is not a JSON number", "write a finite number", "syntax")


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
