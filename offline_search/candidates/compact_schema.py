"""The JSON Schema of proposals in its shortest form, because every request carries it."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator, Sequence

from pydantic import JsonValue

from offline_search.candidates.components import JsonObject
from offline_search.candidates.schema import (
    called_atom,
    definitions,
    list_references,
    reference_name,
)


def shorten_schema(schema: JsonObject) -> JsonObject:
    """A schema of about a third of the length that accepts the same proposals."""
    merged = _merge_equal_calls(schema)
    known = definitions(merged)
    uses = Counter(list_references(merged))
    names = {name: f"d{number}" for number, name in enumerate(known) if uses[name] > 1}

    def shorten(value: JsonValue) -> JsonValue:
        if isinstance(value, list):
            return [shorten(item) for item in value]
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if not isinstance(value, dict):
            return value
        if name := reference_name(value):
            return {"$ref": f"#/$defs/{names[name]}"} if name in names else shorten(known[name])
        typed = "enum" in value or "const" in value  # its values have their type
        return {
            name: shorten(item)
            for name, item in value.items()
            if not (typed and name == "type" and isinstance(item, str))
        }

    shortened = {name: shorten(item) for name, item in merged.items() if name != "$defs"}
    return {**shortened, "$defs": {short: shorten(known[name]) for name, short in names.items()}}


def _merge_equal_calls(schema: JsonObject) -> JsonObject:
    """The schema with one definition for all atoms that take the same parameters.

    The 81 atoms of reassembly, for example, have twelve forms.
    """
    forms: dict[str, list[str]] = {}
    known = definitions(schema)
    for name, body in known.items():
        if atom := called_atom(body):
            form = json.dumps(body, sort_keys=True).replace(json.dumps(atom), "ATOM")
            forms.setdefault(form, []).append(name)
    merged: JsonObject = {}
    replaced: set[str] = set()
    for first, *others in forms.values():
        if others and not _differ_in_place(schema, first, others):
            atoms: list[JsonValue] = [called_atom(known[name]) for name in (first, *others)]
            merged[first] = _with_atoms(known[first], atoms)
            replaced |= set(others)

    def keep(value: JsonValue) -> JsonValue:
        if isinstance(value, list):
            return [keep(item) for item in value if reference_name(item) not in replaced]
        if isinstance(value, dict):
            return {name: keep(item) for name, item in value.items()}
        return value

    kept = {name: body for name, body in {**known, **merged}.items() if name not in replaced}
    result = keep({**schema, "$defs": kept})
    assert isinstance(result, dict)
    return result


def _differ_in_place(schema: JsonObject, first: str, others: Sequence[str]) -> bool:
    """Whether some list of alternatives has only some of these definitions."""
    places = [names for names in _alternatives(schema) if first in names or names & set(others)]
    return any(not {first, *others} <= names for names in places)


def _alternatives(value: JsonValue) -> Iterator[set[str]]:
    if isinstance(value, list):
        for item in value:
            yield from _alternatives(item)
    elif isinstance(value, dict):
        if name := reference_name(value):
            yield {name}
        for key, item in value.items():
            if key == "anyOf" and isinstance(item, list):
                yield {reference_name(one) for one in item} - {""}
                for one in item:
                    if not reference_name(one):
                        yield from _alternatives(one)
            else:
                yield from _alternatives(item)


def _with_atoms(definition: JsonValue, atoms: list[JsonValue]) -> JsonValue:
    """The definition of a call for any of several atoms."""
    body = copy.deepcopy(definition)
    if isinstance(body, dict) and isinstance(properties := body.get("properties"), dict):
        properties["atom"] = {"type": "string", "enum": atoms}
    return body
