"""Tables of pins: JSON with a row a line, written and compared by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from difflib import unified_diff
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).with_name("data")

Table = dict[str, Any]
"""Rows by their key; a row is any JSON value."""

TABLES: dict[str, Callable[[], Table]] = {}
"""What makes each table, by the name of its file."""


def table(build: Callable[[], Table]) -> Callable[[], Table]:
    """Decorator: register what makes the table of the function's name."""
    TABLES[build.__name__] = build
    return build


def digest(value: object) -> str:
    """Eight hexadecimal digits of a JSON value, whose keys may stand in any order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def key_paths(value: object, path: str = "") -> set[str]:
    """Paths of all keys in a JSON value but those of states and scores; items of a list are one."""
    if isinstance(value, list):
        return {
            below for item in value or [""] for below in key_paths(item, f"{path}[]")
        }
    if isinstance(value, dict) and value and not path.endswith((".state", ".scores")):
        return {
            below for key in value for below in key_paths(value[key], f"{path}.{key}")
        }
    return {path}


def read(name: str) -> Table:
    """A table as it was written."""
    rows: Table = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return rows


def render(name: str) -> str:
    """The file of a table as it would be written now."""
    rows = [
        f"{json.dumps(key)}: {json.dumps(row)}"
        for key, row in sorted(TABLES[name]().items())
    ]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def differences(name: str) -> Iterator[str]:
    """Rows that have changed, gone or come, with ``-`` as written and ``+`` as they are now."""
    pinned = (DATA / f"{name}.json").read_text(encoding="utf-8")
    lines = unified_diff(pinned.splitlines(), render(name).splitlines(), n=0)
    # A row begins with its key.
    return (f"{line[0]} {name}: {line[1:]}" for line in lines if line[1:2] == '"')
