"""`python -m benchmarks.cost soak`: a pruned server under mixed load, judged by counts and memory.

All of it is on: two API servers, adapters, states by request, cores, recall, and clients that hang
up. Every request has the counts by which the server's metrics should grow. Half of the pictures are
new and half are of a few that are repeated; every cache of the server is small, so that it is full,
hit and evicts before the warm-up is over: growth of memory after that is a leak.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import BenchmarkError
from benchmarks.common.report import MIB
from benchmarks.common.requests import build_body, build_content, draw_picture, encode_picture
from benchmarks.common.shapes import count_kv_bytes, count_visual_tokens
from benchmarks.server import serve
from benchmarks.yardsticks.adapters import ADAPTERS, adapter_flags, write_adapters
from benchmarks.yardsticks.examples import CLIP, LLAVA, image_token_id
from vllm_autoprune.http_client import CHAT
from vllm_autoprune.serving.api.layout import align_core
from vllm_autoprune.tpdsl.loading import load_state

STATE, BUDGET, RECALL, BLOCK = "autoprune", 32, 4, 32
"""Of the server; tokens of a KV block."""
TOKENS, KV_BYTES = count_visual_tokens(LLAVA), count_kv_bytes(LLAVA)
"""N of an image, and bytes of a token in the KV cache."""
_API_SERVERS = 2
_START_TIMEOUT = 1200.0
"""Seconds that the server may take to start on a busy machine."""
_SMALL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
"""oneDNN keeps 1,024 compiled operations, one for every shape: about a gigabyte, which takes
thousands of requests to fill."""
_HANGING_UP = 16
"""Clients that hang up, each once in so many seconds: together one every second."""
_SIDE, _REPEATED = 96, 12
"""Side of the pictures in pixels; how many are repeated."""
LONG_ANSWER = 160
"""Tokens of an answer that a client may hang up on."""

KINDS = {
    "plain": 20, "budget": 25, "policy": 20, "own": 8, "control": 8, "off": 8, "two": 10,
    "split": 15, "recall": 8, "split, recall": 7, "bad": 5,
}  # fmt: skip
"""Kinds of requests with their weights."""
_BUDGETS, _SPLIT_BUDGETS = (1, 4, 8, 16, 31, 64, 143, 144, 4096), (16, 32, 48, 64, 96, 143, 4096)
# None that reads the language model's layers: those are refused where adapters change them.
_STATES = ("visionzip", "prumerge_plus", "divprune", "trim", "cdpruner", "cen_cdpruner")
_SPLIT_STATES, _RECALLS = ("shared-core", "minillava-split"), (RECALL, 0, 1, 8, 24, 4096)
_BAD: Sequence[Mapping[str, object]] = (
    {"budget": 0},
    {"state": "nobody"},
    {"buget": 8},
    {"budget": [8, 8]},
    {"recall": -1},
)
_QUESTIONS = (
    "What digit is on the red shape?",
    "What colour is the circle?",
    "How many blue shapes are there?",
    "Is there a green square?",
    "Which shape is left of the triangle?",
    "What is shown?",
)


@dataclass(frozen=True)
class Request:
    """The body of a request, and by what the server's counters grow."""

    kind: str
    body: bytes
    counts: Mapping[str, int]


def draw_request(random: Random, start: int, *, stream: bool = False) -> Request:
    """A request of a random kind, to the model or one of its adapters.

    ``start`` tokens of a prompt stand before its image. ``stream``: a valid request for a long
    answer, which is streamed with its usage.
    """
    kinds = [kind for kind in KINDS if not (stream and kind in ("own", "control", "bad"))]
    (kind,), choose = random.choices(kinds, [KINDS[kind] for kind in kinds]), random.choice
    brought = json.loads(load_state(STATE).dumps())
    brought["scoring"]["signals"][0]["weight"] = round(random.uniform(0.1, 0.9), 2)
    split = {"state": choose(_SPLIT_STATES), "budget": choose(_SPLIT_BUDGETS)}
    recall = {"recall": choose(_RECALLS)}
    fields_by_kind: Mapping[str, Mapping[str, Any]] = {
        "plain": {},
        "budget": {"budget": choose(_BUDGETS)},
        "policy": {"budget": choose(_BUDGETS), "state": choose(_STATES)},
        "own": {"budget": choose((16, 32, 64)), "state": brought},
        "control": {"budget": choose(_BUDGETS), "keep": choose(("reference", "random"))},
        "off": {"enabled": False},
        "two": {"budget": [choose(_BUDGETS[:-1]), choose(_BUDGETS[:-1])]},
        "split": split,
        "recall": recall,
        "split, recall": split | recall,
        "bad": choose(_BAD),
    }
    pruning = fields_by_kind[kind]
    turns = choose((1, 2, 3)) if "recall" in kind else 0
    images = 2 if kind == "two" else 1
    urls = []
    for _ in range(images):
        image, url = choose(_draw_repeated_pictures())
        turned = random.random() < 0.5
        urls.append(encode_picture(image.rotate(random.random() * 360)) if turned else url)
    messages: list[Mapping[str, object]] = [
        {"role": "user", "content": build_content(choose(_QUESTIONS), urls)}
    ]
    for _ in range(turns):
        messages.append({"role": "assistant", "content": choose(("red", "two", "no"))})
        messages.append({"role": "user", "content": choose(_QUESTIONS)})
    fields: dict[str, object] = {"ignore_eos": True, "messages": messages}
    if pruning:
        fields["mm_processor_kwargs"] = {"autoprune": pruning}
    if stream:
        fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    model, length = choose((str(LLAVA), *ADAPTERS)), LONG_ANSWER if stream else 4
    body = build_body(model, [], tokens=length, stream=stream, fields=fields)
    if kind == "bad":
        return Request(kind, body, {_REFUSED: 1})
    return Request(kind, body, _count_tokens(pruning, images, turns, start))


