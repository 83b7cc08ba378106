"""JSON text and values of untrusted input: bounded memory and time, and their form in messages.

Escape sequences, line breaks and very long text must not reach a terminal or a log, and no value
may take much memory or time.
"""

from __future__ import annotations

import codecs
import json
import math
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from pydantic import JsonValue

from vllm_autoprune.errors import Problem, StateError

MAX_BYTES = 1 << 20
"""Largest text that is read; a state has a few kilobytes."""

MAX_DEPTH = 32
"""Deepest nesting; a state itself has five levels, and provenance may have more."""

MAX_VALUES = 10_000
"""Largest number of values in one document, counting lists and objects."""


def escape_unprintable(text: str, limit: int = 60) -> str:
    """Escape unprintable characters and shorten the text to ``limit`` characters."""
    text = text if len(text) <= limit else f"{text[: limit - 3]}..."
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def child_pointer(where: str, step: str | int) -> str:
    """JSON pointer (RFC 6901) to a child of ``where``."""
    key = escape_unprintable(str(step), 80)
    return f"{where}/{key.replace('~', '~0').replace('/', '~1')}"


def format_value(value: object, limit: int = 60) -> str:
    """Format a JSON value on one line of about ``limit`` characters at most."""
    if isinstance(value, str):
        return f'"{escape_unprintable(value, limit)}"'
    text = ""
    for piece in json.JSONEncoder().iterencode(value):  # stops early on large values
        text += piece
        if len(text) > limit:
            return f"{text[: limit - 3]}..."
    return text


def copy_json(data: Mapping[str, object], subject: str) -> tuple[JsonValue, list[Problem]]:
    """Copy a mapping into plain JSON values, and list the values that JSON cannot represent.

    The same limits and conversions as for JSON text: ``2.0`` becomes 2, and an invalid value
    becomes null and a problem. Raises :class:`StateError` if a limit is exceeded.
    """
    copier = _Copier(subject)
    return copier.copy(data, "", 1), copier.problems


@dataclass(frozen=True, slots=True)
class _InvalidNumber:
    """A number that a 64-bit float cannot represent, as written."""

    text: str


class _Object(dict[str, object]):
    """An object, and the keys that occur more than once in its text."""

    duplicates: tuple[str, ...] = ()


class _Copier:
    """Recursive copy of a Python value, with bounds on depth, number of values and text."""

    def __init__(self, subject: str) -> None:
        self.problems: list[Problem] = []
        self._subject = subject
        self._values = 0
        self._characters = 0

    def copy(self, value: object, where: str, depth: int) -> JsonValue:
        """Copy the value at a JSON pointer; ``depth`` is its number of enclosing containers + 1."""
        self._values += 1
        if self._values > MAX_VALUES:
            self._refuse(_values_problem(f"more than {MAX_VALUES}"))
        if isinstance(value, Mapping):
            return self._copy_object(value, where, depth)
        if isinstance(value, list | tuple):
            self._check_depth(depth)
            items = enumerate(value)
            return [
                self.copy(item, child_pointer(where, index), depth + 1) for index, item in items
            ]
        if isinstance(value, str):
            self._check_text(value, where)
            return value
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int | float):
            return self._copy_number(value, where)
        if isinstance(value, _InvalidNumber):
            self.problems.append(_number_problem(value, where))
        else:
            self._reject(f"{type(value).__name__} is not a JSON type", where)
        return None

    def _copy_object(self, value: Mapping[object, object], where: str, depth: int) -> JsonValue:
        self._check_depth(depth)
        for name in value.duplicates if isinstance(value, _Object) else ():
            what = f"key {format_value(name)} occurs twice in one object"
            problem = Problem(child_pointer(where, name), what, "keep one of them", "duplicate_key")
            self.problems.append(problem)
        copied: dict[str, JsonValue] = {}
        for key, item in value.items():
            if isinstance(key, str):
                below = child_pointer(where, key)
                self._check_text(key, below, "key ")
                copied[key] = self.copy(item, below, depth + 1)
            else:
                self._reject(f"has a key of type {type(key).__name__}, not a string", where)
        return copied

    def _copy_number(self, value: float, where: str) -> JsonValue:
        if isinstance(value, int):
            if abs(value) <= sys.float_info.max:
                return value
            what = f"an integer of {value.bit_length()} bits is larger than any 64-bit float"
            self.problems.append(Problem(where, what, "write a smaller number", "number"))
            return None
        if math.isfinite(value):
            # Larger ones stay floats: no field of a state takes an integer of that size.
            return int(value) if value.is_integer() and abs(value) < 2**63 else value
        self._reject(f"{value} is not a JSON number", where, "write a finite number")
        return None

    def _check_depth(self, depth: int) -> None:
        if depth > MAX_DEPTH:
            self._refuse(_depth_problem(f"more than {MAX_DEPTH}"))

    def _check_text(self, text: str, where: str, kind: str = "") -> None:
        self._characters += len(text)
        if self._characters > MAX_BYTES:
            self._refuse(SIZE_PROBLEM)
        self.problems += _surrogate_problems(text, where, kind)

    def _reject(
        self, what: str, where: str, fix: str = "use a dictionary such as json.load returns"
    ) -> None:
        self.problems.append(Problem(where, what, fix, "syntax"))

    def _refuse(self, problem: Problem) -> None:
        raise StateError(self._subject, [problem])


