"""Servers shared by all tests of a session: starting one costs more than asking it everything."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from benchmarks.server import Server, serve
from tests.serving.paths import CLIP, LLAVA
from tests.serving.runners import ENVIRONMENTS, Runner
from vllm_autoprune.serving.endpoint import NAME

COMMON = (
    *("--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "2048", "--block-size", "32"),
    "--enable-prompt-tokens-details",
)
PRUNED = ("--autoprune-state", "autoprune", "--autoprune-text-tower", str(CLIP))


@pytest.fixture(scope="session", params=ENVIRONMENTS)
def runner(request: pytest.FixtureRequest) -> Runner:
    """Each of vLLM's model runners; servers of one are ended before those of the other start."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    asked = {item.callspec.params.get("runner") for item in items if hasattr(item, "callspec")}
    return Runner(request.param, frozenset(ENVIRONMENTS.keys() & asked))


@pytest.fixture(scope="session")
def stock(runner: Runner) -> Iterator[Server]:
    """The plugin installed, no state given."""
    with serve(LLAVA, *COMMON, env=runner.environment) as server:
        yield server


@pytest.fixture(scope="session")
def pruned(runner: Runner) -> Iterator[Server]:
    """The shipped state at its own K = 32; requests may bring any other."""
    flags = (*COMMON, *PRUNED, "--autoprune-requests", "states")
    with serve(LLAVA, *flags, env=runner.environment) as server:
        yield server


@pytest.fixture(scope="session")
def two_front_ends(runner: Runner) -> Iterator[Server]:
    """Two API servers before one engine, K = 16 by flag; requests may set nothing.

    They have the endpoint that tells what is served.
    """
    flags = (*COMMON, *PRUNED, "--autoprune-budget", "16", "--api-server-count", "2")
    env = {**runner.environment, "VLLM_PLUGINS": f"autoprune,{NAME}"}
    with serve(LLAVA, *flags, "--enable-log-requests", env=env) as server:
        # Health is answered by whichever process is up first.
        deadline = time.monotonic() + 60
        while server.logged().count("Application startup complete") < 2:
            assert time.monotonic() < deadline, "the second front end did not start"
            time.sleep(0.2)
        yield server