def _count_tokens(
    pruning: Mapping[str, Any], images: int, turns: int, start: int
) -> dict[str, int]:
    """By what the server's counters grow with a valid request."""
    state, budget = pruning.get("state", STATE), pruning.get("budget", BUDGET)
    if not pruning.get("enabled", True):
        state, budget = "off", TOKENS
    budgets = budget if isinstance(budget, list) else [budget]
    before = images * TOKENS
    after = sum(min(budget, TOKENS) for budget in budgets)
    # Later turns recall what was not kept.
    recalled = min(turns * pruning.get("recall", RECALL), before - after)
    core = load_state(state).core if state in _SPLIT_STATES else None
    wanted = core.tokens(budget) if core and budget < TOKENS else 0
    # Up to the edge of a KV block, as the prompt has them.
    aligned = align_core(start, budget, wanted, BLOCK) if wanted else 0
    return {
        f"autoprune_requests_total {'request' if isinstance(state, dict) else state}": 1,
        f"autoprune_images_total {pruning.get('keep', 'state')}": images,
        "autoprune_visual_tokens_total before": before,
        "autoprune_visual_tokens_total after": after + recalled,
        "autoprune_core_tokens_total": aligned,
        "autoprune_recalled_tokens_total": recalled,
        "autoprune_kv_bytes_saved_total": (before - after - recalled) * KV_BYTES,
    }


@cache
def _draw_repeated_pictures() -> Sequence[tuple[Image.Image, str]]:
    pictures = [draw_picture(seed, _SIDE, _SIDE) for seed in range(_REPEATED)]
    return [(image, encode_picture(image)) for image in pictures]


Sample = Mapping[str, int]
"""Resident bytes by process."""
_SAMPLES = 200
"""Memory samples over the whole run; at most one a second."""


@dataclass
class Tally:
    """What the client counted; ``counts`` by the names of the server's counters."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Requests that were answered, refused as expected, hung up on, or failed."""
    kinds: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    unseen_tokens: int = 0
    """At most so many answer tokens were computed that nobody waited for."""
    faults: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def send(client: httpx.Client, request: Request, tally: Tally, events: int | None = None) -> bool:
    """Send a request and count its answer; returns whether there was a server.

    ``events``: hang up after so many events of a stream, and count what they said.
    """
    usage: Mapping[str, int] | None = None
    error, status = "", 0
    try:
        with client.stream("POST", CHAT, content=request.body) as answer:
            status = answer.status_code
            if status != (expected := 400 if _REFUSED in request.counts else 200):
                error = f"HTTP {status}, not {expected}: {answer.read()[:200]!r}"
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
    with tally.lock:
        tally.kinds[request.kind] += 1
        if error:
            tally.outcomes["failed"] += 1
            tally.faults.append(f"{request.kind}: {error}")
            return status != 0
        tally.counts.update(request.counts)
        if usage is None:
            tally.outcomes["refused"] += 1
            return True
        tally.counts["vllm:prompt_tokens_total"] += usage["prompt_tokens"]
        tally.counts["vllm:generation_tokens_total"] += usage["completion_tokens"]
        tally.outcomes["answered" if events is None else "hung up"] += 1
        if events is not None:
            tally.unseen_tokens += LONG_ANSWER - usage["completion_tokens"]
    return True


