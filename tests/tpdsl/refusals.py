"""Problems reported for refused states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tpdsl.samples import edited, shipped
from vllm_autoprune import StateError, load_state


def refused(source: str | Path) -> list[tuple[str, str]]:
    """(where, what) of every problem of a refused state."""
    with pytest.raises(StateError) as raised:
        load_state(source)
    assert raised.value.problems and all(p.fix for p in raised.value.problems)
    return [(problem.where, problem.what) for problem in raised.value.problems]


def refused_with(changes: dict[str, object]) -> list[tuple[str, str]]:
    """(where, what) of every problem of the shipped state with some fields changed."""
    return refused(json.dumps(edited(shipped(), changes)))


def fixed(changes: dict[str, object]) -> str:
    """The fix proposed for the only problem of a changed state."""
    with pytest.raises(StateError) as raised:
        load_state(json.dumps(edited(shipped(), changes)))
    (problem,) = raised.value.problems
    return problem.fix
