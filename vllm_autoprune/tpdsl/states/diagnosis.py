"""Translation of pydantic's validation errors on a state into :class:`Problem` records."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from types import UnionType
from typing import get_args

from pydantic import BaseModel, JsonValue, ValidationError
from pydantic_core import ErrorDetails

from vllm_autoprune.errors import Problem
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, BasePolicyCall
from vllm_autoprune.tpdsl.registry import ATOMS
from vllm_autoprune.tpdsl.states.json_values import child_pointer, format_value
from vllm_autoprune.tpdsl.states.state import PruningState


def diagnose(error: ValidationError, data: JsonValue, most: int) -> tuple[list[Problem], int]:
    """At most ``most`` problems in pydantic's order, and the number of errors left out."""
    details = error.errors(include_url=False, include_input=False)
    outer = {d["loc"][:size] for d in details for size in range(len(d["loc"]))}
    # A list whose items are all invalid is also reported as too short: a consequence, not a cause.
    details = [d for d in details if not (d["type"] == "too_short" and d["loc"] in outer)]
    problems: dict[tuple[str, str], Problem] = {}
    for detail in details[:most]:
        problem = _problem(detail, data)
        key = (problem.where, problem.what)
        if key in problems:  # several branches of one union refused the value: list their fixes
            fix = f"{problems[key].fix}, or {problem.fix}"
            problem = Problem(problem.where, problem.what, fix, problem.kind)
        problems[key] = problem
    return list(problems.values()), len(details[most:])


_MESSAGES = {
    "tuple_type": "should be a list",
    "model_type": "should be an object",
    "model_attributes_type": 'should be an object such as {"atom": "..."}',
    "dataclass_type": "should be an object",
    "dict_type": "should be an object",
}
"""Pydantic error type -> message in terms of JSON instead of Python."""

_LISTED = 20
"""Allowed names that a message lists."""

_RULES = ("value_error", "assertion_error")
"""Pydantic error types raised by this project's validators, for rules beyond the schema."""


def _problem(detail: ErrorDetails, data: JsonValue) -> Problem:
    kind, context = detail["type"], detail.get("ctx", {})
    where, value = _place(detail["loc"], data)
    if kind == "union_tag_invalid":
        field = str(context["discriminator"]).strip("'")
        allowed = [tag.strip().strip("'") for tag in str(context["expected_tags"]).split(",")]
        if isinstance(value, dict):
            where, value = child_pointer(where, field), value[field]
        # Otherwise the value is a bare name that stands for an atom.
        return _unknown(field, value, allowed, where)
    if kind == "union_tag_not_found":
        field = str(context["discriminator"]).strip("'")
        return Problem(where, f"has no {field!r}", f'add "{field}": "..."', "missing")
    if kind == "missing":
        return Problem(where, "required but missing", "add it", "missing")
    if kind == "extra_forbidden":
        return _extra(detail["loc"], data, where)
    message = _MESSAGES.get(kind, detail["msg"].removeprefix("Value error, "))
    broken = "parameters" if kind in _RULES else "value"
    return Problem(
        where, f"{format_value(value)} is refused", message[:1].lower() + message[1:], broken
    )


def _unknown(field: str, name: JsonValue, allowed: Sequence[str], where: str) -> Problem:
    what = f"unknown {field} {format_value(name)}"
    if not isinstance(name, str):
        return Problem(where, what, "name it in a string", "unknown_name")
    if field == "name" and name in BASE_POLICIES:
        what = f"base policy {name!r} reads the question"
        return Problem(where, what, f"use one of: {', '.join(allowed)}", "unknown_name")
    fix = suggest_name(name, allowed)
    if field == "atom" and name in ATOMS.names():
        fix = f"that is one of {ATOMS[name].group}, this field takes another group; {fix}"
    return Problem(where, what, fix, "unknown_name")


def _extra(location: Sequence[int | str], data: JsonValue, where: str) -> Problem:
    parent_at, parent = _place(location[:-1], data)
    parent = parent if isinstance(parent, dict) else {}
    atom = parent.get("atom")
    known = isinstance(atom, str) and atom in ATOMS.names()
    fields = ATOMS[str(atom)].call.parameters() if known else _fields(parent_at, data)
    near = _near(str(location[-1]), [field for field in fields if field not in parent])
    present = _near(str(location[-1]), [field for field in fields if field in parent])
    fix = (
        f"remove it: {present!r} is already present" if present else "remove it or correct its name"
    )
    fix = f"did you mean {near!r}?" if near else fix
    of = f" of {atom!r}" if known else ""
    return Problem(where, f"not a known field{of}", fix, "unknown_field")


def _fields(where: str, data: JsonValue) -> Sequence[str]:
    """Fields of the object at a JSON pointer, if it is not an atom."""
    model: type[BaseModel] = PruningState
    value = data
    for step in where.split("/")[1:]:
        value = _item(value, step)
        field = model.model_fields.get(step)
        inner: object = field.annotation if field else None
        if isinstance(inner, UnionType):  # a field that may be null
            inner = get_args(inner)[0]
        if inner is BasePolicyCall:
            inner = _chosen_policy(value)
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return ()
        model = inner
    return [field.alias or name for name, field in model.model_fields.items()]


def _chosen_policy(call: JsonValue) -> type[BasePolicyCall]:
    name = call.get("name") if isinstance(call, dict) else None
    known = isinstance(name, str) and name in BASE_POLICIES
    return BASE_POLICIES[str(name)].call if known else BasePolicyCall


def _place(location: Sequence[int | str], data: JsonValue) -> tuple[str, JsonValue]:
    """JSON pointer and value of a pydantic location, whose union tags are not part of the JSON."""
    where, value = "", data
    for step in location:
        if not isinstance(value, dict | list):
            break  # a scalar has nothing below it: the step is the tag of a union
        # The top level is not a union, so there a missing field may have the name of a tag.
        tags = (value.get("atom"), value.get("name")) if where and isinstance(value, dict) else ()
        if step in tags and step not in value:
            continue
        where = child_pointer(where, step)
        value = _item(value, step)
    return where, value


def _item(value: JsonValue, step: int | str) -> JsonValue:
    if isinstance(value, dict):
        return value.get(str(step))
    if isinstance(value, list) and isinstance(step, int) and step < len(value):
        return value[step]
    return None


def suggest_name(name: str, allowed: Sequence[str]) -> str:
    """Fix for an unknown name: the most similar allowed one, or the list of allowed names."""
    near = _near(name, allowed)
    listed = ", ".join(allowed[:_LISTED]) + (", ..." if len(allowed) > _LISTED else "")
    return f"did you mean {near!r}?" if near else f"use one of: {listed or 'none installed'}"


def _near(name: str, allowed: Sequence[str]) -> str | None:
    if len(name) > 100:  # the comparison takes quadratic time, and no name is this long
        return None
    lower = {known.lower(): known for known in allowed}
    close = difflib.get_close_matches(name.lower(), list(lower), n=1, cutoff=0.6)
    return lower[close[0]] if close else None
