from __future__ import annotations

import json
from itertools import count
from random import Random
from typing import get_args

import jsonschema  # type: ignore[import-untyped]
import pytest
from pydantic import JsonValue

from offline_search.candidates import assemble_state, parse_proposal
from offline_search.components import JsonObject
from offline_search.prompt import describe_language
from offline_search.schema import proposal_schema, shorten_schema
from offline_search.search_space import RandomSource, sample_proposal
from offline_search.settings import Library, Settings
from vllm_autoprune.errors import StateError
from vllm_autoprune.tpdsl.registry import ATOMS

BUDGET = 32
PAPER = Settings(budgets=(BUDGET,), library="paper")
PLAIN = Settings(budgets=(BUDGET,))
OWN = {name for name in ATOMS.names() if ATOMS[name].origin != "extension"}
EXTENSIONS = set(ATOMS.names()) - OWN


def names_in(schema: JsonObject) -> set[str]:
    text = json.dumps(schema)
    return {name for name in ATOMS.names() if json.dumps(name) in text}


def proposal(**changes: JsonValue) -> JsonObject:
    """A random proposal without extensions, with some components replaced."""
    sampled = (sample_proposal(RandomSource(Random(seed)), BUDGET) for seed in count())
    plain = next(one for one in sampled if not names_in(one) & EXTENSIONS)
    return {**plain, **changes}


def test_the_papers_library_has_131_atoms_and_no_extension() -> None:
    assert len(OWN) == 131
    schema = shorten_schema(proposal_schema(BUDGET, library="paper"))
    assert names_in(schema) == OWN
    assert '"r_min"' in json.dumps(schema)
    text = describe_language(PAPER)
    shown = {name for name in OWN if not name.startswith("reassemble/")}
    assert all(name in text for name in shown)
    assert not any(name in text for name in EXTENSIONS)
    assert "reassemble/ASSIGNMENT" in text


def test_without_it_proposers_are_offered_what_the_search_varies() -> None:
    offered = names_in(proposal_schema(BUDGET))
    groups = {ATOMS[name].group for name in offered}
    assert not groups & {"token_source_base_policy", "budget_control", "safety_checks"}
    assert {"centred_cosine_kernel", "local_detail_energy"} <= offered
    assert '"r_min"' not in json.dumps(proposal_schema(BUDGET))


def test_source_budget_safety_and_r_min_of_a_proposal_are_used() -> None:
    changes: JsonObject = {
        "source": {"tokens": {"atom": "vision_tokens@pre_llm"},
                   "priors": [{"atom": "reference_mask_prior", "floor": 0.5}]},
        "budget": {"atom": f"fixed_budget@{BUDGET}"},
        "safety": ["preserve_budget"],
        "constraints": {"pool": [{"atom": "quality_pool_builder"}],
                        "selector": {"atom": "reference_residual_exchange_selector",
                                     "q_e": 8, "r_min": 30}},
    }  # fmt: skip
    state = assemble_state(proposal(**changes), PAPER)
    assert state.source.tokens.atom == "vision_tokens@pre_llm"
    assert [prior.atom for prior in state.source.priors] == ["reference_mask_prior"]
    assert len(state.safety) == 1
    assert state.constraints.selector.bounds(BUDGET) == (2, 30)
    plain = assemble_state(proposal(**changes), PLAIN)
    assert not plain.source.priors and len(plain.safety) == 4


@pytest.mark.parametrize("atom", sorted(EXTENSIONS - {"ratio_budget", "per_tile_budget"}))
def test_an_extension_is_refused(atom: str) -> None:
    kernel: JsonValue = {"atom": "pairwise_cosine_kernel"}
    signal: JsonValue = {"atom": "visual_token_norm_saliency", "weight": 1.0}
    if ATOMS[atom].group == "scoring":
        signal = {"atom": atom, "weight": 1.0}
    else:
        kernel = {"atom": atom}
    scoring: JsonValue = {
        "signals": [signal],
        "kernel": kernel,
        "fusion": {"atom": "weighted_sum_fusion"},
    }
    with pytest.raises(StateError, match=f"{atom} is an extension"):
        assemble_state(proposal(scoring=scoring), PAPER)
    assert assemble_state(proposal(scoring=scoring), PLAIN).digest


@pytest.mark.parametrize("budget", [BUDGET, 48])
def test_a_candidate_with_any_fixed_budget_is_one_at_the_k_of_the_search(budget: int) -> None:
    settings = Settings(budgets=(budget,), library="paper")
    for name in ATOMS.names("budget_control")[:10]:
        text = json.dumps(proposal(budget={"atom": name, "limit": 99, "floor": 1}))
        assert "floor" in str(parse_proposal(text, settings, "llm", ()).problems) or budget == 48
        text = json.dumps(proposal(budget={"atom": name, "limit": 99}))
        state = parse_proposal(text, settings, "llm", ()).state
        assert state is not None and state.budget.limit == 99
        assert state.budget.range() == (budget, budget)


@pytest.mark.parametrize("library", get_args(Library))
def test_the_shorter_schema_accepts_the_same_proposals(library: Library) -> None:
    schema = proposal_schema(BUDGET, library=library)
    merged = shorten_schema(schema)
    assert 5 * len(json.dumps(merged)) < 2 * len(json.dumps(schema))
    long, short = (jsonschema.Draft202012Validator(one) for one in (schema, merged))
    valid = 0
    for seed in range(60):
        rng = Random(seed)
        candidate = sample_proposal(RandomSource(rng), BUDGET)
        text = json.dumps(candidate)
        if seed % 2:  # a number or a name that may not belong where it is
            old, new = rng.sample(ATOMS.names(), 2)
            text = text.replace(f'"{old}"', f'"{new}"').replace("1.0", "99.0")
        changed = json.loads(text)
        assert long.is_valid(changed) == short.is_valid(changed)
        valid += long.is_valid(changed)
    assert 5 < valid < 60
