from __future__ import annotations

import inspect
import pickle

import pytest

import vllm_autoprune
from vllm_autoprune import errors
from vllm_autoprune.errors import AutopruneError, Problem, ProblemsError

PROBLEMS = (
    Problem("/budget/atom", "unknown atom 'x'", "did you mean 'y'?"),
    Problem("", "empty", "add it"),
)


def every_error() -> list[type[Exception]]:
    actual = (c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, Exception))
    return [c for c in actual if c.__module__ == errors.__name__]


def with_problems() -> list[type[ProblemsError]]:
    return [c for c in every_error() if issubclass(c, ProblemsError)]


def test_public_names() -> None:
    assert vllm_autoprune.__all__ == [
        "AutopruneError",
        "BudgetError",
        "ConfigError",
        "Grid",
        "Instruction",
        "PruningPolicy",
        "PruningState",
        "RefinedTokens",
        "RequestError",
        "SafetyRecord",
        "SelectionError",
        "StateError",
        "UnsupportedModelError",
        "VisualTokens",
        "load_state",
        "materialize",
        "refine",
        "safety_check",
    ]
    assert all(name in vars(vllm_autoprune) for name in vllm_autoprune.__all__)


def test_all_lists_every_public_name() -> None:
    # Submodules become attributes of a package as they are imported; they are not its names.
    public = {
        name
        for name, value in vars(vllm_autoprune).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public == set(vllm_autoprune.__all__)


def test_every_error_is_an_autoprune_error() -> None:
    assert {error.__name__ for error in every_error()} >= {
        "StateError",
        "BudgetError",
        "ConfigError",
        "UnsupportedModelError",
        "SelectionError",
    }
    assert all(issubclass(error, AutopruneError) for error in every_error())


@pytest.mark.parametrize("name", ["StateError", "BudgetError", "RequestError", "SelectionError"])
def test_errors_about_values_are_value_errors(name: str) -> None:
    assert issubclass(vars(errors)[name], ValueError)


@pytest.mark.parametrize("error", with_problems())
def test_message_lists_every_problem_with_place_and_fix(
    error: type[ProblemsError],
) -> None:
    assert str(error("state s.json", PROBLEMS)).splitlines() == [
        "state s.json: 2 problem(s)",
        "  - /budget/atom: unknown atom 'x' -> did you mean 'y'?",
        "  - /: empty -> add it",
    ]


@pytest.mark.parametrize("error", with_problems())
def test_errors_survive_pickling(error: type[ProblemsError]) -> None:
    sent = error("state s.json", list(PROBLEMS))
    received = pickle.loads(pickle.dumps(sent))
    assert type(received) is error
    assert received.problems == PROBLEMS and received.subject == "state s.json"
    assert str(received) == str(sent)


def test_exception_tree_in_the_docstring_is_correct() -> None:
    drawn = [
        line.split("── ")[1].split()[0]
        for line in (errors.__doc__ or "").splitlines()
        if "── " in line
    ]
    leaves = [e.__name__ for e in every_error() if e not in (AutopruneError, ProblemsError)]
    assert sorted(drawn) == sorted(leaves)
