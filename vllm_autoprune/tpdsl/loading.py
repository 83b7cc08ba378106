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
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NoReturn, get_args

from pydantic import BaseModel, JsonValue, ValidationError
from pydantic_core import ErrorDetails

from vllm_autoprune.errors import Problem, StateError
from vllm_autoprune.tpdsl.atoms.reassembly import PRINTED
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.registry import ATOMS, AtomCall
from vllm_autoprune.tpdsl.state import SCHEMA, Constraints, PruningState, Scoring

DEFAULT_STATE = "pivoted_qr-searched-free"
"""Shipped state to begin with on every backbone, by docs/choosing.md, "Default states"."""

FOR_VIDEOS = f"{DEFAULT_STATE}-video"
"""The same state for images; it prunes videos too."""

MAX_BYTES = 1 << 20
"""Largest text, in bytes, that is read; a state has a few kilobytes."""

MAX_DEPTH = 32
"""Deepest nesting; a state itself has five levels, and provenance may have more."""

MAX_VALUES = 10_000
"""Largest number of values in one document, counting lists and objects."""

MAX_PROBLEMS = 64
"""Number of problems that are listed for one state; further problems are only counted."""

RULES = (
    "file",
    "size",
    "encoding",
    "syntax",
    "duplicate_key",
    "surrogate",
    "number",
    "depth",
    "values",
    "limit_below_budget",
    "r_min_above_budget",
)
"""Kinds of problems that a JSON Schema cannot express; ``docs/states.md`` explains each of them."""

_PACKAGE = Path(__file__).resolve().parents[1]

# A wheel has the shipped states inside the package, and a checkout has them beside it.
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
    subject = "state"
    try:
        if isinstance(source, Mapping):
            text = _write_text(source)
        elif isinstance(source, str) and source.lstrip("\ufeff \t\r\n").startswith("{"):
            subject = "state text"
            text = source
        else:
            subject = f"state {escape_unprintable(str(source), 200)}"
            text = _read_text(source)
        return _validate(parse_json(text))
    except StateError as error:
        raise StateError(subject, error.problems) from None


# Text is checked in stages: file, limits, values. A problem of one stage is reported alone.


_LARGER = f"larger than {MAX_BYTES} bytes"
_SHORTEN = "a state is a few kilobytes"
_NESTED = f"levels, at most {MAX_DEPTH} are read"
_FLATTEN = "a state is five levels deep: reduce the nesting"
_ONE_OBJECT = "write one JSON object as `vllm-autoprune atoms --schema` describes it"
_WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)


def _write_text(source: Mapping[str, object]) -> str:
    """JSON text of a mapping, which is then checked like any other text."""
    try:
        return json.dumps(dict(source), ensure_ascii=False)
    except RecursionError:
        what = f"nested too deeply: more than {MAX_DEPTH} {_NESTED}"
        raise StateError.of("", what, _FLATTEN, kind="depth") from None
    except (TypeError, ValueError) as error:
        fix = "use a dictionary such as json.load returns"
        raise StateError.of("", str(error), fix, kind="syntax") from None


def _read_text(source: str | Path) -> str:
    """Text of the file at a path, or else of the shipped state with that name.

    The size bound applies while reading, so it also holds for files that grow or report a wrong
    size. Pipes and devices, which could block, are never opened.
    """
    try:
        path = _find_file(source)
        # The path may be replaced in the meantime, so the checks apply to the open file.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _require_regular(os.fstat(handle).st_mode)
            content = b""
            while more := os.read(handle, MAX_BYTES + 1 - len(content)):
                content += more
        finally:
            os.close(handle)
    except OSError as error:  # such as a name that is too long, or a missing permission
        what = f"cannot be read ({error.strerror or type(error).__name__})"
        fix = "check the path and its permissions"
        raise StateError.of("", what, fix, kind="file") from None
    if len(content) > MAX_BYTES:
        raise StateError.of("", _LARGER, _SHORTEN, kind="size")
    try:
        # UTF-16 without a byte order mark may be valid UTF-8, but contains zero bytes.
        if not content.startswith(_WIDE_MARKS) and b"\0" not in content[:4]:
            return content.decode("utf-8")
        what = "not UTF-8 text (it looks like UTF-16 or UTF-32)"
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text ({error.reason} at byte {error.start})"
    raise StateError.of("", what, "save it as UTF-8", kind="encoding")


