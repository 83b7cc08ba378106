"""Problems of refused states: their place, their fix, and that the schema refuses them too."""

from __future__ import annotations

import json

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.tpdsl.samples import DELETE, Changes, edited, refused, refused_with, sample
from vllm_autoprune import PruningState, StateError, load_state
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import RULES
from vllm_autoprune.tpdsl.registry import ATOMS

ACCEPTS = jsonschema.Draft202012Validator(PruningState.model_json_schema()).is_valid

CASES: list[tuple[Changes, str, str, str]] = [
    ({"/scoring/signals/1/atom": "atention_proxy_saliency"}, "/scoring/signals/1/atom",
     'unknown atom "atention_proxy_saliency"', "did you mean 'attention_proxy_saliency'?"),
    ({"/base_policy/name": "zzz"}, "/base_policy/name", 'unknown name "zzz"',
     f"use one of: {', '.join(BASE_POLICIES)}"),
    ({"/budget/atom": 32}, "/budget/atom", "unknown atom 32", "name it in a string"),
    # An atom of another group is as invalid here as one that does not exist, and no typo.
    ({"/reassembly/atom": "pairwise_cosine_kernel"}, "/reassembly/atom", "unknown atom",
     "that is one of similarity_kernel, this field takes another group; "),
    ({"/reassembly/atom": "pairwise_cosine_kernal"}, "/reassembly/atom", "unknown atom",
     f"use one of: {', '.join(ATOMS.names('reassembly')[:20])}, ..."),
    ({"/safety/0": "PRESERVE_BUGDET"}, "/safety/0", 'unknown atom "PRESERVE_BUGDET"',
     "did you mean 'preserve_budget'?"),
    ({"/safety/1": {"atom": "x"}}, "/safety/1/atom", 'unknown atom "x"', "use one of: "),
    ({"/scoring/kernel/atom": DELETE}, "/scoring/kernel", "has no 'atom'", 'add "atom": "..."'),
    ({"/budget": DELETE}, "/budget", "required but missing", "add it"),
    ({"/name": "budget", "/budget": DELETE}, "/budget", "required but missing", "add it"),
    ({"/scoring/fusion": DELETE}, "/scoring/fusion", "required but missing", "add it"),
    ({"/zzz": 1}, "/zzz", "not a known field", "remove it or correct its name"),
    ({"/a~1b": 1}, "/a~01b", "not a known field", "remove it"),
    ({"/scoring/signals/2/radius": 1}, "/scoring/signals/2/radius",
     "not a known field of 'spatial_centrality_prior'", "remove it"),
    ({"/scoring/signals/0/wieght": 1}, "/scoring/signals/0/wieght", "not a known field",
     "remove it: 'weight' is already present"),
    ({"/scoring/signals/1/temperature": DELETE, "/scoring/signals/1/temprature": 1},
     "/scoring/signals/1/temprature", "not a known field", "did you mean 'temperature'?"),
    ({"/budget/limit": DELETE, "/budget/Limit": 64}, "/budget/Limit", "not a known field",
     "did you mean 'limit'?"),
    ({"/scoring/fussion": 1}, "/scoring/fussion", "not a known field",
     "remove it: 'fusion' is already present"),
    ({"/provenance": {"note": ""}}, "/provenance/note", "not a known field",
     "did you mean 'notes'?"),
    ({"/base_policy/params/theta": DELETE, "/base_policy/params/teta": 0.5},
     "/base_policy/params/teta", "not a known field", "did you mean 'theta'?"),
    ({"/base_policy/parms": {}}, "/base_policy/parms", "not a known field",
     "remove it: 'params' is already present"),
    ({"/provenance": DELETE, "/provenence": {}}, "/provenence", "not a known field",
     "did you mean 'provenance'?"),
    ({"/reassembly/strength": 1.01}, "/reassembly/strength", "1.01 is refused",
     "input should be less than or equal to 1"),
    *(({place: value}, place, f"{text} is refused", "") for place, value, text in (
        ("/scoring/signals/0/sign", "±", '"±"'),
        ("/scoring/signals/0/weight", "0.4", '"0.4"'),
        ("/scoring/signals/0/weight", True, "true"),
        ("/constraints/selector/q_e", True, "true"),
        ("/constraints/selector/q_e", "2", '"2"'),
        ("/constraints/selector/r_min", -1, "-1"),
        ("/base_policy/params/theta", 1, "1"),
        ("/scoring/signals", [], "[]"),
        ("/scoring", None, "null"),
        ("/safety/0", 5, "5"),
        ("/name", 7, "7"),
        ("/name", "", '""'),
        ("/rank_at", "merger", '"merger"'),
        ("/rank_at", 1, "1"),
        ("/name", "x" * 129, f'"{"x" * 57}..."'),
        ("/$schema", 7, "7"),
        ("/$schema", None, "null"),
        ("/$schema", "x" * 2049, f'"{"x" * 57}..."'),
        ("/budget/limit", 0, "0"),
        ("/scoring/signals/0/weight", -1, "-1"),
        ("/constraints/selector/q_e", 2.5, "2.5"),
        ("/constraints/pool/1/pool_ratio", 100, "100"),
        ("/safety", [], "[]"),
    )),
    ({"/scoring/signals": {}}, "/scoring/signals", "{} is refused", "should be a list"),
    ({"/scoring/signals": "all"}, "/scoring/signals", '"all" is refused', "should be a list"),
    ({"/budget": "fixed_budget@32"}, "/budget", '"fixed_budget@32" is refused',
     "should be an object"),
    ({"/safety/1": "deterministic"}, "/safety", '[{"atom": "preserve_budget"}, "determ',
     "list deterministic once"),
    ({"/budget/limit": 31}, "/budget/limit", "limit 31 is below the state's own K = 32",
     "write 32 or more, or null for no limit"),
    ({"/constraints/selector/r_min": 33}, "/constraints/selector/r_min",
     "r_min = 33 reference tokens cannot be kept of K = 32",
     "write 32 or less, or null, which means K - q_e"),
    ({"/safety/2": {"atom": "deterministic", "repeats": 1}}, "/safety/2/repeats", "1 is", ""),
    ({"/name": DELETE}, "/name", "required but missing", "add it"),
    ({"/budget": {"atom": "fixed_budget@33"}}, "/budget/atom", "unknown atom", ""),
    ({"/safety": ["deterministic", {"atom": "deterministic", "repeats": 3}]}, "/safety",
     '["deterministic", {"atom"', "list deterministic once"),
    *(({"/provenance": {"seed": seed}}, "/provenance/seed", "", "")
      for seed in (0.5, "0", 2**63, 1e300)),
    ({"/provenance": {"notes": ["a"] * 99}}, "/provenance/notes", '["a", "a"', ""),
]  # fmt: skip
"""Changes to the sample; place of the only problem, and how what it says and its fix begin."""


