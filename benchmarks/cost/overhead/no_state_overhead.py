"""The plugin without a state against vLLM without the plugin, and that against itself.

The three servers run side by side and get every request in turn, so that whatever slows the machine
slows all of them; the second stock server shows the size of the noise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from itertools import count

from benchmarks.common.client import Client
from benchmarks.common.progress import log_progress
from benchmarks.common.report import Claim, Section, Table, format_excess, format_spread
from benchmarks.cost.overhead.settings import Settings, build_request, image_url
from benchmarks.cost.overhead.ttft import Timing
from benchmarks.server import Server, serve
from vllm_autoprune.serving.plugin import DISABLE
from vllm_autoprune.statistics import Estimate, ratio_of_medians, spread, within

SERVERS: Mapping[str, Mapping[str, str]] = {
    "stock": {DISABLE: "1"},
    "plugin": {DISABLE: "0"},
    "stock again": {DISABLE: "1"},
}
REQUESTS = ("text", "image")
TOKENS, SIDE = 8, 168
LOW, HIGH = 0.99, 1.01

Times = dict[str, dict[str, list[list[float]]]]
"""Seconds of whole requests by kind of request and server, one row a round."""


def measure(settings: Settings) -> Section:
    """Two sets of servers, started in opposite order."""
    turns, rounds = (1, 40) if settings.quick else (2, 200)
    totals, firsts = _empty(), _empty()
    by_set: list[dict[str, float]] = []
    for turn in range(turns):
        names = list(SERVERS) if turn % 2 == 0 else list(SERVERS)[::-1]
        with contextlib.ExitStack() as stack:
            running = {name: stack.enter_context(_serve(settings, name)) for name in names}
            _send_rounds(running, turn, rounds, totals, firsts)
        part = slice(turn * rounds, None)
        by_set.append({kind: _ratio(totals, kind, "plugin", part).value for kind in REQUESTS})
    return build_section(totals, firsts, by_set)


def _empty() -> Times:
    return {kind: {name: [] for name in SERVERS} for kind in REQUESTS}


@contextlib.contextmanager
def _serve(settings: Settings, name: str) -> Iterator[Server]:
    log_progress(f"inert: start {name}")
    flags = ("--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "2048",
             "--no-enable-prefix-caching", "--mm-processor-cache-gb", "0")  # fmt: skip
    log = settings.log(f"inert-{name.replace(' ', '-')}")
    with serve(settings.model, *flags, env=SERVERS[name], log=log) as server:
        yield server


def _send_rounds(
    running: Mapping[str, Server], turn: int, rounds: int, totals: Times, firsts: Times
) -> None:
    numbers, names, warm_up = count(turn * 100_000), list(SERVERS), 20
    for i in range(warm_up + rounds):
        if i % 50 == 0:
            log_progress(f"inert: round {i} of {warm_up + rounds}")
        order = names[i % 3 :] + names[: i % 3]
        for kind in REQUESTS:
            number = next(numbers)
            url = image_url(number, SIDE, SIDE) if kind == "image" else None
            text = f"What is number {number} in the picture? Say it again: {number}."
            for name in order if i % 2 == 0 else reversed(order):
                server = running[name]
                body = build_request(server.model, text, url, tokens=TOKENS)
                (record,) = Client(server.url).send_together([body])
                timing = Timing.of(record)
                if i >= warm_up:
                    totals[kind][name].append([timing.total])
                    firsts[kind][name].append([timing.ttft])


def _ratio(times: Times, kind: str, name: str, part: slice = slice(None)) -> Estimate:
    return ratio_of_medians(times[kind][name][part], times[kind]["stock"][part])


def build_section(totals: Times, firsts: Times, by_set: list[dict[str, float]]) -> Section:
    """Claims and figures; ``by_set``: the ratios of each set of servers alone."""
    claims = []
    for what, times in (("whole request", totals), ("TTFT", firsts)):
        for kind in REQUESTS:
            ratio = _ratio(times, kind, "plugin")
            noise = format_excess(_ratio(times, kind, "stock again"))
            promise = f"plugin installed, no state, {kind} request, {what}: within 1 % of stock"
            measured = f"{format_excess(ratio)}; stock against stock: {noise}"
            claims.append(Claim(promise, measured, within(ratio, LOW, HIGH)))
    rows = [
        (kind, name, *(format_spread(spread([v for row in t[kind][name] for v in row]))
                       for t in (totals, firsts)))
        for kind in REQUESTS
        for name in SERVERS
    ]  # fmt: skip
    return Section(
        name="inert",
        title="The plugin without a state",
        setup=[
            f"mini-LLaVA, one request at a time, {TOKENS} tokens each, caches off",
            "three servers side by side, every request to each of them in rotating order; sets of "
            "servers started anew, one after the other: ratios "
            + "; ".join(
                ", ".join(f"{k} {100 * (r - 1):+.1f} %" for k, r in one.items()) for one in by_set
            ),
        ],
        claims=claims,
        tables=[
            Table(
                "Milliseconds: median (quartiles).",
                ("request", "server", "whole request", "TTFT"),
                rows,
            )
        ],
        data={"totals": totals, "firsts": firsts},
    )
