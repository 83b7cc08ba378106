from __future__ import annotations

import inspect
import pickle
import re

import pytest

import vllm_autoprune
from vllm_autoprune import errors
from vllm_autoprune.errors import AutopruneError, Problem, ProblemsError

PROBLEMS = (
    Problem("/budget/atom", "unknown atom 'x'", "did you mean 'y'?"),
    Problem("", "empty", "add it"),
)


ERRORS = [
    error
    for _, error in inspect.getmembers(errors, inspect.isclass)
    if issubclass(error, Exception) and error.__module__ == errors.__name__
]


def test_public_names() -> None:
    names = vllm_autoprune.__all__
    assert names == [
        "AutopruneError", "BudgetError", "ConfigError", "Grid", "Instruction", "PruningPolicy",
        "PruningState", "RefinedTokens", "RequestError", "SafetyRecord", "SelectionError",
        "StateError", "UnsupportedModelError", "VisualTokens", "load_state", "materialize",
        "refine", "safety_check",
    ]  # fmt: skip
    # Submodules become attributes of a package as they are imported; they are not its names.
    public = {
        name
        for name, value in vars(vllm_autoprune).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public == set(names)


def test_the_tree_of_errors_is_the_one_that_is_drawn() -> None:
    drawn = re.findall("── (\\w+)", errors.__doc__ or "")
    leaves = [e.__name__ for e in ERRORS if e not in (AutopruneError, ProblemsError)]
    assert sorted(drawn) == sorted(leaves)
    assert all(issubclass(error, AutopruneError) for error in ERRORS)
    for name in ("StateError", "BudgetError", "RequestError", "SelectionError"):
        assert issubclass(vars(errors)[name], ValueError), "errors about values are ValueErrors"


@pytest.mark.parametrize("error", [e for e in ERRORS if issubclass(e, ProblemsError)])
def test_a_message_lists_every_problem_and_survives_pickling(error: type[ProblemsError]) -> None:
    sent = error("state s.json", list(PROBLEMS))
    assert str(sent).splitlines() == [
        "state s.json: 2 problem(s)",
        "  - /budget/atom: unknown atom 'x' -> did you mean 'y'?",
        "  - /: empty -> add it",
    ]
    received = pickle.loads(pickle.dumps(sent))
    assert type(received) is error
    assert received.problems == PROBLEMS and received.subject == "state s.json"
    assert str(received) == str(sent)
