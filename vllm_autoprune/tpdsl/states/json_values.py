"""JSON values: the limits on them, copies of Python mappings, and their form in messages.

Input is untrusted: escape sequences, line breaks and very long text must not reach a terminal or a
log, and no value may take much memory or time.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping

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
            self._refuse(values_problem(f"more than {MAX_VALUES}"))
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
        self._reject(f"{type(value).__name__} is not a JSON type", where)
        return None

    def _copy_object(self, value: Mapping[object, object], where: str, depth: int) -> JsonValue:
        self._check_depth(depth)
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
            return int(value) if value.is_integer() and abs(value) < 2**63 else value
        self._reject(f"{value} is not a JSON number", where, "write a finite number")
        return None

    def _check_depth(self, depth: int) -> None:
        if depth > MAX_DEPTH:
            self._refuse(depth_problem(f"more than {MAX_DEPTH}"))

    def _check_text(self, text: str, where: str, kind: str = "") -> None:
        self._characters += len(text)
        if self._characters > MAX_BYTES:
            self._refuse(SIZE_PROBLEM)
        self.problems += surrogate_problems(text, where, kind)

    def _reject(
        self, what: str, where: str, fix: str = "use a dictionary such as json.load returns"
    ) -> None:
        self.problems.append(Problem(where, what, fix, "syntax"))

    def _refuse(self, problem: Problem) -> None:
        raise StateError(self._subject, [problem])


SIZE_PROBLEM = Problem(
    "", f"larger than {MAX_BYTES} bytes", "a state is a few kilobytes of JSON", "size"
)


def depth_problem(depth: str) -> Problem:
    """The document is nested too deeply."""
    what = f"nested too deeply: {depth} levels, at most {MAX_DEPTH} are read"
    return Problem("", what, "a state is five levels deep: reduce the nesting", "depth")


def values_problem(count: str) -> Problem:
    """The document has too many values."""
    what = f"{count} values, at most {MAX_VALUES} are read"
    return Problem("", what, "a state has some dozens: shorten its lists", "values")


def surrogate_problems(text: str, where: str, kind: str = "") -> Iterable[Problem]:
    """A string or key with an unpaired surrogate, which UTF-8 cannot encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        what = f"{kind}{format_value(text)} holds half of a surrogate pair"
        yield Problem(where, what, "write the whole character", "surrogate")
