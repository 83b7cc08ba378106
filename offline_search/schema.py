"""JSON Schema of a proposal: the state's own schema, reduced to the searched components."""

from __future__ import annotations

import json
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
    """JSON Schema of a proposal of a search: accepts a subset of what a state accepts.

    Atoms that take the same parameters are one alternative, so that it is about a third as long as
    the state's: the 81 atoms of reassembly, for example, have twelve forms.
    """
    schema: JsonObject = PruningState.model_json_schema()
    definitions, fields = _object(schema["$defs"]), _object(schema["properties"])
    excluded = excluded_atoms(settings)

    def reduce(value: JsonValue) -> JsonValue:
        """A part of the schema with what it refers to in place of the reference."""
        if isinstance(value, list):
            return [reduce(item) for item in value]
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if not isinstance(value, dict):
            return value
        if isinstance(reference := value.get("$ref"), str):
            return reduce(definitions[reference.rpartition("/")[2]])
        typed = "enum" in value or "const" in value  # its values have their type
        reduced: JsonObject = {}
        for keyword, item in value.items():
            if keyword in ("anyOf", "oneOf") and isinstance(item, list):
                # Equivalent here, because branches differ in a constant, and `anyOf` is supported
                # by every engine for constrained output.
                reduced["anyOf"] = merge([reduce(alternative) for alternative in item])
            elif keyword == "properties":
                reduced[keyword] = reduce_fields(_object(item))
            elif keyword not in _UNUSED_KEYWORDS and not (typed and keyword == "type"):
                reduced[keyword] = reduce(item)
        return reduced

    def reduce_fields(values: JsonObject) -> JsonObject:
        """Fields with limits on lists and q_e, without r_min where it follows."""
        reduced = {name: reduce(item) for name, item in values.items()}
        if settings.library != "paper":
            reduced.pop("r_min", None)
        for name, item in reduced.items():
            if name in _MAX_ITEMS:
                _object(item)["maxItems"] = _MAX_ITEMS[name]
            elif name == "q_e":
                _object(item)["maximum"] = min(settings.source_budget, MAX_QUOTA)
        return reduced

    def merge(alternatives: list[JsonValue]) -> list[JsonValue]:
        """One alternative for all offered atoms that take the same parameters."""
        atoms: dict[str, list[JsonValue]] = {}
        for alternative in alternatives:
            parts = alternative.get("properties") if isinstance(alternative, dict) else None
            called = parts.get("atom") if isinstance(parts, dict) else None
            atom = called.get("const") if isinstance(called, dict) else None
            if atom is None:
                atoms[json.dumps(alternative)] = []
            elif atom not in excluded:
                form = json.dumps(alternative).replace(json.dumps(called), "ATOM", 1)
                atoms.setdefault(form, []).append(atom)
        return [json.loads(form.replace("ATOM", json.dumps({"enum": names}), 1))
                for form, names in atoms.items()]  # fmt: skip

    properties = reduce_fields({name: fields[name] for name in searched_components(settings)})
    required: list[JsonValue] = [*COMPONENTS]
    if settings.bases:
        name: JsonObject = {"enum": list(settings.bases)}
        properties[BASE] = _closed_object({"name": name}, ["name"])
        required.append(BASE)
    return _closed_object(properties, required)


@cache
def list_schema(settings: Settings, count: int) -> JsonObject:
    """JSON Schema of ``count`` proposals, each with its hypothesis."""
    proposal = proposal_schema(settings)
    hypothesis: JsonObject = {
        "purpose": {"enum": list(PURPOSES)},
        "hypothesis": {"type": "string", "maxLength": MAX_HYPOTHESIS},
        "parent": {"type": "string", "maxLength": 8},
        "expect": {"enum": list(get_args(Expectation))},
    }
    required = proposal["required"]
    assert isinstance(required, list)
    item = _closed_object(
        {**hypothesis, **_object(proposal["properties"])}, [*hypothesis, *required]
    )
    items: JsonObject = {"type": "array", "items": item, "minItems": count, "maxItems": count}
    return _closed_object({PROPOSALS: items}, [PROPOSALS])


def _closed_object(properties: JsonObject, required: list[JsonValue]) -> JsonObject:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _object(value: JsonValue) -> JsonObject:
    assert isinstance(value, dict), "a part of a JSON Schema that is an object"
    return value
