"""What a proposer writes, alpha = (S, C, R) as JSON, and how it becomes a state.

Knows nothing about who writes it. Base policy, budget and safety checks are the search's, so a
proposer is not asked for them; the schema it is held to is the state's own, cut down to the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from pydantic import JsonValue

from offline_search.ablation import ablated
from offline_search.settings import Settings, budget_call
from vllm_autoprune.errors import Problem, StateError
from vllm_autoprune.tpdsl.states.json_text import parse_json
from vllm_autoprune.tpdsl.states.load import load_state
from vllm_autoprune.tpdsl.states.state import SCHEMA, Constraints, PruningState

JsonObject = dict[str, JsonValue]

COMPONENTS = ("scoring", "constraints", "reassembly")
"""The components of alpha that are proposed; B is the search's."""

SAFETY = ("preserve_budget", "no_shape_change", "deterministic", "fallback_to_selection")

LONGEST_REPLY = 20_000
"""Characters of a reply that are looked at; a proposal has about a thousand."""

MOST_SIGNALS = 6

_MOST = {"signals": MOST_SIGNALS, "pool": 3}
"""Lists that a proposer may not make longer, so that a small one comes to an end."""

# `r_min` follows from q_e, and whatever else a reader of JSON does not need.
_UNSAID = ("title", "description", "discriminator", "default", "$schema", "$id")


@dataclass(frozen=True, slots=True)
class Draft:
    """One candidate on its way: a state, or the problems that keep it from being one.

    origin says who made it; parents name the proposals that it was made from; program is the code
    that returned it, where code is what is proposed.
    """

    origin: str
    state: PruningState | None
    problems: tuple[Problem, ...] = ()
    parents: tuple[str, ...] = ()
    program: str = ""


@cache
def proposal_schema(budget: int) -> JsonObject:
    """JSON Schema of a proposal at K = ``budget``: narrower than the state's, never wider."""
    full: JsonObject = PruningState.model_json_schema()
    properties, known = full["properties"], full["$defs"]
    assert isinstance(properties, dict) and isinstance(known, dict)
    parts: JsonObject = {name: properties[name] for name in COMPONENTS}
    schema: JsonObject = {
        "type": "object",
        "properties": {name: _narrowed(part, budget) for name, part in parts.items()},
        "required": list(COMPONENTS),
        "additionalProperties": False,
    }
    needed = reached(schema, known)
    schema["$defs"] = {
        name: _narrowed(described, budget) for name, described in known.items() if name in needed
    }
    return schema


def _narrowed(value: JsonValue, budget: int, key: str = "") -> JsonValue:
    if isinstance(value, list):
        return [_narrowed(item, budget) for item in value]
    if not isinstance(value, dict):
        return value
    named = key == "properties"  # its keys are names of fields, not words of the schema
    found: JsonObject = {
        name: _narrowed(item, budget, name)
        for name, item in value.items()
        if named or name not in _UNSAID
    }
    if named:
        found.pop("r_min", None)
        for name, item in found.items():
            if isinstance(item, dict) and name in _MOST:
                item["maxItems"] = _MOST[name]
            if isinstance(item, dict) and name == "q_e":
                item["maximum"] = budget
    if "oneOf" in found:
        # Branches differ in a constant, so either word admits the same; this one is understood
        # by every engine that constrains its output.
        found["anyOf"] = found.pop("oneOf")
    return found


def reached(value: JsonValue, known: Mapping[str, JsonValue]) -> set[str]:
    """Names of the definitions that a schema refers to, itself or through others."""
    found, waiting = set[str](), list(_references(value))
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _references(known[name])
    return found


def _references(value: JsonValue) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _references(item)
    elif isinstance(value, dict):
        if isinstance(reference := value.get("$ref"), str):
            yield reference.rpartition("/")[2]
        for name, item in value.items():
            if name != "discriminator":
                yield from _references(item)


def alpha(state: PruningState) -> JsonObject:
    """The part of a state that is searched, short: defaults that say little are left out."""
    body: JsonObject = state.model_dump(mode="json", include=set(COMPONENTS), exclude_defaults=True)
    constraints = state.constraints
    shown: JsonObject = {
        "pool": [call.model_dump(mode="json", exclude_defaults=True) for call in constraints.pool],
        "selector": constraints.selector.model_dump(mode="json", exclude={"r_min"}),
    }
    if constraints.partition != Constraints.model_fields["partition"].get_default(
        call_default_factory=True
    ):
        shown["partition"] = constraints.partition.model_dump(mode="json", exclude_defaults=True)
    return {**body, "constraints": shown, "reassembly": state.reassembly.model_dump(mode="json")}


def assembled(proposed: Mapping[str, JsonValue], settings: Settings, name: str) -> PruningState:
    """The state of an alpha under this search's base policy, budget and safety checks.

    Raises :class:`StateError` with every problem, as any other state does.
    """
    call = budget_call(settings.source_budget)
    parts = {part: proposed[part] for part in COMPONENTS if part in proposed}
    if settings.without or settings.quota is not None:
        parts = ablated(parts, settings.without, settings.quota)
    document: JsonObject = {
        "schema": SCHEMA,
        "name": name,
        "base_policy": {"name": settings.base_policy},
        "budget": call.model_dump(mode="json"),
        **parts,
        "safety": list(SAFETY),
        "provenance": {"found_by": f"vllm-autoprune search, strategy {settings.strategy}"},
    }
    return load_state(document)


def read_proposal(text: str, settings: Settings, origin: str, parents: tuple[str, ...]) -> Draft:
    """The draft in a reply: the JSON object in it, whatever stands around it.

    Whatever a reply holds, this returns: a state, or the reasons why there is none.
    """
    try:
        data = _object_in(text)
        return Draft(origin, assembled(data, settings, "candidate"), (), parents)
    except StateError as error:
        return Draft(origin, None, error.problems, parents)


def _object_in(text: str) -> JsonObject:
    """The outermost JSON object of a text; raises :class:`StateError`."""
    if not text.strip():
        raise _unread("the reply is empty", "reply.empty")
    if len(text) > LONGEST_REPLY:
        raise _unread(f"the reply has {len(text)} characters", "reply.long")
    begin, end = text.find("{"), text.rfind("}")
    if begin < 0:
        raise _unread("the reply holds no JSON object", "reply.no_object")
    if end < begin:
        raise _unread("the reply ends within its JSON object", "reply.cut")
    data, problems = parse_json(text[begin : end + 1], "proposal")
    if problems or not isinstance(data, dict):
        raise StateError("proposal", problems)
    unknown = sorted(set(data) - set(COMPONENTS))
    if unknown:
        data = {name: part for name, part in data.items() if name in COMPONENTS}
    return data


def _unread(what: str, kind: str) -> StateError:
    fix = f"write one JSON object with {', '.join(COMPONENTS)}"
    return StateError("proposal", [Problem("", what, fix, kind)])
