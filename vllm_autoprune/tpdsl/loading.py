"""Loading and validation of states: all problems are reported at once.

The JSON Schema and the loader accept the same states except for :data:`RULES`, each with the reason
why a schema cannot express it. Problems of a refused state carry the name of the rule as
:attr:`vllm_autoprune.errors.Problem.kind`, so that tests can compare the loader with the schema.
"""

from __future__ import annotations

import difflib
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import NoReturn, TypeVar, get_args

from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from vllm_autoprune.errors import Problem, StateError
from vllm_autoprune.tpdsl.atoms.selectors import Selector, SelectorCall
from vllm_autoprune.tpdsl.atoms.source import Budget, BudgetCall
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, BasePolicyCall
from vllm_autoprune.tpdsl.json_text import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_VALUES,
    child_pointer,
    dump_mapping,
    escape_unprintable,
    format_value,
    parse_json,
    read_error,
    read_text,
)
from vllm_autoprune.tpdsl.registry import ATOMS
from vllm_autoprune.tpdsl.state import SCHEMA, PruningState


@dataclass(frozen=True, slots=True)
class _Rule:
    """What a rule requires, and why a JSON Schema cannot express it."""

    requires: str
    why: str


_TEXT = "a schema sees values, not their text"
_DOCUMENT = "a schema cannot limit a document as a whole"
_TWO = "a schema cannot compare two fields"

RULES = {
    "file": _Rule("the path names a regular file that can be read", _TEXT),
    "size": _Rule(f"at most {MAX_BYTES} bytes, as read and as written out again", _TEXT),
    "encoding": _Rule("UTF-8 without a byte order mark", _TEXT),
    "syntax": _Rule("one JSON value, by RFC 8259: no NaN, no Infinity, no comments", _TEXT),
    "duplicate_key": _Rule("no key twice in one object", _TEXT),
    "surrogate": _Rule("no half of a surrogate pair in a string or key", _TEXT),
    "number": _Rule("every number fits a 64-bit float", _TEXT),
    "depth": _Rule(f"nested at most {MAX_DEPTH} deep", _DOCUMENT),
    "values": _Rule(f"at most {MAX_VALUES} values", _DOCUMENT),
    "limit_below_budget": _Rule("budget.limit is at least the state's own K", _TWO),
    "r_min_above_budget": _Rule("constraints.selector.r_min is at most the state's K", _TWO),
}
"""Kind of a problem -> its rule, for those that only the loader can state."""

T = TypeVar("T")

_BUDGET: TypeAdapter[BudgetCall] = TypeAdapter(Budget)
_SELECTOR: TypeAdapter[SelectorCall] = TypeAdapter(Selector)


def _find_contradictions(data: Mapping[str, JsonValue]) -> Iterator[Problem]:
    """Check the rules about two fields of a JSON object that may be invalid elsewhere.

    Only the parts that a rule reads must be valid, so that contradictions are reported together
    with all other problems.
    """
    budget = _part(_BUDGET, data.get("budget"))
    if budget is None:
        return
    least, most = budget.range()
    if budget.limit is not None and most > budget.limit:
        what = f"limit {budget.limit} is below the state's own K = {most}"
        fix = f"write {most} or more, or null for no limit"
        yield Problem("/budget/limit", what, fix, "limit_below_budget")
    constraints = data.get("constraints")
    raw = constraints.get("selector") if isinstance(constraints, dict) else None
    selector = _part(_SELECTOR, raw)
    r_min = None if selector is None else selector.insists_on
    if r_min is not None and r_min > least:
        what = f"r_min = {r_min} reference tokens cannot be kept of K = {least}"
        fix = f"write {least} or less, or null, which means K - q_e"
        yield Problem("/constraints/selector/r_min", what, fix, "r_min_above_budget")


def _part(adapter: TypeAdapter[T], data: JsonValue) -> T | None:
    try:
        return adapter.validate_python(data)
    except ValidationError:
        return None


def _diagnose(error: ValidationError, data: JsonValue, most: int) -> tuple[list[Problem], int]:
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
    if field == "atom" and name in ATOMS:
        fix = f"that is one of {ATOMS[name].group}, this field takes another group; {fix}"
    return Problem(where, what, fix, "unknown_name")