SIZE_PROBLEM = Problem(
    "", f"larger than {MAX_BYTES} bytes", "a state is a few kilobytes of JSON", "size"
)


def _depth_problem(depth: str) -> Problem:
    """The document is nested too deeply."""
    what = f"nested too deeply: {depth} levels, at most {MAX_DEPTH} are read"
    return Problem("", what, "a state is five levels deep: reduce the nesting", "depth")


def _values_problem(count: str) -> Problem:
    """The document has too many values."""
    what = f"{count} values, at most {MAX_VALUES} are read"
    return Problem("", what, "a state has some dozens: shorten its lists", "values")


def _surrogate_problems(text: str, where: str, kind: str = "") -> Iterable[Problem]:
    """A string or key with an unpaired surrogate, which UTF-8 cannot encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        what = f"{kind}{format_value(text)} holds half of a surrogate pair"
        yield Problem(where, what, "write the whole character", "surrogate")


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
            parse_float=_float,
            parse_int=_integer,
        )
    except json.JSONDecodeError as error:
        what = f"not JSON: {error.msg} at line {error.lineno} col {error.colno}"
        fix = "write one JSON object as `vllm-autoprune schema` describes it"
        raise StateError(subject, [Problem("", what, fix, "syntax")]) from None
    if isinstance(parsed, _InvalidNumber):
        raise StateError(subject, [_number_problem(parsed, "")])
    copier = _Copier(subject)
    return copier.copy(parsed, "", 1), copier.problems


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
        yield _depth_problem(str(depth))
    values = 1 + sum(outside.count(char) for char in ",[{")
    if values > MAX_VALUES:
        yield _values_problem(f"about {values}")


def _object(pairs: list[tuple[str, object]]) -> _Object:
    value = _Object(pairs)
    if len(value) < len(pairs):
        times = Counter(key for key, _ in pairs)
        value.duplicates = tuple(key for key, count in times.items() if count > 1)
    return value


def _float(text: str) -> float | _InvalidNumber:
    value = float(text)
    return value if abs(value) <= sys.float_info.max else _InvalidNumber(text)


def _integer(text: str) -> int | _InvalidNumber:
    if len(text) > 310:  # int() is slow for, or refuses, very long texts
        return _InvalidNumber(text)
    value = int(text)
    return value if abs(value) <= sys.float_info.max else _InvalidNumber(text)


def _number_problem(number: _InvalidNumber, where: str) -> Problem:
    text = number.text if len(number.text) <= 20 else f"{number.text[:17]}..."
    if number.text.lstrip("-")[0].isdigit():
        what = f"{text} is larger than any 64-bit float"
        return Problem(where, what, "write a smaller number", "number")
    return Problem(where, f"{text} is not a JSON number", "write a finite number", "syntax")