def connect(url: str) -> httpx.Client:
    """A client with a new connection for each request, so that every API server gets some."""
    headers = {"Content-Type": "application/json", "Connection": "close"}
    limits = httpx.Limits(max_connections=None)
    return httpx.Client(base_url=url, headers=headers, timeout=300.0, limits=limits)


def keep_busy(
    url: str, pid: int, start: int, users: int, seconds: float, seed: int = 0
) -> tuple[Tally, list[Sample]]:
    """Send requests for that long; what was counted, and the memory of the server with that pid.

    Every user sends the next request as soon as it has an answer. Beside them a client hangs up in
    the middle of an answer every second. Waits for requests in flight at the end, so that both
    sides count them.
    """
    tally, samples, begin = Tally(), [read_resident(pid)], time.monotonic()
    end = begin + seconds

    def use(number: int) -> None:
        random = Random(f"{seed}/{number}")
        while time.monotonic() < end:
            if not send(client, draw_request(random, start), tally):
                time.sleep(1.0)  # no server: do not retry in a busy loop

    def hang_up(number: int) -> None:
        random, due = Random(f"{seed}/hanging up {number}"), begin + number
        while due < end:
            time.sleep(max(0.0, due - time.monotonic()))
            request = draw_request(random, start, stream=True)
            send(client, request, tally, events=random.randint(1, 10))
            due = max(due + _HANGING_UP, time.monotonic())

    with connect(url) as client, ThreadPoolExecutor(users + _HANGING_UP) as pool:
        futures = [pool.submit(use, number) for number in range(users)]
        futures += [pool.submit(hang_up, number) for number in range(_HANGING_UP)]
        while time.monotonic() < end:
            time.sleep(min(max(1.0, seconds / _SAMPLES), max(0.0, end - time.monotonic())))
            samples.append(read_resident(pid))
        for future in futures:
            future.result()
    return tally, samples


_SHORT_ANSWERS = "vllm:request_generation_tokens_bucket 5.0"
"""Requests that ended after five tokens at most: those whose client waited, which get four."""
_SUCCESSES = "vllm:request_success_total"
_REFUSED = "autoprune_requests_refused_total"
_VLLM_COUNTERS = (
    _SUCCESSES, "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
    "vllm:request_generation_tokens_bucket",
)  # fmt: skip
_LABELS = ("state", "chooser", "stage", "le")
_FAILURES = (
    "autoprune_fallbacks_total",
    "autoprune_selection_errors_total",
    "autoprune_unsafe_states_total",
)


def read_counters(exposition: str) -> Counter[str]:
    """Counters of one ``/metrics`` answer by name and labels, summed over engines and reasons."""
    counters: Counter[str] = Counter()
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name in _VLLM_COUNTERS or sample.name.startswith("autoprune_"):
                labels = [sample.labels[key] for key in _LABELS if key in sample.labels]
                counters[" ".join([sample.name, *labels])] += int(sample.value)
    return counters


def compare_counts(
    before: Mapping[str, int], after: Mapping[str, int], tally: Tally
) -> dict[str, tuple[int, int, int]]:
    """Every figure that both count: the client's, the server's, and what its client did not see.

    At most so much more is counted by the server, of what its client did not wait for. A figure of
    the server alone must be 0. ``autoprune_fallbacks_total{fallback="none"}`` is not exported: it
    is no failure.
    """
    counted = ("autoprune_requests_total ", "autoprune_images_total ")
    client = dict.fromkeys((*_FAILURES, *(n for n in after if n.startswith(counted))), 0)
    client |= tally.counts
    client |= dict.fromkeys((_SUCCESSES, _SHORT_ANSWERS), tally.outcomes["answered"])
    # A server that learns too late that a client has hung up ends the answer, a long one.
    unseen = {
        "vllm:generation_tokens_total": tally.unseen_tokens,
        _SUCCESSES: tally.outcomes["hung up"],
    }
    return {
        name: (count, after.get(name, 0) - before.get(name, 0), unseen.get(name, 0))
        for name, count in sorted(client.items())
    }


def read_resident(pid: int) -> Sample:
    """Resident bytes of a process and all its descendants, by process id and name.

    Pages of files and those shared with other processes are left out: the kernel takes pages of
    files back when memory is scarce.
    """
    resident: dict[str, int] = {}
    processes: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            memory = process.memory_info()
            if memory.rss > memory.shared:
                resident[f"{process.pid} {process.name()}"] = int(memory.rss - memory.shared)
    return resident


_PARTS = 5
"""The time is divided into equal parts; the first is the warm-up."""
ALLOWED, SLACK = 0.02, 4 << 20
"""Growth from the median of the second part to that of the last that is tolerated: a share, or
bytes."""


