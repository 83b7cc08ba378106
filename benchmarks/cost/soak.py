"""`python -m benchmarks.cost soak`: a pruned server under mixed load, judged by counts and memory.

Everything is switched on: two API servers, adapters, states by request, cores, recall, and clients
that hang up. For every request it is known by how much the server's counters should grow. Half of
the pictures are new, the others repeat a few. Every cache of the server is so small that it is
full, hit and evicted from before the warm-up ends: memory that grows later is a leak.
"""

from __future__ import annotations

import argparse
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
from benchmarks.common.requests import (
    build_body,
    build_content,
    draw_picture,
    encode_picture,
)
from benchmarks.common.shapes import count_kv_bytes, count_visual_tokens
from benchmarks.server import serve
from benchmarks.yardsticks.adapters import ADAPTERS, write_adapters
from benchmarks.yardsticks.examples import CLIP, IMAGE_TOKEN, LLAVA
from vllm_autoprune.connection import Connection, make_client
from vllm_autoprune.http_client import CHAT
from vllm_autoprune.serving.api.layout import align_core
from vllm_autoprune.tpdsl.loading import load_state

_STATE = "autoprune"
_BUDGET = 32
_RECALL = 4
_BLOCK = 32
"""Tokens of a KV block of the server."""
_TOKENS = count_visual_tokens(LLAVA)
_KV_BYTES = count_kv_bytes(LLAVA)
"""N of an image, and bytes of one token in the KV cache."""
_API_SERVERS = 2
_START_TIMEOUT = 1200.0
"""Seconds in which the server must start, even on a busy machine."""
_SMALL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
"""oneDNN keeps 1,024 compiled operations, one for every shape. They take about a gigabyte, and
thousands of requests until the cache is full."""
_HANGING_UP = 1 / 16
"""Share of requests whose client hangs up after the first piece of a long answer."""
_LONG_ANSWER = 160
_SHORT_ANSWER = 4
"""Tokens of an answer that a client hangs up on, and of any other answer."""
_SAMPLES = 200
_PARTS = 5
"""Maximum number of memory samples of the run, at most one a second, and the number of equal parts
into which they are split; the first part is the warm-up."""
_ALLOWED = 0.02
_SLACK = 4 << 20
"""Tolerated growth of memory from the median of the second part to that of the last: the larger of
a share and a number of bytes."""

_KINDS = {"plain": 20, "policy": 35, "off": 10, "split": 15, "recall": 15, "bad": 5}
"""Kinds of requests with their weights."""
_BUDGETS = (1, 4, 8, 16, 31, 64, 143, 144, 4096)
_SPLIT_BUDGETS = (16, 32, 48, 64, 96, 143, 4096)
# No state reads layers of the language model: such states are refused where adapters change layers.
_STATES = ("visionzip", "prumerge_plus", "divprune", "trim", "cdpruner", "cen_cdpruner")
_SPLIT_STATES = ("shared-core", "minillava-split")
_RECALLS = (_RECALL, 0, 1, 8, 24, 4096)
_BAD = (
    {"budget": 0},
    {"state": "nobody"},
    {"buget": 8},
    {"budget": [8, 8]},
    {"recall": -1},
)
_QUESTIONS = (
    "What digit is on the red shape?",
    "How many blue shapes are there?",
    "What is shown?",
)

_SHORT_ANSWERS = "vllm:request_generation_tokens_bucket 5.0"
"""Number of requests that ended after at most five tokens: those whose client did not hang up."""
_REFUSED = "autoprune_requests_refused_total"
_BY_REQUEST = ("autoprune_requests_total", "autoprune_images_total")
"""Counters with a sample for each state or chooser."""
_FAILURES = ("autoprune_fallbacks_total", "autoprune_selection_errors_total")


