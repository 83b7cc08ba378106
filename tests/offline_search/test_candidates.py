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
    list_schema,
    paper_state,
    parse_list,
    parse_proposal,
    proposal_schema,
)
from offline_search.components import JsonObject, compact_json
from offline_search.prompt import describe_task
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
PAPERS_ATOMS = {name for name in ATOMS.names() if ATOMS[name].origin != "extension"}
EXTENSIONS = set(ATOMS.names()) - PAPERS_ATOMS
DEFAULT = Draft("llm", None, (), ("1.0",))


def draw(seed: int, settings: Settings = PLAIN) -> dict[str, Any]:
    return sample_proposal(RandomSource(Random(seed)), settings)


def accepts(settings: Settings, body: JsonValue) -> bool:
    valid: bool = jsonschema.Draft202012Validator(proposal_schema(settings)).is_valid(body)
    return valid


def paper_body() -> dict[str, Any]:
    body: dict[str, Any] = json.loads(json.dumps(compact_json(paper_state(PLAIN))))
    return body


@pytest.mark.parametrize("name", HOSTILE)
def test_invalid_replies_give_problems(name: str) -> None:
    draft = parse_proposal(HOSTILE[name], PLAIN, DEFAULT)
    assert draft.state is None
    assert draft.problems and all(problem.what and problem.fix for problem in draft.problems)
    assert sum(len(str(problem)) for problem in draft.problems) < 20_000
    assert (draft.origin, draft.parents) == ("llm", ("1.0",))


@pytest.mark.parametrize("around", ["{}", "Here it is:\n```json\n{}\n```\nDone.", "\n\n {} "])
def test_a_proposal_is_found_in_surrounding_text(around: str) -> None:
    text = valid_replies(1)[0]
    draft = parse_proposal(around.replace("{}", text), PLAIN, DEFAULT)
    assert draft.problems == ()
    assert draft.state == assemble_state(json.loads(text), PLAIN)


def test_settings_decide_base_policy_budget_and_safety() -> None:
    settings = Settings(base_policy="visionzip", budgets=(9, 4))
    proposed = {**draw(0), "base_policy": {"name": "trim"}, "safety": []}
    state = parse_proposal(json.dumps(proposed), settings, DEFAULT).state
    assert state is not None and state.base_policy.name == "visionzip"
    assert materialize(state).budget == 9
    assert {call.atom for call in state.safety} >= {"preserve_budget", "fallback_to_selection"}


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"name": "dart", "params": {"anything": 1}}, "dart"),
        ("divprune", "divprune"),
        *((odd, "") for odd in ({"name": "trim"}, {"name": ["dart"]}, {}, 7, ["dart"],
                                {"name": "x" * 9000})),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_a_proposal_names_one_of_the_base_policies_offered(choice: JsonValue, name: str) -> None:
    offering = PLAIN.model_copy(update={"other_bases": ("divprune", "dart")})
    assert assemble_state(draw(0), offering).base_policy.name == "cdpruner"
    draft = parse_proposal(json.dumps({**draw(0), "base_policy": choice}), offering, DEFAULT)
    assert (draft.state.base_policy.name if draft.state else "") == name
    for problem in draft.problems:
        assert problem.fix == "write cdpruner or divprune or dart" and len(str(problem)) < 300


@pytest.mark.parametrize("name", sorted(shipped_states()))
def test_compact_json_keeps_all_searched_components(name: str) -> None:
    state = load_state(name)
    again = assemble_state(compact_json(state), Settings(base_policy=state.base_policy.name))
    assert (again.scoring, again.reassembly) == (state.scoring, state.reassembly)
    assert again.constraints == state.constraints


def test_core_and_place_of_ranking_are_accepted_where_they_are_searched() -> None:
    body = paper_body()
    chosen: JsonObject = {
        "core": {"share": 0.5, "policy": {"name": "visionzip"}},
        "rank_at": "merger_in",
    }
    for accepted in (body, body | chosen, {**body, "core": None}):
        assert accepts(SPLIT, accepted)
    question = {"share": 0.5, "policy": {"name": "cdpruner"}}
    assert not any(accepts(SPLIT, body | odd) for odd in ({"core": question}, {"rank_at": "x"}))
    assert not any(accepts(PLAIN, {**body, name: value}) for name, value in chosen.items())
    state = assemble_state(body | chosen, SPLIT)
    assert state.core is not None and (state.core.share, state.rank_at) == (0.5, "merger_in")
    again = assemble_state(compact_json(state), SPLIT)
    assert (again.core, again.rank_at) == (state.core, state.rank_at)
    text = describe_task(SPLIT)
    assert "core (/core)" in text and '"core": {' in text and "merger_in" in text
    assert '"core"' not in describe_task(PLAIN) and "rank_at" not in describe_task(PLAIN)


@pytest.mark.parametrize("settings", [PLAIN, SEARCHED, PAPER], ids=["plain", "searched", "paper"])
def test_the_schema_accepts_only_loadable_proposals(settings: Settings) -> None:
    text = json.dumps(proposal_schema(settings))
    assert len(text) < 20_000 and "oneOf" not in text and "discriminator" not in text
    valid = 0
    for seed in range(60):
        rng = Random(seed)
        body = sample_proposal(RandomSource(rng), settings)
        limits = [body["scoring"]["signals"], body["constraints"]["pool"]]  # type: ignore[index, call-overload]
        short = len(limits[0]) <= 6 and len(limits[1]) <= 3  # type: ignore[arg-type]
        assert accepts(settings, body) == short
        # A number or a name that may not belong where it is.
        old, new = rng.sample(ATOMS.names(), 2)
        changed = json.dumps(body).replace(f'"{old}"', f'"{new}"').replace("1.0", "99.0")
        if accepts(settings, json.loads(changed)):
            assert assemble_state(json.loads(changed), settings).digest
            valid += 1
    assert 5 < valid < 60
    for reply in HOSTILE.values():
        try:
            value = json.loads(reply)
        except (ValueError, RecursionError):
            continue
        assert not accepts(settings, value)


