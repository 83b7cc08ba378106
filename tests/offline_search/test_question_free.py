"""Searches for policies that do not read the question, whose KV all questions share."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from offline_search.candidates import assemble_state, paper_state
from offline_search.components import components_json, structure
from offline_search.image_facts import ImageFacts
from offline_search.ledger import ProposalRecord, TrialRecord
from offline_search.search_space import excluded_atoms
from offline_search.settings import Settings
from offline_search.task import describe_task
from tests.offline_search.synthetic import (
    VALID_REPLIES,
    Searches,
    settings_of,
)
from vllm_autoprune import load_state, materialize
from vllm_autoprune.errors import StateError
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.base_policy import INSTRUCTION_NEEDS
from vllm_autoprune.tpdsl.registry import ATOMS
from vllm_autoprune.tpdsl.safety import synthetic_probes

FREE: dict[str, Any] = {"question_free": True, "base_policy": "pivoted_qr"}


@pytest.mark.parametrize("strategy", ["random", "tpe", "autoprune+", "autoprune"])
async def test_no_candidate_reads_the_question(strategy: str, search: Searches) -> None:
    """What a language model writes with a signal that reads it is no candidate."""
    winner = await search(VALID_REPLIES, strategy=strategy, rounds=4, **FREE)
    proposed = search.records(ProposalRecord)
    assert len(proposed) >= 5
    left_out = excluded_atoms(settings_of(**FREE))
    for record in proposed:
        if record.state is None:
            continue
        state = load_state(record.state)
        assert not materialize(state, 8).reads_instruction
        if record.origin != "llm":
            assert left_out.isdisjoint(structure(state)), "what the task does not list"
    assert not materialize(load_state(winner.state), 8).reads_instruction
    results = search.records(TrialRecord)
    refused = [r for r in results if "reads the question" in r.reason]
    assert bool(refused) == (strategy in ("autoprune", "autoprune+"))


def test_a_task_offers_no_atom_that_reads_the_question() -> None:
    free = settings_of(**FREE)
    task = describe_task(free)
    assert "It must not read the question: all questions about an image are" in task
    assert "must not read the question: all" not in describe_task(settings_of())
    readers = {name for name in ATOMS.names() if ATOMS[name].needs & INSTRUCTION_NEEDS}
    assert len(readers) > 10
    assert not [name for name in readers if name in task]


def test_facts_about_questions_are_left_out() -> None:
    budget = BudgetCall.parse(8)
    facts = ImageFacts.of_probes(synthetic_probes(8)[:1])
    with_question = facts.describe(budget)
    alone = facts.without_question().describe(budget)
    for words in ("The sign", "Text segments", "Embeddings of words", "and question"):
        assert words in with_question and words not in alone
    assert "Cosines between tokens are" in alone and "pool_ratio" in alone


def test_a_base_policy_that_reads_the_question_is_refused() -> None:
    for fields in ({"base_policy": "cdpruner"}, {"other_bases": ("cdpruner",)}):
        with pytest.raises(ValidationError, match="cdpruner reads the question"):
            Settings.model_validate({**FREE, **fields})


def test_the_structure_of_the_paper_keeps_its_signals_that_are_offered() -> None:
    signals = [call.atom for call in load_state("autoprune").scoring.signals]
    free = [call.atom for call in paper_state(settings_of(**FREE)).scoring.signals]
    assert free == signals[1:] and signals[0] == "instruction_guided_visual_relevance"
    unrestricted = paper_state(settings_of(base_policy="pivoted_qr"))
    assert [call.atom for call in unrestricted.scoring.signals] == signals


def test_a_reading_part_that_acts_on_nothing_is_no_problem() -> None:
    """A gate of the question in a policy that exchanges nothing reads none."""
    settings = settings_of(**FREE)
    state = load_state("autoprune").without_exchange()
    assemble_state(components_json(state), settings)
    reading = json.loads(VALID_REPLIES[0])
    reading["scoring"]["signals"] = [{"atom": "instruction_guided_visual_relevance"}]
    with pytest.raises(StateError, match="reads the question -> use atoms that the ta"):
        assemble_state(reading, settings)
