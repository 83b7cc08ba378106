"""The plugin without a state against an environment without the plugin, and that against itself.

The three servers run side by side and are sent requests in turn, so that whatever slows the machine
slows all of them; the second stock server shows the size of the noise. Calls of the plugin's
functions, which have no noise, are counted on servers of their own.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from time import sleep

from benchmarks.common import BenchmarkError
from benchmarks.common.client import Client
from benchmarks.common.progress import log_progress
from benchmarks.common.report import Claim, Section, Table, format_excess, format_spread
from benchmarks.cost.overhead.bare_environment import build_bare_environment
from benchmarks.cost.overhead.plugin_calls import Calls, count_calls
from benchmarks.cost.overhead.settings import Settings, build_request, image_url
from benchmarks.cost.overhead.ttft import Timing
from benchmarks.server import POLLING, Server, serve
from vllm_autoprune.statistics import Estimate, at_most, ratio_of_medians, spread, verdict_of

SERVERS = ("stock", "plugin", "stock again")
"""``plugin`` has it installed; the environment of the others does not."""

REQUESTS: Mapping[str, int] = {"text": 1, "image": 1, "8 images at once": 8}
"""Kinds of requests, and how many are sent together."""

TOKENS, SIDE, COMPARED = 8, 168, 20
ROUNDS, EACH, WARM_UP = 20, 10, 2
"""Rounds, the requests of each kind in a round, and rounds before those that count."""

HIGH = 1.01

PROFILED: Mapping[str, tuple[str, ...]] = {
    "no state": (),
    "state `divprune`": ("--autoprune-state", "divprune", "--autoprune-budget", "64"),
}

Times = dict[str, dict[str, list[list[float]]]]
"""Seconds by kind of request and server, one row a round."""


def _empty() -> Times:
    return {kind: {name: [] for name in SERVERS} for kind in REQUESTS}


@dataclass
class Measured:
    """All values of a run."""

    totals: Times = field(default_factory=_empty)
    """Until the last answer of those sent together has ended."""
    processor: Times = field(default_factory=_empty)
    """Processor time of the server meanwhile."""
    differing: list[str] = field(default_factory=list)
    """Requests whose answers are not the same bytes on all servers."""
    compared: int = 0
    by_set: list[dict[str, float]] = field(default_factory=list)
    """Ratios of whole requests, plugin to stock, of each set of servers alone."""
    calls: dict[str, Calls] = field(default_factory=dict)
    """Calls of the plugin's functions by server, without a state and with one."""


def measure(settings: Settings) -> Section:
    """Two sets of servers, started in opposite order."""
    turns, rounds = (1, 4) if settings.quick else (2, ROUNDS)
    measured = Measured()
    measured.calls = {name: count_calls(settings, flags) for name, flags in PROFILED.items()}
    with tempfile.TemporaryDirectory(prefix="bare-") as folder:
        bare = build_bare_environment(Path(folder))
        for turn in range(turns):
            names = SERVERS if turn % 2 == 0 else SERVERS[::-1]
            with contextlib.ExitStack() as stack:
                running = {
                    name: stack.enter_context(_serve(settings, name, bare)) for name in names
                }
                _compare_answers(running, turn, measured)
                _send_rounds(running, turn, rounds, measured)
            part = slice(turn * rounds, None)
            measured.by_set.append(
                {kind: _ratio(measured.totals, kind, "plugin", part).value for kind in REQUESTS}
            )
    return build_section(measured)


@contextlib.contextmanager
def _serve(settings: Settings, name: str, bare: Path) -> Iterator[Server]:
    log_progress(f"inert: start {name}")
    flags = ("--enforce-eager", "--max-model-len", "2048",
             "--no-enable-prefix-caching", "--mm-processor-cache-gb", "0")  # fmt: skip
    log = settings.log(f"inert-{name.replace(' ', '-')}")
    stock = name != "plugin"
    with serve(
        settings.model,
        *flags,
        env={"PYTHONPATH": ""} if stock else None,
        log=log,
        vllm=bare if stock else None,
    ) as server:
        yield server


def _compare_answers(running: Mapping[str, Server], turn: int, measured: Measured) -> None:
    for at in range(COMPARED):
        url = image_url(turn * COMPARED + at, SIDE, SIDE) if at % 2 else None
        text = f"Which shape is number {at} of {turn}?"
        answers = {_answer(server, text, url) for server in running.values()}
        measured.compared += 1
        if len(answers) > 1:
            measured.differing.append(f"{'image' if url else 'text'} {turn}/{at}")


