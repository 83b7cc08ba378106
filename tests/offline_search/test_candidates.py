"""Proposals: their schema, what is read of a reply, and the state that is made of it."""

from __future__ import annotations

import json
from itertools import count
from random import Random
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from pydantic import JsonValue

from offline_search.candidates import (
    MAX_HYPOTHESIS,
    PURPOSES,
    Draft,
    assemble_state,
    list_purposes,
    paper_state,
    parse_list,
    parse_proposal,
)
from offline_search.components import JsonObject, compact_json
from offline_search.prompt import describe_task
from offline_search.schema import list_schema, proposal_schema, shorten_schema
from offline_search.search_space import RandomSource, sample_proposal
from offline_search.settings import Settings
from tests.offline_search.synthetic import BUDGET, HOSTILE, valid_replies
from vllm_autoprune import load_state, materialize
from vllm_autoprune.errors import StateError
from vllm_autoprune.tpdsl.loading import shipped_states
from vllm_autoprune.tpdsl.registry import ATOMS

PLAIN = Settings(budgets=(BUDGET,))
PAPER = Settings(budgets=(32,), library="paper")
SEARCHED = Settings(budgets=(32,))
SPLIT = Settings(budgets=(BUDGET,), core=True, rank_at=True)
OWN = {name for name in ATOMS.names() if ATOMS[name].origin != "extension"}
EXTENSIONS = set(ATOMS.names()) - OWN


def draw(seed: int, settings: Settings = PLAIN) -> dict[str, Any]:
    return sample_proposal(RandomSource(Random(seed)), settings)


def validator(settings: Settings) -> Any:
    return jsonschema.Draft202012Validator(proposal_schema(settings))


@pytest.mark.parametrize("name", HOSTILE)
def test_invalid_replies_give_problems(name: str) -> None:
    draft = parse_proposal(HOSTILE[name], PLAIN, "llm", ("1.0",))
    assert draft.state is None
    assert draft.problems and all(problem.what and problem.fix for problem in draft.problems)
    assert sum(len(str(problem)) for problem in draft.problems) < 20_000
    assert (draft.origin, draft.parents) == ("llm", ("1.0",))


@pytest.mark.parametrize("around", ["{}", "Here it is:\n```json\n{}\n```\nDone.", "\n\n {} "])
def test_a_proposal_is_found_in_surrounding_text(around: str) -> None:
    text = valid_replies(1)[0]
    draft = parse_proposal(around.replace("{}", text), PLAIN, "llm", ())
    assert draft.problems == ()
    assert draft.state == assemble_state(json.loads(text), PLAIN)


def test_settings_decide_base_policy_budget_and_safety() -> None:
    settings = Settings(base_policy="visionzip", budgets=(9, 4))
    proposed = json.loads(valid_replies(1)[0]) | {"base_policy": {"name": "trim"}, "safety": []}
    state = parse_proposal(json.dumps(proposed), settings, "llm", ()).state
    assert state is not None and state.base_policy.name == "visionzip"
    assert materialize(state).budget == 9
    assert {call.atom for call in state.safety} >= {"preserve_budget", "fallback_to_selection"}


def test_a_proposal_names_one_of_the_base_policies_offered() -> None:
    several = PLAIN.model_copy(update={"other_bases": ("divprune", "dart")})
    proposed: dict[str, Any] = json.loads(valid_replies(1)[0])
    for choice, expected in (
        ({"name": "dart", "params": {"anything": 1}}, "dart"),
        ("divprune", "divprune"),
        (None, "cdpruner"),
    ):
        body = proposed if choice is None else proposed | {"base_policy": choice}
        state = parse_proposal(json.dumps(body), several, "llm", ()).state
        assert state is not None and state.base_policy.name == expected
    refused: list[Any] = [
        {"name": "trim"},
        {"name": ["dart"]},
        {},
        7,
        ["dart"],
        {"name": "x" * 9000},
    ]
    for choice in refused:
        text = json.dumps(proposed | {"base_policy": choice})
        (problem,) = parse_proposal(text, several, "llm", ()).problems
        assert problem.fix == "write cdpruner or divprune or dart" and len(str(problem)) < 300


@pytest.mark.parametrize("name", sorted(shipped_states()))
def test_compact_json_keeps_all_searched_components(name: str) -> None:
    state = load_state(name)
    again = assemble_state(compact_json(state), Settings(base_policy=state.base_policy.name))
    assert (again.scoring, again.reassembly) == (state.scoring, state.reassembly)
    assert again.constraints == state.constraints


