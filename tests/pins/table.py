"""Tables of pins: JSON with a row a line, written and compared by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
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
        return {below for item in value or [""] for below in key_paths(item, f"{path}[]")}
    if isinstance(value, dict) and value and not path.endswith((".state", ".scores")):
        return {below for key in value for below in key_paths(value[key], f"{path}.{key}")}
    return {path}


def read(name: str) -> Table:
    """A table as it was written."""
    rows: Table = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return rows


def write(name: str) -> None:
    """Make a table and write it."""
    rows = [f"{json.dumps(key)}: {json.dumps(row)}" for key, row in sorted(TABLES[name]().items())]
    (DATA / f"{name}.json").write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


def differences(name: str) -> Iterator[str]:
    """Two lines for each row that has changed, one for each that is new or has gone."""
    pinned, made = read(name), json.loads(json.dumps(TABLES[name]()))
    for key in sorted({*pinned, *made}):
        for sign, rows, others in (("-", pinned, made), ("+", made, pinned)):
            if key in rows and (key not in others or rows[key] != others[key]):
                yield f"{sign} {name}: {key}: {json.dumps(apart(rows[key], others.get(key)))}"


def apart(row: object, other: object) -> object:
    """What a row has and the other one has not."""
    if isinstance(row, dict) and isinstance(other, dict):
        return {key: row[key] for key in row if row[key] != other.get(key)} or row
    if isinstance(row, list) and isinstance(other, list):
        return [item for item in row if item not in other] or row
    return row
