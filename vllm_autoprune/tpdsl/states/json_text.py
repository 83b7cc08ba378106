"""Bounded reading of files and JSON text: limited memory and time for any input."""

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
from vllm_autoprune.tpdsl.states.json_values import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_VALUES,
    SIZE_PROBLEM,
    child_pointer,
    depth_problem,
    format_value,
    surrogate_problems,
    values_problem,
)

_WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def read_text(path: Path, subject: str) -> str:
    """Read a regular UTF-8 file of at most MAX_BYTES; raises :class:`StateError`.

    The bound applies while reading, so it also holds for files that grow or report a wrong size.
    Pipes and devices, which could block, are never opened.
    """
    try:
        _require_regular(path.stat().st_mode, subject)
        # The path may have been replaced meanwhile, so check the opened file again.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _require_regular(os.fstat(handle).st_mode, subject)
            content = _read_at_most(handle, MAX_BYTES + 1)
        finally:
            os.close(handle)
    except OSError as error:
        raise read_error(subject, error) from None
    if len(content) > MAX_BYTES:
        raise StateError(subject, [SIZE_PROBLEM])
    return _decode(content, subject)


def read_error(subject: str, error: OSError) -> StateError:
    """Error for a path that the operating system cannot read."""
    reason = error.strerror or type(error).__name__
    fix = "check the path and its permissions"
    return StateError(subject, [Problem("", f"cannot be read ({reason})", fix, "file")])


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
        # UTF-16 without a byte order mark may be valid UTF-8, but contains zero bytes.
        if not content.startswith(_WIDE_MARKS) and b"\0" not in content[:4]:
            return content.decode("utf-8")
        what = "not UTF-8 text (it looks like UTF-16 or UTF-32)"
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text ({error.reason} at byte {error.start})"
    raise StateError(subject, [Problem("", what, "save it as UTF-8", "encoding")])


@dataclass(frozen=True, slots=True)
class _InvalidNumber:
    """A number that a 64-bit float cannot represent, as written."""

    text: str


class _Object(dict[str, object]):
    """An object, and the keys that occur more than once in its text."""

    duplicates: tuple[str, ...] = ()


def parse_json(text: str, subject: str) -> tuple[JsonValue, list[Problem]]:
    """Parse JSON text into a value and a list of problems.

    Numbers without a fractional part become integers (``2.0`` is 2, as in JSON Schema). A duplicate
    key keeps its last value and an invalid number becomes null; both are reported with their JSON
    pointer. Raises :class:`StateError` if the text cannot be parsed at all.
    """
    if violations := list(_limit_problems(text)):
        raise StateError(subject, violations)
    try:
        parsed: object = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_InvalidNumber,
            parse_float=_number,
            parse_int=_integer,
        )
    except json.JSONDecodeError as error:
        what = f"not JSON: {error.msg} at line {error.lineno} col {error.colno}"
        fix = "write one JSON object as `vllm-autoprune schema` describes it"
        raise StateError(subject, [Problem("", what, fix, "syntax")]) from None
    if isinstance(parsed, _InvalidNumber):
        raise StateError(subject, [_number_problem(parsed, "")])
    problems = list(_problems(parsed, ""))
    value: JsonValue = parsed  # type: ignore[assignment]  # all else is in `problems`
    return value, problems


def _limit_problems(text: str) -> Iterator[Problem]:
    """Limits that are checked before the text is parsed."""
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        yield SIZE_PROBLEM
    elif text.startswith("\ufeff"):
        yield Problem(
            "", "begins with a byte order mark", "save it as UTF-8 without one", "encoding"
        )
    elif not text.strip():
        yield Problem("", "is empty", "write one JSON object", "syntax")
    else:
        yield from _nesting_problems(text)


def _nesting_problems(text: str) -> Iterator[Problem]:
    """Check depth and number of values before parsing.

    The parser's own recursion limit depends on the process and may end it.
    """
    # Exact up to the first syntax error, where a parser would stop as well.
    outside = "".join(text.replace("\\\\", "").replace('\\"', "").split('"')[::2])
    steps = (1 if char in "[{" else -1 for char in outside if char in "[]{}")
    depth = max(accumulate(steps), default=0)
    if depth > MAX_DEPTH:
        yield depth_problem(str(depth))
    values = 1 + sum(outside.count(char) for char in ",[{")
    if values > MAX_VALUES:
        yield values_problem(f"about {values}")


def _object(pairs: list[tuple[str, object]]) -> _Object:
    value = _Object(pairs)
    if len(value) < len(pairs):
        times = Counter(key for key, _ in pairs)
        value.duplicates = tuple(key for key, count in times.items() if count > 1)
    return value


def _number(text: str) -> float | _InvalidNumber:
    value = float(text)
    if abs(value) > sys.float_info.max:
        return _InvalidNumber(text)
    # Larger ones stay floats: no field of a state takes an integer of that size.
    return int(value) if value.is_integer() and abs(value) < 2**63 else value


def _integer(text: str) -> int | _InvalidNumber:
    if len(text) > 310:  # int() is slow for, or refuses, very long texts
        return _InvalidNumber(text)
    value = int(text)
    return value if abs(value) <= sys.float_info.max else _InvalidNumber(text)


def _problems(value: object, where: str) -> Iterator[Problem]:
    """Problems below one JSON pointer, in document order; invalid numbers are set to null."""
    if isinstance(value, str):
        yield from surrogate_problems(value, where)
    if isinstance(value, _Object):
        for key in value.duplicates:
            what = f"key {format_value(key)} occurs twice in one object"
            yield Problem(child_pointer(where, key), what, "keep one of them", "duplicate_key")
    if not isinstance(value, _Object | list):
        return
    items = value.items() if isinstance(value, _Object) else enumerate(value)
    for step, inner in items:
        below = child_pointer(where, step)
        if isinstance(step, str):
            yield from surrogate_problems(step, below, "key ")
        if isinstance(inner, _InvalidNumber):
            yield _number_problem(inner, below)
            value[step] = None  # type: ignore[index]  # a key of this very container
        else:
            yield from _problems(inner, below)


def _number_problem(number: _InvalidNumber, where: str) -> Problem:
    text = number.text if len(number.text) <= 20 else f"{number.text[:17]}..."
    if number.text.lstrip("-")[0].isdigit():
        what = f"{text} is larger than any 64-bit float"
        return Problem(where, what, "write a smaller number", "number")
    return Problem(where, f"{text} is not a JSON number", "write a finite number", "syntax")
