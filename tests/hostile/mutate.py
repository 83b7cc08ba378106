"""``python -m tests.hostile.mutate``: mutated requests to one live server, which has to live.

All of it is on: two API servers, adapters, recall, a state with a core, states by request. No
request is missing an answer, and none is answered by a server error that stock vLLM does not
give for such requests: those that change what vLLM reads itself are sent to a stock server too,
without our entry. What is refused never reaches the engine, and a normal request is answered
afterwards as it was before. Exit status 0 where all of that holds.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.server import Server, serve
from benchmarks.yardsticks.adapters import ADAPTERS, adapter_flags, write_adapters
from tests.hostile.bodies import READ_BY_VLLM, Mutant, draw
from tests.hostile.client import CHAT, Client, Reply
from tests.serving.engine import examples
from tests.serving.http import ask, text_of
from tests.serving.paths import CLIP, LLAVA
from tests.serving.runners import ENVIRONMENTS
from vllm_autoprune.cli.output import CommandParser

FLAGS = (
    *("--enforce-eager", "--max-model-len", "2048", "--block-size", "32"),
    *("--num-gpu-blocks-override", "1024"),
)
PRUNED = (
    *("--autoprune-state", "minillava-split", "--autoprune-budget", "64"),
    *("--autoprune-text-tower", str(CLIP), "--autoprune-recall", "4"),
    *("--autoprune-requests", "states:1-256", "--autoprune-detail", "low=8,high=64"),
)
API_SERVERS = 2
START_TIMEOUT = 1200.0
"""Seconds that a server may take to start on a busy machine."""

PROGRESS = 250
"""Requests after which progress is printed."""

SHOWN = 200
"""Characters of a bad exchange that are shown."""


@dataclass
class Tally:
    """What became of the requests.

    ``errors`` and ``stock_errors`` count server errors by their message.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    stock_errors: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    answers: int = 0

    @property
    def served(self) -> int:
        """Requests that were answered by the engine."""
        return self.statuses[200]


@dataclass(frozen=True)
class Exchange:
    """A request with its number, and what it was answered here and, where asked, by stock."""

    number: int
    mutant: Mutant
    reply: Reply
    stock: Reply | None


def _count_exchange(tally: Tally, exchange: Exchange) -> bool:
    """Count one request; True where the server failed."""
    reply, stock = exchange.reply, exchange.stock
    failed = not 0 < reply.status < 500
    tally.kinds[exchange.mutant.kind] += 1
    tally.statuses[reply.status] += 1
    if reply.status == 200:
        tally.answers += len(reply.body["choices"])
    if failed:
        tally.errors[_cause(reply)] += 1
    if stock is not None and stock.status >= 500:
        tally.stock_errors[_cause(stock)] += 1
    return failed


def run(
    server: Server,
    count: int,
    seed: int = 0,
    at_once: int = 4,
    stock: Server | None = None,
    seconds: float = math.inf,
    first: int = 0,
    adapters: Sequence[str] = (),
) -> Tally:
    """Send ``count`` requests, ``at_once`` at a time, and hold the server to its promises.

    Without a ``stock`` server no server error is excused. After ``seconds`` no more are sent.
    ``first`` is the number of the first request, to go on with a run of the same seed.
    """
    begun = time.monotonic()
    deadline = begun + seconds
    tally = Tally()
    asked = examples(2)
    before, engine = text_of(ask(server, asked[0])), _finished_by_engine(server)
    client, other = Client(server), None if stock is None else Client(stock)

    def exchange(number: int) -> Exchange | None:
        if time.monotonic() > deadline:
            return None
        mutant = draw(server, asked, Random(f"{seed}/{number}"), adapters)
        reply = client.send(CHAT, mutant.content)
        failed = not 0 < reply.status < 500
        mirrored = None
        if (
            other is not None
            and mutant.stock is not None
            and (failed or mutant.kind in READ_BY_VLLM)
        ):
            mirrored = other.send(CHAT, mutant.stock)
        return Exchange(number, mutant, reply, mirrored)

    wrong: list[Exchange] = []
    with ThreadPoolExecutor(at_once) as pool:
        for one in pool.map(exchange, range(first, first + count)):
            if one is None:
                break
            if _count_exchange(tally, one):
                wrong.append(one)
                print(f"number {one.number}: {one.reply}; stock: {one.stock}", flush=True)
            _print_progress(tally, one.number + 1 - first, count, time.monotonic() - begun)
    # After the last one: what stock answers to a request depends on those before it.
    tally.faults += [
        f"seed {seed} number {one.number} ({one.mutant.kind}): {one.mutant.shown[:SHOWN]} -> "
        f"{one.reply}"
        for one in wrong
        if _cause(one.reply) not in tally.stock_errors
    ]
    reached = _finished_by_engine(server) - engine
    if reached != tally.answers:
        tally.faults.append(f"the engine gave {reached} answers, and {tally.answers} were received")
    after = text_of(ask(server, asked[0]))
    if after != before:
        tally.faults.append(f"a normal request was answered {before!r}, and is now {after!r}")
    return tally


