"""Reading a state from text, a file or a shipped name, with every problem told at once.

Knows nothing about the meaning of atoms: the grammar is PruningState's.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pydantic import JsonValue, ValidationError
from pydantic_core import ErrorDetails

from vllm_autoprune.errors import Problem, StateError
from vllm_autoprune.tpdsl.state import SCHEMA, PruningState

MAX_BYTES = 1 << 20
"""States are a few kilobytes; anything near this size is not one."""

_PACKAGE = Path(__file__).resolve().parents[1]

# Installed wheels carry the states inside the package; a checkout keeps them beside it.
POLICY_FOLDERS = (_PACKAGE / "policies", _PACKAGE.parent / "policies")


def shipped_states() -> dict[str, Path]:
    """Name -> file of every state that comes with this installation."""
    files = (f for folder in POLICY_FOLDERS for f in sorted(folder.glob("*.json")))
    return {f.stem: f for f in reversed(list(files))}


def load_state(source: str | Path) -> PruningState:
    """The state in a file, in JSON text (starts with ``{``), or shipped under a name.

    Raises :class:`StateError` that lists every problem with its JSON pointer and the way to
    mend it. Nothing but that one file is read, nothing in it is run.
    """
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return _parse(source, "state text")
    path = _locate(source)
    return _parse(_read(path), str(source))


def _locate(source: str | Path) -> Path:
    path = Path(source)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except OSError as error:  # a name that is too long, a folder that may not be searched
        _refuse_unreadable(source, error)
    if is_file:
        return path
    shipped = shipped_states()
    if str(source) in shipped:
        return shipped[str(source)]
    if is_folder:
        _refuse(source, "is a folder", "name a JSON file")
    near = _nearest(str(source), list(shipped))
    _refuse(source, "no such file, and no shipped state of that name", near)


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            _refuse(path, f"larger than {MAX_BYTES} bytes", "a state is a few kilobytes of JSON")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        _refuse(path, f"not UTF-8 text ({error.reason} at byte {error.start})", "save it as UTF-8")
    except OSError as error:
        _refuse_unreadable(path, error)


def _refuse(subject: str | Path, what: str, mend: str) -> NoReturn:
    raise StateError(f"state {subject}", [Problem("", what, mend)])


def _refuse_unreadable(subject: str | Path, error: OSError) -> NoReturn:
    reason = error.strerror or type(error).__name__
    _refuse(subject, f"cannot be read ({reason})", "check the path and its permissions")


class _Duplicate(ValueError):
    """A key that occurs twice in one object."""


def _unique(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    found: dict[str, JsonValue] = {}
    for key, value in pairs:
        if key in found:
            raise _Duplicate(key)
        found[key] = value
    return found


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _parse(text: str, subject: str) -> PruningState:
    mend = "write one JSON object as `vllm_autoprune.PruningState` describes it"
    try:
        data: JsonValue = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        _refuse(subject, f"not JSON: {error.msg} at line {error.lineno} col {error.colno}", mend)
    except _Duplicate as error:
        _refuse(subject, f"key {str(error)!r} occurs twice in one object", "keep one of them")
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        _refuse(subject, f"not JSON: {reason}", mend)
    if not isinstance(data, dict):
        _refuse(subject, f"a state is a JSON object, not a {type(data).__name__}", mend)
    return _validate(data, subject)


def _validate(data: dict[str, JsonValue], subject: str) -> PruningState:
    version = data.get("schema")
    if version != SCHEMA:
        # Fields of another version mean something else, so nothing further can be said of them.
        said = "missing" if version is None else f"{version!r} is not known"
        what = f"schema version {said}; this version reads {SCHEMA!r}"
        mend = f'write "schema": "{SCHEMA}", or use the release that wrote the state'
        raise StateError(f"state {subject}", [Problem("/schema", what, mend)])
    try:
        return PruningState.model_validate(data)
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems = [
            _problem(detail, data)
            for detail in details
            # A list whose items all failed is also told to be too short: an echo.
            if not (detail["type"] == "too_short" and _deeper(detail["loc"], details))
        ]
        raise StateError(f"state {subject}", problems) from None


def _deeper(location: tuple[int | str, ...], details: Sequence[ErrorDetails]) -> bool:
    size = len(location)
    return any(d["loc"][:size] == location and len(d["loc"]) > size for d in details)


_PLAIN = {
    "tuple_type": "should be a list",
    "model_type": "should be an object",
    "model_attributes_type": 'should be an object such as {"atom": "..."}',
    "dataclass_type": "should be an object",
}
"""JSON's words for what pydantic says in Python's."""


def _problem(detail: ErrorDetails, data: JsonValue) -> Problem:
    kind, context = detail["type"], detail.get("ctx", {})
    where, value = _pointer(detail["loc"], data)
    if kind == "union_tag_invalid":
        field = str(context["discriminator"]).strip("'")
        allowed = [tag.strip().strip("'") for tag in str(context["expected_tags"]).split(",")]
        said = str(context["tag"])
        # Where a bare name stands for an atom, the name itself is what is wrong.
        where += f"/{field}" if isinstance(value, dict) else ""
        return Problem(where, f"unknown {field} {said!r}", _nearest(said, allowed))
    if kind == "union_tag_not_found":
        field = str(context["discriminator"]).strip("'")
        return Problem(where, f"has no {field!r}", f'add "{field}": "..."')
    if kind == "missing":
        return Problem(where, "required but missing", "add it")
    if kind == "extra_forbidden":
        parent = _lookup(data, where.rpartition("/")[0])
        of = f" of {parent['atom']!r}" if isinstance(parent, dict) and "atom" in parent else ""
        return Problem(where, f"not a known field{of}", "remove it or correct its name")
    shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
    message = _PLAIN.get(kind, detail["msg"])
    return Problem(where, f"{shown} is refused", message[:1].lower() + message[1:])


def _pointer(location: Sequence[int | str], data: JsonValue) -> tuple[str, JsonValue]:
    """JSON pointer of a pydantic location, without the union tags that pydantic puts into it."""
    pointer, here = "", data
    for step in location:
        if not isinstance(here, dict | list):
            break  # nothing is below a plain value: the step names a branch of a union
        # The state itself is no union, so a field that is missing there may be called as it is.
        tags = (here.get("atom"), here.get("name")) if pointer and isinstance(here, dict) else ()
        if step in tags and step not in here:
            continue
        pointer += "/" + str(step).replace("~", "~0").replace("/", "~1")
        here = _step(here, step)
    return pointer, here


def _step(here: JsonValue, step: int | str) -> JsonValue:
    if isinstance(here, dict):
        return here.get(str(step))
    if isinstance(here, list) and isinstance(step, int) and step < len(here):
        return here[step]
    return None


def _lookup(data: JsonValue, pointer: str) -> JsonValue:
    here = data
    for step in pointer.split("/")[1:]:
        here = _step(here, int(step) if step.isdigit() else step)
    return here


def _nearest(said: str, allowed: Sequence[str]) -> str:
    close = difflib.get_close_matches(said, allowed, n=1, cutoff=0.5)
    listed = ", ".join(allowed[:12]) + (", ..." if len(allowed) > 12 else "")
    return f"did you mean {close[0]!r}?" if close else f"use one of: {listed or 'none installed'}"