def _answer(server: Server, text: str, url: str | None) -> str:
    """The body of an answer with log-probabilities, without what names the request."""
    request = json.loads(build_request(server.model, text, url, tokens=TOKENS))
    request.pop("stream_options", None)
    status, answer = server.post(
        "/v1/chat/completions", {**request, "stream": False, "logprobs": True, "top_logprobs": 5}
    )
    if status != 200:
        raise BenchmarkError(f"{status}: {answer}")
    return json.dumps({k: v for k, v in answer.items() if k not in ("id", "created")})


def _send_rounds(running: Mapping[str, Server], turn: int, rounds: int, measured: Measured) -> None:
    numbers = count(turn * 1_000_000)
    for i in range(WARM_UP + rounds):
        if i % 5 == 0:
            log_progress(f"inert: round {i} of {WARM_UP + rounds}")
        order = SERVERS[i % 3 :] + SERVERS[: i % 3]
        for kind, together in REQUESTS.items():
            sent = [[next(numbers) for _ in range(together)] for _ in range(EACH)]
            for name in order if i % 2 == 0 else reversed(order):
                sleep(POLLING)
                totals, processor = _send(running[name], kind, sent)
                if i >= WARM_UP:
                    measured.totals[kind][name].append(totals)
                    measured.processor[kind][name].append(processor)


def _send(
    server: Server, kind: str, sent: Sequence[Sequence[int]]
) -> tuple[list[float], list[float]]:
    """Seconds, and processor seconds, of requests sent one after another, or several at once."""
    totals, processor = [], []
    for numbers in sent:
        bodies = [_build_body(server, kind, number) for number in numbers]
        before = server.processor_seconds()
        records = Client(server.url).send_together(bodies)
        processor.append(server.processor_seconds() - before)
        totals.append(max(Timing.of(record).total for record in records))
    return totals, processor


def _build_body(server: Server, kind: str, number: int) -> bytes:
    url = None if kind == "text" else image_url(number, SIDE, SIDE)
    text = f"What is number {number} in the picture? Say it again: {number}."
    return build_request(server.model, text, url, tokens=TOKENS)


def _ratio(times: Times, kind: str, name: str, part: slice = slice(None)) -> Estimate:
    return ratio_of_medians(times[kind][name][part], times[kind]["stock"][part])


def _claim_calls(calls: Calls) -> Claim:
    return Claim(
        "plugin installed, no state: requests call none of its functions",
        f"{calls.plugin.total()} calls by {calls.requests} requests, {len(calls.steps)} processes",
        verdict_of(not calls.plugin),
    )


def build_section(measured: Measured) -> Section:
    """Claims and figures."""
    equal = measured.compared - len(measured.differing)
    claims = [
        Claim(
            "plugin installed, no state: answers with their log-probabilities are the same bytes",
            f"{equal} of {measured.compared}",
            verdict_of(not measured.differing and measured.compared > 0),
        ),
        _claim_calls(measured.calls["no state"]),
    ]
    parts = (("time, and so requests/s", measured.totals), ("processor time", measured.processor))
    for what, times in parts:
        for kind in REQUESTS:
            ratio = _ratio(times, kind, "plugin")
            noise = format_excess(_ratio(times, kind, "stock again"))
            promise = f"plugin installed, no state, {kind}, {what}: at most 1 % above stock"
            text = f"{format_excess(ratio)}; stock against stock: {noise}"
            claims.append(Claim(promise, text, at_most(ratio, HIGH)))
    rows = [
        (kind, name, *(format_spread(spread([v for row in times[kind][name] for v in row]))
                       for _, times in parts))
        for kind in REQUESTS
        for name in SERVERS
    ]  # fmt: skip
    return Section(
        name="inert",
        title="The plugin without a state",
        setup=[
            f"mini-LLaVA, {TOKENS} tokens an answer, caches off; stock is an environment without "
            "the plugin, otherwise the same",
            f"three servers side by side, every {EACH} requests to each of them in rotating order; "
            "sets of servers started anew, one after the other: ratios "
            + "; ".join(
                ", ".join(f"{k} {100 * (r - 1):+.1f} %" for k, r in one.items())
                for one in measured.by_set
            ),
            "processor time is that of the API server and the worker; the engine core between "
            "them polls while the worker computes",
        ],
        claims=claims,
        tables=[
            Table(
                "Milliseconds: median (quartiles).",
                ("request", "server", "time", "processor time"),
                rows,
            ),
            Table(
                "Calls of the plugin's functions, by Python's profiler.",
                ("server", "requests", "calls", "most called"),
                [
                    (name, str(calls.requests), str(calls.plugin.total()), _most_called(calls))
                    for name, calls in measured.calls.items()
                ],
            ),
        ],
        data={"totals": measured.totals, "processor": measured.processor},
    )


def _most_called(calls: Calls) -> str:
    return ", ".join(f"`{name}`" for name, _ in calls.plugin.most_common(2)) or "-"
