"""JSON Schema of a proposal: the state's own schema, reduced to the searched components."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from pydantic import JsonValue

from offline_search.candidates.components import COMPONENTS, JsonObject, searched_components
from vllm_autoprune.tpdsl.states.state import PruningState

MAX_SIGNALS = 6

# Limits on list lengths, so that a small model's constrained output comes to an end.
_MAX_ITEMS = {"signals": MAX_SIGNALS, "pool": 3}

# Schema keywords that do not constrain the output.
_UNUSED_KEYWORDS = ("title", "description", "discriminator", "default", "$schema", "$id")


@cache
def proposal_schema(budget: int, core: bool = False, rank_at: bool = False) -> JsonObject:
    """JSON Schema of a proposal at K = ``budget``: accepts a subset of what a state accepts.

    With ``core``, a proposal may have one; with ``rank_at``, it may say where tokens are ranked.
    """
    full: JsonObject = PruningState.model_json_schema()
    properties, known = _object_at(full, "properties"), definitions(full)
    parts: JsonObject = {name: properties[name] for name in searched_components(core, rank_at)}
    schema: JsonObject = {
        "type": "object",
        "properties": {name: _restrict(part, budget) for name, part in parts.items()},
        "required": list(COMPONENTS),
        "additionalProperties": False,
    }
    needed = referenced_definitions(schema, known)
    schema["$defs"] = {
        name: _restrict(definition, budget) for name, definition in known.items() if name in needed
    }
    return schema


def definitions(schema: JsonObject) -> JsonObject:
    """The named definitions of a schema."""
    return _object_at(schema, "$defs")


def _object_at(schema: JsonObject, key: str) -> JsonObject:
    value = schema[key]
    if not isinstance(value, dict):
        raise TypeError(f"{key} of a JSON Schema is an object")
    return value


def _restrict(value: JsonValue, budget: int, key: str = "") -> JsonValue:
    if isinstance(value, list):
        return [_restrict(item, budget) for item in value]
    if not isinstance(value, dict):
        return value
    if key == "properties":  # its keys are field names, not schema keywords
        return _restrict_properties(value, budget)
    restricted: JsonObject = {
        name: _restrict(item, budget, name)
        for name, item in value.items()
        if name not in _UNUSED_KEYWORDS
    }
    if "oneOf" in restricted:
        # Equivalent here, because branches differ in a constant, and supported by every engine
        # for constrained output.
        restricted["anyOf"] = restricted.pop("oneOf")
    return restricted


def _restrict_properties(properties: JsonObject, budget: int) -> JsonObject:
    """Bound list lengths and the quota; ``r_min`` is omitted because it follows from q_e."""
    restricted: JsonObject = {
        name: _restrict(item, budget, name) for name, item in properties.items() if name != "r_min"
    }
    for name, item in restricted.items():
        if isinstance(item, dict) and name in _MAX_ITEMS:
            item["maxItems"] = _MAX_ITEMS[name]
        if isinstance(item, dict) and name == "q_e":
            item["maximum"] = budget
    return restricted


def referenced_definitions(value: JsonValue, known: Mapping[str, JsonValue]) -> set[str]:
    """Names of the definitions that a schema refers to, directly or through others."""
    names, pending = set[str](), list(_references(value))
    while pending:
        name = pending.pop()
        if name not in names:
            names.add(name)
            pending += _references(known[name])
    return names


def _references(value: JsonValue) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _references(item)
    elif isinstance(value, dict):
        if name := reference_name(value):
            yield name
        for key, item in value.items():
            if key != "discriminator":
                yield from _references(item)


def reference_name(value: JsonValue) -> str:
    """The definition that ``{"$ref": ...}`` refers to, or an empty string for other values."""
    reference = value.get("$ref") if isinstance(value, dict) else None
    return reference.rpartition("/")[2] if isinstance(reference, str) else ""
