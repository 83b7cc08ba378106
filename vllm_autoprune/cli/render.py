"""How the command speaks: tables for people, JSON for programs, errors in one line each.

Knows nothing about what is said.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from itertools import zip_longest

from pydantic import JsonValue

from vllm_autoprune.errors import AutopruneError, ProblemsError

WIDTH = 100
_NARROW = 24


def as_json(value: object) -> str:
    """Indented JSON; tuples become lists."""
    return json.dumps(value, indent=2, ensure_ascii=False)


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], align: str = "", wrap: int | None = None
) -> str:
    """Columns aligned as ``align`` says (``<`` or ``>`` for each, ``<`` where it says nothing).

    With ``wrap`` the widest columns are broken into lines until the table is that wide.
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    if wrap is not None:
        widths = _fitted(widths, wrap - 2 * (len(widths) - 1))
    sides = align.ljust(len(head), "<")
    lines: list[str] = []
    for row in (head, ["-" * width for width in widths], *rows):
        cells = [_lines(text, width) for text, width in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            lines.append("  ".join(map(_cell, parts, widths, sides)).rstrip())
    return "\n".join(lines)


def _lines(text: str, width: int) -> list[str]:
    # Names hold hyphens, and a name that is cut cannot be copied.
    return textwrap.wrap(text, width, break_on_hyphens=False)


def _fitted(widths: Sequence[int], room: int) -> list[int]:
    """Widths whose sum is at most ``room``, but none cut below what still reads well."""
    fitted = list(widths)
    while sum(fitted) > room and max(fitted) > _NARROW:
        fitted[fitted.index(max(fitted))] -= 1
    return fitted


def _cell(text: str, width: int, side: str) -> str:
    return text.rjust(width) if side == ">" else text.ljust(width)


def paragraph(text: str, indent: str = "") -> str:
    """Prose broken into lines."""
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent)


def brief(value: JsonValue) -> str:
    """A JSON value in one line, strings bare."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def told(error: AutopruneError) -> str:
    """An error for people: one line where one thing is wrong."""
    if isinstance(error, ProblemsError) and len(error.problems) == 1:
        return f"{error.subject}: {error.problems[0]}"
    return str(error)


def error_record(error: AutopruneError) -> dict[str, JsonValue]:
    """An error for programs."""
    problems: list[JsonValue] = []
    if isinstance(error, ProblemsError):
        problems = [{"where": p.where, "what": p.what, "fix": p.fix} for p in error.problems]
    return {"error": type(error).__name__, "message": told(error), "problems": problems}
