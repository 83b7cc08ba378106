"""`python -m benchmarks.cost curve`: load curves by `vllm bench serve`, and what is busy meanwhile.

One server for each number of API servers; its arms are fields of requests, since a server with a
state answers ``"enabled": false`` as stock vLLM does. All caches are off, so that every request
has its image processed, encoded and prefilled. Points are appended to a file as they are measured,
and another run measures those that are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from benchmarks import BenchmarkError
from benchmarks.common.busy import Busy, BusyWatch
from benchmarks.common.report import format_environment, log_progress
from benchmarks.common.requests import build_content, crop_pictures, encode_picture
from benchmarks.common.shapes import draw_words
from benchmarks.cost.efficiency import OPTIONS as _EFFICIENCY
from benchmarks.cost.efficiency import ServedModel
from benchmarks.cost.turns import as_fields
from benchmarks.server import Server, default_flags, serve
from vllm_autoprune.record_file import FrozenModel, RecordFile
from vllm_autoprune.report import Table
from vllm_autoprune.tpdsl.loading import DEFAULT_STATE

ARMS: Mapping[str, Mapping[str, object]] = {
    "stock": {"enabled": False},
    "resized": {"keep": "resized"},
    "random": {"keep": "random"},
    "default": {},
}
"""What each arm adds to a request; the default is the state of the server."""
_SERVED = "served"
_NO_CACHES = (
    "--no-enable-prefix-caching",
    "--mm-processor-cache-gb=0",
    "--autoprune-feature-cache-gb=0",
)
_ANSWER_TOKENS = 16
_PERCENTILES = (25, 50, 75, 99)
_COLUMNS = (
    "API servers",
    "users",
    "arm",
    "requests/s",
    "TTFT, ms",
    "p99",
    "TPOT, ms",
    "busiest API server, %",
    "GPU, %",
    "client, %",
    "failed",
)
_NOTES = """\
TTFT and TPOT: medians (quartiles) by `vllm bench serve`; requests that a user sends one after the
other. Busy: processor seconds a second; the client at 100 % is the bottleneck itself. GPU: share of
time with a kernel running, by NVML."""


class Point(FrozenModel):
    """Figures of one arm at one number of users."""

    api_servers: int
    users: int
    arm: str
    requests: int
    failed: int
    throughput: float
    """Requests a second."""
    ttft: tuple[float, float, float, float]
    """Milliseconds: quartiles and the 99th percentile."""
    tpot: tuple[float, float, float, float]
    busy: Busy

    def format_row(self) -> list[str]:
        """The row of the table."""
        busiest = max(self.busy.api_servers)
        return [
            str(self.api_servers),
            str(self.users),
            self.arm,
            f"{self.throughput:.2f}",
            f"{self.ttft[1]:,.0f} ({self.ttft[0]:,.0f}–{self.ttft[2]:,.0f})",
            f"{self.ttft[3]:,.0f}",
            f"{self.tpot[1]:.1f} ({self.tpot[0]:.1f}–{self.tpot[2]:.1f})",
            f"{100 * busiest:.0f}",
            "no GPU" if self.busy.gpu is None else f"{100 * self.busy.gpu:.0f}",
            f"{100 * self.busy.client:.0f}",
            f"{self.failed} of {self.requests}",
        ]


class _Points(RecordFile[Point]):
    """Points that are measured; one process at a time may append."""

    adapter = TypeAdapter(Point)
    error_type = BenchmarkError


def write_dataset(file: Path, count: int, side: int) -> Path:
    """Write questions about ``count`` pictures for `vllm bench serve`; returns the file."""
    lines = []
    for number, picture in enumerate(crop_pictures(1, count, side, side)):
        url = encode_picture(picture, "jpeg")
        content = build_content(draw_words(16, number), [url])
        lines.append(json.dumps({"content": content}))
    file.write_text("\n".join(lines) + "\n")
    return file


def measure(
    server: Server, model: ServedModel, dataset: Path, arm: str, users: int, count: int
) -> Point:
    """Measure one point: ``count`` requests by so many users; raises if none is answered."""
    from vllm.benchmarks import serve as bench
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # A special first token would have no text, so its time could not be measured.
    body = {**as_fields(ARMS[arm]), "skip_special_tokens": False}
    words = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
    words += ["--base-url", server.url, "--served-model-name", _SERVED]
    words += ["--model", str(model.folder), "--extra-body", json.dumps(body)]
    words += ["--dataset-name", "custom_image", "--dataset-path", str(dataset)]
    words += ["--disable-shuffle", "--disable-tqdm", "--temperature", "0"]
    words += ["--num-prompts", str(count), "--max-concurrency", str(users)]
    words += ["--output-len", str(_ANSWER_TOKENS), "--ignore-eos"]
    words += ["--metric-percentiles", ",".join(map(str, _PERCENTILES))]
    words += ["--num-warmups", "1", "--ready-check-timeout-sec", "0"]
    parser = FlexibleArgumentParser()
    bench.add_cli_args(parser)
    options = parser.parse_args(words)
    watch = BusyWatch(server)
    with contextlib.redirect_stdout(sys.stderr):
        result: Mapping[str, Any] = bench.main(options)
    # Before its requests, the command reads its data set and sends what warms up.
    busy = watch.read(result["duration"])
    if not result["completed"]:
        what = f"answered none of {count} requests of {arm}"
        raise BenchmarkError.of(server.url, what, f"see {server.log}")

    def read_percentiles(name: str) -> tuple[float, ...]:
        return tuple(result[f"p{percent}_{name}_ms"] for percent in _PERCENTILES)

    return Point.model_validate(
        {
            "api_servers": len(busy.api_servers),
            "users": users,
            "arm": arm,
            "requests": count,
            "failed": result["failed"],
            "throughput": result["request_throughput"],
            "ttft": read_percentiles("ttft"),
            "tpot": read_percentiles("tpot"),
            "busy": busy,
        }
    )


def format_points(points: Sequence[Point]) -> str:
    """The curve as a table: by API servers, users, and arms in the order of :data:`ARMS`."""
    order = list(ARMS)
    in_order = sorted(
        points, key=lambda p: (p.api_servers, p.users, order.index(p.arm))
    )
    rows = [point.format_row() for point in in_order]
    return f"{Table('', _COLUMNS, rows, align='rrl').markdown()}\n\n{_NOTES}\n"


OPTIONS: Mapping[str, Mapping[str, Any]] = {
    **{name: _EFFICIENCY[name] for name in ("--model", "--layers", "--budget")},
    "--state": {"default": DEFAULT_STATE, "help": "state of the server"},
    "--arms": {
        "default": ",".join(ARMS),
        "help": "arms, in turn at each number of users",
    },
    "--users": {"default": "1,2,4,8,16,32,64,128", "help": "users, in this order"},
    "--api-servers": {"default": "1,4", "help": "numbers of API servers"},
    "--requests": {
        "type": int,
        "default": 16,
        "help": "least requests of a point; at least twice as many as users",
    },
    "--out": {"type": Path, "default": Path("out/curve"), "help": "folder of files"},
}


def run(options: argparse.Namespace) -> int:
    """Measure the points that are missing, print all; returns 0 if no request failed, else 1."""
    model = ServedModel.open(options.model, options.layers, options.out)
    budget = options.budget or model.shape.tokens // 9
    arms = options.arms.split(",")
    users = [int(number) for number in options.users.split(",")]
    counts = {number: max(options.requests, 2 * number) for number in users}
    flags = ["--served-model-name", _SERVED, *default_flags(), *model.flags.split()]
    flags += ["--autoprune-state", options.state, "--autoprune-budget", str(budget)]
    flags += ["--autoprune-requests", "budget", *_NO_CACHES]
    with _Points(options.out / "points.jsonl") as points:
        known = {(p.api_servers, p.users, p.arm): p for p in points.records}
        try:
            for servers in map(int, options.api_servers.split(",")):
                missing = [
                    (number, arm)
                    for number in users
                    for arm in arms
                    if (servers, number, arm) not in known
                ]
                if not missing:
                    continue
                file = options.out / "questions.jsonl"
                dataset = write_dataset(file, max(counts.values()), model.side)
                log = options.out / f"server-{servers}.log"
                several = [] if servers == 1 else ["--api-server-count", str(servers)]
                with serve(model.folder, *flags, *several, log=log) as server:
                    server.await_api_servers(servers)
                    for number, arm in missing:
                        count = counts[number]
                        point = measure(server, model, dataset, arm, number, count)
                        points.append([point])
                        known[servers, number, arm] = point
                        log_progress(f"{servers} API servers, {number} users, {arm}")
        finally:  # also at the deadline of whoever has started this
            print(format_points([*known.values()]))
            print(format_environment())
    return int(any(point.failed for point in known.values()))
