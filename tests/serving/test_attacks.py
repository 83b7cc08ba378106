"""Quick attacks of ``python -m tests.hostile`` on the shared servers."""

from __future__ import annotations

import pytest

import tests.hostile.attacks  # noqa: F401  (registers them)
from benchmarks.server import Server
from tests.hostile.attack import ATTACKS
from tests.hostile.campaign import run_attack
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
    # The plugin's endpoint is off on the shared servers.
    and attack.name not in (*API_SERVER, "paths_of_the_server")
)


def find_problems(name: str, runner: Runner, stock: Server, pruned: Server) -> list[str]:
    servers = {"default": pruned, "stock": stock}
    return run_attack(ATTACKS[name], "llava", runner.name, lambda p: servers[p]).problems


@pytest.mark.parametrize("name", WORKER)
def test_attack_on_the_worker_finds_no_problem(
    runner: Runner, stock: Server, pruned: Server, name: str
) -> None:
    assert find_problems(name, runner, stock, pruned) == []


@pytest.mark.parametrize("runner", ["v1"], indirect=True)
@pytest.mark.parametrize("name", API_SERVER)
def test_attack_on_the_api_server_finds_no_problem(
    runner: Runner, stock: Server, pruned: Server, name: str
) -> None:
    assert find_problems(name, runner, stock, pruned) == []


@pytest.mark.parametrize("runner", ["v1"], indirect=True)
def test_mutated_requests_do_not_affect_the_server(stock: Server, pruned: Server) -> None:
    tally = run(pruned, 300, seed=5, stock=stock)
    assert tally.faults == []
    assert min(tally.statuses[200], tally.statuses[400]) > 20
