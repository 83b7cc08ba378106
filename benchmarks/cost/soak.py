"""`python -m benchmarks.cost soak`: a pruned server under mixed load, judged by counts and memory.

All of it is on: two API servers, adapters, states by request, cores, recall, and clients that hang
up. Every cache of the server is small, so that it is full before the warm-up is over: growth after
that is a leak.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common import BenchmarkError
from benchmarks.common.report import MIB
from benchmarks.common.requests import build_content, draw_picture, encode_picture
from benchmarks.common.shapes import count_visual_tokens, read_kv_layout
from benchmarks.cost.soak_requests import BLOCK, LONG_ANSWER, SIDE, Request, RequestMix
from benchmarks.server import Server, serve
from benchmarks.yardsticks.adapters import ADAPTERS, adapter_flags, write_adapters
from benchmarks.yardsticks.examples import CLIP, LLAVA, image_token_id
from vllm_autoprune.http_client import CHAT

STATE, BUDGET, RECALL = "autoprune", 32, 4
_API_SERVERS = 2
_START_TIMEOUT = 1200.0
"""Seconds that the server may take to start on a busy machine."""
_SMALL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
"""oneDNN keeps 1,024 compiled operations, one for every shape: about a gigabyte, which takes
thousands of requests to fill."""
_KILLERS = 16
"""Clients that hang up, each once in so many seconds: together one every second."""
_MAX_EVENTS = 10
"""Events of a stream that a client reads before it hangs up, at most."""
_MAX_FAULTS = 20
"""Faults that are described; all are counted."""


@dataclass
class Tally:
    """What the client counted; ``counts`` by the names of the server's counters."""

    sent: int = 0
    answered: int = 0
    refused: int = 0
    killed: int = 0
    """Requests whose client hung up."""
    errors: int = 0
    unseen_tokens: int = 0
    """At most so many answer tokens were computed that nobody waited for."""
    kinds: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(
        self, request: Request, usage: Mapping[str, int] | None, error: str, *, hung_up: bool
    ) -> None:
        """Count a request, and the usage of its answer; ``hung_up``: as far as it was read."""
        with self._lock:
            self.sent += 1
            self.kinds[request.kind] += 1
            if error:
                self.errors += 1
                if len(self.faults) < _MAX_FAULTS:
                    self.faults.append(f"{request.kind}: {error}")
                return
            self.counts.update(request.counts)
            if usage is None:
                self.refused += 1
                return
            self.counts["vllm:prompt_tokens_total"] += usage["prompt_tokens"]
            self.counts["vllm:generation_tokens_total"] += usage["completion_tokens"]
            if hung_up:
                self.killed += 1
                self.unseen_tokens += LONG_ANSWER - usage["completion_tokens"]
            else:
                self.answered += 1


def send(client: httpx.Client, request: Request, tally: Tally, events: int | None = None) -> bool:
    """Send a request and count its answer; returns whether there was a server.

    ``events``: hang up after so many events of a stream, and count what they said.
    """
    usage, error, status = None, "", 0
    try:
        with client.stream("POST", CHAT, content=request.body) as answer:
            status = answer.status_code
            if status != request.status:
                error = f"HTTP {status}, not {request.status}: {answer.read()[:200]!r}"
            elif events is None:
                content = answer.read()
                usage = json.loads(content)["usage"] if status == 200 else None
            else:
                lines = (line for line in answer.iter_lines() if line.startswith("data:"))
                for line in islice(lines, events):
                    if line == "data: [DONE]":
                        error = "the answer ended before its client hung up"
                        break
                    usage = json.loads(line.removeprefix("data:"))["usage"]
    except (httpx.HTTPError, ValueError, KeyError) as failure:
        error = repr(failure)
    tally.add(request, usage, error, hung_up=events is not None)
    return status != 0


