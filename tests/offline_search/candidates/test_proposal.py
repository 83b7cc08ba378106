from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from offline_search.candidates import (
    assemble_state,
    minimal_state,
    paper_state,
    parse_proposal,
    warm_start_states,
)
from offline_search.components import compact_json
from offline_search.prompt import describe_language
from offline_search.schema import proposal_schema
from offline_search.search_space import RandomSource, sample_proposal
from offline_search.settings import Settings
from tests.offline_search.replies import BUDGET, HOSTILE, valid_replies
from vllm_autoprune import load_state, materialize
from vllm_autoprune.tpdsl.loading import shipped_states


@pytest.mark.parametrize("name", HOSTILE)
def test_invalid_replies_give_problems(name: str, settings: Settings) -> None:
    draft = parse_proposal(HOSTILE[name], settings, "llm", ("1.0",))
    assert draft.state is None
    assert draft.problems and all(problem.what and problem.fix for problem in draft.problems)
    assert sum(len(str(problem)) for problem in draft.problems) < 20_000
    assert (draft.origin, draft.parents) == ("llm", ("1.0",))


@pytest.mark.parametrize("around", ["{}", "Here it is:\n```json\n{}\n```\nDone.", "\n\n {} "])
def test_a_proposal_is_found_in_surrounding_text(around: str, settings: Settings) -> None:
    text = valid_replies(1)[0]
    draft = parse_proposal(around.replace("{}", text), settings, "llm", ())
    assert draft.problems == ()
    assert draft.state is not None
    assert draft.state == assemble_state(json.loads(text), settings)


def test_settings_decide_base_policy_budget_and_safety() -> None:
    settings = Settings(base_policy="visionzip", budgets=(9, 4))
    proposed = json.loads(valid_replies(1)[0]) | {"base_policy": {"name": "trim"}, "safety": []}
    state = parse_proposal(json.dumps(proposed), settings, "llm", ()).state
    assert state is not None
    assert state.base_policy.name == "visionzip"
    assert materialize(state).budget == 9
    assert {call.atom for call in state.safety} >= {"preserve_budget", "fallback_to_selection"}


def test_a_proposal_names_one_of_the_base_policies_offered(settings: Settings) -> None:
    several = settings.model_copy(update={"other_bases": ("divprune", "dart")})
    proposed: dict[str, Any] = json.loads(valid_replies(1)[0])
    for choice, expected in (
        ({"name": "dart"}, "dart"),
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


def test_the_schema_accepts_only_loadable_proposals(settings: Settings) -> None:
    schema = proposal_schema(BUDGET)
    checked = jsonschema.Draft202012Validator(schema)
    text = json.dumps(schema)
    assert "oneOf" not in text and "discriminator" not in text and "r_min" not in text
    for seed in range(60):
        body: dict[str, Any] = sample_proposal(RandomSource(Random(seed)), BUDGET)
        body["scoring"]["signals"] = body["scoring"]["signals"][:6]
        checked.validate(body)
        assert assemble_state(body, settings).scoring.signals
    for name in HOSTILE:
        try:
            value = json.loads(HOSTILE[name])
        except (ValueError, RecursionError):
            continue
        assert not checked.is_valid(value)


def test_the_schema_limits_the_quota_to_the_budget(settings: Settings) -> None:
    checked = jsonschema.Draft202012Validator(proposal_schema(BUDGET))
    body: dict[str, Any] = json.loads(json.dumps(compact_json(paper_state(settings))))
    body["constraints"]["selector"] = {
        "atom": "reference_residual_exchange_selector",
        "q_e": BUDGET,
    }
    assert checked.is_valid(body)
    body["constraints"]["selector"]["q_e"] = BUDGET + 1
    assert not checked.is_valid(body)


@pytest.mark.parametrize("name", sorted(shipped_states()))
def test_compact_json_keeps_all_searched_components(name: str) -> None:
    state = load_state(name)
    settings = Settings(base_policy=state.base_policy.name)
    again = assemble_state(compact_json(state), settings)
    assert (again.scoring, again.reassembly) == (state.scoring, state.reassembly)
    assert again.constraints == state.constraints


def test_start_states_differ(settings: Settings) -> None:
    digests = {state.digest for state in (minimal_state(settings), *warm_start_states(settings))}
    assert len(digests) == 1 + len(warm_start_states(settings))


def test_a_search_of_cores_tells_and_accepts_them(settings: Settings) -> None:
    split = settings.model_copy(update={"core": True})
    body: dict[str, Any] = json.loads(json.dumps(compact_json(paper_state(settings))))
    with_core = {**body, "core": {"share": 0.5, "policy": {"name": "visionzip"}}}
    checked = jsonschema.Draft202012Validator(proposal_schema(BUDGET, core=True))
    assert checked.is_valid(body) and checked.is_valid(with_core)
    assert checked.is_valid({**body, "core": None})
    assert not checked.is_valid({**body, "core": {"share": 0.5, "policy": {"name": "cdpruner"}}})
    assert not jsonschema.Draft202012Validator(proposal_schema(BUDGET)).is_valid(with_core)

    state = parse_proposal(json.dumps(with_core), split, "llm", ()).state
    assert state is not None and state.core is not None and state.core.share == 0.5
    assert assemble_state(compact_json(state), split).core == state.core
    assert "core (/core)" in describe_language(split) and '"core": {' in describe_language(split)
    assert '"core"' not in describe_language(settings)
