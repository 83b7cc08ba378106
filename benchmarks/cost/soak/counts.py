"""What a soak's client counted, beside what the server's ``/metrics`` grew by."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common.client import Client
from benchmarks.cost.soak.requests import Request

MAX_FAULTS = 20
"""Faults that are described; all are counted."""

CounterValues = Mapping[str, float]
"""Values by name and labels, summed over engines and finish reasons."""

_OWN_PREFIX = "autoprune_"
_VLLM_COUNTERS = (
    "vllm:request_success_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
)
_LABELS = ("state", "chooser", "stage")
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
    prompt_tokens: int = 0
    answer_tokens: int = 0
    faults: list[str] = field(default_factory=list)

    def add(self, request: Request, status: int, text: str) -> None:
        """Count one request and its answer."""
        self.sent += 1
        self.kinds[request.kind] += 1
        if status != request.status:
            self.errors += 1
            if len(self.faults) < MAX_FAULTS:
                self.faults.append(
                    f"{request.kind}: HTTP {status}, not {request.status}: {text[:200]}"
                )
        elif status != 200:
            self.refused += 1
        else:
            self._add_answer(request, json.loads(text)["usage"])

    def _add_answer(self, request: Request, usage: dict[str, int]) -> None:
        self.answered += 1
        self.requests[request.policy] += 1
        self.images[request.keep] += request.images
        self.before += request.before
        self.after += request.after
        self.prompt_tokens += usage["prompt_tokens"]
        self.answer_tokens += usage["completion_tokens"]


def keep_busy(
    url: str, draw: Callable[[Random], Request], users: int, seconds: float, seed: int = 0
) -> Tally:
    """Send requests for that long; every user sends the next one as soon as it has an answer.

    Waits for requests in flight at the end, so that both sides count them.
    """
    client, tally, lock = Client(url), Tally(), threading.Lock()
    end = time.monotonic() + seconds

    def user(number: int) -> None:
        random = Random(f"{seed}/{number}")
        while time.monotonic() < end:
            request = draw(random)
            status, text = client.post(request.body)
            with lock:
                tally.add(request, status, text)
            if status == 0:
                time.sleep(1.0)  # no server: do not retry in a busy loop

    with ThreadPoolExecutor(users, thread_name_prefix="user") as pool:
        for future in [pool.submit(user, number) for number in range(users)]:
            future.result()
    return tally


@dataclass(frozen=True, slots=True)
class CountPair:
    """One figure as counted by client and server."""

    name: str
    client: float
    server: float

    @property
    def equal(self) -> bool:
        """Whether both counts are exactly the same."""
        return self.client == self.server


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
        "vllm:prompt_tokens_total": tally.prompt_tokens,
        "vllm:generation_tokens_total": tally.answer_tokens,
        "autoprune_requests_refused_total": tally.refused,
        "autoprune_visual_tokens_total before": tally.before,
        "autoprune_visual_tokens_total after": tally.after,
        "autoprune_kv_bytes_saved_total": (tally.before - tally.after) * kv_bytes,
        **{f"autoprune_requests_total {policy}": n for policy, n in tally.requests.items()},
        **{f"autoprune_images_total {keep}": n for keep, n in tally.images.items()},
        **dict.fromkeys(_FAILURES, 0.0),
    }
    counted = ("autoprune_requests_total ", "autoprune_images_total ")
    server_only = {name for name in after if name.startswith(counted)} - client.keys()
    client |= dict.fromkeys(server_only, 0.0)
    grown = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in client}
    return [CountPair(name, client[name], grown[name]) for name in sorted(client)]