def _extra(location: Sequence[int | str], data: JsonValue, where: str) -> Problem:
    parent_at, parent = _place(location[:-1], data)
    parent = parent if isinstance(parent, dict) else {}
    atom = parent.get("atom")
    known = isinstance(atom, str) and atom in ATOMS
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
        if inner is BasePolicyCall and isinstance(value, dict):
            name = value.get("name")
            inner = BASE_POLICIES[name].call if name in BASE_POLICIES else BasePolicyCall
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return ()
        model = inner
    return [field.alias or name for name, field in model.model_fields.items()]


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


MAX_PROBLEMS = 64
"""Problems that are listed for one state; further ones are counted."""

_PACKAGE = Path(__file__).resolve().parents[1]

# A wheel holds the shipped states inside the package, a checkout beside it.
POLICY_FOLDERS = (_PACKAGE / "policies", _PACKAGE.parent / "policies")


def shipped_states() -> dict[str, Path]:
    """Name -> file of every state that ships with this installation."""
    files = (f for folder in POLICY_FOLDERS for f in sorted(folder.glob("*.json")))
    return {f.stem: f for f in reversed(list(files))}


def load_state(source: str | Path | Mapping[str, object]) -> PruningState:
    """Load a state from a mapping, JSON text (starts with ``{``), a file or a shipped name.

    Raises :class:`StateError`, which lists every problem with its JSON pointer and how to fix it.
    No other file is read and no code is run.
    """
    if isinstance(source, Mapping):
        subject = "state"
        text = dump_mapping(source, subject)
    elif isinstance(source, str) and source.lstrip("\ufeff \t\r\n").startswith("{"):
        text, subject = source, "state text"
    else:
        subject = f"state {escape_unprintable(str(source), 200)}"
        text = read_text(_locate(source, subject), subject)
    return _validate(*parse_json(text, subject), subject)


def _locate(source: str | Path, subject: str) -> Path:
    path, shipped = Path(source), shipped_states()
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
        if not (is_folder and str(source) in shipped):
            return path
    except (FileNotFoundError, NotADirectoryError, ValueError):
        pass  # not a path, but it may be the name of a shipped state
    except OSError as error:  # such as a name that is too long, or a missing permission
        raise read_error(subject, error) from None
    if str(source) in shipped:
        return shipped[str(source)]
    what = "no such file, and no shipped state of that name"
    fix = suggest_name(str(source), list(shipped))
    raise StateError(subject, [Problem("", what, fix, "file")])


def _validate(data: JsonValue, problems: list[Problem], subject: str) -> PruningState:
    if not isinstance(data, dict):
        what = f"a state is a JSON object, not {format_value(data)}"
        fix = "write one JSON object as `vllm-autoprune schema` describes it"
        _refuse(subject, [*problems, Problem("", what, fix, "value")])
    # Invalid values were replaced by null; problems of the replacement are not reported.
    replaced = {problem.where for problem in problems if problem.kind != "duplicate_key"}
    version = data.get("schema")
    if version != SCHEMA:
        # Fields of another version may have another meaning, so they are not checked.
        status = "missing" if version is None else f"{format_value(version)} is not known"
        what = f"schema version {status}; this version reads {SCHEMA!r}"
        fix = f'write "schema": "{SCHEMA}", or use the release that wrote the state'
        unknown = [] if "/schema" in replaced else [Problem("/schema", what, fix, "version")]
        _refuse(subject, [*problems, *unknown])
    omitted = 0
    try:
        state = PruningState.model_validate(data)
    except ValidationError as error:
        invalid, omitted = _diagnose(error, data, MAX_PROBLEMS)
        problems += [problem for problem in invalid if problem.where not in replaced]
    problems += _find_contradictions(data)
    if problems:
        _refuse(subject, problems, omitted)
    if len(state.dumps().encode()) > MAX_BYTES:
        what = f"larger than {MAX_BYTES} bytes when written out with its defaults"
        _refuse(subject, [Problem("", what, "shorten its provenance", "size")])
    return state


def _refuse(subject: str, problems: list[Problem], omitted: int = 0) -> NoReturn:
    omitted += len(problems[MAX_PROBLEMS:])
    if omitted:
        more = Problem("", f"{omitted} more problem(s)", "fix the ones above first", "more")
        problems = [*problems[:MAX_PROBLEMS], more]
    raise StateError(subject, problems)
