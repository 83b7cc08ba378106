"""Quick attacks on a backbone with variable image sizes; on mini-LLaVA: ``test_hostile.py``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hostile.__main__ import Fleet, run_attack
from tests.hostile.site import ATTACKS, Reply, distance

BACKBONE = "qwen2_5_vl"
CACHED = ("one_uuid_in_one_request", "one_uuid_in_two_requests")
UNCACHED = tuple(a.name for a in ATTACKS.values() if a.quick and a.profile == "uncached")
SPLIT = ("forged_parts", "cache_salt_of_cores")


# One runner each, because starting a server takes longer than all attacks on it.
@pytest.fixture(scope="module")
def cached() -> Iterator[Fleet]:
    with Fleet(BACKBONE, "v2") as fleet:
        yield fleet


@pytest.fixture(scope="module")
def uncached() -> Iterator[Fleet]:
    with Fleet(BACKBONE, "v1") as fleet:
        yield fleet


@pytest.mark.exhaustive
@pytest.mark.engine
@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", CACHED)
def test_attack_finds_no_problem(cached: Fleet, name: str) -> None:
    assert run_attack(ATTACKS[name], cached.get).problems == []


@pytest.mark.engine
@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", [*UNCACHED, *SPLIT])
def test_attack_without_caches_or_on_split_images_finds_no_problem(
    uncached: Fleet, name: str
) -> None:
    assert run_attack(ATTACKS[name], uncached.get).problems == []


def test_a_token_that_one_answer_lacks_counts_as_its_least_likely() -> None:
    refused = Reply(400, '{"error": {"message": "no"}}', 0.1)
    assert distance(refused.logprobs, {"1": -1.0}) == float("inf")
    assert distance({"1": -1.0, "2": -3.0}, {"1": -1.0, "3": -4.0}) == pytest.approx(2 / 3)
