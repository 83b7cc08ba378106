"""The quick attacks of ``python -m tests.hostile``, on the servers that these tests share."""

from __future__ import annotations

import pytest

import tests.hostile.attacks  # noqa: F401  (registers them)
from benchmarks.server import Server
from tests.hostile.attack import ATTACKS
from tests.hostile.campaign import carry_out
from tests.hostile.mutate import run
from tests.serving.runners import Runner

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]

API_SERVER = (
    *("dear_states", "counted_though_not_served", "control_characters", "special_tokens"),
    *("truncated_prompts", "odd_sizes", "images_of_every_role", "odd_arguments_of_media"),
)
"""Attacks on the API server, which is the same for both model runners."""

WORKER = tuple(
    attack.name
    for attack in ATTACKS.values()
    if attack.quick
    and attack.profile == "default"
    and "llava" in attack.backbones
    # The shared servers have no endpoint of ours.
    and attack.name not in (*API_SERVER, "paths_of_the_server")
)


def find_problems(name: str, runner: Runner, stock: Server, pruned: Server) -> list[str]:
    servers = {"default": pruned, "stock": stock}
    return carry_out(ATTACKS[name], "llava", runner.name, lambda p: servers[p]).problems


@pytest.mark.parametrize("name", WORKER)
def test_an_attack_on_the_worker_is_withstood(
    runner: Runner, stock: Server, pruned: Server, name: str
) -> None:
    assert find_problems(name, runner, stock, pruned) == []


@pytest.mark.parametrize("runner", ["v1"], indirect=True)
@pytest.mark.parametrize("name", API_SERVER)
def test_an_attack_on_the_api_server_is_withstood(
    runner: Runner, stock: Server, pruned: Server, name: str
) -> None:
    assert find_problems(name, runner, stock, pruned) == []


@pytest.mark.parametrize("runner", ["v1"], indirect=True)
def test_mutated_requests_leave_the_server_as_it_was(stock: Server, pruned: Server) -> None:
    tally = run(pruned, 300, seed=5, stock=stock)
    assert tally.faults == []
    assert min(tally.statuses[200], tally.statuses[400]) > 20