def judge_memory(samples: Sequence[Sample]) -> dict[str, tuple[float, float, str]]:
    """Bytes after the warm-up and at the end, and what is wrong with them.

    Of every process that existed after the warm-up, and of all together. Samples are evenly spaced
    in time.
    """
    size = len(samples) // _PARTS
    if not size:
        return {"all": (0.0, 0.0, "too few samples")}
    later = [{**sample, "all": sum(sample.values())} for sample in samples[size:]]
    rows = {}
    for name in (*sorted({name for sample in later for name in sample} - {"all"}), "all"):
        if any(name not in sample for sample in later):
            rows[name] = (0.0, 0.0, "it did not exist all the time")
            continue
        early, late = (
            median(sample[name] for sample in part) for part in (later[:size], later[-size:])
        )
        grew = late - early > max(ALLOWED * early, SLACK)
        rows[name] = (early, late, "it grew" if grew else "")
    return rows


def format_report(
    minutes: float,
    tally: Tally,
    pairs: Mapping[str, tuple[int, int, int]],
    memory: Mapping[str, tuple[float, float, str]],
) -> tuple[str, list[str]]:
    """A few lines of text, and every broken promise; none where the soak is passed."""
    outcomes, sent = tally.outcomes, tally.outcomes.total()
    wrong = [] if outcomes["answered"] else ["nothing was answered"]
    if outcomes["failed"]:
        wrong.append(f"{outcomes['failed']} of {sent} requests failed")
    different = {
        name: pair for name, pair in pairs.items() if not pair[0] <= pair[1] <= pair[0] + pair[2]
    }
    wrong += [
        f"{name}: {server:,} by the server, {client:,} by its client"
        for name, (client, server, _) in different.items()
    ]
    wrong += [f"memory of {name}: {problem}" for name, (_, _, problem) in memory.items() if problem]
    lines = [
        f"{sent:,} requests in {minutes:g} min ({sent / (60 * minutes):.1f} a second): "
        + ", ".join(f"{outcome} {count:,}" for outcome, count in sorted(outcomes.items())),
        "kinds: " + ", ".join(f"{kind} {count:,}" for kind, count in sorted(tally.kinds.items())),
        f"metrics: {len(pairs) - len(different)} of {len(pairs)} figures equal to what the client "
        "counted",
        f"memory, median of part {_PARTS} against part 2 of {_PARTS} "
        f"(at most {ALLOWED:.0%} more, or {SLACK // MIB} MiB):",
    ]
    for name, (early, late, _) in memory.items():
        growth = f" ({late / early - 1:+.2%})" if early else ""
        lines.append(f"  {name}: {early / MIB:,.1f} -> {late / MIB:,.1f} MiB{growth}")
    lines += [f"fault: {fault}" for fault in tally.faults[:20]]
    lines += [f"does not hold: {problem}" for problem in wrong]
    lines.append("The soak is not passed." if wrong else "The soak is passed.")
    return "\n".join(lines), wrong


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options; each has a default."""
    parser.add_argument("--minutes", type=float, default=60.0, help="duration")
    parser.add_argument("--users", type=int, default=8, help="requests at once")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests")
    parser.add_argument("--out", type=Path, default=Path("out/soak"), help="folder of report, log")


def run(options: argparse.Namespace) -> int:
    """Serve, send requests, compare: 0 where every promise holds, else 1."""
    options.out.mkdir(parents=True, exist_ok=True)
    at_once, seconds = options.users + _HANGING_UP, 60 * options.minutes
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
    log = options.out / "server.log"
    with tempfile.TemporaryDirectory(prefix="adapters-") as adapters:
        write_adapters(Path(adapters))
        flags += adapter_flags(Path(adapters))
        with serve(LLAVA, *flags, env=_SMALL_CACHES, log=log, patience=_START_TIMEOUT) as server:
            server.await_api_servers(_API_SERVERS, _START_TIMEOUT)
            # Tokens of a prompt in front of its image.
            content = build_content("?", [_draw_repeated_pictures()[0][1]])
            asked = {"model": server.model, "messages": [{"role": "user", "content": content}]}
            status, reply = server.post("/tokenize", asked)
            tokens = reply.get("tokens")
            if status != 200 or not isinstance(tokens, list):
                raise BenchmarkError(f"/tokenize is answered {status}: {reply}")
            start = tokens.index(image_token_id())
            before = read_counters(server.get("/metrics"))
            tally, samples = keep_busy(
                server.url, server.process.pid, start, options.users, seconds, options.seed
            )
            pairs = compare_counts(before, read_counters(server.get("/metrics")), tally)
    text, wrong = format_report(options.minutes, tally, pairs, judge_memory(samples))
    (options.out / "soak.txt").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if wrong else 0
