"""Structural differences between two JSON documents, with a JSON pointer for each.

Items of a list are matched by their ``atom`` (or by their own value, if that is a string).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from vllm_autoprune.tpdsl.states.json_values import child_pointer

Kind = Literal["changed", "added", "removed", "reordered"]


@dataclass(frozen=True, slots=True)
class Change:
    """One difference. ``where`` points into the first document, or into the second if added.

    ``before`` is None for an added field, ``after`` for a removed one; ``why`` is the reason, if
    one is known.
    """

    where: str
    kind: Kind
    before: JsonValue
    after: JsonValue
    why: str = ""


def list_changes(before: JsonValue, after: JsonValue, where: str = "") -> tuple[Change, ...]:
    """All differences between two documents, in the order of the first."""
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
    differences: list[Change] = []
    for key in dict.fromkeys((*before, *after)):
        below = child_pointer(where, key)
        if key not in after:
            differences.append(Change(below, "removed", before[key], None))
        elif key not in before:
            differences.append(Change(below, "added", None, after[key]))
        else:
            differences += list_changes(before[key], after[key], below)
    return tuple(differences)


def _lists(
    before: Sequence[JsonValue], after: Sequence[JsonValue], where: str
) -> tuple[Change, ...]:
    """Compare items of the same name with each other, whatever their positions."""
    old, new = _index_by_name(before), _index_by_name(after)
    differences: list[Change] = []
    for name, index in old.items():
        below = child_pointer(where, index)
        if name in new:
            differences += list_changes(before[index], after[new[name]], below)
        else:
            differences.append(Change(below, "removed", before[index], None))
    for name, index in new.items():
        if name not in old:
            differences.append(Change(child_pointer(where, index), "added", None, after[index]))
    order = [name for name in old if name in new]
    reordered = [name for name in new if name in old]
    if order != reordered:
        names: list[list[JsonValue]] = [[name for name, _ in row] for row in (order, reordered)]
        differences.append(Change(where, "reordered", names[0], names[1]))
    return tuple(differences)


def _index_by_name(items: Sequence[JsonValue]) -> dict[tuple[str, int], int]:
    """(name, occurrence of that name) -> index of the item."""
    seen: Counter[str] = Counter()
    indices: dict[tuple[str, int], int] = {}
    for index, item in enumerate(items):
        atom = item.get("atom") if isinstance(item, dict) else item
        name = atom if isinstance(atom, str) else ""
        indices[name, seen[name]] = index
        seen[name] += 1
    return indices


def set_at_pointer(document: JsonValue, where: str, value: JsonValue) -> None:
    """Set the field at a JSON pointer, in place; its parent must exist."""
    *path, last = [step.replace("~1", "/").replace("~0", "~") for step in where.split("/")[1:]]
    parent = document
    for step in path:
        parent = parent[int(step)] if isinstance(parent, list) else _as_object(parent)[step]
    if isinstance(parent, list):
        parent[int(last)] = value
    else:
        _as_object(parent)[last] = value


def _as_object(value: JsonValue) -> dict[str, JsonValue]:
    if not isinstance(value, dict):
        raise TypeError(f"the JSON pointer leads into {value!r}, not an object")
    return value
