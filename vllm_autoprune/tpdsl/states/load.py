"""Loading and validation of states; all problems are reported at once."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from pydantic import JsonValue, ValidationError

from vllm_autoprune.errors import Problem, StateError
from vllm_autoprune.tpdsl.states.diagnosis import diagnose, suggest_name
from vllm_autoprune.tpdsl.states.json_text import parse_json, read_error, read_text
from vllm_autoprune.tpdsl.states.json_values import (
    MAX_BYTES,
    copy_json,
    escape_unprintable,
    format_value,
)
from vllm_autoprune.tpdsl.states.rules import find_contradictions
from vllm_autoprune.tpdsl.states.state import SCHEMA, PruningState

MAX_PROBLEMS = 64
"""Problems that are listed for one state; further ones are counted."""

_PACKAGE = Path(__file__).resolve().parents[2]

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
        return state_from_mapping(source)
    if isinstance(source, str) and source.lstrip("\ufeff \t\r\n").startswith("{"):
        return state_from_text(source)
    subject = f"state {escape_unprintable(str(source), 200)}"
    return state_from_text(read_text(_locate(source, subject), subject), subject)


def state_from_text(text: str, subject: str = "state text") -> PruningState:
    """Load a state from JSON text; ``subject`` names it in errors."""
    return _validate(*parse_json(text, subject), subject)


def state_from_mapping(data: Mapping[str, object], subject: str = "state") -> PruningState:
    """Load a state from a mapping of JSON values, with the same checks as its text."""
    return _validate(*copy_json(data, subject), subject)


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
    if unknown := _unknown_version(data):
        # Fields of another version may have another meaning, so they are not checked.
        _refuse(subject, problems if unknown.where in replaced else [*problems, unknown])
    omitted = 0
    try:
        state = PruningState.model_validate(data)
    except ValidationError as error:
        invalid, omitted = diagnose(error, data, MAX_PROBLEMS)
        problems += [problem for problem in invalid if problem.where not in replaced]
    problems += find_contradictions(data)
    if problems:
        _refuse(subject, problems, omitted)
    if len(state.dumps().encode()) > MAX_BYTES:
        what = f"larger than {MAX_BYTES} bytes when written out with its defaults"
        _refuse(subject, [Problem("", what, "shorten its provenance", "size")])
    return state


def _unknown_version(data: dict[str, JsonValue]) -> Problem | None:
    version = data.get("schema")
    if version == SCHEMA:
        return None
    status = "missing" if version is None else f"{format_value(version)} is not known"
    what = f"schema version {status}; this version reads {SCHEMA!r}"
    fix = f'write "schema": "{SCHEMA}", or use the release that wrote the state'
    return Problem("/schema", what, fix, "version")


def _refuse(subject: str, problems: list[Problem], omitted: int = 0) -> NoReturn:
    omitted += len(problems[MAX_PROBLEMS:])
    if omitted:
        more = Problem("", f"{omitted} more problem(s)", "fix the ones above first", "more")
        problems = [*problems[:MAX_PROBLEMS], more]
    raise StateError(subject, problems)