def _print_progress(tally: Tally, done: int, count: int, seconds: float) -> None:
    if done % PROGRESS == 0:
        left = seconds / done * (count - done)
        print(f"[{done}/{count}, {left:.0f} s left] {_format_counts(tally.statuses)}", flush=True)


def _cause(reply: Reply) -> str:
    """An error's message without the numbers in it."""
    return re.sub(r"[0-9a-f]{8,}|\d+", "…", f"{reply.status} {reply.message[:120]}")


def _finished_by_engine(server: Server) -> int:
    """Answers that the engine has finished without an error, by vLLM's own count."""
    client, name = Client(server), "vllm:request_success_total"
    return int(client.metric(name) - client.metric(name, finished_reason="error"))


def report(tally: Tally, seconds: float) -> str:
    """What is printed at the end."""
    lines = [
        f"{sum(tally.statuses.values())} requests in {seconds:.0f} s, {len(tally.faults)} faults",
        f"by status: {_format_counts(tally.statuses)}",
        f"by kind: {_format_counts(tally.kinds)}",
        f"server errors: {_format_counts(tally.errors) or 'none'}",
        f"of stock: {_format_counts(tally.stock_errors) or 'none'}",
        *tally.faults[:20],
    ]
    return "\n".join(lines)


def _format_counts(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Start a server and a stock one, send mutated requests, and report."""
    parser = CommandParser(
        prog="python -m tests.hostile.mutate", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--count", type=int, default=10_000, help="number of requests")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--first", type=int, default=0, help="number of the first request")
    parser.add_argument(
        "--runner", choices=[*ENVIRONMENTS], default="v1", help="model runner of vLLM"
    )
    parser.add_argument("--at-once", type=int, default=4, help="requests in flight")
    parser.add_argument("--seconds", type=float, default=math.inf, help="send no more after that")
    parser.add_argument("--json", help="write the tally to this file")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="adapters-")))
        write_adapters(folder)
        flags, env = (*FLAGS, *adapter_flags(folder)), ENVIRONMENTS[options.runner]
        stock = stack.enter_context(serve(LLAVA, *flags, env=env, patience=START_TIMEOUT))
        pruned = (*flags, *PRUNED, "--api-server-count", str(API_SERVERS))
        server = stack.enter_context(serve(LLAVA, *pruned, env=env, patience=START_TIMEOUT))
        server.await_api_servers(API_SERVERS, START_TIMEOUT)
        begun = time.monotonic()
        tally = run(
            *(server, options.count, options.seed, options.at_once, stock, options.seconds),
            *(options.first, ADAPTERS),
        )
        print(report(tally, time.monotonic() - begun))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(
                {
                    "statuses": tally.statuses,
                    "kinds": tally.kinds,
                    "faults": tally.faults,
                    "errors": tally.errors,
                    "stock_errors": tally.stock_errors,
                },
                file,
                indent=1,
            )
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