def test_core_and_place_of_ranking_are_told_and_accepted_where_they_are_searched() -> None:
    body: dict[str, Any] = json.loads(json.dumps(compact_json(paper_state(PLAIN))))
    chosen = {"core": {"share": 0.5, "policy": {"name": "visionzip"}}, "rank_at": "merger_in"}
    assert validator(SPLIT).is_valid(body) and validator(SPLIT).is_valid(body | chosen)
    assert validator(SPLIT).is_valid({**body, "core": None})
    question = {"share": 0.5, "policy": {"name": "cdpruner"}}
    for odd in ({"core": question}, {"rank_at": "elsewhere"}):
        assert not validator(SPLIT).is_valid(body | odd)
    for name, value in chosen.items():
        assert not validator(PLAIN).is_valid({**body, name: value})
    state = parse_proposal(json.dumps(body | chosen), SPLIT, "llm", ()).state
    assert state is not None and state.core is not None
    assert state.core.share == 0.5 and state.rank_at == "merger_in"
    again = assemble_state(compact_json(state), SPLIT)
    assert (again.core, again.rank_at) == (state.core, state.rank_at)
    text = describe_task(SPLIT)
    assert "core (/core)" in text and '"core": {' in text and "merger_in" in text
    assert '"core"' not in describe_task(PLAIN) and "rank_at" not in describe_task(PLAIN)


def test_the_schema_accepts_only_loadable_proposals() -> None:
    text = json.dumps(proposal_schema(PLAIN))
    assert "oneOf" not in text and "discriminator" not in text and "r_min" not in text
    for seed in range(60):
        body = draw(seed)
        body["scoring"]["signals"] = body["scoring"]["signals"][:6]
        validator(PLAIN).validate(body)
        assert assemble_state(body, PLAIN).scoring.signals
    for name in HOSTILE:
        try:
            value = json.loads(HOSTILE[name])
        except (ValueError, RecursionError):
            continue
        assert not validator(PLAIN).is_valid(value)


def test_the_schema_limits_the_quota_to_the_budget() -> None:
    body: dict[str, Any] = json.loads(json.dumps(compact_json(paper_state(PLAIN))))
    selector = body["constraints"]["selector"] = {"atom": "reference_residual_exchange_selector"}
    for quota in (BUDGET, BUDGET + 1):
        selector["q_e"] = quota  # type: ignore[assignment]
        assert validator(PLAIN).is_valid(body) == (quota == BUDGET)


@pytest.mark.parametrize("settings", [SEARCHED, PAPER], ids=["searched", "paper"])
def test_the_shorter_schema_accepts_the_same_proposals(settings: Settings) -> None:
    schema = proposal_schema(settings)
    merged = shorten_schema(schema)
    assert 5 * len(json.dumps(merged)) < 2 * len(json.dumps(schema))
    long, short = (jsonschema.Draft202012Validator(one) for one in (schema, merged))
    valid = 0
    for seed in range(60):
        rng = Random(seed)
        text = json.dumps(sample_proposal(RandomSource(rng), SEARCHED))
        if seed % 2:  # a number or a name that may not belong where it is
            old, new = rng.sample(ATOMS.names(), 2)
            text = text.replace(f'"{old}"', f'"{new}"').replace("1.0", "99.0")
        changed = json.loads(text)
        assert long.is_valid(changed) == short.is_valid(changed)
        valid += long.is_valid(changed)
    assert 5 < valid < 60


def names_in(schema: JsonObject) -> set[str]:
    text = json.dumps(schema)
    return {name for name in ATOMS.names() if json.dumps(name) in text}


def proposal(**changes: JsonValue) -> JsonObject:
    """A random proposal without extensions, with some components replaced."""
    plain = next(
        one for one in (draw(n, SEARCHED) for n in count()) if not names_in(one) & EXTENSIONS
    )
    return {**plain, **changes}


def test_the_papers_library_has_131_atoms_and_no_extension() -> None:
    assert len(OWN) == 131
    schema = shorten_schema(proposal_schema(PAPER))
    assert names_in(schema) == OWN and '"r_min"' in json.dumps(schema)
    text = describe_task(PAPER)
    assert all(name in text for name in OWN if not name.startswith("reassemble/"))
    assert not any(name in text for name in EXTENSIONS) and "reassemble/ASSIGNMENT" in text
    offered = names_in(proposal_schema(SEARCHED))
    groups = {ATOMS[name].group for name in offered}
    assert not groups & {"token_source_base_policy", "budget_control", "safety_checks"}
    assert {"centred_cosine_kernel", "local_detail_energy"} <= offered


