"""How the command speaks: tables for people, JSON for programs, errors in one line each.

Knows nothing about what is said.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence

from pydantic import JsonValue

from vllm_autoprune.errors import AutopruneError, ProblemsError

WIDTH = 100


def as_json(value: object) -> str:
    """Indented JSON; tuples become lists."""
    return json.dumps(value, indent=2, ensure_ascii=False)


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], align: str = "", wrap: int | None = None
) -> str:
    """Columns aligned as ``align`` says (``<`` or ``>`` for each, ``<`` where it says nothing).

    With ``wrap`` the last column is broken into lines so that the table is that wide.
    """
    columns = list(zip(head, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if wrap is not None:
        before = sum(widths[:-1]) + 2 * (len(widths) - 1)
        widths[-1] = min(widths[-1], max(24, wrap - before))
    sides = align.ljust(len(head), "<")
    lines: list[str] = []
    for row in (head, ["-" * width for width in widths], *rows):
        *cells, last = row
        parts = textwrap.wrap(last, widths[-1]) or [""]
        for number, part in enumerate(parts):
            shown = [*(cells if number == 0 else [""] * len(cells)), part]
            lines.append("  ".join(map(_cell, shown, widths, sides)).rstrip())
    return "\n".join(lines)


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
        problems = [{"where": p.where, "what": p.what, "mend": p.mend} for p in error.problems]
    return {"error": type(error).__name__, "message": told(error), "problems": problems}
