"""Loading and validation of states: all problems are reported at once.

Input is not trusted: no text may take much memory or time, and escape sequences, line breaks and
very long values must not reach a terminal or a log. The JSON Schema and the loader accept the same
states except for :data:`RULES`.
"""

from __future__ import annotations

import codecs
import difflib
import json
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NoReturn, TypeVar

from pydantic import JsonValue, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from vllm_autoprune.errors import Problem, StateError
from vllm_autoprune.tpdsl.atoms.selectors import Selector, SelectorCall
from vllm_autoprune.tpdsl.atoms.source import Budget, BudgetCall
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.registry import ATOMS
from vllm_autoprune.tpdsl.state import SCHEMA, PruningState

MAX_BYTES = 1 << 20
"""Largest text that is read; a state has a few kilobytes."""

MAX_DEPTH = 32
"""Deepest nesting; a state itself has five levels, and provenance may have more."""

MAX_VALUES = 10_000
"""Largest number of values in one document, counting lists and objects."""

MAX_PROBLEMS = 64
"""Problems that are listed for one state; further ones are counted."""

RULES = (
    *("file", "size", "encoding", "syntax", "duplicate_key", "surrogate", "number", "depth"),
    *("values", "limit_below_budget", "r_min_above_budget"),
)
"""Kinds of problems that a JSON Schema cannot express; ``docs/states.md`` says why, of each."""

_PACKAGE = Path(__file__).resolve().parents[1]

# A wheel holds the shipped states inside the package, a checkout beside it.
_POLICY_FOLDERS = (_PACKAGE / "policies", _PACKAGE.parent / "policies")


def shipped_states() -> dict[str, Path]:
    """Name -> file of every state that ships with this installation."""
    files = (f for folder in _POLICY_FOLDERS for f in sorted(folder.glob("*.json")))
    return {f.stem: f for f in reversed(list(files))}


def load_state(source: str | Path | Mapping[str, object]) -> PruningState:
    """Load a state from a mapping, JSON text (starts with ``{``), a file or a shipped name.

    Raises :class:`StateError`, which lists every problem with its JSON pointer and how to fix it.
    No other file is read and no code is run.
    """
    if isinstance(source, Mapping):
        subject = "state"
        try:
            text = json.dumps(dict(source), ensure_ascii=False)
        except RecursionError:
            raise StateError(subject, [_depth_problem(f"more than {MAX_DEPTH}")]) from None
        except (TypeError, ValueError) as error:
            fix = "use a dictionary such as json.load returns"
            raise StateError(subject, [Problem("", str(error), fix, "syntax")]) from None
    elif isinstance(source, str) and source.lstrip("\ufeff \t\r\n").startswith("{"):
        text, subject = source, "state text"
    else:
        subject = f"state {escape_unprintable(str(source), 200)}"
        text = _read_text(source, subject)
    return _validate(*parse_json(text, subject), subject)


# Text, from the outside to the inside: file, limits, values.


def _read_text(source: str | Path, subject: str) -> str:
    """Text of a path, else of the shipped state of that name.

    The bound applies while reading, so it also holds for files that grow or report a wrong size.
    Pipes and devices, which could block, are never opened.
    """
    path, shipped = Path(source), shipped_states()
    try:
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError, ValueError):
            mode = 0  # not a path, but it may be the name of a shipped state
        if mode == 0 or (stat.S_ISDIR(mode) and str(source) in shipped):
            if str(source) not in shipped:
                what = "no such file, and no shipped state of that name"
                fix = suggest_name(str(source), list(shipped))
                raise StateError(subject, [Problem("", what, fix, "file")])
            path = shipped[str(source)]
            mode = path.stat().st_mode
        _require_regular(mode, subject)
        # The path may have been replaced meanwhile, so check the opened file again.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _require_regular(os.fstat(handle).st_mode, subject)
            content, most = b"", MAX_BYTES + 1
            while len(content) < most and (more := os.read(handle, most - len(content))):
                content += more
        finally:
            os.close(handle)
    except OSError as error:  # such as a name that is too long, or a missing permission
        what = f"cannot be read ({error.strerror or type(error).__name__})"
        fix = "check the path and its permissions"
        raise StateError(subject, [Problem("", what, fix, "file")]) from None
    if len(content) > MAX_BYTES:
        raise StateError(subject, [_SIZE_PROBLEM])
    try:
        # UTF-16 without a byte order mark may be valid UTF-8, but contains zero bytes.
        if not content.startswith(_WIDE_MARKS) and b"\0" not in content[:4]:
            return content.decode("utf-8")
        what = "not UTF-8 text (it looks like UTF-16 or UTF-32)"
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text ({error.reason} at byte {error.start})"
    raise StateError(subject, [Problem("", what, "save it as UTF-8", "encoding")])


_WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)


def _require_regular(mode: int, subject: str) -> None:
    if not stat.S_ISREG(mode):
        what = "is a folder" if stat.S_ISDIR(mode) else "is no regular file"
        raise StateError(subject, [Problem("", what, "name a JSON file", "file")])


_SIZE_PROBLEM = Problem(
    "", f"larger than {MAX_BYTES} bytes", "a state is a few kilobytes of JSON", "size"
)
_ONE_OBJECT = "write one JSON object as `vllm-autoprune schema` describes it"


def _depth_problem(depth: str) -> Problem:
    what = f"nested too deeply: {depth} levels, at most {MAX_DEPTH} are read"
    return Problem("", what, "a state is five levels deep: reduce the nesting", "depth")


def _limit_problems(text: str) -> Iterator[Problem]:
    """Limits that are checked before the text is parsed.

    Depth and number of values among them: the parser's own recursion limit depends on the process
    and may end it.
    """
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        yield _SIZE_PROBLEM
    elif text.startswith("\ufeff"):
        fix = "save it as UTF-8 without one"
        yield Problem("", "begins with a byte order mark", fix, "encoding")
    elif not text.strip():
        yield Problem("", "is empty", "write one JSON object", "syntax")
    else:
        # Exact up to the first syntax error, where a parser would stop as well.
        outside = "".join(text.replace("\\\\", "").replace('\\"', "").split('"')[::2])
        steps = (1 if char in "[{" else -1 for char in outside if char in "[]{}")
        depth = max(accumulate(steps), default=0)
        if depth > MAX_DEPTH:
            yield _depth_problem(str(depth))
        values = 1 + sum(outside.count(char) for char in ",[{")
        if values > MAX_VALUES:
            what = f"about {values} values, at most {MAX_VALUES} are read"
            yield Problem("", what, "a state has some dozens: shorten its lists", "values")


class _InvalidNumber(str):
    """The text of a number that a 64-bit float cannot represent."""


class _Object(dict[str, object]):
    """An object, and the keys that occur more than once in its text."""

    duplicates: Sequence[str] = ()


def parse_json(text: str, subject: str) -> tuple[JsonValue, list[Problem]]:
    """Parse JSON text into a value and a list of problems.

    Numbers without a fractional part become integers (``2.0`` is 2, as in JSON Schema). A duplicate
    key keeps its last value and an invalid number becomes null; both are reported with their JSON
    pointer. Raises :class:`StateError` if the text cannot be parsed at all.
    """
    if violations := list(_limit_problems(text)):
        raise StateError(subject, violations)
    try:
        parsed: object = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_InvalidNumber,
            parse_float=_number,
            parse_int=_number,
        )
    except json.JSONDecodeError as error:
        what = f"not JSON: {error.msg} at line {error.lineno} col {error.colno}"
        raise StateError(subject, [Problem("", what, _ONE_OBJECT, "syntax")]) from None
    problems: list[Problem] = []
    value = _checked(parsed, "", problems)
    if isinstance(parsed, _InvalidNumber):
        raise StateError(subject, problems)
    return value, problems


def _object(pairs: list[tuple[str, object]]) -> _Object:
    value = _Object(pairs)
    if len(value) < len(pairs):
        times = Counter(key for key, _ in pairs)
        value.duplicates = [key for key, count in times.items() if count > 1]
    return value