def keep_busy(url: str, mix: RequestMix, users: int, seconds: float, seed: int = 0) -> Tally:
    """Send requests for that long; every user sends the next one as soon as it has an answer.

    Beside them a client hangs up in the middle of an answer every second. Waits for requests in
    flight at the end, so that both sides count them.
    """
    tally, begin = Tally(), time.monotonic()
    end = begin + seconds

    def use(number: int) -> None:
        random = Random(f"{seed}/{number}")
        while time.monotonic() < end:
            if not send(client, mix.draw(random), tally):
                time.sleep(1.0)  # no server: do not retry in a busy loop

    def kill(number: int) -> None:
        random, due = Random(f"{seed}/killer {number}"), begin + number
        while due < end:
            time.sleep(max(0.0, due - time.monotonic()))
            send(client, mix.draw(random, stream=True), tally, random.randint(1, _MAX_EVENTS))
            due = max(due + _KILLERS, time.monotonic())

    with connect(url) as client, ThreadPoolExecutor(users + _KILLERS) as pool:
        futures = [pool.submit(use, number) for number in range(users)]
        futures += [pool.submit(kill, number) for number in range(_KILLERS)]
        for future in futures:
            future.result()
    return tally


def connect(url: str) -> httpx.Client:
    """A client with a new connection for each request, so that every API server gets some."""
    headers = {"Content-Type": "application/json", "Connection": "close"}
    limits = httpx.Limits(max_connections=None)
    return httpx.Client(base_url=url, headers=headers, timeout=300.0, limits=limits)


_SHORT_ANSWERS = "vllm:request_generation_tokens_bucket 5.0"
"""Requests that ended after five tokens at most: those whose client waited, which get four."""
_VLLM_COUNTERS = (
    "vllm:request_success_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_generation_tokens_bucket",
)
_LABELS = ("state", "chooser", "stage", "le")
_FAILURES = (
    "autoprune_fallbacks_total",
    "autoprune_selection_errors_total",
    "autoprune_unsafe_states_total",
)


def read_counters(exposition: str) -> dict[str, float]:
    """Counters of one ``/metrics`` answer by name and labels, summed over engines and reasons."""
    counters: Counter[str] = Counter()
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name in _VLLM_COUNTERS or sample.name.startswith("autoprune_"):
                labels = [sample.labels[key] for key in _LABELS if key in sample.labels]
                counters[" ".join([sample.name, *labels])] += sample.value  # type: ignore[assignment]
    return dict(counters)


def compare_counts(
    before: Mapping[str, float], after: Mapping[str, float], tally: Tally
) -> list[dict[str, Any]]:
    """Every figure that both count, and whether it is equal; one of the server alone must be 0.

    ``unseen``: at most so much more is counted by the server, of what its client did not wait for.
    ``autoprune_fallbacks_total{fallback="none"}`` is not exported: it is no failure.
    """
    client: dict[str, float] = dict.fromkeys(_FAILURES, 0.0)
    counted = ("autoprune_requests_total ", "autoprune_images_total ")
    client |= dict.fromkeys((name for name in after if name.startswith(counted)), 0.0)
    client |= tally.counts
    client |= dict.fromkeys(("vllm:request_success_total", _SHORT_ANSWERS), tally.answered)
    unseen_by_name = {
        "vllm:generation_tokens_total": float(tally.unseen_tokens),
        # A server that learns too late that a client has hung up ends the answer, a long one.
        "vllm:request_success_total": float(tally.killed),
    }
    pairs = []
    for name, sent in sorted(client.items()):
        grown, unseen = after.get(name, 0) - before.get(name, 0), unseen_by_name.get(name, 0)
        equal = sent <= grown <= sent + unseen
        pairs.append(
            {"what": name, "client": sent, "server": grown, "unseen": unseen, "equal": equal}
        )
    return pairs


PARTS = 5
"""The time is divided into equal parts; the first is the warm-up."""
_ALLOWED = 0.02
"""Growth from the median of the second part to that of the last that is tolerated."""
SLACK = 4 << 20
"""Bytes of growth that are always tolerated."""
_SAMPLES = 200
"""Memory samples over the whole run; at most one a second."""


