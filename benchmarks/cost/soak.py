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
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

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
from vllm_autoprune.connection import Connection, make_client
from vllm_autoprune.http_client import CHAT
from vllm_autoprune.serving.api.layout import align_core
from vllm_autoprune.stream import parse_stream
from vllm_autoprune.tpdsl.loading import load_state

_STATE, _BUDGET, _RECALL, _BLOCK = "autoprune", 32, 4, 32
"""Of the server; tokens of a KV block."""
_TOKENS, _KV_BYTES = count_visual_tokens(LLAVA), count_kv_bytes(LLAVA)
"""N of an image, and bytes of a token in the KV cache."""
_API_SERVERS, _START_TIMEOUT = 2, 1200.0
"""The seconds are those that the server may take to start on a busy machine."""
_SMALL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
"""oneDNN keeps 1,024 compiled operations, one for every shape: about a gigabyte, which takes
thousands of requests to fill."""
_HANGING_UP = 1 / 16
"""Share of requests whose client hangs up in the middle of a long answer."""
_SIDE, _REPEATED = 96, 12
"""Side of the pictures in pixels; how many are repeated."""
_LONG_ANSWER, _SHORT_ANSWER = 160, 4
"""Tokens of an answer that a client may hang up on, and of any other."""
_SAMPLES = 200
"""Memory samples over the whole run; at most one a second."""
_PARTS = 5
"""The time is divided into equal parts; the first is the warm-up."""
_ALLOWED, _SLACK = 0.02, 4 << 20
"""Growth from the median of the second part to that of the last that is tolerated: a share, or
bytes."""

_KINDS = {
    "plain": 20, "budget": 25, "policy": 20, "own": 8, "control": 8, "off": 8, "two": 10,
    "split": 15, "recall": 8, "split, recall": 7, "bad": 5,
}  # fmt: skip
"""Kinds of requests with their weights."""
_BUDGETS, _SPLIT_BUDGETS = (1, 4, 8, 16, 31, 64, 143, 144, 4096), (16, 32, 48, 64, 96, 143, 4096)
# None that reads the language model's layers: those are refused where adapters change them.
_STATES = ("visionzip", "prumerge_plus", "divprune", "trim", "cdpruner", "cen_cdpruner")
_SPLIT_STATES, _RECALLS = ("shared-core", "minillava-split"), (_RECALL, 0, 1, 8, 24, 4096)
_BAD: Sequence[Mapping[str, object]] = (
    {"budget": 0}, {"state": "nobody"}, {"buget": 8}, {"budget": [8, 8]}, {"recall": -1},
)  # fmt: skip
_QUESTIONS = (
    "What digit is on the red shape?",
    "What colour is the circle?",
    "How many blue shapes are there?",
    "Is there a green square?",
    "Which shape is left of the triangle?",
    "What is shown?",
)

_PROMPT, _GENERATED = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"
_SUCCESSES, _BUCKETS = "vllm:request_success_total", "vllm:request_generation_tokens_bucket"
_VLLM_COUNTERS = (_SUCCESSES, _PROMPT, _GENERATED, _BUCKETS)
_SHORT_ANSWERS = f"{_BUCKETS} 5.0"
"""Requests that ended after five tokens at most: those whose client waited."""
_REFUSED = "autoprune_requests_refused_total"
_FAILURES = (
    "autoprune_fallbacks_total", "autoprune_selection_errors_total",
    "autoprune_unsafe_states_total",
)  # fmt: skip


class _Request(NamedTuple):
    """The body of a request, and by what the server's counters grow."""

    kind: str
    body: bytes
    counts: Mapping[str, int]


@cache
def _draw_repeated_pictures() -> Sequence[tuple[Image.Image, str]]:
    pictures = [draw_picture(seed, _SIDE, _SIDE) for seed in range(_REPEATED)]
    return [(image, encode_picture(image)) for image in pictures]


