"""JSON Schema of a proposal: the state's own schema, reduced to the searched components."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator
from functools import cache
from typing import get_args

from pydantic import JsonValue

from offline_search.candidates import MAX_HYPOTHESIS, PROPOSALS, PURPOSES, Expectation
from offline_search.components import BASE, COMPONENTS, JsonObject, searched_components
from offline_search.search_space import excluded_atoms
from offline_search.settings import MAX_QUOTA, Settings
from vllm_autoprune.tpdsl.state import PruningState

# Limits on list lengths, so that a small model's constrained output comes to an end.
_MAX_ITEMS = {"signals": 6, "pool": 3}

# Schema keywords that do not constrain the output.
_UNUSED_KEYWORDS = ("title", "description", "discriminator", "default", "allOf", "$schema", "$id")


@cache
def proposal_schema(settings: Settings) -> JsonObject:
    """JSON Schema of a proposal of a search: accepts a subset of what a state accepts."""
    full: JsonObject = PruningState.model_json_schema()
    known, fields = _object(full["$defs"]), _object(full["properties"])
    parts: JsonObject = {name: fields[name] for name in searched_components(settings)}
    properties = {name: _restrict(part, settings) for name, part in parts.items()}
    required: list[JsonValue] = [*COMPONENTS]
    if settings.bases:
        properties[BASE] = {
            "type": "object",
            "properties": {"name": {"type": "string", "enum": list(settings.bases)}},
            "required": ["name"],
            "additionalProperties": False,
        }
        required.append(BASE)
    needed, pending = set[str](), list(_references(properties))
    while pending:
        name = pending.pop()
        if name not in needed:
            needed.add(name)
            pending += _references(known[name])
    definitions = {name: _restrict(known[name], settings) for name in known if name in needed}
    schema: JsonObject = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        "$defs": definitions,
    }
    excluded = excluded_atoms(settings)
    return _without(
        schema, {n for n, body in definitions.items() if _called_atom(body) in excluded}
    )


def list_schema(schema: JsonObject, count: int) -> JsonObject:
    """JSON Schema of ``count`` proposals, each with its hypothesis, given that of one."""
    proposal = {name: part for name, part in schema.items() if name != "$defs"}
    hypothesis: JsonObject = {
        "purpose": {"enum": list(PURPOSES)},
        "hypothesis": {"type": "string", "maxLength": MAX_HYPOTHESIS},
        "parent": {"type": "string", "maxLength": 8},
        "expect": {"enum": list(get_args(Expectation))},
    }
    required = proposal["required"]
    assert isinstance(required, list)
    proposal["properties"] = {**hypothesis, **_object(proposal["properties"])}
    proposal["required"] = [*hypothesis, *required]
    items: JsonObject = {"type": "array", "items": proposal, "minItems": count, "maxItems": count}
    return {
        "type": "object",
        "properties": {PROPOSALS: items},
        "required": [PROPOSALS],
        "additionalProperties": False,
        "$defs": schema["$defs"],
    }


def shorten_schema(schema: JsonObject) -> JsonObject:
    """A schema of about a third of the length that accepts the same proposals."""
    merged = _merge_equal_calls(schema)
    known = _object(merged["$defs"])
    uses = Counter(_references(merged))
    names = {name: f"d{number}" for number, name in enumerate(known) if uses[name] > 1}

    def shorten(value: JsonValue) -> JsonValue:
        if isinstance(value, list):
            return [shorten(item) for item in value]
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if not isinstance(value, dict):
            return value
        if name := _reference(value):
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
    known = dict(_object(schema["$defs"]))
    for name, body in known.items():
        if name_of_atom := _called_atom(body):
            form = json.dumps(body, sort_keys=True).replace(json.dumps(name_of_atom), "ATOM")
            forms.setdefault(form, []).append(name)
    places, merged = list(_alternatives(schema)), set[str]()
    for equal in forms.values():
        # Not where some list of alternatives has only some of these atoms.
        if len(equal) > 1 and all(names >= {*equal} for names in places if names & {*equal}):
            call = _object(known[equal[0]])
            atoms: list[JsonValue] = [_called_atom(known[name]) for name in equal]
            atom: JsonObject = {"atom": {"type": "string", "enum": atoms}}
            known[equal[0]] = {**call, "properties": _object(call["properties"]) | atom}
            merged |= set(equal[1:])
    return _without({**schema, "$defs": known}, merged)


def _restrict(value: JsonValue, settings: Settings, key: str = "") -> JsonValue:
    """A part of the state's schema, with limits on lists and q_e, without r_min where it follows.

    The keys of ``properties`` are names of fields and not keywords.
    """
    if isinstance(value, list):
        return [_restrict(item, settings) for item in value]
    if not isinstance(value, dict):
        return value
    fields = key == "properties"
    restricted: JsonObject = {
        name: _restrict(item, settings, name)
        for name, item in value.items()
        if fields or name not in _UNUSED_KEYWORDS
    }
    if fields and settings.library != "paper":
        restricted.pop("r_min", None)
    for name, item in restricted.items() if fields else ():
        if isinstance(item, dict) and name in _MAX_ITEMS:
            item["maxItems"] = _MAX_ITEMS[name]
        elif isinstance(item, dict) and name == "q_e":
            item["maximum"] = min(settings.source_budget, MAX_QUOTA)
    if not fields and "oneOf" in restricted:
        # Equivalent here, because branches differ in a constant, and supported by every engine
        # for constrained output.
        restricted["anyOf"] = restricted.pop("oneOf")
    return restricted


def _without(schema: JsonObject, names: Collection[str]) -> JsonObject:
    """The schema without some of its definitions, wherever a list refers to them."""

    def keep(value: JsonValue) -> JsonValue:
        if isinstance(value, list):
            return [keep(item) for item in value if _reference(item) not in names]
        if isinstance(value, dict):
            return {name: keep(item) for name, item in value.items() if name not in names}
        return value

    return _object(keep(schema)) if names else schema


def _alternatives(value: JsonValue) -> Iterator[set[str]]:
    """Definitions that a schema refers to, those of a list together."""
    if isinstance(value, list):
        yield {_reference(item) for item in value} - {""}
        for item in value:
            if not _reference(item):
                yield from _alternatives(item)
    elif isinstance(value, dict):
        if name := _reference(value):
            yield {name}
        for item in value.values():
            yield from _alternatives(item)


def _references(value: JsonValue) -> Iterator[str]:
    """Names of the definitions that a schema refers to directly, as often as it does."""
    if isinstance(value, list):
        for item in value:
            yield from _references(item)
    elif isinstance(value, dict):
        if name := _reference(value):
            yield name
        for key, item in value.items():
            if key != "discriminator":
                yield from _references(item)


def _reference(value: JsonValue) -> str:
    """The definition that ``{"$ref": ...}`` refers to, or an empty string for other values."""
    reference = value.get("$ref") if isinstance(value, dict) else None
    return reference.rpartition("/")[2] if isinstance(reference, str) else ""


def _called_atom(definition: JsonValue) -> str:
    """The atom whose call a definition describes, or an empty string."""
    properties = definition.get("properties") if isinstance(definition, dict) else None
    atom = properties.get("atom") if isinstance(properties, dict) else None
    name = atom.get("const") if isinstance(atom, dict) else None
    return name if isinstance(name, str) else ""


def _object(value: JsonValue) -> JsonObject:
    assert isinstance(value, dict), "a part of a JSON Schema that is an object"
    return value
