"""Reading a state from text, a file or a shipped name, with every problem told at once.

Knows nothing about the meaning of atoms: the grammar is PruningState's.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import NoReturn

from pydantic import JsonValue, ValidationError

from vllm_autoprune.errors import Problem, StateError
from vllm_autoprune.tpdsl.diagnosis import diagnose, nearest
from vllm_autoprune.tpdsl.rules import contradictions
from vllm_autoprune.tpdsl.shown import printable, shown
from vllm_autoprune.tpdsl.state import SCHEMA, PruningState
from vllm_autoprune.tpdsl.text import MAX_BYTES, parse, read_text, unreadable

MAX_TOLD = 64
"""Problems told of one state; the rest is counted."""

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
    if isinstance(source, str) and source.lstrip("\ufeff \t\r\n").startswith("{"):
        return _state(source, "state text")
    subject = f"state {printable(str(source), 200)}"
    return _state(read_text(_locate(source, subject), subject), subject)


def _locate(source: str | Path, subject: str) -> Path:
    path, shipped = Path(source), shipped_states()
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
        if not (is_folder and str(source) in shipped):
            return path
    except (FileNotFoundError, NotADirectoryError, ValueError):
        pass  # no path, or none that can be one: it may still be a name
    except OSError as error:  # a name that is too long, a folder that may not be searched
        raise unreadable(subject, error) from None
    if str(source) in shipped:
        return shipped[str(source)]
    what = "no such file, and no shipped state of that name"
    mend = nearest(str(source), list(shipped))
    raise StateError(subject, [Problem("", what, mend, "file")])


def _state(text: str, subject: str) -> PruningState:
    data, problems = parse(text, subject)
    if not isinstance(data, dict):
        what = f"a state is a JSON object, not {shown(data)}"
        mend = "write one JSON object as `vllm-autoprune schema` describes it"
        _refuse(subject, [*problems, Problem("", what, mend, "value")])
    if unknown := _version(data):
        # Fields of another version mean something else, so nothing further can be said of them.
        _refuse(subject, [*problems, unknown])
    # What a text cannot hold was replaced, and the replacement is not what is wrong.
    told = {problem.where for problem in problems if problem.kind != "duplicate_key"}
    left = 0
    try:
        state = PruningState.model_validate(data)
    except ValidationError as error:
        wrong, left = diagnose(error, data, MAX_TOLD)
        problems += [problem for problem in wrong if problem.where not in told]
    problems += contradictions(data)
    if problems:
        _refuse(subject, problems, left)
    if len(state.dumps().encode()) > MAX_BYTES:
        what = f"larger than {MAX_BYTES} bytes when it is written out, with its defaults"
        _refuse(subject, [Problem("", what, "shorten its provenance", "size")])
    return state


def _version(data: dict[str, JsonValue]) -> Problem | None:
    version = data.get("schema")
    if version == SCHEMA:
        return None
    said = "missing" if version is None else f"{shown(version)} is not known"
    what = f"schema version {said}; this version reads {SCHEMA!r}"
    mend = f'write "schema": "{SCHEMA}", or use the release that wrote the state'
    return Problem("/schema", what, mend, "version")


def _refuse(subject: str, problems: list[Problem], left: int = 0) -> NoReturn:
    left += len(problems[MAX_TOLD:])
    if left:
        more = Problem("", f"{left} more problem(s)", "mend the ones above first", "more")
        problems = [*problems[:MAX_TOLD], more]
    raise StateError(subject, problems)