def _draw_request(random: Random, start: int, *, stream: bool = False) -> _Request:
    """A request of a random kind, to the model or one of its adapters.

    ``start`` tokens of a prompt stand before its image. ``stream``: a valid request for a long
    answer, which is streamed with its usage.
    """
    kinds = [kind for kind in _KINDS if not (stream and kind in ("own", "control", "bad"))]
    (kind,), choose = random.choices(kinds, [_KINDS[kind] for kind in kinds]), random.choice
    brought = json.loads(load_state(_STATE).dumps())
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
    images, turns = 2 if kind == "two" else 1, choose((1, 2, 3)) if "recall" in kind else 0
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
    model, length = choose((str(LLAVA), *ADAPTERS)), _LONG_ANSWER if stream else _SHORT_ANSWER
    body = build_body(model, [], tokens=length, stream=stream, fields=fields)
    if kind == "bad":
        return _Request(kind, body, {_REFUSED: 1})

    # By what the counters grow.
    state, budget = pruning.get("state", _STATE), pruning.get("budget", _BUDGET)
    if not pruning.get("enabled", True):
        state, budget = "off", _TOKENS
    budgets = budget if isinstance(budget, list) else [budget]
    before, kept = images * _TOKENS, sum(min(budget, _TOKENS) for budget in budgets)
    # Later turns recall what was not kept.
    recalled = min(turns * pruning.get("recall", _RECALL), before - kept)
    core = load_state(state).core if state in _SPLIT_STATES else None
    wanted = core.tokens(budget) if core and budget < _TOKENS else 0
    counts = {
        f"autoprune_requests_total {'request' if isinstance(state, dict) else state}": 1,
        f"autoprune_images_total {pruning.get('keep', 'state')}": images,
        "autoprune_visual_tokens_total before": before,
        "autoprune_visual_tokens_total after": kept + recalled,
        # Up to the edge of a KV block, as the prompt has them.
        "autoprune_core_tokens_total": align_core(start, budget, wanted, _BLOCK) if wanted else 0,
        "autoprune_recalled_tokens_total": recalled,
        "autoprune_kv_bytes_saved_total": (before - kept - recalled) * _KV_BYTES,
    }
    return _Request(kind, body, counts)


@dataclass
class _Tally:
    """What the client counted; ``counts`` by the names of the server's counters."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Requests that were answered, refused as expected, hung up on, or failed."""
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def _send(
    client: httpx.Client, request: _Request, tally: _Tally, deltas: int | None = None
) -> bool:
    """Send a request and count its answer; returns whether there was a server.

    ``deltas``: hang up after so many deltas of a stream, and count what they said.
    """
    usage: Mapping[str, int] | None = None
    reads = list[tuple[float, bytes]]()
    error, status = "", 0
    try:
        with client.stream("POST", CHAT, content=request.body) as answer:
            status = answer.status_code
            if status != (expected := 400 if _REFUSED in request.counts else 200):
                error = f"HTTP {status}, not {expected}: {answer.read()[:200]!r}"
            elif deltas is None:
                content = answer.read()
                usage = json.loads(content)["usage"] if status == 200 else None
            else:
                for piece in answer.iter_bytes():
                    reads.append((0.0, piece))
                    stream = parse_stream(reads)
                    if len(stream.deltas) >= deltas:
                        usage = stream._asdict()
                        break
                else:
                    error = "the answer ended before its client hung up"
    except (httpx.HTTPError, ValueError, KeyError) as failure:
        error = repr(failure)
    with tally.lock:
        if error:
            tally.outcomes["failed"] += 1
            tally.faults.append(f"{request.kind}: {error}")
            return status != 0
        tally.counts.update(request.counts)
        if usage is None:
            tally.outcomes["refused"] += 1
            return True
        tally.counts[_PROMPT] += usage["prompt_tokens"]
        tally.counts[_GENERATED] += usage["completion_tokens"]
        tally.outcomes["answered" if deltas is None else "hung up"] += 1
    return True


def _connect(url: str) -> httpx.Client:
    """A client with a new connection for each request, so that every API server gets some."""
    headers = {"Content-Type": "application/json", "Connection": "close"}
    limits = httpx.Limits(max_connections=None)
    return make_client(
        httpx.Client, url, Connection(), base_url=url, headers=headers, timeout=300.0, limits=limits
    )


_Sample = Mapping[str, int]
"""Resident bytes by process."""


def _keep_busy(
    url: str, pid: int, start: int, users: int, seconds: float, seed: int = 0
) -> tuple[_Tally, list[_Sample]]:
    """Send requests for that long; what was counted, and the memory of the server with that pid.

    Every user sends the next request as soon as it has an answer, or has hung up. Waits for
    requests in flight at the end, so that both sides count them.
    """
    tally, samples, end = _Tally(), [_read_resident(pid)], time.monotonic() + seconds

    def use(number: int) -> None:
        random = Random(f"{seed}/{number}")
        while time.monotonic() < end:
            deltas = random.randint(0, 9) if random.random() < _HANGING_UP else None
            request = _draw_request(random, start, stream=deltas is not None)
            if not _send(client, request, tally, deltas):
                time.sleep(1.0)  # no server: do not retry in a busy loop

    with _connect(url) as client, ThreadPoolExecutor(users) as pool:
        futures = [pool.submit(use, number) for number in range(users)]
        while time.monotonic() < end:
            time.sleep(min(max(1.0, seconds / _SAMPLES), max(0.0, end - time.monotonic())))
            samples.append(_read_resident(pid))
        for future in futures:
            future.result()
    return tally, samples


