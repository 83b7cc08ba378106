"""Quick attacks on a backbone with variable image sizes: cached, uncached, and split images."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tests.hostile.attacks  # noqa: F401  (registers them)
from tests.hostile.attack import ATTACKS
from tests.hostile.campaign import run_attack
from tests.hostile.fleet import Fleet

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]

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
@pytest.mark.parametrize("name", CACHED)
def test_attack_finds_no_problem(cached: Fleet, name: str) -> None:
    assert run_attack(ATTACKS[name], BACKBONE, "v2", cached.get).problems == []


@pytest.mark.parametrize("name", UNCACHED)
def test_attack_without_caches_finds_no_problem(uncached: Fleet, name: str) -> None:
    assert run_attack(ATTACKS[name], BACKBONE, "v1", uncached.get).problems == []


@pytest.mark.parametrize("name", SPLIT)
def test_attack_on_split_images_finds_no_problem(uncached: Fleet, name: str) -> None:
    uncached.end("uncached")  # one pruned server at a time
    assert run_attack(ATTACKS[name], BACKBONE, "v1", uncached.get).problems == []
