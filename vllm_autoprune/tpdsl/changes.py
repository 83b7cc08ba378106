"""Differences between two JSON documents, field by field, with JSON pointers.

Knows nothing about states, except that items of a list are told apart by their ``atom``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from vllm_autoprune.tpdsl.shown import pointer

Kind = Literal["changed", "added", "removed", "reordered"]


@dataclass(frozen=True, slots=True)
class Change:
    """One difference. ``where`` points into the first document, or the second if it was added.

    ``before`` is None where the field was added, ``after`` where it was removed. ``why`` is empty
    where nobody gave a reason.
    """

    where: str
    kind: Kind
    before: JsonValue
    after: JsonValue
    why: str = ""


def changes(before: JsonValue, after: JsonValue, where: str = "") -> tuple[Change, ...]:
    """Every difference between two documents, in the order of the first."""
    if isinstance(before, dict) and isinstance(after, dict):
        return _objects(before, after, where)
    if isinstance(before, list) and isinstance(after, list):
        return _lists(before, after, where)
    if type(before) is type(after) and before == after:
        return ()
    return (Change(where, "changed", before, after),)


def _objects(
    before: Mapping[str, JsonValue], after: Mapping[str, JsonValue], where: str
) -> tuple[Change, ...]:
    found: list[Change] = []
    for key in dict.fromkeys((*before, *after)):
        below = pointer(where, key)
        if key not in after:
            found.append(Change(below, "removed", before[key], None))
        elif key not in before:
            found.append(Change(below, "added", None, after[key]))
        else:
            found += changes(before[key], after[key], below)
    return tuple(found)


def _lists(
    before: Sequence[JsonValue], after: Sequence[JsonValue], where: str
) -> tuple[Change, ...]:
    """Items of one name are compared with each other, wherever in the list they stand."""
    old, new = _named(before), _named(after)
    found: list[Change] = []
    for name, index in old.items():
        below = pointer(where, index)
        if name in new:
            found += changes(before[index], after[new[name]], below)
        else:
            found.append(Change(below, "removed", before[index], None))
    for name, index in new.items():
        if name not in old:
            found.append(Change(pointer(where, index), "added", None, after[index]))
    order = [name for name in old if name in new]
    reordered = [name for name in new if name in old]
    if order != reordered:
        said: list[list[JsonValue]] = [[name for name, _ in row] for row in (order, reordered)]
        found.append(Change(where, "reordered", said[0], said[1]))
    return tuple(found)


def _named(items: Sequence[JsonValue]) -> dict[tuple[str, int], int]:
    """Index of each item under its name and how many of that name came before it."""
    seen: Counter[str] = Counter()
    found: dict[tuple[str, int], int] = {}
    for index, item in enumerate(items):
        atom = item.get("atom") if isinstance(item, dict) else item
        name = atom if isinstance(atom, str) else ""
        found[name, seen[name]] = index
        seen[name] += 1
    return found


def put(document: JsonValue, where: str, value: JsonValue) -> None:
    """Set the field that a pointer names, in place; its parent must be there."""
    *path, last = [step.replace("~1", "/").replace("~0", "~") for step in where.split("/")[1:]]
    parent = document
    for step in path:
        parent = parent[int(step)] if isinstance(parent, list) else _inside(parent)[step]
    if isinstance(parent, list):
        parent[int(last)] = value
    else:
        _inside(parent)[last] = value


def _inside(value: JsonValue) -> dict[str, JsonValue]:
    if not isinstance(value, dict):
        raise TypeError(f"a pointer leads into {value!r}")
    return value