def _number(text: str) -> float | _InvalidNumber:
    # int() is slow for, or refuses, very long texts.
    integral = text.lstrip("-").isdigit()
    if integral and len(text) > 310:
        return _InvalidNumber(text)
    value = int(text) if integral else float(text)
    if abs(value) > sys.float_info.max:
        return _InvalidNumber(text)
    # Larger ones stay floats: no field of a state takes an integer of that size.
    return int(value) if float(value).is_integer() and abs(value) < 2**63 else value


def _checked(value: object, where: str, problems: list[Problem]) -> JsonValue:
    """The parsed value at a JSON pointer; what JSON cannot hold is null and a problem."""

    def refuse_surrogates(text: str, where: str, key: str = "") -> None:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:  # half of a pair, which UTF-8 cannot encode
            what = f"{key}{_format_value(text)} holds half of a surrogate pair"
            problems.append(Problem(where, what, "write the whole character", "surrogate"))

    if isinstance(value, _Object):
        for name in value.duplicates:
            what, below = (
                f"key {_format_value(name)} occurs twice in one object",
                child_pointer(where, name),
            )
            problems.append(Problem(below, what, "keep one of them", "duplicate_key"))
        copied: dict[str, JsonValue] = {}
        for key, item in value.items():
            below = child_pointer(where, key)
            refuse_surrogates(key, below, "key ")
            copied[key] = _checked(item, below, problems)
        return copied
    if isinstance(value, list):
        return [_checked(item, child_pointer(where, i), problems) for i, item in enumerate(value)]
    if isinstance(value, _InvalidNumber):
        text = value if len(value) <= 20 else f"{value[:17]}..."
        what, fix, kind = f"{text} is not a JSON number", "write a finite number", "syntax"
        if value.lstrip("-")[0].isdigit():
            what, fix = f"{text} is larger than any 64-bit float", "write a smaller number"
            kind = "number"
        problems.append(Problem(where, what, fix, kind))
        return None
    if isinstance(value, str):
        refuse_surrogates(value, where)
    assert value is None or isinstance(value, str | int | float)
    return value


def escape_unprintable(text: str, limit: int = 60) -> str:
    """Escape unprintable characters and shorten the text to ``limit`` characters."""
    text = text if len(text) <= limit else f"{text[: limit - 3]}..."
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def child_pointer(where: str, step: str | int) -> str:
    """JSON pointer (RFC 6901) to a child of ``where``."""
    key = escape_unprintable(str(step), 80)
    return f"{where}/{key.replace('~', '~0').replace('/', '~1')}"


def _format_value(value: object, limit: int = 60) -> str:
    """Format a JSON value on one line of about ``limit`` characters at most."""
    if isinstance(value, str):
        return f'"{escape_unprintable(value, limit)}"'
    text = ""
    for piece in json.JSONEncoder().iterencode(value):  # stops early on large values
        text += piece
        if len(text) > limit:
            return f"{text[: limit - 3]}..."
    return text


# Values: the grammar by pydantic, then the rules on two fields.


def _validate(data: JsonValue, problems: list[Problem], subject: str) -> PruningState:
    if not isinstance(data, dict):
        what = f"a state is a JSON object, not {_format_value(data)}"
        _refuse(subject, [*problems, Problem("", what, _ONE_OBJECT, "value")])
    # Invalid values were replaced by null; problems of the replacement are not reported.
    replaced = {problem.where for problem in problems if problem.kind != "duplicate_key"}
    version = data.get("schema")
    if version != SCHEMA:
        # Fields of another version may have another meaning, so they are not checked.
        status = "missing" if version is None else f"{_format_value(version)} is not known"
        what = f"schema version {status}; this version reads {SCHEMA!r}"
        fix = f'write "schema": "{SCHEMA}", or use the release that wrote the state'
        unknown = [] if "/schema" in replaced else [Problem("/schema", what, fix, "version")]
        _refuse(subject, [*problems, *unknown])
    omitted = 0
    try:
        state = PruningState.model_validate(data)
    except ValidationError as error:
        invalid, omitted = _diagnose(error, data)
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
        more = Problem("", f"{omitted} more problems", "fix the ones above first", "more")
        problems = [*problems[:MAX_PROBLEMS], more]
    raise StateError(subject, problems)


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