@dataclass
class Samples:
    """Resident bytes by process at each of ``seconds``."""

    seconds: list[float] = field(default_factory=list)
    resident: list[dict[str, int]] = field(default_factory=list)

    def judge(self) -> list[dict[str, Any]]:
        """Bytes after the warm-up and at the end, and whether they are flat.

        Of every process that existed after the warm-up, and of all together.
        """
        parts: list[list[dict[str, int]]] = [[] for _ in range(PARTS)]
        span = self.seconds[-1] - self.seconds[0] if self.seconds else 0.0
        for at, sample in zip(self.seconds, self.resident, strict=True):
            share = (at - self.seconds[0]) / span if span else 0.0
            total = {"all": sum(sample.values())}
            parts[min(int(share * PARTS), PARTS - 1)].append(sample | total)
        later = [sample for part in parts[1:] for sample in part] if all(parts) else []
        rows = []
        for name in (*sorted({name for sample in later for name in sample} - {"all"}), "all"):
            sizes = [sample.get(name, 0) for sample in later]
            early = late = 0.0
            if not sizes:
                why = "too few samples"
            elif any(name not in sample for sample in later):
                why = "it did not exist all the time"
            else:
                early, late = (median(sample[name] for sample in parts[i]) for i in (1, -1))
                why = "it grew" if late - early > max(_ALLOWED * early, SLACK) else ""
            growth = late / early - 1.0 if early else float("inf")
            rows.append(
                {"process": name, "early": early, "late": late, "most": max(sizes, default=0),
                 "flat": not why, "why": why, "growth": growth}
            )  # fmt: skip
        return rows