def _find_file(source: str | Path) -> Path:
    """The file at a path, or else of the shipped state with that name; may raise OSError."""
    if not str(source).strip():
        what = "is empty, as where a variable is not set"
        raise StateError.of(
            "", what, "name a JSON file or a shipped state", kind="file"
        )
    path = Path(source)
    shipped = shipped_states()
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):
        mode = 0  # not a path, but it may be the name of a shipped state
    if str(source) in shipped and (mode == 0 or stat.S_ISDIR(mode)):
        path = shipped[str(source)]
        mode = path.stat().st_mode
    if mode == 0:
        what = "no such file, and no shipped state of that name"
        fix = suggest_name(str(source), list(shipped))
        raise StateError.of("", what, fix, kind="file")
    _require_regular(mode)
    return path


def _require_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        what = "is a folder" if stat.S_ISDIR(mode) else "is no regular file"
        raise StateError.of("", what, "name a JSON file", kind="file")


def _require_limits(text: str) -> None:
    """Refuse text beyond the limits that are checked before parsing.

    Depth and number of values are among them, because the parser's own recursion limit depends on
    the process and reaching it may end the process.
    """
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise StateError.of("", _LARGER, _SHORTEN, kind="size")
    if text.startswith("\ufeff"):
        what = "begins with a byte order mark"
        raise StateError.of("", what, "save it as UTF-8 without one", kind="encoding")
    if not text.strip():
        raise StateError.of("", "is empty", "write one JSON object", kind="syntax")
    # Exact up to the first syntax error, at which a parser would stop too.
    outside = "".join(text.replace("\\\\", "").replace('\\"', "").split('"')[::2])
    steps = (1 if char in "[{" else -1 for char in outside if char in "[]{}")
    depth = max(accumulate(steps), default=0)
    if depth > MAX_DEPTH:
        what = f"nested too deeply: {depth} {_NESTED}"
        raise StateError.of("", what, _FLATTEN, kind="depth")
    values = 1 + sum(outside.count(char) for char in ",[{")
    if values > MAX_VALUES:
        what = f"about {values} values, at most {MAX_VALUES} are read"
        fix = "a state has some dozens: shorten its lists"
        raise StateError.of("", what, fix, kind="values")


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The object of its key-value pairs; raises if two pairs have the same key."""
    value = dict(pairs)
    if len(value) < len(pairs):
        ((name, _),) = Counter(key for key, _ in pairs).most_common(1)
        what = f"key {_format_value(name)} occurs twice in one object"
        raise StateError.of("", what, "keep one of them", kind="duplicate_key")
    return value


def _refuse_constant(text: str) -> NoReturn:
    """Refuse NaN and the infinities, which Python's parser accepts."""
    what = f"{text} is not a JSON number"
    raise StateError.of("", what, "write a finite number", kind="syntax")


def _parse_number(text: str) -> float:
    # int() is slow for, or refuses, very long texts.
    integral = text.lstrip("-").isdigit() and len(text) <= 310
    value = int(text) if integral else float(text)
    if abs(value) > sys.float_info.max:
        what = f"{escape_unprintable(text, 20)} is larger than any 64-bit float"
        raise StateError.of("", what, "write a smaller number", kind="number")
    # Larger numbers stay floats: no field of a state takes an integer of that size.
    return int(value) if float(value).is_integer() and abs(value) < 2**63 else value


def parse_json(text: str) -> JsonValue:
    """Parse JSON text; raises :class:`StateError` at the first thing that is not strict JSON.

    Numbers without a fractional part become integers (``2.0`` is 2, as in JSON Schema).
    """
    _require_limits(text)
    try:
        value: JsonValue = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_parse_number,
            parse_int=_parse_number,
        )
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        what = f"not JSON: {error.msg} at line {error.lineno} col {error.colno}"
        raise StateError.of("", what, _ONE_OBJECT, kind="syntax") from None
    except UnicodeEncodeError as error:
        # A surrogate, in the text or escaped in it, which UTF-8 cannot encode.
        near = _format_value(error.object[max(0, error.start - 20) : error.end])
        what = f"half of a surrogate pair at the end of {near}"
        fix = "write the whole character"
        raise StateError.of("", what, fix, kind="surrogate") from None
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


# Values are checked by pydantic models, after rules on two fields.


