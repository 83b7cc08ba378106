"""What a soak's client counted, beside what the server's ``/metrics`` grew by."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common.client import Client
from benchmarks.cost.soak.hang_up import Killed, hang_up
from benchmarks.cost.soak.requests import LONG_ANSWER, Request, RequestMix

MAX_FAULTS = 20
"""Faults that are described; all are counted."""

KILLERS = 16
"""Clients that hang up, each once in so many seconds: together one every second."""

MAX_EVENTS = 10
"""Events of a stream that a client reads before it hangs up, at most."""

CounterValues = Mapping[str, float]
"""Values by name and labels, summed over engines and finish reasons."""

_OWN_PREFIX = "autoprune_"
_VLLM_COUNTERS = (
    "vllm:request_success_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_generation_tokens_bucket",
)
_SHORT_ANSWERS = "vllm:request_generation_tokens_bucket 5.0"
"""Requests that ended after five tokens at most: those whose client waited, which get four."""

_LABELS = ("state", "chooser", "stage", "le")
_FAILURES = (
    "autoprune_fallbacks_total",
    "autoprune_selection_errors_total",
    "autoprune_unsafe_states_total",
)


@dataclass
class Tally:
    """The counts that a server should have, by its client. Not safe for several threads."""

    sent: int = 0
    answered: int = 0
    refused: int = 0
    errors: int = 0
    images: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    before: int = 0
    after: int = 0
    core: int = 0
    recalled: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    killed: int = 0
    unseen_tokens: int = 0
    """At most so many answer tokens were computed that nobody waited for."""
    faults: list[str] = field(default_factory=list)

    def add(self, request: Request, status: int, text: str) -> None:
        """Count one request and its answer."""
        self.sent += 1
        self.kinds[request.kind] += 1
        if status != request.status:
            self.errors += 1
            self._add_fault(f"{request.kind}: HTTP {status}, not {request.status}: {text[:200]}")
        elif status != 200:
            self.refused += 1
        else:
            self.answered += 1
            usage = json.loads(text)["usage"]
            self._add_counts(request, usage["prompt_tokens"], usage["completion_tokens"])

    def add_killed(self, request: Request, killed: Killed) -> None:
        """Count one request whose client hung up in the middle of the answer."""
        self.sent += 1
        if killed.error:
            self.errors += 1
            self._add_fault(f"{request.kind}, streamed: {killed.error}")
            return
        self.killed += 1
        self.unseen_tokens += LONG_ANSWER - killed.answer_tokens
        self._add_counts(request, killed.prompt_tokens, killed.answer_tokens)

    def _add_fault(self, text: str) -> None:
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(text)

    def _add_counts(self, request: Request, prompt_tokens: int, answer_tokens: int) -> None:
        self.requests[request.policy] += 1
        self.images[request.keep] += request.images
        self.before += request.before
        self.after += request.after
        self.core += request.core
        self.recalled += request.recalled
        self.prompt_tokens += prompt_tokens
        self.answer_tokens += answer_tokens


def keep_busy(url: str, mix: RequestMix, users: int, seconds: float, seed: int = 0) -> Tally:
    """Send requests for that long; every user sends the next one as soon as it has an answer.

    Beside them a client hangs up in the middle of an answer every second. Waits for requests in
    flight at the end, so that both sides count them.
    """
    client, tally, lock = Client(url), Tally(), threading.Lock()
    begin = time.monotonic()
    end = begin + seconds

    def user(number: int) -> None:
        random = Random(f"{seed}/{number}")
        while time.monotonic() < end:
            request = mix.draw(random)
            status, text = client.post(request.body)
            with lock:
                tally.add(request, status, text)
            if status == 0:
                time.sleep(1.0)  # no server: do not retry in a busy loop

    def killer(number: int) -> None:
        random, due = Random(f"{seed}/killer {number}"), begin + number
        while due < end:
            time.sleep(max(0.0, due - time.monotonic()))
            request = mix.draw_stream(random)
            killed = hang_up(url, request.body, random.randint(1, MAX_EVENTS))
            with lock:
                tally.add_killed(request, killed)
            due = max(due + KILLERS, time.monotonic())

    with ThreadPoolExecutor(users + KILLERS, thread_name_prefix="client") as pool:
        futures = [pool.submit(user, number) for number in range(users)]
        futures += [pool.submit(killer, number) for number in range(KILLERS)]
        for future in futures:
            future.result()
    return tally


@dataclass(frozen=True, slots=True)
class CountPair:
    """One figure as counted by client and server.

    ``unseen``: at most so much more is counted by the server, of what its client did not wait for.
    """

    name: str
    client: float
    server: float
    unseen: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether both counts are the same, but for what the client cannot know."""
        return self.client <= self.server <= self.client + self.unseen


def read_counters(exposition: str) -> CounterValues:
    """The counters of one ``/metrics`` answer."""
    counters: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name not in _VLLM_COUNTERS and not sample.name.startswith(_OWN_PREFIX):
                continue
            labels = "".join(f" {sample.labels[key]}" for key in _LABELS if key in sample.labels)
            name = sample.name + labels
            counters[name] = counters.get(name, 0.0) + sample.value
    return counters


def compare_counts(
    before: CounterValues, after: CounterValues, tally: Tally, kv_bytes: int
) -> list[CountPair]:
    """Every figure that both count; one that only the server reports is 0 at the client.

    ``kv_bytes``: size of one token. ``autoprune_fallbacks_total{fallback="none"}`` is not exported:
    it is no failure.
    """
    client: dict[str, float] = {
        "vllm:request_success_total": tally.answered,
        _SHORT_ANSWERS: tally.answered,
        "vllm:prompt_tokens_total": tally.prompt_tokens,
        "vllm:generation_tokens_total": tally.answer_tokens,
        "autoprune_requests_refused_total": tally.refused,
        "autoprune_visual_tokens_total before": tally.before,
        "autoprune_visual_tokens_total after": tally.after,
        "autoprune_core_tokens_total": tally.core,
        "autoprune_recalled_tokens_total": tally.recalled,
        "autoprune_kv_bytes_saved_total": (tally.before - tally.after) * kv_bytes,
        **{f"autoprune_requests_total {policy}": n for policy, n in tally.requests.items()},
        **{f"autoprune_images_total {keep}": n for keep, n in tally.images.items()},
        **dict.fromkeys(_FAILURES, 0.0),
    }
    counted = ("autoprune_requests_total ", "autoprune_images_total ")
    server_only = {name for name in after if name.startswith(counted)} - client.keys()
    client |= dict.fromkeys(server_only, 0.0)
    grown = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in client}
    unseen = {
        "vllm:generation_tokens_total": float(tally.unseen_tokens),
        # A server that learns too late that a client has hung up ends the answer, a long one.
        "vllm:request_success_total": float(tally.killed),
    }
    return [
        CountPair(name, client[name], grown[name], unseen.get(name, 0.0)) for name in sorted(client)
    ]