def _diagnose(error: ValidationError, data: JsonValue) -> tuple[list[Problem], int]:
    """At most MAX_PROBLEMS problems in pydantic's order, and the number of errors left out."""
    details = error.errors(include_url=False, include_input=False)
    outer = {d["loc"][:size] for d in details for size in range(len(d["loc"]))}
    # A list whose items are all invalid is also reported as too short: a consequence, not a cause.
    details = [d for d in details if not (d["type"] == "too_short" and d["loc"] in outer)]
    problems: dict[tuple[str, str], Problem] = {}
    for detail in details[:MAX_PROBLEMS]:
        problem = _problem(detail, data)
        key = (problem.where, problem.what)
        if key in problems:  # several branches of one union refused the value: list their fixes
            fix = f"{problems[key].fix}, or {problem.fix}"
            problem = Problem(problem.where, problem.what, fix, problem.kind)
        problems[key] = problem
    return list(problems.values()), len(details[MAX_PROBLEMS:])


_MESSAGES = {
    "tuple_type": "should be a list",
    "model_type": "should be an object",
    "model_attributes_type": 'should be an object such as {"atom": "..."}',
    "dict_type": "should be an object",
}
"""Pydantic error type -> message in terms of JSON instead of Python."""


def _problem(detail: ErrorDetails, data: JsonValue) -> Problem:
    kind, context = detail["type"], detail.get("ctx", {})
    where, value = _place(detail["loc"], data)
    if kind == "missing":
        return Problem(where, "required but missing", "add it", "missing")
    if kind == "extra_forbidden":
        return _extra(detail["loc"], data, where)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        field = str(context["discriminator"]).strip("'")
        if kind == "union_tag_not_found":
            return Problem(where, f"has no {field!r}", f'add "{field}": "..."', "missing")
        if isinstance(value, dict):
            where, value = child_pointer(where, field), value[field]
        # Otherwise the value is a bare name that stands for an atom.
        allowed = [tag.strip().strip("'") for tag in str(context["expected_tags"]).split(",")]
        return _unknown(field, value, allowed, where)
    message = _MESSAGES.get(kind, detail["msg"])
    return Problem(
        where, f"{_format_value(value)} is refused", message[:1].lower() + message[1:], "value"
    )


def _unknown(field: str, name: JsonValue, allowed: Sequence[str], where: str) -> Problem:
    what = f"unknown {field} {_format_value(name)}"
    if not isinstance(name, str):
        fix = "name it in a string"
    elif field == "name" and name in BASE_POLICIES:
        what = f"base policy {name!r} reads the question"
        fix = f"use one of: {', '.join(allowed)}"
    else:
        fix = suggest_name(name, allowed)
        if field == "atom" and name in ATOMS:
            fix = f"that is one of {ATOMS[name].group}, this field takes another group; {fix}"
    return Problem(where, what, fix, "unknown_name")


def _extra(location: Sequence[int | str], data: JsonValue, where: str) -> Problem:
    _, parent = _place(location[:-1], data)
    name, atom = str(location[-1]), parent.get("atom") if isinstance(parent, dict) else None
    fields, of = _all_fields(), ""
    if isinstance(atom, str) and atom in ATOMS:
        fields, of = ATOMS[atom].call.parameters(), f" of {atom!r}"
    near = None if name in _all_fields() else _near(name, fields)
    fix = f"did you mean {near!r}?" if near else "remove it or correct its name"
    return Problem(where, f"not a known field{of}", fix, "unknown_field")


@cache
def _all_fields() -> tuple[str, ...]:
    """Names of all fields of a state and its parts."""
    schema = PruningState.model_json_schema()
    parts = [schema, *schema["$defs"].values()]
    return tuple(dict.fromkeys(name for part in parts for name in part.get("properties", ())))


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
    listed = ", ".join(allowed[:20]) + (", ..." if len(allowed) > 20 else "")
    return f"did you mean {near!r}?" if near else f"use one of: {listed or 'none installed'}"


def _near(name: str, allowed: Sequence[str]) -> str | None:
    if len(name) > 100:  # the comparison takes quadratic time, and no name is this long
        return None
    lower = {known.lower(): known for known in allowed}
    close = difflib.get_close_matches(name.lower(), list(lower), n=1, cutoff=0.6)
    return lower[close[0]] if close else None
