"""Another state without dropping a request: two servers behind a router, then the new one."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import httpx
import pytest

from benchmarks.server import Server, serve
from benchmarks.yardsticks.examples import Example
from tests.serving.conftest import COMMON, PRUNED
from tests.serving.engine import examples
from tests.serving.http import ask, body, prompt_tokens, text_of
from tests.serving.paths import LLAVA, TOKENS
from tests.serving.runners import Runner
from tests.serving.tcp_router import TcpRouter
from tests.serving.test_metrics import samples

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, pytest.mark.timeout(1500)]

OLD, NEW = 32, 16
"""K of the two states."""
# In float32, so that an answer does not depend on the requests that share its step.
FLAGS = (*COMMON, *PRUNED, "--dtype", "float32", "--shutdown-timeout", "100")
STATES = {
    OLD: FLAGS,
    NEW: (*FLAGS, "--autoprune-state", "visionzip", "--autoprune-budget", str(NEW)),
}
CLIENTS, EACH = 3, 12
"""Concurrent clients, and answers that are waited for in each phase."""


@dataclass
class Traffic:
    """Clients that ask without a pause until they are stopped."""

    server: Server
    questions: Sequence[Example]
    answers: list[tuple[int, int, str]] = field(default_factory=list)
    """Which question, tokens of its prompt, and the answer."""
    failures: list[str] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self, client: int) -> None:
        """One client; the questions in turn."""
        at = client
        while not self.stopped.is_set():
            which = at % len(self.questions)
            try:
                answer = ask(self.server, self.questions[which], max_tokens=12)
                self.answers.append((which, prompt_tokens(answer), text_of(answer)))
            except (httpx.HTTPError, AssertionError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            at += 1

    def wait(self, reached: Callable[[], bool]) -> None:
        """Until something is reached; the clients go on."""
        deadline = time.monotonic() + 300
        while not reached():
            assert not self.failures, self.failures[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_another_state_is_rolled_out_under_traffic(runner: Runner) -> None:
    questions = examples(4)
    with ExitStack() as stack:
        old = stack.enter_context(serve(LLAVA, *STATES[OLD], env=runner.environment, patience=600))
        router = stack.enter_context(TcpRouter([old.url]))
        traffic = Traffic(replace(old, url=router.url), questions)
        clients = [threading.Thread(target=traffic.run, args=(at,)) for at in range(CLIENTS)]
        stack.callback(traffic.stopped.set)
        for client in clients:
            client.start()
        traffic.wait(lambda: len(traffic.answers) >= EACH)

        # 1. The new server starts beside the old one, and is warmed up before it gets traffic.
        new = stack.enter_context(serve(LLAVA, *STATES[NEW], env=runner.environment, patience=600))
        assert samples(new).get("autoprune_requests_total state=visionzip", 0.0) == 0.0
        expected = {
            OLD: [_expect(old, example) for example in questions],
            NEW: [_expect(new, example) for example in questions],
        }
        misses = samples(new)["autoprune_feature_cache_misses_total"]
        assert misses == len({example.image_id for example in questions})

        # 2. Both states side by side.
        router.send_to([old.url, new.url])
        traffic.wait(lambda: router.opened(new.url) >= EACH)

        # 3. The old server is told to end while it is answering; it finishes what it has.
        router.send_to([new.url])
        old.process.send_signal(signal.SIGTERM)
        given = router.opened(new.url)
        traffic.wait(lambda: router.opened(new.url) >= given + EACH)
        assert old.process.wait(timeout=120) == 0
        traffic.stopped.set()
        for client in clients:
            client.join()
        counted = samples(new)

    assert traffic.failures == []
    by_state: dict[int, list[bool]] = {OLD: [], NEW: []}
    full = expected[OLD][0][0] - OLD
    for which, tokens, text in traffic.answers:
        (state,) = [k for k in STATES if tokens == expected[k][which][0]]
        by_state[state].append((tokens, text) == expected[state][which])
    assert all(by_state[OLD]) and all(by_state[NEW])
    assert len(by_state[NEW]) >= 2 * EACH and full < TOKENS
    # Counters begin at 0 with a server, and none of its requests is counted elsewhere.
    requests = counted["autoprune_requests_total state=visionzip"]
    assert requests == len(by_state[NEW]) + len(questions)
    # What the warm-up sent was not encoded again.
    assert counted["autoprune_feature_cache_misses_total"] == misses


def _expect(server: Server, example: Example) -> tuple[int, str]:
    status, answer = server.post("/v1/chat/completions", body(server, example, max_tokens=12))
    assert status == 200, answer
    return prompt_tokens(answer), text_of(answer)