def _validate(data: JsonValue) -> PruningState:
    if not isinstance(data, dict):
        what = f"a state is a JSON object, not {_format_value(data)}"
        raise StateError.of("", what, _ONE_OBJECT, kind="value")
    version = data.get("schema")
    if version != SCHEMA:
        # The fields of another schema version may have other meanings, so they are not checked.
        status = "missing"
        if version is not None:
            status = f"{_format_value(version)} is not known"
        what = f"schema version {status}; this version reads {SCHEMA!r}"
        fix = f'write "schema": "{SCHEMA}", or use the release that wrote the state'
        raise StateError.of("/schema", what, fix, kind="version")
    try:
        state = PruningState.model_validate(data)
    except ValidationError as error:
        raise StateError("", _list_problems(error, data)) from None
    problems = state.budget_problems(*state.budget.range())
    if state.frames is not None:
        problems += state.budget_problems(*state.frames.tokens.range(), video=True)
    if problems:
        raise StateError("", problems)
    if len(state.dumps().encode()) > MAX_BYTES:
        what = f"{_LARGER} when written out with its defaults"
        raise StateError.of("", what, "shorten its provenance", kind="size")
    return state


def _list_problems(error: ValidationError, data: JsonValue) -> list[Problem]:
    """The problems that pydantic found: up to ``MAX_PROBLEMS``, and the number of the others."""
    details = error.errors(include_url=False, include_input=False)
    outer = {
        detail["loc"][:size] for detail in details for size in range(len(detail["loc"]))
    }
    # If all items of a list are invalid, pydantic also reports the list as too short.
    details = [
        detail
        for detail in details
        if detail["type"] != "too_short" or detail["loc"] not in outer
    ]
    problems = [_problem(detail, data) for detail in details[:MAX_PROBLEMS]]
    omitted = len(details[MAX_PROBLEMS:])
    lacks_parts = any(d["type"] == "missing" and len(d["loc"]) == 1 for d in details)
    if lacks_parts and not omitted:
        fix = f"begin with the smallest one: {json.dumps(SMALLEST)}"
        problems.append(Problem("", "is no whole state", fix, "missing"))
    if omitted:
        fix = "fix the ones above first"
        problems.append(Problem("", f"{omitted} more problems", fix, "more"))
    return problems


_PARTS: Mapping[str, type[BaseModel]] = {
    "/scoring": Scoring,
    "/constraints": Constraints,
}

SMALLEST: dict[str, JsonValue] = {
    "schema": SCHEMA,
    "name": "mine",
    "base_policy": {"name": "norm"},
    "budget": {"atom": "fixed_budget@32"},
    "scoring": {
        "signals": [{"atom": "visual_token_norm_saliency"}],
        "kernel": {"atom": "pairwise_cosine_kernel"},
        "fusion": {"atom": "weighted_product_fusion"},
    },
    "constraints": {
        "pool": [{"atom": "quality_pool_builder"}],
        "selector": {"atom": "reference_strict_preservation_selector"},
    },
    "reassembly": {"atom": "mean_residual"},
    "safety": ["preserve_budget"],
}
"""A state of nothing but what is required."""

_MESSAGES = {
    "tuple_type": "should be a list",
    "model_type": "should be an object",
    "model_attributes_type": 'should be an object such as {"atom": "..."}',
    "dict_type": "should be an object",
}
"""Pydantic error type -> message in terms of JSON instead of Python."""

_BOUNDS = {"less_than", "less_than_equal", "greater_than", "greater_than_equal"}
"""Pydantic error types of numbers outside their range."""


def _problem(detail: ErrorDetails, data: JsonValue) -> Problem:
    kind = detail["type"]
    context = detail.get("ctx", {})
    where, value, parent = _locate(detail["loc"], data)
    if kind == "missing":
        return _missing(where, str(detail["loc"][-1]), parent)
    if kind == "extra_forbidden":
        name = str(detail["loc"][-1])
        atom = parent.get("atom") if isinstance(parent, dict) else None
        fields = _all_fields()
        of = ""
        if isinstance(atom, str) and atom in ATOMS:
            fields = ATOMS[atom].call.parameters()
            of = f" of {atom!r}"
        near = None if name in _all_fields() else _near(name, fields)
        fix = f"did you mean {near!r}?" if near else "remove it or correct its name"
        return Problem(where, f"not a known field{of}", fix, "unknown_field")
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        field = str(context["discriminator"]).strip("'")
        if kind == "union_tag_not_found":
            return Problem(
                where, f"has no {field!r}", f'add "{field}": "..."', "missing"
            )
        if isinstance(value, dict):
            where = child_pointer(where, field)
            value = value[field]
        # Otherwise the value is a bare name, which stands for an atom.
        allowed = [
            tag.strip().strip("'") for tag in str(context["expected_tags"]).split(",")
        ]
        return _unknown(field, value, allowed, where)
    message = _MESSAGES.get(kind, detail["msg"])
    if kind in _BOUNDS and _accepts_null(parent, where.rpartition("/")[2]):
        message += ", or null"
    what = f"{_format_value(value)} is refused"
    return Problem(where, what, message[:1].lower() + message[1:], "value")