@contextmanager
def watch_memory(pid: int, every: float) -> Iterator[Samples]:
    """Sample the memory of a server's processes every so many seconds until the block ends."""
    samples, stop, begin = Samples(), threading.Event(), time.monotonic()

    def poll() -> None:
        while True:
            try:
                resident = _resident_by_process(pid)
            except psutil.NoSuchProcess:
                return  # the server ended: requests fail from now on
            samples.seconds.append(time.monotonic() - begin)
            samples.resident.append(resident)
            if stop.wait(every):
                return

    thread = threading.Thread(target=poll, name="memory", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


def _resident_by_process(pid: int) -> dict[str, int]:
    """Resident bytes of a process and all its descendants, by process id and short title.

    Pages of files and those shared with other processes are left out: the kernel takes pages of
    files back when memory is scarce. Raises psutil.NoSuchProcess where there is no such process.
    """
    root = psutil.Process(pid)
    resident: dict[str, int] = {}
    for process in [root, *root.children(recursive=True)]:
        try:
            # ``VLLM::EngineCore``, or the first words of a command line, without folders.
            words = [word.rsplit("/", 1)[-1] for word in process.cmdline() if word[:1] != "-"]
            memory = process.memory_info()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if memory.rss > memory.shared:
            title = " ".join(" ".join(words).split()[:3])
            resident[f"{process.pid} {title}"] = int(memory.rss - memory.shared)
    return resident


def build_report(
    minutes: float,
    users: int,
    seed: int,
    tally: Tally,
    pairs: list[dict[str, Any]],
    samples: Samples,
) -> dict[str, Any]:
    """All data as JSON, with every broken promise; none where the soak is passed."""
    memory = samples.judge()
    wrong = [] if tally.answered else ["nothing was answered"]
    if tally.errors:
        wrong.append(f"{tally.errors} of {tally.sent} requests failed")
    wrong += [
        f"{pair['what']}: {pair['server']:,.0f} by the server, {pair['client']:,.0f} by its client"
        for pair in pairs
        if not pair["equal"]
    ]
    wrong += [f"memory of {row['process']}: {row['why']}" for row in memory if not row["flat"]]
    client = {name: value for name, value in vars(tally).items() if name != "_lock"}
    return {
        "holds": not wrong,
        "wrong": wrong,
        "command": f"python -m benchmarks.cost soak --minutes {minutes:g} --users {users} "
        f"--seed {seed}",
        "minutes": minutes,
        "users": users,
        "client": client,
        "metrics": pairs,
        "memory": memory,
        "samples": vars(samples),
    }


def format_report(report: Mapping[str, Any]) -> str:
    """A few lines of text."""
    client, pairs, minutes = report["client"], report["metrics"], report["minutes"]
    counts, rate = client["counts"], 1 / (60 * minutes)
    tokens = "autoprune_visual_tokens_total"
    lines = [
        f"{client['sent']:,} requests of {report['users']} users in {minutes:g} min "
        f"({rate * client['sent']:.1f} a second): {client['answered']:,} answered, "
        f"{client['refused']:,} refused as expected, "
        f"{client['killed']:,} ({rate * client['killed']:.2f} a second) whose client hung up, "
        f"{client['errors']:,} errors",
        "kinds: " + ", ".join(f"{kind} {n:,}" for kind, n in sorted(client["kinds"].items())),
        f"visual tokens: {counts[f'{tokens} before']:,} before, "
        f"{counts[f'{tokens} after']:,} after ({counts['autoprune_core_tokens_total']:,} of cores, "
        f"{counts['autoprune_recalled_tokens_total']:,} recalled)",
        f"metrics: {sum(pair['equal'] for pair in pairs)} of {len(pairs)} figures equal to what "
        "the client counted",
        f"memory, median of part {PARTS} against part 2 of {PARTS} "
        f"(at most {_ALLOWED:.0%} more, or {SLACK // MIB} MiB):",
    ]
    for row in report["memory"]:
        lines.append(
            f"  {row['process']}: {row['early'] / MIB:,.1f} -> {row['late'] / MIB:,.1f} MiB, "
            f"most {row['most'] / MIB:,.1f} ({row['growth']:+.2%})"
            + (f": {row['why']}" if row["why"] else "")
        )
    lines += [f"fault: {fault}" for fault in client["faults"]]
    lines += [f"does not hold: {problem}" for problem in report["wrong"]]
    lines.append("The soak is passed." if report["holds"] else "The soak is not passed.")
    return "\n".join(lines)


def soak(minutes: float, users: int, seed: int, log: Path) -> dict[str, Any]:
    """Serve, send requests, compare; raises ServerDied where the server does not start."""
    at_once = users + _KILLERS
    flags: tuple[str, ...] = (
        *("--enforce-eager", "--max-model-len", "1024"),
        # 16 blocks for each request that runs, the most that one needs.
        *("--block-size", str(BLOCK), "--num-gpu-blocks-override", str(16 * at_once)),
        *("--max-num-seqs", str(at_once), "--mm-processor-cache-gb", "0.02"),
        *("--limit-mm-per-prompt", '{"image": 2}'),
        *("--autoprune-state", STATE, "--autoprune-budget", str(BUDGET)),
        *("--autoprune-text-tower", str(CLIP), "--autoprune-requests", "states"),
        *("--autoprune-feature-cache-gb", "0.005", "--autoprune-recall", str(RECALL)),
        *("--api-server-count", str(_API_SERVERS)),
    )
    with tempfile.TemporaryDirectory(prefix="adapters-") as adapters:
        write_adapters(Path(adapters))
        flags += adapter_flags(Path(adapters))
        with serve(LLAVA, *flags, env=_SMALL_CACHES, log=log, patience=_START_TIMEOUT) as server:
            server.await_api_servers(_API_SERVERS, _START_TIMEOUT)
            mix = RequestMix(
                *(server.model, count_visual_tokens(LLAVA), STATE, BUDGET, RECALL),
                kv_bytes=read_kv_layout(LLAVA).bytes_per_token,
                start=_count_tokens_before_image(server),
                adapters=ADAPTERS,
            )
            before = read_counters(server.get("/metrics"))
            with watch_memory(server.process.pid, max(1.0, minutes * 60 / _SAMPLES)) as samples:
                tally = keep_busy(server.url, mix, users, minutes * 60, seed)
            after = read_counters(server.get("/metrics"))
    return build_report(minutes, users, seed, tally, compare_counts(before, after, tally), samples)


def _count_tokens_before_image(server: Server) -> int:
    """Tokens of a prompt in front of its first image."""
    parts = build_content("?", [encode_picture(draw_picture(0, SIDE, SIDE))])
    messages = [{"role": "user", "content": parts}]
    status, reply = server.post("/tokenize", {"model": server.model, "messages": messages})
    tokens = reply.get("tokens")
    if status != 200 or not isinstance(tokens, list):
        raise BenchmarkError(f"/tokenize is answered {status}: {reply}")
    return tokens.index(image_token_id())


def add_arguments(parser: argparse.ArgumentParser, command: str = "soak") -> None:
    """Add the options; each has a default."""
    parser.add_argument("--minutes", type=float, default=60.0, help="duration")
    parser.add_argument("--users", type=int, default=8, help="requests at once")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests")
    parser.add_argument("--out", type=Path, default=Path("out/soak"), help="folder of JSON and log")


def run(options: argparse.Namespace) -> int:
    """0 where every promise holds, else 1."""
    options.out.mkdir(parents=True, exist_ok=True)
    report = soak(options.minutes, options.users, options.seed, options.out / "server.log")
    text = json.dumps(report, indent=1)
    (options.out / "soak.json").write_text(text + "\n", encoding="utf-8")
    print(format_report(report))
    return 0 if report["holds"] else 1
