"""JSON Schema of a proposal: the state's own schema, reduced to the searched components."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from pydantic import JsonValue

from offline_search.components import BASE, COMPONENTS, JsonObject, searched_components
from offline_search.search_space import excluded_atoms
from offline_search.settings import MAX_QUOTA, Library, Space
from vllm_autoprune.tpdsl.state import PruningState

# Limits on list lengths, so that a small model's constrained output comes to an end.
_MAX_ITEMS = {"signals": 6, "pool": 3}

# Schema keywords that do not constrain the output.
_UNUSED_KEYWORDS = ("title", "description", "discriminator", "default", "allOf", "$schema", "$id")


@cache
def proposal_schema(
    budget: int,
    core: bool = False,
    rank_at: bool = False,
    library: Library = "searched",
    bases: tuple[str, ...] = (),
    space: Space = "all",
) -> JsonObject:
    """JSON Schema of a proposal at K = ``budget``: accepts a subset of what a state accepts.

    With ``core``, a proposal may have one; with ``rank_at``, it may say where tokens are ranked;
    with the library of the paper, it may have all 131 atoms, r_min, and no extension; with
    ``bases``, it names one of them; a smaller space has the atoms of the released policy.
    """
    full: JsonObject = PruningState.model_json_schema()
    properties, known = _object_at(full, "properties"), definitions(full)
    parts: JsonObject = {
        name: properties[name] for name in searched_components(core, rank_at, library)
    }
    bounds = Bounds(budget, library)
    schema: JsonObject = {
        "type": "object",
        "properties": {name: _restrict(part, bounds) for name, part in parts.items()},
        "required": list(COMPONENTS),
        "additionalProperties": False,
    }
    if bases:
        _object_at(schema, "properties")[BASE] = _base_choice_schema(bases)
        schema["required"] = [*COMPONENTS, BASE]
    needed = _referenced_definitions(schema, known)
    schema["$defs"] = {
        name: _restrict(definition, bounds) for name, definition in known.items() if name in needed
    }
    left_out = excluded_atoms(library, space)
    return _remove_atoms(schema, left_out) if left_out else schema


def _base_choice_schema(bases: Sequence[str]) -> JsonObject:
    """Schema of the choice of a base policy."""
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": list(bases)}},
        "required": ["name"],
        "additionalProperties": False,
    }


@dataclass(frozen=True, slots=True)
class Bounds:
    """What restricts a proposal beyond the language itself."""

    budget: int
    library: Library


def _remove_atoms(schema: JsonObject, left_out: frozenset[str]) -> JsonObject:
    """The schema without some atoms."""
    removed = {name for name, body in definitions(schema).items() if called_atom(body) in left_out}

    def keep(value: JsonValue) -> JsonValue:
        if isinstance(value, list):
            return [keep(item) for item in value if reference_name(item) not in removed]
        if isinstance(value, dict):
            return {name: keep(item) for name, item in value.items() if name not in removed}
        return value

    kept = keep(schema)
    assert isinstance(kept, dict)
    return kept


def called_atom(definition: JsonValue) -> str:
    """The atom whose call a definition describes, or an empty string."""
    if not isinstance(definition, dict) or not isinstance(
        properties := definition.get("properties"), dict
    ):
        return ""
    atom = properties.get("atom")
    name = atom.get("const") if isinstance(atom, dict) else None
    return name if isinstance(name, str) else ""


def definitions(schema: JsonObject) -> JsonObject:
    """The named definitions of a schema."""
    return _object_at(schema, "$defs")


def _object_at(schema: JsonObject, key: str) -> JsonObject:
    value = schema[key]
    if not isinstance(value, dict):
        raise TypeError(f"{key} of a JSON Schema is an object")
    return value


def _restrict(value: JsonValue, bounds: Bounds, key: str = "") -> JsonValue:
    if isinstance(value, list):
        return [_restrict(item, bounds) for item in value]
    if not isinstance(value, dict):
        return value
    if key == "properties":  # its keys are field names, not schema keywords
        return _restrict_properties(value, bounds)
    restricted: JsonObject = {
        name: _restrict(item, bounds, name)
        for name, item in value.items()
        if name not in _UNUSED_KEYWORDS
    }
    if "oneOf" in restricted:
        # Equivalent here, because branches differ in a constant, and supported by every engine
        # for constrained output.
        restricted["anyOf"] = restricted.pop("oneOf")
    return restricted


def _restrict_properties(properties: JsonObject, bounds: Bounds) -> JsonObject:
    """Bound list lengths and the quota; ``r_min`` follows from q_e where it is not offered."""
    offers_r_min = bounds.library == "paper"
    restricted: JsonObject = {
        name: _restrict(item, bounds, name)
        for name, item in properties.items()
        if offers_r_min or name != "r_min"
    }
    for name, item in restricted.items():
        if isinstance(item, dict) and name in _MAX_ITEMS:
            item["maxItems"] = _MAX_ITEMS[name]
        if isinstance(item, dict) and name == "q_e":
            item["maximum"] = min(bounds.budget, MAX_QUOTA)
    return restricted


def _referenced_definitions(value: JsonValue, known: Mapping[str, JsonValue]) -> set[str]:
    """Names of the definitions that a schema refers to, directly or through others."""
    names, pending = set[str](), list(list_references(value))
    while pending:
        name = pending.pop()
        if name not in names:
            names.add(name)
            pending += list_references(known[name])
    return names


def list_references(value: JsonValue) -> Iterator[str]:
    """Names of the definitions that a schema refers to directly, as often as it does."""
    if isinstance(value, list):
        for item in value:
            yield from list_references(item)
    elif isinstance(value, dict):
        if name := reference_name(value):
            yield name
        for key, item in value.items():
            if key != "discriminator":
                yield from list_references(item)


def reference_name(value: JsonValue) -> str:
    """The definition that ``{"$ref": ...}`` refers to, or an empty string for other values."""
    reference = value.get("$ref") if isinstance(value, dict) else None
    return reference.rpartition("/")[2] if isinstance(reference, str) else ""


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
