"""JSON text and values of untrusted input: bounded memory and time, and their form in messages.

Escape sequences, line breaks and very long text must not reach a terminal or a log, and no value
may take much memory or time.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
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
            parse_int=_number,
        )
    except json.JSONDecodeError as error:
        what = f"not JSON: {error.msg} at line {error.lineno} col {error.colno}"
        fix = "write one JSON object as `vllm-autoprune schema` describes it"
        raise StateError(subject, [Problem("", what, fix, "syntax")]) from None
    problems: list[Problem] = []
    value = _checked(parsed, "", problems)
    if isinstance(parsed, _InvalidNumber):
        raise StateError(subject, problems)
    return value, problems


def dump_mapping(data: Mapping[str, object], subject: str) -> str:
    """JSON text of a mapping, to be read with the limits of any text.

    Raises :class:`StateError` for what no text holds. Stops at :data:`MAX_BYTES`, and at the depth
    of Python's own stack, which is above :data:`MAX_DEPTH`.
    """

    def as_object(value: object) -> object:
        if isinstance(value, Mapping):
            return dict(value)
        raise TypeError(f"{type(value).__name__} is not a JSON type")

    text = io.StringIO()
    encoder = json.JSONEncoder(ensure_ascii=False, check_circular=False, default=as_object)
    try:
        for piece in encoder.iterencode(dict(data)):
            if text.tell() > MAX_BYTES:
                raise StateError(subject, [_SIZE_PROBLEM])
            text.write(piece)
    except RecursionError:
        raise StateError(subject, [_depth_problem(f"more than {MAX_DEPTH}")]) from None
    except (TypeError, ValueError) as error:
        if isinstance(error, StateError):
            raise
        fix = "use a dictionary such as json.load returns"
        raise StateError(subject, [Problem("", str(error), fix, "syntax")]) from None
    return text.getvalue()


@dataclass(frozen=True, slots=True)
class _InvalidNumber:
    """A number that a 64-bit float cannot represent, as written."""

    text: str


class _Object(dict[str, object]):
    """An object, and the keys that occur more than once in its text."""

    duplicates: tuple[str, ...] = ()


def _object(pairs: list[tuple[str, object]]) -> _Object:
    value = _Object(pairs)
    if len(value) < len(pairs):
        times = Counter(key for key, _ in pairs)
        value.duplicates = tuple(key for key, count in times.items() if count > 1)
    return value


def _number(text: str) -> float | _InvalidNumber:
    # int() is slow for, or refuses, very long texts.
    integral = text.lstrip("-").isdigit()
    if integral and len(text) > 310:
        return _InvalidNumber(text)
    value = int(text) if integral else float(text)
    if abs(value) > sys.float_info.max:
        return _InvalidNumber(text)
    # Larger ones stay floats: no field of a state takes an integer of that size.
    return int(value) if float(value).is_integer() and abs(value) < 2**63 else value


def _checked(value: object, where: str, problems: list[Problem]) -> JsonValue:
    """The parsed value at a JSON pointer; what JSON cannot hold is null and a problem."""
    if isinstance(value, _Object):
        for name in value.duplicates:
            what = f"key {format_value(name)} occurs twice in one object"
            problem = Problem(child_pointer(where, name), what, "keep one of them", "duplicate_key")
            problems.append(problem)
        copied: dict[str, JsonValue] = {}
        for key, item in value.items():
            below = child_pointer(where, key)
            _check_surrogates(key, below, "key ", problems)
            copied[key] = _checked(item, below, problems)
        return copied
    if isinstance(value, list):
        return [
            _checked(item, child_pointer(where, index), problems)
            for index, item in enumerate(value)
        ]
    if isinstance(value, _InvalidNumber):
        text = value.text if len(value.text) <= 20 else f"{value.text[:17]}..."
        if value.text.lstrip("-")[0].isdigit():
            what = f"{text} is larger than any 64-bit float"
            problems.append(Problem(where, what, "write a smaller number", "number"))
        else:
            what = f"{text} is not a JSON number"
            problems.append(Problem(where, what, "write a finite number", "syntax"))
        return None
    if isinstance(value, str):
        _check_surrogates(value, where, "", problems)
    assert value is None or isinstance(value, str | int | float)
    return value


def _check_surrogates(text: str, where: str, kind: str, problems: list[Problem]) -> None:
    """A string or key with an unpaired surrogate, which UTF-8 cannot encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        what = f"{kind}{format_value(text)} holds half of a surrogate pair"
        problems.append(Problem(where, what, "write the whole character", "surrogate"))


_SIZE_PROBLEM = Problem(
    "", f"larger than {MAX_BYTES} bytes", "a state is a few kilobytes of JSON", "size"
)


def _depth_problem(depth: str) -> Problem:
    what = f"nested too deeply: {depth} levels, at most {MAX_DEPTH} are read"
    return Problem("", what, "a state is five levels deep: reduce the nesting", "depth")


def _limit_problems(text: str) -> Iterator[Problem]:
    """Limits that are checked before the text is parsed.

    Depth and number of values among them: the parser's own recursion limit depends on the process
    and may end it.
    """
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        yield _SIZE_PROBLEM
    elif text.startswith("\ufeff"):
        fix = "save it as UTF-8 without one"
        yield Problem("", "begins with a byte order mark", fix, "encoding")
    elif not text.strip():
        yield Problem("", "is empty", "write one JSON object", "syntax")
    else:
        # Exact up to the first syntax error, where a parser would stop as well.
        outside = "".join(text.replace("\\\\", "").replace('\\"', "").split('"')[::2])
        steps = (1 if char in "[{" else -1 for char in outside if char in "[]{}")
        depth = max(accumulate(steps), default=0)
        if depth > MAX_DEPTH:
            yield _depth_problem(str(depth))
        values = 1 + sum(outside.count(char) for char in ",[{")
        if values > MAX_VALUES:
            what = f"about {values} values, at most {MAX_VALUES} are read"
            yield Problem("", what, "a state has some dozens: shorten its lists", "values")


_WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)


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
            content, most = b"", MAX_BYTES + 1
            while len(content) < most and (more := os.read(handle, most - len(content))):
                content += more
        finally:
            os.close(handle)
    except OSError as error:
        raise read_error(subject, error) from None
    if len(content) > MAX_BYTES:
        raise StateError(subject, [_SIZE_PROBLEM])
    try:
        # UTF-16 without a byte order mark may be valid UTF-8, but contains zero bytes.
        if not content.startswith(_WIDE_MARKS) and b"\0" not in content[:4]:
            return content.decode("utf-8")
        what = "not UTF-8 text (it looks like UTF-16 or UTF-32)"
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text ({error.reason} at byte {error.start})"
    raise StateError(subject, [Problem("", what, "save it as UTF-8", "encoding")])


def read_error(subject: str, error: OSError) -> StateError:
    """Error for a path that the operating system cannot read."""
    reason = error.strerror or type(error).__name__
    fix = "check the path and its permissions"
    return StateError(subject, [Problem("", f"cannot be read ({reason})", fix, "file")])


def _require_regular(mode: int, subject: str) -> None:
    if not stat.S_ISREG(mode):
        what = "is a folder" if stat.S_ISDIR(mode) else "is no regular file"
        raise StateError(subject, [Problem("", what, "name a JSON file", "file")])