def test_source_budget_safety_and_r_min_of_a_proposal_are_used() -> None:
    changes: JsonObject = {
        "source": {"tokens": {"atom": "vision_tokens@pre_llm"},
                   "priors": [{"atom": "reference_mask_prior", "floor": 0.5}]},
        "budget": {"atom": "fixed_budget@32"},
        "safety": ["preserve_budget"],
        "constraints": {"pool": [{"atom": "quality_pool_builder"}],
                        "selector": {"atom": "reference_residual_exchange_selector",
                                     "q_e": 8, "r_min": 30}},
    }  # fmt: skip
    state = assemble_state(proposal(**changes), PAPER)
    assert state.source.tokens.atom == "vision_tokens@pre_llm"
    assert [prior.atom for prior in state.source.priors] == ["reference_mask_prior"]
    assert len(state.safety) == 1 and state.constraints.selector.bounds(32) == (2, 30)
    plain = assemble_state(proposal(**changes), SEARCHED)
    assert not plain.source.priors and len(plain.safety) == 4


@pytest.mark.parametrize("atom", sorted(EXTENSIONS - {"ratio_budget", "per_tile_budget"}))
def test_an_extension_is_refused_in_the_library_of_the_paper(atom: str) -> None:
    kernel: JsonValue = {"atom": "pairwise_cosine_kernel"}
    signal: JsonValue = {"atom": "visual_token_norm_saliency", "weight": 1.0}
    if ATOMS[atom].group == "scoring":
        signal = {"atom": atom, "weight": 1.0}
    else:
        kernel = {"atom": atom}
    fusion: JsonValue = {"atom": "weighted_sum_fusion"}
    body = proposal(scoring={"signals": [signal], "kernel": kernel, "fusion": fusion})
    with pytest.raises(StateError, match=f"{atom} is an extension"):
        assemble_state(body, PAPER)
    assert assemble_state(body, SEARCHED).digest


@pytest.mark.parametrize("budget", [32, 48])
def test_a_candidate_with_any_fixed_budget_is_one_at_the_k_of_the_search(budget: int) -> None:
    settings = Settings(budgets=(budget,), library="paper")
    for name in ATOMS.names("budget_control")[:10]:
        text = json.dumps(proposal(budget={"atom": name, "limit": 99, "floor": 1}))
        assert "floor" in str(parse_proposal(text, settings, "llm", ()).problems) or budget == 48
        text = json.dumps(proposal(budget={"atom": name, "limit": 99}))
        state = parse_proposal(text, settings, "llm", ()).state
        assert state is not None and state.budget.limit == 99
        assert state.budget.range() == (budget, budget)


DEFAULT = Draft("llm", None, (), ("1.0",))


def items(length: int, **changes: JsonValue) -> list[dict[str, Any]]:
    """Different valid proposals of a list, with the same changes each."""
    fields: dict[str, JsonValue] = {
        "purpose": "ablate", "hypothesis": "The fusion does nothing.", "parent": "1.1",
        "expect": "same",
    }  # fmt: skip
    return [{**fields, **changes, **json.loads(one)} for one in valid_replies(length)]


def parse(text: str, length: int = 5) -> list[Draft]:
    drafts = parse_list(text, PLAIN, length, DEFAULT, {"1.0", "1.1"})
    assert len(drafts) == length
    return drafts


def digests(drafts: list[Draft]) -> list[str]:
    return ["" if draft.state is None else draft.state.digest for draft in drafts]


SINGLE = digests([parse_proposal(one, PLAIN, "llm", ()) for one in valid_replies(5)])


@pytest.mark.parametrize(
    "around",
    ['{"proposals": LIST}', "LIST", 'Sure:\n```json\n{"proposals": LIST}\n```\n[1] {}',
     '{"notes": "[{", "proposals": LIST, "more": {}}'],
)  # fmt: skip
def test_a_list_is_found_in_surrounding_text(around: str) -> None:
    drafts = parse(around.replace("LIST", json.dumps(items(5), indent=1)))
    assert digests(drafts) == SINGLE
    for draft in drafts:
        assert draft.origin == "llm" and draft.parents == ("1.1",) and not draft.problems
        assert draft.hypothesis is not None
        assert draft.hypothesis.model_dump() == {
            "purpose": "ablate", "text": "The fusion does nothing.", "expect": "same",
        }  # fmt: skip