def _find_call(parent: JsonValue) -> type[AtomCall] | None:
    """Model of the atom call that an object is meant to be; None if it names no atom."""
    atom = parent.get("atom") if isinstance(parent, dict) else None
    return ATOMS[atom].call if isinstance(atom, str) and atom in ATOMS else None


def _accepts_null(parent: JsonValue, name: str) -> bool:
    """Whether the parameter ``name`` of the atom that ``parent`` calls may be null."""
    call = _find_call(parent)
    field = None if call is None else call.model_fields.get(name)
    return field is not None and type(None) in get_args(field.annotation)


def _missing(where: str, name: str, parent: JsonValue) -> Problem:
    """Problem of a required field: its description, and its value in the smallest state as fix."""
    outside = where.rpartition("/")[0]
    model: type[BaseModel] = _find_call(parent) or _PARTS.get(outside, PruningState)
    what = "required but missing"
    if (field := model.model_fields.get(name)) is not None:
        meaning = field.description or (field.annotation and field.annotation.__doc__)
        what += f": {meaning.rstrip('.')}" if meaning else ""
    part = SMALLEST.get(outside[1:]) if outside else SMALLEST
    fix = "add it"
    if isinstance(part, dict) and name in part:
        fix = f"add {json.dumps({name: part[name]})[1:-1]}"
    return Problem(where, what, fix, "missing")


def _unknown(
    field: str, name: JsonValue, allowed: Sequence[str], where: str
) -> Problem:
    what = f"unknown {field} {_format_value(name)}"
    if not isinstance(name, str):
        fix = "name it in a string"
    elif field == "name" and name in BASE_POLICIES:
        what = f"base policy {name!r} reads the question"
        fix = f"use one of: {', '.join(allowed)}"
    else:
        fix = suggest_name(name, allowed)
        if printed := PRINTED.get(name.removeprefix("reassemble/")):
            fix = f"its name is {printed!r}"
        if field == "atom" and name in ATOMS:
            group = ATOMS[name].group
            is_same = any(ATOMS[other].group == group for other in allowed)
            taken = "others of it" if is_same else "another group"
            fix = f"that is one of {group}, this field takes {taken}; {fix}"
    return Problem(where, what, fix, "unknown_name")


@cache
def _all_fields() -> tuple[str, ...]:
    """Names of all fields of a state and its parts."""
    schema = PruningState.model_json_schema()
    parts = [schema, *schema["$defs"].values()]
    return tuple(
        dict.fromkeys(name for part in parts for name in part.get("properties", ()))
    )


def _locate(
    location: Sequence[int | str], data: JsonValue
) -> tuple[str, JsonValue, JsonValue]:
    """JSON pointer, value and parent value of a pydantic location.

    Pydantic locations contain union tags, which are not in the JSON. A missing value is None.
    """
    where = ""
    value = data
    parent = None
    for step in location:
        if isinstance(value, dict):
            # The top level is not a union, so a missing field there may have the name of a tag.
            if (
                where
                and step not in value
                and step in (value.get("atom"), value.get("name"))
            ):
                continue
            below = value.get(str(step))
        elif isinstance(value, list) and isinstance(step, int):
            below = value[step] if step < len(value) else None
        else:
            break  # a scalar has nothing below it: the step is the tag of a union
        where, value, parent = child_pointer(where, step), below, value
    return where, value, parent


def suggest_name(name: str, allowed: Sequence[str]) -> str:
    """Suggested fix for an unknown name: the most similar allowed name, or all allowed names."""
    near = _near(name, allowed)
    listed = ", ".join(allowed[:24]) + (", ..." if len(allowed) > 24 else "")
    return (
        f"did you mean {near!r}?"
        if near
        else f"use one of: {listed or 'none installed'}"
    )


def _near(name: str, allowed: Sequence[str]) -> str | None:
    if len(name) > 100:  # the comparison takes quadratic time, and no name is this long
        return None
    lower = {candidate.lower(): candidate for candidate in allowed}
    close = difflib.get_close_matches(name.lower(), list(lower), n=1, cutoff=0.6)
    return lower[close[0]] if close else None
