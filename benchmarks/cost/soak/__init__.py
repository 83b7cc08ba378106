"""`python -m benchmarks.cost soak`: a pruned server under mixed load, judged by counts and memory.

All of it is on: two API servers, adapters, states by request, cores, recall, and clients that hang
up. Every cache of the server is small, so that it is full before the warm-up is over: growth after
that is a leak.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import BenchmarkError
from benchmarks.common.client import build_content
from benchmarks.common.pictures import draw_picture, encode_picture
from benchmarks.common.report import MIB
from benchmarks.cost.soak.counts import (
    KILLERS,
    CountPair,
    Tally,
    compare_counts,
    keep_busy,
    read_counters,
)
from benchmarks.cost.soak.memory import ALLOWED, PARTS, SLACK, Flatness, Samples, watch_memory
from benchmarks.cost.soak.requests import BLOCK, SIDE, RequestMix
from benchmarks.demo.kv_cache import count_visual_tokens, read_kv_layout
from benchmarks.minillava.adapters import ADAPTERS, adapter_flags, write_adapters
from benchmarks.minillava.split import CLIP, LLAVA
from benchmarks.minillava.vocabulary import IMAGE_TOKEN, language_tokenizer
from benchmarks.server import Server, serve


@dataclass(frozen=True)
class Verdict:
    """Counts, metrics and memory of one soak."""

    minutes: float
    users: int
    tally: Tally
    counts: list[CountPair]
    samples: Samples
    command: str

    @property
    def memory(self) -> list[Flatness]:
        """Memory by process, and of all together."""
        return self.samples.judge()

    @property
    def problems(self) -> list[str]:
        """Every broken promise; none where the soak is passed."""
        problems = [] if self.tally.answered else ["nothing was answered"]
        if self.tally.errors:
            problems.append(f"{self.tally.errors} of {self.tally.sent} requests failed")
        problems += [
            f"{one.name}: {one.server:,.0f} by the server, {one.client:,.0f} by its client"
            for one in self.counts
            if not one.equal
        ]
        problems += [f"memory of {one.process}: {one.why}" for one in self.memory if not one.flat]
        return problems

    def to_json(self) -> dict[str, object]:
        """All data, with every memory sample."""
        memory = [{**dataclasses.asdict(one), "growth": one.growth} for one in self.memory]
        return {
            "holds": not self.problems,
            "wrong": self.problems,
            "command": self.command,
            "minutes": self.minutes,
            "users": self.users,
            "client": dict(vars(self.tally)),
            "metrics": [
                {
                    "what": one.name,
                    "client": one.client,
                    "server": one.server,
                    "unseen": one.unseen,
                    "equal": one.equal,
                }
                for one in self.counts
            ],
            "memory": memory,
            "samples": dataclasses.asdict(self.samples),
        }

    def format(self) -> str:
        """A few lines of text."""
        tally, seconds = self.tally, self.minutes * 60
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in sorted(tally.kinds.items()))
        equal = sum(one.equal for one in self.counts)
        lines = [
            f"{tally.sent:,} requests of {self.users} users in {self.minutes:g} min "
            f"({tally.sent / seconds:.1f} a second): {tally.answered:,} answered, "
            f"{tally.refused:,} refused as expected, "
            f"{tally.killed:,} ({tally.killed / seconds:.2f} a second) whose client hung up, "
            f"{tally.errors:,} errors",
            f"kinds: {kinds}",
            f"visual tokens: {tally.before:,} before, {tally.after:,} after "
            f"({tally.core:,} of cores, {tally.recalled:,} recalled)",
            f"metrics: {equal} of {len(self.counts)} figures equal to what the client counted",
            f"memory, median of part {PARTS} against part 2 of {PARTS} "
            f"(at most {ALLOWED:.0%} more, or {SLACK // MIB} MiB):",
            *(_format_memory(one) for one in self.memory),
            *(f"fault: {fault}" for fault in tally.faults),
            *(f"does not hold: {problem}" for problem in self.problems),
            "The soak is not passed." if self.problems else "The soak is passed.",
        ]
        return "\n".join(lines)


def _format_memory(one: Flatness) -> str:
    sizes = f"{one.early / MIB:,.1f} -> {one.late / MIB:,.1f} MiB, most {one.most / MIB:,.1f}"
    return f"  {one.process}: {sizes} ({one.growth:+.2%})" + (f": {one.why}" if one.why else "")


STATE, BUDGET, RECALL = "autoprune", 32, 4
API_SERVERS = 2
START_TIMEOUT = 1200.0
"""Seconds that the server may take to start on a busy machine."""

SMALL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
"""oneDNN keeps 1,024 compiled operations, one for every shape: about a gigabyte, which takes
thousands of requests to fill."""

SAMPLES = 200
"""Memory samples over the whole run; at most one a second."""


def server_flags(users: int) -> tuple[str, ...]:
    """Flags of the server: 16 blocks for each request that runs, the most that one needs."""
    at_once = users + KILLERS
    return (
        *("--enforce-eager", "--max-model-len", "1024"),
        *("--block-size", str(BLOCK), "--num-gpu-blocks-override", str(16 * at_once)),
        *("--max-num-seqs", str(at_once), "--mm-processor-cache-gb", "0.02"),
        *("--limit-mm-per-prompt", '{"image": 2}'),
        *("--autoprune-state", STATE, "--autoprune-budget", str(BUDGET)),
        *("--autoprune-text-tower", str(CLIP), "--autoprune-requests", "states"),
        *("--autoprune-feature-cache-gb", "0.005", "--autoprune-recall", str(RECALL)),
        *("--api-server-count", str(API_SERVERS)),
    )


def soak(minutes: float, users: int, seed: int, log: Path) -> Verdict:
    """Serve, send requests, compare; raises ServerDied where the server does not start."""
    with tempfile.TemporaryDirectory(prefix="adapters-") as adapters:
        write_adapters(Path(adapters))
        flags = (*server_flags(users), *adapter_flags(Path(adapters)))
        with serve(LLAVA, *flags, env=SMALL_CACHES, log=log, patience=START_TIMEOUT) as server:
            server.await_api_servers(API_SERVERS, START_TIMEOUT)
            mix = RequestMix(
                *(server.model, count_visual_tokens(LLAVA), STATE, BUDGET, RECALL),
                start=_count_tokens_before_image(server),
                adapters=ADAPTERS,
            )
            before = read_counters(server.get("/metrics"))
            with watch_memory(server.process.pid, max(1.0, minutes * 60 / SAMPLES)) as samples:
                tally = keep_busy(server.url, mix, users, minutes * 60, seed)
            after = read_counters(server.get("/metrics"))
    counts = compare_counts(before, after, tally, read_kv_layout(LLAVA).bytes_per_token)
    command = f"python -m benchmarks.cost soak --minutes {minutes:g} --users {users} --seed {seed}"
    return Verdict(minutes, users, tally, counts, samples, command)


def _count_tokens_before_image(server: Server) -> int:
    """Tokens of a prompt in front of its first image."""
    parts = build_content("?", [encode_picture(draw_picture(0, SIDE, SIDE))])
    messages = [{"role": "user", "content": parts}]
    status, reply = server.post("/tokenize", {"model": server.model, "messages": messages})
    tokens = reply.get("tokens")
    if status != 200 or not isinstance(tokens, list):
        raise BenchmarkError(f"/tokenize is answered {status}: {reply}")
    return tokens.index(language_tokenizer().token_to_id(IMAGE_TOKEN))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options; each has a default."""
    parser.add_argument("--minutes", type=float, default=60.0, help="duration")
    parser.add_argument("--users", type=int, default=8, help="requests at once")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests")
    parser.add_argument("--out", type=Path, default=Path("out/soak"), help="folder of JSON and log")


def run(options: argparse.Namespace) -> int:
    """0 where every promise holds, else 1."""
    options.out.mkdir(parents=True, exist_ok=True)
    verdict = soak(options.minutes, options.users, options.seed, options.out / "server.log")
    text = json.dumps(verdict.to_json(), indent=1)
    (options.out / "soak.json").write_text(text + "\n", encoding="utf-8")
    print(verdict.format())
    return 1 if verdict.problems else 0