def _read_counters(exposition: str) -> Counter[str]:
    """Counters of one ``/metrics`` answer by name and labels, summed over engines and reasons."""
    counters: Counter[str] = Counter()
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name.startswith((*_VLLM_COUNTERS, "autoprune_")):
                keys = ("state", "chooser", "stage", "le")
                labels = [sample.labels[key] for key in keys if key in sample.labels]
                counters[" ".join([sample.name, *labels])] += int(sample.value)
    return counters


_Counts = Mapping[str, tuple[int, int, int]]
"""Of every figure the client's count, the server's, and by how much the latter may be larger."""


def _compare_counts(before: Mapping[str, int], after: Mapping[str, int], tally: _Tally) -> _Counts:
    """Every figure that both count; what the server alone counts must be 0.

    The server may count more of what its client did not wait for: where it learns too late that a
    client has hung up, it completes the answer, a long one. The counter of fallbacks has no sample
    for ``none``, which is no failure.
    """
    by_request = ("autoprune_requests_total ", "autoprune_images_total ")
    client = dict.fromkeys((*_FAILURES, *(n for n in after if n.startswith(by_request))), 0)
    client |= tally.counts
    client |= dict.fromkeys((_SUCCESSES, _SHORT_ANSWERS), tally.outcomes["answered"])
    hung_up = tally.outcomes["hung up"]
    unseen = {_GENERATED: _LONG_ANSWER * hung_up, _SUCCESSES: hung_up}
    return {
        name: (count, after.get(name, 0) - before.get(name, 0), unseen.get(name, 0))
        for name, count in sorted(client.items())
    }


def _read_resident(pid: int) -> _Sample:
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


_Memory = Mapping[str, tuple[float, float, str]]
"""Bytes after the warm-up and at the end, and what is wrong with them."""


def _judge_memory(samples: Sequence[_Sample]) -> _Memory:
    """Of every process that existed after the warm-up, and of all together.

    Samples are evenly spaced in time.
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
        grew = late - early > max(_ALLOWED * early, _SLACK)
        rows[name] = (early, late, "it grew" if grew else "")
    return rows


def _format_report(
    minutes: float, tally: _Tally, counts: _Counts, memory: _Memory
) -> tuple[str, list[str]]:
    """A few lines of text, and every broken promise; none where the soak is passed."""
    outcomes, sent = tally.outcomes, tally.outcomes.total()
    different = {
        name: f"{name}: {server:,} by the server, {client:,} by its client"
        for name, (client, server, unseen) in counts.items()
        if not client <= server <= client + unseen
    }
    wrong = [
        *(() if outcomes["answered"] else ("nothing was answered",)),
        *((f"{outcomes['failed']} of {sent} requests failed",) if outcomes["failed"] else ()),
        *different.values(),
        *(f"memory of {name}: {problem}" for name, (_, _, problem) in memory.items() if problem),
    ]
    lines = [
        f"{sent:,} requests in {minutes:g} min ({sent / (60 * minutes):.1f} a second): "
        + ", ".join(f"{outcome} {count:,}" for outcome, count in sorted(outcomes.items())),
        f"metrics: {len(counts) - len(different)} of {len(counts)} figures equal to what the "
        "client counted",
        f"memory, median of part {_PARTS} against part 2 of {_PARTS} "
        f"(at most {_ALLOWED:.0%} more, or {_SLACK // MIB} MiB):",
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
    # A server may not yet know which clients have hung up.
    at_once, seconds = 2 * options.users, 60 * options.minutes
    flags: tuple[str, ...] = (
        *("--enforce-eager", "--max-model-len", "1024"),
        # 16 blocks for each request that runs, the most that one needs.
        *("--block-size", str(_BLOCK), "--num-gpu-blocks-override", str(16 * at_once)),
        *("--max-num-seqs", str(at_once), "--mm-processor-cache-gb", "0.02"),
        *("--limit-mm-per-prompt", '{"image": 2}'),
        *("--autoprune-state", _STATE, "--autoprune-budget", str(_BUDGET)),
        *("--autoprune-text-tower", str(CLIP), "--autoprune-requests", "states"),
        *("--autoprune-feature-cache-gb", "0.005", "--autoprune-recall", str(_RECALL)),
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
            before = _read_counters(server.get("/metrics"))
            tally, samples = _keep_busy(
                server.url, server.process.pid, start, options.users, seconds, options.seed
            )
            counts = _compare_counts(before, _read_counters(server.get("/metrics")), tally)
    text, wrong = _format_report(options.minutes, tally, counts, _judge_memory(samples))
    (options.out / "soak.txt").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if wrong else 0
