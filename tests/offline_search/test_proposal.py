from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from offline_search.proposal import alpha, assembled, proposal_schema, read_proposal
from offline_search.settings import Settings
from offline_search.space import Dice, composed
from offline_search.strategies.starts import paper_state
from tests.offline_search.replies import BUDGET, HOSTILE, sound
from vllm_autoprune import load_state, materialize
from vllm_autoprune.tpdsl.states.load import shipped_states


@pytest.mark.parametrize("name", HOSTILE)
def test_whatever_a_reply_holds_it_is_a_state_or_a_reason(name: str, settings: Settings) -> None:
    draft = read_proposal(HOSTILE[name], settings, "llm", ("1.0",))
    assert draft.state is None
    assert draft.problems and all(problem.what and problem.fix for problem in draft.problems)
    assert sum(len(str(problem)) for problem in draft.problems) < 20_000
    assert (draft.origin, draft.parents) == ("llm", ("1.0",))


@pytest.mark.parametrize("around", ["{}", "Here it is:\n```json\n{}\n```\nDone.", "\n\n {} "])
def test_a_proposal_is_found_in_what_stands_around_it(around: str, settings: Settings) -> None:
    text = sound(1)[0]
    draft = read_proposal(around.replace("{}", text), settings, "llm", ())
    assert draft.problems == ()
    assert draft.state is not None
    assert draft.state == assembled(json.loads(text), settings, "candidate")


def test_base_policy_budget_and_safety_are_the_searchs() -> None:
    settings = Settings(base_policy="visionzip", budgets=(9, 4))
    proposed = json.loads(sound(1)[0]) | {"base_policy": {"name": "trim"}, "safety": []}
    state = read_proposal(json.dumps(proposed), settings, "llm", ()).state
    assert state is not None
    assert state.base_policy.name == "visionzip"
    assert materialize(state).budget == 9
    assert {call.atom for call in state.safety} >= {"preserve_budget", "fallback_to_selection"}


def test_the_schema_admits_nothing_that_the_loader_refuses(settings: Settings) -> None:
    schema = proposal_schema(BUDGET)
    checked = jsonschema.Draft202012Validator(schema)
    text = json.dumps(schema)
    assert "oneOf" not in text and "discriminator" not in text and "r_min" not in text
    for seed in range(60):
        body: dict[str, Any] = composed(Dice(Random(seed)), BUDGET)
        body["scoring"]["signals"] = body["scoring"]["signals"][:6]
        checked.validate(body)
        assert assembled(body, settings, "candidate").scoring.signals
    for name in HOSTILE:
        try:
            value = json.loads(HOSTILE[name])
        except (ValueError, RecursionError):
            continue
        assert not checked.is_valid(value)


def test_a_proposer_is_held_to_the_budget(settings: Settings) -> None:
    checked = jsonschema.Draft202012Validator(proposal_schema(BUDGET))
    body: dict[str, Any] = json.loads(json.dumps(alpha(paper_state(settings))))
    body["constraints"]["selector"] = {
        "atom": "reference_residual_exchange_selector",
        "q_e": BUDGET,
    }
    assert checked.is_valid(body)
    body["constraints"]["selector"]["q_e"] = BUDGET + 1
    assert not checked.is_valid(body)


@pytest.mark.parametrize("name", sorted(shipped_states()))
def test_alpha_is_all_of_a_state_that_is_searched(name: str) -> None:
    state = load_state(name)
    settings = Settings(base_policy=state.base_policy.name)
    again = assembled(alpha(state), settings, "candidate")
    assert (again.scoring, again.reassembly) == (state.scoring, state.reassembly)
    assert again.constraints == state.constraints
