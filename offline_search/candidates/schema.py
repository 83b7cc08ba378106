"""JSON Schema of a proposal: the state's own schema, reduced to the searched components."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from pydantic import JsonValue

from offline_search.candidates.components import (
    BASE,
    COMPONENTS,
    JsonObject,
    searched_components,
)
from offline_search.candidates.search_space import excluded_atoms
from offline_search.settings import MAX_QUOTA, Library, Space
from vllm_autoprune.tpdsl.states.state import PruningState

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