@pytest.mark.parametrize("length", [0, 1, 4, 9])
def test_missing_proposals_are_problems_and_further_ones_ignored(length: int) -> None:
    drafts = parse(json.dumps({"proposals": items(length)}))
    assert digests(drafts) == SINGLE[:length] + [""] * (5 - length)
    if length < 5:
        assert f"the reply has {length} of 5 proposals" in str(drafts[-1].problems)


def test_an_object_without_a_list_is_its_first_proposal() -> None:
    assert digests(parse(valid_replies(1)[0])) == [SINGLE[0], *[""] * 4]


def test_a_list_that_is_cut_off_keeps_its_complete_proposals() -> None:
    text = json.dumps({"proposals": items(5)})
    parts = [digests(parse(text[:length])) for length in range(0, len(text), 97)]
    assert {len([one for one in part if one]) for part in parts} == {0, 1, 2, 3, 4}
    cut = parse(text[: len(text) * 7 // 10])
    assert digests(cut)[:3] == SINGLE[:3] and cut[-1].problems


@pytest.mark.parametrize("name", HOSTILE)
def test_an_invalid_proposal_spoils_no_other(name: str) -> None:
    drafts = parse(HOSTILE[name])
    assert not any(digests(drafts)) and all(draft.problems for draft in drafts)
    before, after = (json.dumps(one) for one in items(2))
    if HOSTILE[name].startswith("{") and name != "cut":
        drafts = parse(f'{{"proposals": [{before}, {HOSTILE[name]}, {after}]}}', 3)
        assert digests(drafts) == [SINGLE[0], "", SINGLE[1]]
        assert drafts[1].problems and drafts[1].parents == ("1.0",)


@pytest.mark.parametrize(
    ("changes", "purpose", "text", "expect", "parents"),
    [
        ({"purpose": "win", "expect": "much higher", "parent": "9.9"}, "", None, "higher", "1.0"),
        ({"purpose": ["ablate"], "expect": 3, "parent": {}}, "", None, "higher", "1.0"),
        ({"hypothesis": "x" * 10**4}, "ablate", "x" * MAX_HYPOTHESIS, "same", "1.1"),
        ({"hypothesis": ["why"]}, "ablate", "", "same", "1.1"),
        ({"hypothesis": " a\n\tb\u202e\u0007 "}, "ablate", "a b", "same", "1.1"),
        ({"hypothesis": 'a "b}" \\ ]{ c'}, "ablate", 'a "b}" \\ ]{ c', "same", "1.1"),
        ({"parent": "base", "expect": "lower"}, "ablate", None, "lower", ""),
    ],
)
def test_fields_beside_the_policy_never_make_a_proposal_invalid(
    changes: dict[str, JsonValue], purpose: str, text: str | None, expect: str, parents: str
) -> None:
    (draft,) = parse(json.dumps(items(1, **changes)), 1)
    assert digests([draft]) == SINGLE[:1] and draft.hypothesis is not None
    assert draft.hypothesis.purpose == purpose and draft.hypothesis.expect == expect
    assert draft.hypothesis.text == ("The fusion does nothing." if text is None else text)
    assert draft.parents == ((parents,) if parents else ())


def test_an_invalid_policy_keeps_its_hypothesis() -> None:
    broken = items(1)[0] | {"scoring": {"signals": []}}
    (draft,) = parse(json.dumps([broken]), 1)
    assert draft.state is None and draft.hypothesis is not None
    assert draft.hypothesis.purpose == "ablate"


def test_the_schema_of_a_list_accepts_such_lists_of_its_length() -> None:
    one = shorten_schema(proposal_schema(PLAIN))
    schema = list_schema(one, 5)
    checked = jsonschema.Draft202012Validator(schema)
    valid = items(8)
    for item in valid:
        item["scoring"]["signals"] = item["scoring"]["signals"][:6]
    for length in range(8):
        assert checked.is_valid({"proposals": valid[:length]}) == (length == 5)
    for change in ({"purpose": "win"}, {"hypothesis": "x" * 201}, {"expect": "more"}):
        assert not checked.is_valid({"proposals": [*valid[:4], valid[4] | change]})
    del valid[0]["parent"]
    assert not checked.is_valid({"proposals": valid[:5]})
    assert 4 * len(json.dumps(schema)) < 5 * len(json.dumps(one))


def test_purposes_take_turns_once_something_was_measured() -> None:
    assert list_purposes(0, 5, measured=True) == list(PURPOSES)
    assert list_purposes(4, 3, measured=True) == ["worst_category", "exploit", "ablate"]
    assert list_purposes(2, 3, measured=False) == ["explore"] * 3