@pytest.mark.parametrize(("changes", "where", "what", "fix"), CASES)
def test_a_single_problem_has_its_place_and_says_how_to_fix_it(
    changes: Changes, where: str, what: str, fix: str
) -> None:
    data = edited(sample(), changes)
    with pytest.raises(StateError) as raised:
        load_state(json.dumps(data))
    (problem,) = raised.value.problems
    assert ACCEPTS(data) == (problem.kind in RULES)
    assert problem.where == where and problem.what.startswith(what)
    assert problem.fix.startswith(fix) and problem.fix
    assert len(problem.what) < 100


MANY: Changes = {
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
R_MIN = "/constraints/selector/r_min"


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        (MANY, [*MANY]),
        # Rules on two fields are reported with all other problems, and skipped on invalid fields.
        ({"/name": 7, "/budget/limit": 16, R_MIN: 100, "/constraints/pool": []},
         ["/name", "/constraints/pool", "/budget/limit", R_MIN]),
        ({"/budget/limit": 0, R_MIN: -1}, ["/budget/limit", R_MIN]),
        # A list of bad items is not also called too short.
        ({"/scoring/signals": [{"atom": "x"}, {"atom": "y"}]},
         ["/scoring/signals/0/atom", "/scoring/signals/1/atom"]),
    ],
)  # fmt: skip
def test_all_problems_are_reported_together(changes: Changes, places: list[str]) -> None:
    assert [where for where, _ in refused_with(changes)] == places


@pytest.mark.parametrize("data", [{}, {"a": 1}, {"name": None}])
def test_nearly_empty_state(data: dict[str, object]) -> None:
    assert refused(json.dumps(data))[0][0] == "/schema"
    assert len(refused(json.dumps({"schema": "autoprune-state/1", **data}))) >= 7
