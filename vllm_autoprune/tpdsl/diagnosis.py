"""What pydantic finds wrong with a state, told in the words of the state: place, what, mend.

Knows nothing about files or text: it is given the JSON object and pydantic's errors on it.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from pydantic import BaseModel, JsonValue, ValidationError
from pydantic_core import ErrorDetails

from vllm_autoprune.errors import Problem
from vllm_autoprune.tpdsl.atom import ATOMS
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, BasePolicyCall
from vllm_autoprune.tpdsl.shown import pointer, shown
from vllm_autoprune.tpdsl.state import PruningState


def diagnose(error: ValidationError, data: JsonValue, most: int) -> tuple[list[Problem], int]:
    """At most ``most`` problems in pydantic's order, and the number of those left out."""
    details = error.errors(include_url=False, include_input=False)
    outer = {d["loc"][:size] for d in details for size in range(len(d["loc"]))}
    # A list whose items all failed is also told to be too short: an echo.
    details = [d for d in details if not (d["type"] == "too_short" and d["loc"] in outer)]
    found: dict[tuple[str, str], Problem] = {}
    for detail in details[:most]:
        problem = _problem(detail, data)
        key = (problem.where, problem.what)
        if key in found:  # no branch of a union took the value: any of them would do
            mend = f"{found[key].mend}, or {problem.mend}"
            problem = Problem(problem.where, problem.what, mend, problem.kind)
        found[key] = problem
    return list(found.values()), len(details[most:])


_PLAIN = {
    "tuple_type": "should be a list",
    "model_type": "should be an object",
    "model_attributes_type": 'should be an object such as {"atom": "..."}',
    "dataclass_type": "should be an object",
    "dict_type": "should be an object",
}
"""JSON's words for what pydantic says in Python's."""

_RULES = ("value_error", "assertion_error")
"""Types of the errors that a validator of our own raises: a rule beyond the schema."""


def _problem(detail: ErrorDetails, data: JsonValue) -> Problem:
    kind, context = detail["type"], detail.get("ctx", {})
    where, value = _place(detail["loc"], data)
    if kind == "union_tag_invalid":
        field = str(context["discriminator"]).strip("'")
        allowed = [tag.strip().strip("'") for tag in str(context["expected_tags"]).split(",")]
        if isinstance(value, dict):
            where, value = pointer(where, field), value[field]
        # Where a bare name stands for an atom, the name itself is what is wrong.
        return _unknown(field, value, allowed, where)
    if kind == "union_tag_not_found":
        field = str(context["discriminator"]).strip("'")
        return Problem(where, f"has no {field!r}", f'add "{field}": "..."', "missing")
    if kind == "missing":
        return Problem(where, "required but missing", "add it", "missing")
    if kind == "extra_forbidden":
        return _extra(detail["loc"], data, where)
    message = _PLAIN.get(kind, detail["msg"].removeprefix("Value error, "))
    broken = "parameters" if kind in _RULES else "value"
    return Problem(where, f"{shown(value)} is refused", message[:1].lower() + message[1:], broken)


def _unknown(field: str, said: JsonValue, allowed: Sequence[str], where: str) -> Problem:
    what = f"unknown {field} {shown(said)}"
    if not isinstance(said, str):
        return Problem(where, what, "name it in a string", "unknown_name")
    mend = nearest(said, allowed)
    if field == "atom" and said in ATOMS.names():
        mend = f"that is one of {ATOMS[said].group}, this field takes another group; {mend}"
    return Problem(where, what, mend, "unknown_name")


def _extra(location: Sequence[int | str], data: JsonValue, where: str) -> Problem:
    parent_at, parent = _place(location[:-1], data)
    parent = parent if isinstance(parent, dict) else {}
    atom = parent.get("atom")
    known = isinstance(atom, str) and atom in ATOMS.names()
    fields = ATOMS[str(atom)].call.parameters() if known else _fields(parent_at, data)
    near = _near(str(location[-1]), [field for field in fields if field not in parent])
    there = _near(str(location[-1]), [field for field in fields if field in parent])
    mend = f"remove it: {there!r} is there already" if there else "remove it or correct its name"
    mend = f"did you mean {near!r}?" if near else mend
    of = f" of {atom!r}" if known else ""
    return Problem(where, f"not a known field{of}", mend, "unknown_field")


def _fields(where: str, data: JsonValue) -> Sequence[str]:
    """Names that the object at a place may hold, atoms aside."""
    here: type[BaseModel] = PruningState
    for step in where.split("/")[1:]:
        field = here.model_fields.get(step)
        inner: object = field.annotation if field else None
        if inner is BasePolicyCall:
            inner = _chosen_policy(data)
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return ()
        here = inner
    return [field.alias or name for name, field in here.model_fields.items()]


def _chosen_policy(data: JsonValue) -> type[BasePolicyCall]:
    chosen = data.get("base_policy") if isinstance(data, dict) else None
    name = chosen.get("name") if isinstance(chosen, dict) else None
    known = isinstance(name, str) and name in BASE_POLICIES
    return BASE_POLICIES[str(name)].call if known else BasePolicyCall


def _place(location: Sequence[int | str], data: JsonValue) -> tuple[str, JsonValue]:
    """JSON pointer of a pydantic location, without the union tags that pydantic puts into it."""
    where, here = "", data
    for step in location:
        if not isinstance(here, dict | list):
            break  # nothing is below a plain value: the step names a branch of a union
        # The state itself is no union, so a field that is missing there may be called as it is.
        tags = (here.get("atom"), here.get("name")) if where and isinstance(here, dict) else ()
        if step in tags and step not in here:
            continue
        where = pointer(where, step)
        here = _step(here, step)
    return where, here


def _step(here: JsonValue, step: int | str) -> JsonValue:
    if isinstance(here, dict):
        return here.get(str(step))
    if isinstance(here, list) and isinstance(step, int) and step < len(here):
        return here[step]
    return None


def nearest(said: str, allowed: Sequence[str]) -> str:
    """Advice for a name that is not known: the nearest one that is, or what there is."""
    near = _near(said, allowed)
    listed = ", ".join(allowed[:12]) + (", ..." if len(allowed) > 12 else "")
    return f"did you mean {near!r}?" if near else f"use one of: {listed or 'none installed'}"


def _near(said: str, allowed: Sequence[str]) -> str | None:
    if len(said) > 100:  # comparing is quadratic, and no name is as long as that
        return None
    lower = {name.lower(): name for name in allowed}
    close = difflib.get_close_matches(said.lower(), list(lower), n=1, cutoff=0.6)
    return lower[close[0]] if close else None
