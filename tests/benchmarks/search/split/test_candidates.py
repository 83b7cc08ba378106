from __future__ import annotations

import pytest

from benchmarks.search.split.candidates import (
    FAMILIES,
    Family,
    describe,
    family_of,
    neighbours,
    start_states,
)
from vllm_autoprune import load_state, materialize


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [8, 32])
def test_every_candidate_is_of_its_family_and_occurs_once(family: Family, budget: int) -> None:
    states = start_states(family, budget)
    assert len(states) == len({one.digest for one in states}) > 50
    near = neighbours(states[-1], family, budget)
    assert len(near) == len({one.digest for one in near}) > 10
    for one in (*states, *near):
        policy = materialize(one, budget)
        assert family_of(one, budget) == family
        assert policy.reads_instruction == (family != "question-free")
        assert (0 < policy.core < budget) == (family == "split")


def test_the_best_known_state_without_a_core_is_a_start() -> None:
    digests = {one.digest for one in start_states("unsplit", 8)}
    assert load_state("minillava").digest in digests


def test_a_core_too_small_for_a_token_is_no_split() -> None:
    quarter = next(one for one in start_states("split", 8) if one.core and one.core.share == 0.25)
    assert family_of(quarter, 3) == "unsplit"


def test_neighbours_change_the_core() -> None:
    start = start_states("split", 8)[0]
    assert start.core is not None
    before = start.core.model_dump()
    after = [one.core.model_dump() for one in neighbours(start, "split", 8) if one.core]
    assert set(before) == {
        field for core in after for field in core if core[field] != before[field]
    }


def test_a_description_tells_states_apart() -> None:
    states = start_states("split", 8)
    assert describe(load_state("divprune")) == "divprune"
    assert len({describe(one) for one in states}) == len(states)
