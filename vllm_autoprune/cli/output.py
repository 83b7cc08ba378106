"""Output of the command: tables, JSON and error messages as text, and files written atomically."""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NoReturn

from pydantic import JsonValue

from vllm_autoprune.errors import AutopruneError, ConfigError, Problem, ProblemsError


class _HelpFormatter(argparse.HelpFormatter):
    """Help that states the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        unset = default is None or default is False or default in (argparse.SUPPRESS, (), [])
        if text is None or unset or not action.option_strings or "default" in text:
            return text
        shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else default
        return f"{text} (default: {str(shown).replace('%', '%%')})"


class CommandParser(argparse.ArgumentParser):
    """A parser that states defaults in its help, and answers wrong arguments in one line."""

    def _get_formatter(self) -> argparse.HelpFormatter:
        return _HelpFormatter(self.prog)

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and end with status 2."""
        self.exit(2, f"{self.prog}: {message}; options: {self.prog} --help\n")


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically; raises :class:`ConfigError` if it cannot be written."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.umask(mask := os.umask(0))
            os.chmod(name, 0o666 & ~mask)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        what = f"cannot be written ({error.strerror or error})"
        raise ConfigError("output", [Problem(str(path), what, "choose another path")]) from None


WIDTH = 100
_NARROW = 24


def as_json(value: object) -> str:
    """Indented JSON; tuples become lists."""
    return json.dumps(value, indent=2, ensure_ascii=False)


def format_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], align: str = "", wrap: int | None = None
) -> str:
    """A text table; ``align`` has ``<`` or ``>`` for each column, ``<`` by default.

    With ``wrap`` the widest columns are wrapped until the table has at most that width, or none is
    wider than :data:`_NARROW`.
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    room = math.inf if wrap is None else wrap - 2 * (len(widths) - 1)
    while sum(widths) > room and max(widths) > _NARROW:
        widths[widths.index(max(widths))] -= 1
    sides = align.ljust(len(head), "<")[: len(head)]
    lines: list[str] = []
    for row in (head, ["-" * width for width in widths], *rows):
        # Names contain hyphens, and a broken name cannot be copied.
        cells = [
            textwrap.wrap(text, width, break_on_hyphens=False)
            for text, width in zip(row, widths, strict=True)
        ]
        for parts in zip_longest(*cells, fillvalue=""):
            columns = zip(parts, sides, widths, strict=True)
            lines.append(
                "  ".join(f"{text:{side}{width}}" for text, side, width in columns).rstrip()
            )
    return "\n".join(lines)


def format_paragraph(text: str, indent: str = "") -> str:
    """Prose wrapped to :data:`WIDTH`."""
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent)


def format_value(value: JsonValue) -> str:
    """A JSON value in one line, strings without quotes."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def format_error(error: AutopruneError) -> str:
    """An error as text; one line if it has one problem."""
    if isinstance(error, ProblemsError) and len(error.problems) == 1:
        return f"{error.subject}: {error.problems[0]}"
    return str(error)


def error_record(error: AutopruneError) -> dict[str, JsonValue]:
    """An error as JSON."""
    problems: list[JsonValue] = []
    if isinstance(error, ProblemsError):
        problems = [{"where": p.where, "what": p.what, "fix": p.fix} for p in error.problems]
    return {"error": type(error).__name__, "message": format_error(error), "problems": problems}
