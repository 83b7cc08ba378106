"""Rolling out another state: no request is lost with the timings of the manifests."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks.server import Server, serve
from tests.fake_server import Body, FakeServer, Reply, fake_server
from tests.serving.conftest import COMMON, PRUNED
from tests.serving.engine import LLAVA, examples
from tests.serving.http import body, samples
from tests.serving.rollout import Replica, Timings, counting_clients, proxy, roll
from tests.serving.runners import Runner

MANIFEST = Path(__file__).resolve().parents[2] / "examples/kubernetes/serving.yaml"


@dataclass
class FakeReplica:
    """After SIGTERM it answers what it has, and new requests by 500, as vLLM does."""

    stack: ExitStack
    draining: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.server: FakeServer = self.stack.enter_context(fake_server(self.answer))

    def answer(self, body: Body) -> Reply:
        return Reply(status=500 if self.draining.is_set() else 200)

    @property
    def url(self) -> str:
        return self.server.url

    def terminate(self) -> None:
        self.draining.set()

    def wait(self, timeout: float) -> None:
        assert timeout > 0


def roll_fakes(timings: Timings) -> Counter[str]:
    """Outcomes of the requests of four clients while two fake replicas are replaced."""
    requests = {"model": "mock", "messages": [], "max_tokens": 8}
    with ExitStack() as stack:
        old = [FakeReplica(stack) for _ in range(2)]
        balancer = stack.enter_context(proxy([replica.url for replica in old]))
        with counting_clients(balancer.url, [requests] * 4) as outcomes:
            roll(balancer, old, partial(FakeReplica, stack), timings)
    return outcomes


def test_a_rolling_restart_loses_requests_only_without_the_hook() -> None:
    """A second of the cluster is a tenth here."""
    timings = Timings.read(MANIFEST, scale=1 / 10)
    assert timings.pre_stop > 2 * timings.lag
    outcomes = roll_fakes(timings)
    assert outcomes["answered"] > 20 and outcomes.keys() == {"answered"}
    without = roll_fakes(replace(timings, pre_stop=0.0))
    assert without.keys() == {"answered", "status 500"}


@dataclass(frozen=True)
class VllmReplica:
    """A running vLLM."""

    server: Server

    @property
    def url(self) -> str:
        return self.server.url

    def terminate(self) -> None:
        self.server.process.send_signal(signal.SIGTERM)

    def wait(self, timeout: float) -> None:
        assert self.server.process.wait(timeout) == 0


@pytest.mark.engine
@pytest.mark.exhaustive
def test_another_state_is_rolled_out_without_losing_a_request(runner: Runner) -> None:
    """Two replicas, four clients whose answers take seconds, and the manifest's own timings."""
    flags = (*COMMON, *PRUNED, "--shutdown-timeout", "100")
    new_state = ("--autoprune-state", "visionzip", "--autoprune-budget", "16")
    with ExitStack() as stack:
        new: list[VllmReplica] = []

        def start(*more: str) -> VllmReplica:
            server = serve(LLAVA, *flags, *more, env=runner.environment)
            return VllmReplica(stack.enter_context(server))

        def start_new() -> Replica:
            new.append(start(*new_state))
            return new[-1]

        old = [start(), start()]
        requests = [
            body(old[0].server, example, max_tokens=200, ignore_eos=True)
            for example in examples(4)[:4]
        ]
        balancer = stack.enter_context(proxy([replica.url for replica in old]))
        with counting_clients(balancer.url, requests) as outcomes:
            roll(balancer, old, start_new, Timings.read(MANIFEST))
        assert outcomes.keys() == {"answered"} and outcomes["answered"] > 40
        counted = [samples(replica.server) for replica in new]
        assert all(count["requests state=visionzip"] > 0 for count in counted)
