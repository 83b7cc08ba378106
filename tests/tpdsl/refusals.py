"""What is said of a state that is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tpdsl.samples import edited, shipped
from vllm_autoprune import StateError, load_state


def refused(source: str | Path) -> list[tuple[str, str]]:
    """Where and what, of every problem for which the state is refused."""
    with pytest.raises(StateError) as raised:
        load_state(source)
    assert raised.value.problems and all(p.fix for p in raised.value.problems)
    return [(problem.where, problem.what) for problem in raised.value.problems]


def refused_with(changes: dict[str, object]) -> list[tuple[str, str]]:
    """The same of the shipped state with some fields changed."""
    return refused(json.dumps(edited(shipped(), changes)))


def fixed(changes: dict[str, object]) -> str:
    """The advice given for the one problem of a changed state."""
    with pytest.raises(StateError) as raised:
        load_state(json.dumps(edited(shipped(), changes)))
    (problem,) = raised.value.problems
    return problem.fix
