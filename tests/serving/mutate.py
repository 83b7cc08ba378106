"""``python -m tests.serving.mutate``: mutated requests to one live server, which has to live.

Knows nothing about which requests are good: it holds the server to what must be true of all of
them. No answer is a 5xx and none is missing; what is refused never reaches the engine; and a
normal request is answered afterwards as it was before. Exit status 0 where all of that holds.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from typing import Any

from benchmarks.common.client import Client
from benchmarks.server import Server, serve
from tests.fuzz.grammar import anything
from tests.fuzz.mutate import mutate
from tests.fuzz.spoil import spoil
from tests.serving.engine import examples
from tests.serving.http import ask, body, text_of
from tests.serving.paths import CLIP, LLAVA
from tests.tpdsl.samples import shipped
from vllm_autoprune.tpdsl.load import load_state

FLAGS = (
    *("--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "2048", "--block-size", "32"),
    *("--autoprune-state", "autoprune", "--autoprune-text-tower", str(CLIP)),
    *("--autoprune-requests", "states:1-256"),
)

SENT = 200
"""Characters of a bad exchange that are shown."""


@dataclass
class Tally:
    """What became of the requests."""

    statuses: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    @property
    def served(self) -> int:
        """Requests that were answered by the engine."""
        return self.statuses[200]


def entries() -> list[Any]:
    """Sound entries that mutations begin with."""
    state = json.loads(load_state("visionzip").dumps())
    return [
        {"budget": 8},
        {"budget": [8]},
        {"budget": {"shared": 8}},
        {"budget": 8, "keep": "reference"},
        {"keep": "random", "enabled": True},
        {"enabled": False},
        {"policy": "visionzip", "budget": 8},
        *({"policy": name, "budget": 16} for name in ("fastv", "prumerge_plus")),
        *({"policy": copy.deepcopy(whole)} for whole in (shipped(), state) for _ in range(6)),
    ]


def mutated(random: Random) -> tuple[str, Any]:
    """The kind of one request's ``mm_processor_kwargs``, and what they are."""
    entry = random.choice(entries())
    kwargs: Any = {"autoprune": entry}
    kind = random.choices(
        ("state", "entry", "kwargs", "anything", "huge", "sound"), (40, 30, 10, 10, 2, 8)
    )[0]
    if kind == "state":
        kwargs["autoprune"] = {"policy": shipped(), "budget": random.choice((None, 8, 16))}
        mutate(kwargs["autoprune"]["policy"], random)
    elif kind == "entry":
        mutate(entry, random)
    elif kind == "kwargs":
        mutate(kwargs, random)
    elif kind == "anything":
        kwargs = random.choice((anything(random), {"autoprune": anything(random)}))
    elif kind == "huge":
        kwargs["autoprune"] = _huge(random)
    return kind, kwargs


def _huge(random: Random) -> Any:
    deep: Any = 1
    for _ in range(random.choice((300, 900))):
        deep = {"policy": deep}
    return random.choice(
        (
            {"policy": {**shipped(), "provenance": {"notes": "n" * 10_000_000}}},
            {"policy": "n" * 10_000_000},
            {"budget": [8] * 1_000_000},
            {"n" * 1_000_000: 8},
            {str(i): i for i in range(50_000)},
            deep,
        )
    )


def run(server: Server, count: int, seed: int = 0, at_once: int = 4) -> Tally:
    """Send ``count`` requests, ``at_once`` at a time, and hold the server to its promises."""
    tally = Tally()
    example = examples(1)[0]
    before, engine = text_of(ask(server, example)), _by_the_engine(server)

    def one(number: int) -> tuple[str, int, str]:
        random = Random(f"{seed}/{number}")
        kind, kwargs = mutated(random)
        about = random.choice(examples(2))
        text = json.dumps(body(server, about, mm_processor_kwargs=kwargs, max_tokens=1))
        sent = text.encode()
        if random.random() < 0.03:
            kind, spoilt = "spoilt", spoil(text, random)[0]
            sent = spoilt if isinstance(spoilt, bytes) else spoilt.encode("utf-8", "surrogatepass")
        status, answer = Client(server.url).post(sent)
        wrong = status >= 500 or status == 0
        shown = f"seed {seed} number {number} ({kind}): {json.dumps(kwargs)[:SENT]} -> {status} "
        return kind, status, shown + answer[:SENT] if wrong else ""

    with ThreadPoolExecutor(at_once) as pool:
        for kind, status, fault in pool.map(one, range(count)):
            tally.kinds[kind] += 1
            tally.statuses[status] += 1
            tally.faults += [fault] if fault else []
    reached = _by_the_engine(server) - engine
    if reached != tally.served:
        tally.faults.append(f"the engine saw {reached} requests, and {tally.served} were answered")
    after = text_of(ask(server, example))
    if after != before:
        tally.faults.append(f"a normal request was answered {before!r}, and is now {after!r}")
    return tally


def _by_the_engine(server: Server) -> int:
    """Requests that the engine has finished, by vLLM's own count."""
    found = re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", server.get("/metrics"), re.M)
    return int(sum(map(float, found)))


def report(tally: Tally, seconds: float) -> str:
    """What is printed at the end."""
    lines = [
        f"{sum(tally.statuses.values())} requests in {seconds:.0f} s, {len(tally.faults)} faults",
        f"by status: {_told(tally.statuses)}",
        f"by kind: {_told(tally.kinds)}",
        *tally.faults[:20],
    ]
    return "\n".join(lines)


def _told(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Start a server, send it mutated requests, and report."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.serving.mutate", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=4)
    options = parser.parse_args(arguments)
    with serve(LLAVA, *FLAGS) as server:
        begun = time.monotonic()
        tally = run(server, options.count, options.seed, options.at_once)
        print(report(tally, time.monotonic() - begun))
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
