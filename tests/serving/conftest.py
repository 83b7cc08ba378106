"""Servers shared by all tests of a session, because starting one takes longer than its tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.server import Server, serve
from tests.serving.engine import CLIP, LLAVA
from tests.serving.runners import (
    Runner,
    begin_tests,
    end_processes,
    find_functions,
)
from vllm_autoprune.serving.api.endpoint import NAME

COMMON = (
    "--enforce-eager",
    "--max-model-len",
    "2048",
    "--block-size",
    "32",
    "--enable-prompt-tokens-details",
)
PRUNED = ("--autoprune-state", "autoprune", "--autoprune-text-tower", str(CLIP))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise tests by model runner: V2 is exhaustive, unless the test is marked ``both``.

    ``only("v1")`` names the one that a test runs on.
    """
    if "runner" not in metafunc.fixturenames:
        return
    runners: tuple[object, ...] = (
        "v1",
        pytest.param("v2", marks=pytest.mark.exhaustive),
    )
    if any(metafunc.definition.iter_markers("both")):
        runners = ("v1", "v2")
    for mark in metafunc.definition.iter_markers("only"):
        runners = mark.args
    metafunc.parametrize("runner", runners, indirect=True, scope="session")


@pytest.hookimpl(trylast=True)  # after pytest has grouped the tests by model runner
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests of servers first, while engines in processes of their own work on the others.

    Tests that end a shared server run after all others of servers and the same model runner.
    """
    in_engines = [item for item in items if find_functions(item)]
    items[:] = [item for item in items if not find_functions(item)]
    ends = [item for item in items if item.get_closest_marker("ends_servers")]
    for item in ends:
        name = item.callspec.id if isinstance(item, pytest.Function) else ""
        items.remove(item)
        of_runner = [
            i for i, other in enumerate(items) if name in other.nodeid.partition("[")[2]
        ]
        items.insert(max(of_runner, default=len(items) - 1) + 1, item)
    items += in_engines


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the tests that run in an engine's process, V1 and V2 in parallel."""
    if not session.config.option.collectonly and not hasattr(
        session.config, "workerinput"
    ):
        begin_tests(session.items)


def pytest_sessionfinish() -> None:
    end_processes()


@pytest.fixture(scope="session")
def runner(request: pytest.FixtureRequest) -> Runner:
    """One of vLLM's model runners; its servers end before those of the other one start."""
    return Runner(request.param)


@pytest.fixture(scope="session")
def stock(runner: Runner) -> Iterator[Server]:
    """Server with the plugin installed and no state."""
    with serve(LLAVA, *COMMON, env=runner.environment) as server:
        yield server


@pytest.fixture(scope="session")
def pruned(runner: Runner) -> Iterator[Server]:
    """Server of the shipped state at K = 32; requests may bring other states, or be processed."""
    flags = (*COMMON, *PRUNED, "--autoprune-requests", "states", "--enable-scale-out")
    with serve(LLAVA, *flags, env=runner.environment) as server:
        yield server


@pytest.fixture(scope="session")
def two_front_ends(runner: Runner) -> Iterator[Server]:
    """Two API servers and one engine, K = N / 9 and K_r = 5 by flags; requests may set nothing.

    The endpoints of the plugin and rendering are on.
    """
    budgets = ("--autoprune-budget", "1/9:8-64", "--autoprune-recall", "5")
    routes = ("--api-server-count", "2", "--enable-scale-out")
    flags = (*COMMON, *PRUNED, *budgets, *routes, "--enable-log-requests")
    env = {**runner.environment, "VLLM_PLUGINS": f"autoprune,{NAME}"}
    with serve(LLAVA, *flags, env=env) as server:
        server.await_api_servers(2)
        yield server
