"""Output of the command: results as JSON or text, tables, error messages, and files."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from vllm_autoprune.errors import AutopruneError, ConfigError, Problem

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

_PROSE = 100
_NARROW = 24
"""Maximum width of a line of prose, and minimum width of a wrapped table cell, in columns."""


def _measure_terminal() -> int:
    """Width of the terminal in columns; for output to a file or pipe, the width of prose."""
    return shutil.get_terminal_size((_PROSE, 24)).columns


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Help that states the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        unset = action.default in (None, (), []) or action.default is False
        stated = unset or "default" in (action.help or "")
        return action.help if stated else super()._get_help_string(action)


class CommandParser(argparse.ArgumentParser):
    """Argument parser that states defaults in its help and reports an error in one line."""

    def _get_formatter(self) -> argparse.HelpFormatter:
        return _HelpFormatter(self.prog)

    def parse_known_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse all arguments; a sub-command refuses unknown ones itself and names its own help."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, []

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Print the help; raises :class:`ConfigError` if that fails, which argparse ignores."""
        print_text(self.format_help(), end="")

    def error(self, message: str) -> NoReturn:
        """Print ``message`` and exit with status 2; the cause of SystemExit is a ConfigError."""
        problem = Problem(self.prog, message, f"see {self.prog} --help")
        print(problem, file=sys.stderr)
        raise SystemExit(2) from ConfigError("arguments", [problem])


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically; raises :class:`ConfigError` if it cannot be written."""
    beside = path.parent / f".{path.name}.{os.getpid()}"
    try:
        try:
            beside.write_bytes(
                content.encode() if isinstance(content, str) else content
            )
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        what = f"cannot be written ({error.strerror or error})"
        fix = "choose another path"
        raise ConfigError.of(str(path), what, fix, subject="output") from None


def check_writable(path: Path) -> None:
    """Raise :class:`ConfigError` before long work if :func:`write_file` would fail after it."""
    what = ""
    fix = "choose another path"
    if path.is_dir():
        what = "is a folder"
        fix = "name a file in it"
    elif not path.parent.is_dir():
        what = f"cannot be written: there is no folder {path.parent}"
        fix = "make it"
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        what = "cannot be written (Permission denied)"
    if what:
        raise ConfigError.of(str(path), what, fix, subject="output")


def print_text(text: str, end: str = "\n") -> None:
    """Print to standard output; raises :class:`ConfigError` if that fails."""
    try:
        print(text, end=end, flush=True)  # unflushed, an error comes only at exit
    except BrokenPipeError:
        raise  # the reader has closed the pipe
    except OSError as error:
        discard_output()
        what = f"cannot be written ({error.strerror or error})"
        fix = "make room, or send it elsewhere"
        raise ConfigError.of("standard output", what, fix, subject="") from None


def discard_output() -> None:
    """Redirect standard output to the null device: Python retries a failed write at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_result(options: argparse.Namespace, record: object, *blocks: str) -> None:
    """Print the record with ``--json``, or else the blocks of text, with empty lines between."""
    print_text(_as_json(record) if options.json else "\n\n".join(blocks))


def _as_json(value: object) -> str:
    """Indented JSON, in which tuples become lists."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return text.encode(errors="backslashreplace").decode()  # paths may not be UTF-8


def format_table(
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
    align: str = "",
    wrap: bool = False,
) -> str:
    """A text table; ``align`` has ``<`` or ``>`` for each column, ``<`` by default.

    Cells are texts, numbers or booleans.

    With ``wrap`` the widest columns are wrapped until the table fits the terminal or no column is
    wider than :data:`_NARROW`.
    """
    cells = [
        [
            {True: "yes", False: "no"}[cell] if isinstance(cell, bool) else str(cell)
            for cell in row
        ]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    room = _measure_terminal() - 2 * (len(widths) - 1)
    while wrap and sum(widths) > room and max(widths) > _NARROW:
        widths[widths.index(max(widths))] -= 1
    sides = align.ljust(len(head), "<")
    lines = []
    for row in (head, ["-" * width for width in widths], *cells):
        # Names contain hyphens, and a broken name cannot be copied.
        wrapped = [
            textwrap.wrap(text, width, break_on_hyphens=False)
            for text, width in zip(row, widths, strict=True)
        ]
        for parts in zip_longest(*wrapped, fillvalue=""):
            columns = zip(parts, sides, widths, strict=False)
            lines.append(
                "  ".join(f"{text:{side}{width}}" for text, side, width in columns)
            )
    return "\n".join(map(str.rstrip, lines))


def format_paragraphs(texts: Iterable[str], bullet: str = "") -> str:
    """Prose wrapped to the terminal; every text begins on a new line, after ``bullet``."""
    width = min(_PROSE, _measure_terminal())
    # A flag that is broken at a hyphen cannot be copied.
    return "\n".join(
        textwrap.fill(bullet + text, width, break_on_hyphens=False) for text in texts
    )


def format_definitions(rows: Sequence[tuple[str, str]]) -> str:
    """Two columns, the terms and their definitions, wrapped to the width of prose."""
    indent = max(len(term) for term, _ in rows) + 2
    width = max(min(_PROSE, _measure_terminal()), indent + _NARROW)
    return "\n".join(
        textwrap.fill(
            text,
            width,
            initial_indent=f"{term:{indent}}",
            subsequent_indent=" " * indent,
            break_on_hyphens=False,
        )
        for term, text in rows
    )


def format_milliseconds(seconds: float) -> str:
    """``seconds`` in milliseconds, with four significant digits or no decimals."""
    return f"{1000 * seconds:.4g}" if seconds < 10 else f"{1000 * seconds:.0f}"


def error_as_json(error: AutopruneError) -> str:
    """JSON of an error: its class, its message, and the list of its problems."""
    fixes = [{"where": p.where, "what": p.what, "fix": p.fix} for p in error.problems]
    return _as_json(
        {"error": type(error).__name__, "message": str(error), "problems": fixes}
    )