def test_the_schema_limits_the_quota_to_the_budget() -> None:
    body = paper_body()
    selector = body["constraints"]["selector"] = {"atom": "reference_residual_exchange_selector"}
    for quota in (BUDGET, BUDGET + 1):
        selector["q_e"] = quota  # type: ignore[assignment]
        assert accepts(PLAIN, body) == (quota == BUDGET)


def names_in(schema: JsonObject) -> set[str]:
    text = json.dumps(schema)
    return {name for name in ATOMS.names() if json.dumps(name) in text}


def proposal(**changes: JsonValue) -> JsonObject:
    """A random proposal without extensions, with some components replaced."""
    bodies = (draw(seed, SEARCHED) for seed in count())
    return {**next(body for body in bodies if not names_in(body) & EXTENSIONS), **changes}


def test_the_papers_library_has_131_atoms_and_no_extension() -> None:
    assert len(PAPERS_ATOMS) == 131
    schema = proposal_schema(PAPER)
    assert names_in(schema) == PAPERS_ATOMS and '"r_min"' in json.dumps(schema)
    assert '"r_min"' not in json.dumps(proposal_schema(SEARCHED))
    text = describe_task(PAPER)
    assert all(name in text for name in PAPERS_ATOMS if not name.startswith("reassemble/"))
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
        state = assemble_state(proposal(budget={"atom": name, "limit": 99}), settings)
        assert state.budget.limit == 99 and state.budget.range() == (budget, budget)


def items(length: int, **changes: JsonValue) -> list[dict[str, Any]]:
    """Different valid proposals of a list, with the same changes each."""
    fields: dict[str, JsonValue] = {
        "purpose": "ablate", "hypothesis": "The fusion does nothing.", "parent": "1.1",
        "expect": "same",
    }  # fmt: skip
    return [{**fields, **changes, **json.loads(text)} for text in valid_replies(length)]


def parse(text: str, length: int = 5) -> list[Draft]:
    drafts = parse_list(text, PLAIN, length, DEFAULT, {"1.0", "1.1"})
    assert len(drafts) == length
    return drafts


def digests(drafts: list[Draft]) -> list[str]:
    return ["" if draft.state is None else draft.state.digest for draft in drafts]


SINGLE = digests([parse_proposal(text, PLAIN, DEFAULT) for text in valid_replies(5)])


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


def test_missing_proposals_are_problems_and_further_ones_ignored() -> None:
    for length in (0, 1, 4, 9):
        drafts = parse(json.dumps({"proposals": items(length)}))
        assert digests(drafts) == SINGLE[:length] + [""] * (5 - length)
        if length < 5:
            assert f"the reply has {length} of 5 proposals" in str(drafts[-1].problems)
    assert digests(parse(valid_replies(1)[0])) == [SINGLE[0], *[""] * 4], "it has no list"


def test_a_list_that_is_cut_off_keeps_its_complete_proposals() -> None:
    text = json.dumps({"proposals": items(5)})
    parts = [digests(parse(text[:length])) for length in range(0, len(text), 97)]
    assert {5 - part.count("") for part in parts} == {0, 1, 2, 3, 4}
    cut = parse(text[: len(text) * 7 // 10])
    assert digests(cut)[:3] == SINGLE[:3] and cut[-1].problems


@pytest.mark.parametrize("name", HOSTILE)
def test_an_invalid_proposal_spoils_no_other(name: str) -> None:
    drafts = parse(HOSTILE[name])
    assert not any(digests(drafts)) and all(draft.problems for draft in drafts)
    before, after = map(json.dumps, items(2))
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
    assert (draft.hypothesis.purpose, draft.hypothesis.expect) == (purpose, expect)
    assert draft.hypothesis.text == ("The fusion does nothing." if text is None else text)
    assert draft.parents == ((parents,) if parents else ())


def test_the_schema_of_a_list_accepts_such_lists_of_its_length() -> None:
    checked = jsonschema.Draft202012Validator(list_schema(PLAIN, 5))
    valid = items(8)
    for item in valid:
        item["scoring"]["signals"] = item["scoring"]["signals"][:6]
    for length in range(8):
        assert checked.is_valid({"proposals": valid[:length]}) == (length == 5)
    for change in ({"purpose": "win"}, {"hypothesis": "x" * 201}, {"expect": "more"}):
        assert not checked.is_valid({"proposals": [*valid[:4], valid[4] | change]})
    del valid[0]["parent"]
    assert not checked.is_valid({"proposals": valid[:5]})


def test_purposes_take_turns_once_something_was_measured() -> None:
    assert list_purposes(0, 5, measured=True) == list(PURPOSES)
    assert list_purposes(4, 3, measured=True) == ["worst_category", "exploit", "ablate"]
    assert list_purposes(2, 3, measured=False) == ["explore"] * 3