class _Request(NamedTuple):
    """Body of a request, and by how much it increases each of the server's counters."""

    kind: str
    body: bytes
    counts: Mapping[str, int]

    @classmethod
    def draw(cls, random: Random, start: int, *, hang_up: bool = False) -> _Request:
        """Draw a request of a random kind, to the model or one of its adapters.

        ``start`` is the number of prompt tokens before the image. With ``hang_up`` the request is
        valid and asks for a long, streamed answer.
        """
        kinds = {
            kind: weight
            for kind, weight in _KINDS.items()
            if not (hang_up and kind == "bad")
        }
        (kind,) = random.choices([*kinds], [*kinds.values()])
        choose = random.choice
        fields_by_kind: dict[str, Mapping[str, Any]] = {
            "plain": {},
            "policy": {"budget": choose(_BUDGETS), "state": choose(_STATES)},
            "off": {"enabled": False},
            "split": {"budget": choose(_SPLIT_BUDGETS), "state": choose(_SPLIT_STATES)},
            "recall": {"budget": choose(_BUDGETS), "recall": choose(_RECALLS)},
            "bad": choose(_BAD),
        }
        pruning = fields_by_kind[kind]
        turns = choose((1, 2, 3)) if kind == "recall" else 0
        image, url = choose(_draw_repeated_pictures())
        if random.random() < 0.5:
            url = encode_picture(image.rotate(random.random() * 360))
        messages: list[Mapping[str, object]] = [
            {"role": "user", "content": build_content(choose(_QUESTIONS), [url])}
        ]
        for _ in range(turns):
            messages.append(
                {"role": "assistant", "content": choose(("red", "two", "no"))}
            )
            messages.append({"role": "user", "content": choose(_QUESTIONS)})
        fields: dict[str, object] = {"ignore_eos": True, "messages": messages}
        if pruning:
            fields["mm_processor_kwargs"] = {"autoprune": pruning}
        length = _LONG_ANSWER if hang_up else _SHORT_ANSWER
        model = choose((str(LLAVA), *ADAPTERS))
        body = build_body(model, [], tokens=length, stream=hang_up, fields=fields)
        if kind == "bad":
            return cls(kind, body, {_REFUSED: 1})

        # Expected increments of the counters.
        state = pruning.get("state", _STATE)
        budget = min(pruning.get("budget", _BUDGET), _TOKENS)
        if kind == "off":
            state = "off"
            budget = _TOKENS
        # Each later turn recalls tokens that were dropped.
        recalled = min(turns * pruning.get("recall", _RECALL), _TOKENS - budget)
        core = load_state(state).core if kind == "split" else None
        wanted = core.tokens(budget) if core and budget < _TOKENS else 0
        counts = {
            f"autoprune_requests_total {state}": 1,
            "autoprune_images_total state": 1,
            "autoprune_visual_tokens_total before": _TOKENS,
            "autoprune_visual_tokens_total after": budget + recalled,
            # A core ends at a boundary of a KV block, counted from the start of the prompt.
            "autoprune_core_tokens_total": wanted
            and align_core(start, budget, wanted, _BLOCK),
            "autoprune_recalled_tokens_total": recalled,
            "autoprune_kv_bytes_saved_total": (_TOKENS - budget - recalled) * _KV_BYTES,
        }
        return cls(kind, body, counts if hang_up else counts | {_SHORT_ANSWERS: 1})


@cache
def _draw_repeated_pictures() -> Sequence[tuple[Image.Image, str]]:
    pictures = [draw_picture(seed, 96, 96) for seed in range(12)]
    return [(image, encode_picture(image)) for image in pictures]


@dataclass
class _Tally:
    """Outcomes and faults that the client saw, and the counts that the server should have.

    ``counts`` are by name of the server's counter.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    """Number of requests that were answered, refused as expected, hung up on, or failed."""
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def send(
        self, client: httpx.Client, request: _Request, *, hang_up: bool = False
    ) -> None:
        """Send a request and count its outcome; ``hang_up`` closes it once its answer begins."""
        status = 0
        error = ""
        refused = _REFUSED in request.counts
        try:
            with client.stream("POST", CHAT, content=request.body) as answer:
                status = answer.status_code
                content = next(answer.iter_bytes(), b"") if hang_up else answer.read()
                if status != (400 if refused else 200):
                    error = f"HTTP {status}: {content[:200]!r}"
        except httpx.HTTPError as failure:
            error = repr(failure)
        outcome = "hung up" if hang_up else "answered"
        if refused:
            outcome = "refused"
        with self.lock:
            if error:
                outcome = "failed"
                self.faults.append(f"{request.kind}: {error}")
            else:
                self.counts.update(request.counts)
            self.outcomes[outcome] += 1
        if not status:
            time.sleep(1.0)  # no server: do not retry in a busy loop

    def compare(self, gained: Counter[str]) -> list[str]:
        """Counters whose growth differs from the expected; unexpected counters must stay 0.

        The counter of fallbacks has no sample for ``none``, because this is not a failure.
        """
        names = {name for name in gained if name.startswith((*_BY_REQUEST, *_FAILURES))}
        return [
            f"{name}: {gained[name]:,} by the server, {self.counts[name]:,} by its client"
            for name in sorted(names | self.counts.keys())
            if gained[name] != self.counts[name]
        ]

    def format_report(
        self, minutes: float, different: Sequence[str], samples: Sequence[_Sample]
    ) -> tuple[str, bool]:
        """The report as text, and whether the soak has passed.

        ``samples`` of the memory are evenly spaced in time.
        """
        outcomes = self.outcomes
        sent = outcomes.total()
        size = len(samples) // _PARTS
        memory = list[str]()
        wrong = [*different]
        if not outcomes["answered"] or not size:
            wrong.append(
                "nothing was answered, or there are too few samples of the memory"
            )
        if outcomes["failed"]:
            wrong.append(f"{outcomes['failed']} of {sent} requests failed")
        later = samples[size:]
        for name in sorted({name for sample in later for name in sample}):
            if any(name not in sample for sample in later):
                wrong.append(f"memory of {name}: it did not exist all the time")
                continue
            early, late = (
                median(s[name] for s in part) for part in (later[:size], later[-size:])
            )
            memory.append(f"  {name}: {early / MIB:,.1f} -> {late / MIB:,.1f} MiB")
            if late - early > max(_ALLOWED * early, _SLACK):
                wrong.append(f"memory of {name}: it grew")
        lines = [
            f"{sent:,} requests in {minutes:g} min: "
            + ", ".join(
                f"{outcome} {count:,}" for outcome, count in sorted(outcomes.items())
            ),
            f"memory, median of part {_PARTS} against part 2 of {_PARTS} "
            f"(at most {_ALLOWED:.0%} more, or {_SLACK // MIB} MiB):",
            *memory,
            *(f"fault: {fault}" for fault in self.faults[:20]),
            *(f"does not hold: {problem}" for problem in wrong),
            "The soak is not passed." if wrong else "The soak is passed.",
        ]
        return "\n".join(lines), not wrong


_Sample = Mapping[str, int]
"""Resident bytes of each process."""


def _keep_busy(
    url: str, pid: int, start: int, users: int, seconds: float
) -> tuple[_Tally, list[_Sample]]:
    """Keep ``users`` busy for ``seconds``; returns their tally, and memory samples of the server.

    A user sends the next request as soon as the last one is answered or hung up on. At the end it
    waits for requests in flight, so that both sides count them.
    """
    tally = _Tally()
    samples = [_read_resident(pid)]
    end = time.monotonic() + seconds
    # Each request has a new connection, so that every API server gets some.
    headers = {"Content-Type": "application/json", "Connection": "close"}
    client = make_client(
        httpx.Client, url, Connection(), base_url=url, headers=headers, timeout=300.0
    )

    def use(number: int) -> None:
        random = Random(number)
        while time.monotonic() < end:
            hang_up = random.random() < _HANGING_UP
            request = _Request.draw(random, start, hang_up=hang_up)
            tally.send(client, request, hang_up=hang_up)

    with client, ThreadPoolExecutor(users) as pool:
        futures = [pool.submit(use, number) for number in range(users)]
        while time.monotonic() < end:
            time.sleep(
                min(max(1.0, seconds / _SAMPLES), max(0.0, end - time.monotonic()))
            )
            samples.append(_read_resident(pid))
        for future in futures:
            future.result()
    return tally, samples


def _read_counters(exposition: str) -> Counter[str]:
    """Counters of a ``/metrics`` answer by name and labels, summed over engines and reasons."""
    counters: Counter[str] = Counter()
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            labels = [
                sample.labels.get(key) for key in ("state", "chooser", "stage", "le")
            ]
            counters[" ".join([sample.name, *filter(None, labels)])] += int(
                sample.value
            )
    return counters


def _read_resident(pid: int) -> _Sample:
    """Resident bytes of a process and of all its descendants, by process id and name.

    Shared pages and pages of files are left out, because the kernel takes pages of files back when
    memory is scarce.
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
                resident[f"{process.pid} {process.name()}"] = int(
                    memory.rss - memory.shared
                )
    return resident


OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "--minutes": {"type": float, "default": 60.0, "help": "duration"},
    "--users": {"type": int, "default": 8, "help": "requests at once"},
    "--out": {
        "type": Path,
        "default": Path("out/soak"),
        "help": "folder of report, log",
    },
}


def run(options: argparse.Namespace) -> int:
    """Serve, send requests, compare; returns 0 if every promise holds, else 1."""
    options.out.mkdir(parents=True, exist_ok=True)
    # The server may not yet have noticed clients that hung up.
    at_once = 2 * options.users
    seconds = 60 * options.minutes
    # 16 blocks for each running request, which is the most that one needs.
    flags = (
        f"--enforce-eager --max-model-len 1024 --block-size {_BLOCK} "
        f"--num-gpu-blocks-override {16 * at_once} --max-num-seqs {at_once} "
        f"--api-server-count {_API_SERVERS} --mm-processor-cache-gb 0.02 "
        f"--autoprune-state {_STATE} --autoprune-budget {_BUDGET} "
        f"--autoprune-recall {_RECALL} --autoprune-requests states "
        "--autoprune-feature-cache-gb 0.005"
    ).split()
    flags += ["--autoprune-text-tower", str(CLIP)]
    log = options.out / "server.log"
    with tempfile.TemporaryDirectory(prefix="adapters-") as adapters:
        flags += write_adapters(Path(adapters))
        with serve(
            LLAVA, *flags, env=_SMALL_CACHES, log=log, patience=_START_TIMEOUT
        ) as server:
            server.await_api_servers(_API_SERVERS, _START_TIMEOUT)
            # Number of prompt tokens before the image.
            content = build_content("?", [_draw_repeated_pictures()[0][1]])
            question = {
                "model": server.model,
                "messages": [{"role": "user", "content": content}],
            }
            status, reply = server.post("/tokenize", question)
            tokens = reply.get("tokens")
            if status != 200 or not isinstance(tokens, list):
                raise BenchmarkError.of("/tokenize", f"is answered {status}: {reply}")
            start = tokens.index(IMAGE_TOKEN)
            initial = _read_counters(server.get("/metrics"))
            tally, samples = _keep_busy(
                server.url, server.process.pid, start, options.users, seconds
            )
            gained = _read_counters(server.get("/metrics")) - initial
    text, passed = tally.format_report(options.minutes, tally.compare(gained), samples)
    (options.out / "soak.txt").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0 if passed else 1
