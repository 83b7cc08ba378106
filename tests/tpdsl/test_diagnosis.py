"""Problems of refused states: their place, and how to fix them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.tpdsl.samples import DELETE, edited, refused, refused_with, sample
from vllm_autoprune import StateError, load_state
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.registry import ATOMS


def fixed(changes: dict[str, object]) -> str:
    """The fix proposed for the only problem of a changed state."""
    with pytest.raises(StateError) as raised:
        load_state(json.dumps(edited(sample(), changes)))
    (problem,) = raised.value.problems
    return problem.fix


@pytest.mark.parametrize(
    ("changes", "where", "what"),
    [
        (
            {"/scoring/signals/1/atom": "attention_proxy_salience"},
            "/scoring/signals/1/atom",
            'unknown atom "attention_proxy_salience"',
        ),
        ({"/base_policy/name": "cdprune"}, "/base_policy/name", 'unknown name "cdprune"'),
        ({"/budget/atom": "fixed_budget@33"}, "/budget/atom", 'unknown atom "fixed_budget@33"'),
        ({"/budget/atom": 32}, "/budget/atom", "unknown atom 32"),
        # An atom of another group is as invalid here as one that does not exist.
        ({"/reassembly/atom": "pairwise_cosine_kernel"}, "/reassembly/atom", "unknown atom"),
        ({"/safety/1": "mean_residual"}, "/safety/1", 'unknown atom "mean_residual"'),
        ({"/safety/1": {"atom": "x"}}, "/safety/1/atom", 'unknown atom "x"'),
        ({"/scoring/kernel/atom": DELETE}, "/scoring/kernel", "has no 'atom'"),
        ({"/budget": DELETE}, "/budget", "required but missing"),
        ({"/name": "budget", "/budget": DELETE}, "/budget", "required but missing"),
        ({"/scoring/fusion": DELETE}, "/scoring/fusion", "required but missing"),
        ({"/colour": 1}, "/colour", "not a known field"),
        ({"/a~1b": 1}, "/a~01b", "not a known field"),
        (
            {"/scoring/signals/2/radius": 1},
            "/scoring/signals/2/radius",
            "not a known field of 'spatial_centrality_prior'",
        ),
        ({"/reassembly/strength": 1.01}, "/reassembly/strength", "1.01 is refused"),
        ({"/scoring/signals/0/sign": "±"}, "/scoring/signals/0/sign", '"±" is refused'),
        ({"/scoring/signals/0/weight": "0.4"}, "/scoring/signals/0/weight", '"0.4" is refused'),
        ({"/scoring/signals/0/weight": True}, "/scoring/signals/0/weight", "true is refused"),
        ({"/constraints/selector/q_e": True}, "/constraints/selector/q_e", "true is refused"),
        ({"/constraints/selector/q_e": "2"}, "/constraints/selector/q_e", '"2" is refused'),
        ({"/constraints/selector/r_min": -1}, "/constraints/selector/r_min", "-1 is refused"),
        ({"/base_policy/params/theta": 1}, "/base_policy/params/theta", "1 is refused"),
        ({"/scoring/signals": []}, "/scoring/signals", "[] is refused"),
        ({"/scoring/signals": {}}, "/scoring/signals", "{} is refused"),
        ({"/scoring/signals": "all"}, "/scoring/signals", '"all" is refused'),
        ({"/scoring": None}, "/scoring", "null is refused"),
        ({"/budget": "fixed_budget@32"}, "/budget", '"fixed_budget@32" is refused'),
        ({"/safety/0": 5}, "/safety/0", "5 is refused"),
        ({"/name": 7}, "/name", "7 is refused"),
        ({"/name": "x" * 129}, "/name", f'"{"x" * 57}..." is refused'),
        ({"/$schema": 7}, "/$schema", "7 is refused"),
        ({"/safety/1": "deterministic"}, "/safety", '[{"atom": "preserve_budget"}, "determ'),
        ({"/budget/limit": 31}, "/budget/limit", "limit 31 is below the state's own K = 32"),
        (
            {"/constraints/selector/r_min": 33},
            "/constraints/selector/r_min",
            "r_min = 33 reference tokens cannot be kept of K = 32",
        ),
        ({"/provenance": {"seed": 0.5}}, "/provenance/seed", "0.5 is refused"),
        ({"/provenance": {"notes": ["a"] * 99}}, "/provenance/notes", '["a", "a"'),
    ],
)
def test_single_problem_is_reported_at_its_pointer(
    changes: dict[str, object], where: str, what: str
) -> None:
    ((actual, message),) = refused_with(changes)
    assert actual == where and message.startswith(what)
    assert len(message) < 100


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        (
            {"/scoring/signals/1/atom": "atention_proxy_saliency"},
            "did you mean 'attention_proxy_saliency'?",
        ),
        ({"/safety/0": "preserve_bugdet"}, "did you mean 'preserve_budget'?"),
        ({"/safety/0": "PRESERVE_BUDGET"}, "did you mean 'preserve_budget'?"),
        ({"/base_policy/name": "zzz"}, f"use one of: {', '.join(BASE_POLICIES)}"),
        (
            {"/reassembly/atom": "pairwise_cosine_kernal"},
            f"use one of: {', '.join(ATOMS.names('reassembly')[:20])}",
        ),
        ({"/budget/atom": 7}, "name it in a string"),
        ({"/reassembly/strength": 2}, "input should be less than or equal to 1"),
        ({"/scoring/kernel/atom": DELETE}, 'add "atom": "..."'),
        ({"/scoring/signals/0/wieght": 1}, "remove it: 'weight' is already present"),
        (
            {"/scoring/signals/1/temperature": DELETE, "/scoring/signals/1/temprature": 1},
            "did you mean 'temperature'?",
        ),
        ({"/budget/limit": DELETE, "/budget/Limit": 64}, "did you mean 'limit'?"),
        ({"/scoring/fussion": 1}, "remove it: 'fusion' is already present"),
        ({"/provenance": {"note": ""}}, "did you mean 'notes'?"),
        (
            {"/base_policy/params/theta": DELETE, "/base_policy/params/teta": 0.5},
            "did you mean 'theta'?",
        ),
        ({"/base_policy/parms": {}}, "remove it: 'params' is already present"),
        ({"/zzz": 1}, "remove it or correct its name"),
        ({"/provenance": DELETE, "/provenence": {}}, "did you mean 'provenance'?"),
        ({"/budget/limit": 31}, "write 32 or more, or null for no limit"),
        (
            {"/constraints/selector/r_min": 33},
            "write 32 or less, or null, which means K - q_e",
        ),
        ({"/safety/1": "deterministic"}, "list deterministic once"),
    ],
)
def test_each_problem_says_how_to_fix_it(changes: dict[str, object], fix: str) -> None:
    assert fixed(changes) == fix or fixed(changes).startswith(f"{fix}, ...")


def test_atom_of_another_group_is_not_reported_as_a_typo() -> None:
    message = fixed({"/reassembly/atom": "pairwise_cosine_kernel"})
    assert message.startswith("that is one of similarity_kernel, this field takes another group; ")


def test_rules_on_two_fields_are_reported_with_all_problems() -> None:
    actual = refused_with(
        {
            "/name": 7,
            "/budget/limit": 16,
            "/constraints/selector/r_min": 100,
            "/constraints/pool": [],
        }
    )
    assert [where for where, _ in actual] == [
        "/name",
        "/constraints/pool",
        "/budget/limit",
        "/constraints/selector/r_min",
    ]


def test_rules_on_invalid_fields_are_skipped() -> None:
    actual = refused_with({"/budget/limit": 0, "/constraints/selector/r_min": -1})
    assert [where for where, _ in actual] == ["/budget/limit", "/constraints/selector/r_min"]


def test_all_problems_are_reported_together() -> None:
    actual = refused_with(
        {
            "/base_policy/name": "nobody",
            "/budget/limit": 0,
            "/scoring/signals/0/weight": 9,
            "/scoring/signals/1/atom": "unheard_of",
            "/scoring/signals/2/sigma": 0,
            "/scoring/kernel": DELETE,
            "/constraints/selector/q_e": "many",
            "/reassembly/power": 1,
            "/safety/3": "pray",
            "/extra": [],
        }
    )
    assert [where for where, _ in actual] == [
        "/base_policy/name",
        "/budget/limit",
        "/scoring/signals/0/weight",
        "/scoring/signals/1/atom",
        "/scoring/signals/2/sigma",
        "/scoring/kernel",
        "/constraints/selector/q_e",
        "/reassembly/power",
        "/safety/3",
        "/extra",
    ]


def test_a_list_of_bad_items_is_not_also_called_too_short() -> None:
    actual = refused_with({"/scoring/signals": [{"atom": "x"}, {"atom": "y"}]})
    assert [where for where, _ in actual] == [
        "/scoring/signals/0/atom",
        "/scoring/signals/1/atom",
    ]


@pytest.mark.parametrize("data", [{}, {"a": 1}, {"name": None}])
def test_nearly_empty_state(data: dict[str, Any]) -> None:
    assert refused(json.dumps(data))[0][0] == "/schema"
    rest = {"schema": "autoprune-state/1", **data}
    assert len(refused(json.dumps(rest))) >= 7
