"""Options of the load test, its loads and its objective; flags and help come from the fields."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field

from benchmarks.common.client import Phase, Record
from benchmarks.common.shapes import TOWER_LAYERS, WIDTH
from benchmarks.yardsticks.examples import LLAVA
from vllm_autoprune.record_file import FrozenModel

_M = TypeVar("_M", bound=FrozenModel)

CACHES = {
    "unique": "every image is new, so that no cache helps",
    "repeat": "whole requests are repeated, by Zipf's law",
    "same-image": "images are repeated by Zipf's law, each time with a new question",
    "off": "as repeat, but the server's caches are switched off",
}
"""States of the server's caches: a factor of the experiment."""

SHAPE = "shape"
_OPEN_RAMP = 0.05
"""Share of an open loop's requests that do not count: the first meet an emptier server."""


class Load(FrozenModel):
    """Exactly one of ``rate`` (requests a second, open loop) and ``users`` (closed loop)."""

    rate: float | None = None
    burstiness: float = 1.0
    users: int | None = None
    seed: int = 0

    @property
    def label(self) -> str:
        """Short, unique, fit for a file name."""
        return f"rate-{self.rate:g}" if self.rate is not None else f"users-{self.users}"

    @property
    def title(self) -> str:
        """Short, for the rows of a table."""
        if self.rate is not None:
            return "1 request/s" if self.rate == 1 else f"{self.rate:g} requests/s"
        return "1 user" if self.users == 1 else f"{self.users} users"

    def describe(self) -> str:
        """In words."""
        if self.rate is None:
            return f"closed loop, {self.title}"
        kind = "Poisson" if self.burstiness == 1 else f"gamma({self.burstiness:g})"
        return f"open loop, {kind} arrivals at {self.title}"

    def due(self, count: int) -> list[float]:
        """Seconds from the start at which each of ``count`` requests is due; 0 in a closed loop.

        Gaps are gamma distributed with mean 1 / ``rate`` seconds and shape ``burstiness``: 1 is a
        Poisson process, less is burstier, more is more regular (as ``vllm bench serve`` counts it).
        They are scaled so that the measured requests come at exactly ``rate``, and so do those of
        the ramp: the mean of a few hundred random gaps would be several per cent off. The same seed
        gives the same pattern at every rate, only faster or slower, so that the points of a sweep
        differ in nothing else.
        """
        if self.rate is None:
            return [0.0] * count
        gaps = np.random.default_rng(self.seed).gamma(
            self.burstiness, 1.0 / self.burstiness, size=count
        )
        # The gap before the first measured request belongs to the ramp.
        measured_from = self.phases(count).count("ramp") + 1
        for part in (gaps[:measured_from], gaps[measured_from:]):
            # A very bursty draw may be all zeros: such gaps stay as they are.
            part *= len(part) / (part.sum() or 1.0)
        return [float(at) for at in np.cumsum(gaps) / self.rate]

    def phases(self, count: int) -> list[Phase]:
        """Which of ``count`` requests count, by their place in the schedule.

        The first requests meet an emptier server, and in a closed loop the last ones too, because
        some users have already finished. Where too few would remain, all count.
        """
        ramp = round(_OPEN_RAMP * count) if self.users is None else self.users
        drain = 0 if self.users is None else self.users
        if ramp + drain > count // 2:
            ramp = drain = 0
        lengths: dict[Phase, int] = {"ramp": ramp, "measured": count - ramp - drain, "drain": drain}
        return [phase for phase, length in lengths.items() for _ in range(length)]


def _split_mix(value: object) -> object:
    """``A=1,B=2`` as a mapping; a part without ``=`` gets the weight 1."""
    if not isinstance(value, str):
        return value
    parts = (part.partition("=") for part in value.split(","))
    return {name: weight or 1 for name, _, weight in parts}


def _split_list(value: object) -> object:
    """``1,2,4`` as a list."""
    words = [value] if isinstance(value, str) else value
    if not words or not isinstance(words, list):
        return words
    numbers = ",".join(map(str, words)).split(",")
    return "find" if numbers == ["find"] else numbers


def _check_quotes(text: str) -> str:
    try:
        shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{error}: close the quotation") from None
    return text


def _check_servers(servers: tuple[str, ...]) -> tuple[str, ...]:
    for server in servers:
        if not re.match("[^=]+=https?://.", server):
            raise ValueError(f"{server!r} is no server: give NAME=http://HOST:PORT")
    if len({server.partition("=")[0] for server in servers}) < len(servers):
        raise ValueError("two servers have the same name: give each its own")
    return servers


_Count = Annotated[int, Field(ge=1)]
_Positive = Annotated[float, Field(gt=0)]
_Limit = Annotated[float, Field(ge=0)]
_Mix = Annotated[dict[_Count, _Positive], BeforeValidator(_split_mix), Field(min_length=1)]
"""Values with their weights."""


class Slo(FrozenModel):
    """Service-level objective: the highest latencies of a good request."""

    slo_ttft: _Limit = Field(default=1000.0, description="TTFT limit, ms; 0: none")
    slo_tpot: _Limit = Field(default=0.0, description="TPOT limit, ms; 0: none")
    slo_e2e: _Limit = Field(default=0.0, description="end-to-end limit, ms; 0: none")

    def good(self, record: Record) -> bool:
        """Whether a request met every limit; one that failed met none."""
        if not record.ok:
            return False
        times = (record.ttft, record.tpot, record.e2e)
        limits = (self.slo_ttft, self.slo_tpot, self.slo_e2e)
        pairs = zip(times, limits, strict=True)
        return all(time is None or not limit or 1000 * time <= limit for time, limit in pairs)

    def describe(self) -> str:
        """In words, milliseconds."""
        limits = {"TTFT": self.slo_ttft, "TPOT": self.slo_tpot, "E2E": self.slo_e2e}
        described = [f"{name} at most {limit:g} ms" for name, limit in limits.items() if limit]
        return ", ".join(described) or "none declared"


class RequestOptions(FrozenModel):
    """Requests of a workload."""

    requests: _Count = Field(default=200, description="measured requests of a run")
    warm_up: int = Field(
        default=8, ge=0, description="requests on other images before the clock starts"
    )
    output_tokens: _Count = Field(default=16, description="length of every answer")
    cache: Literal["unique", "repeat", "same-image", "off"] = Field(
        default="unique",
        description="state of the server's caches: unique, repeat, same-image or off",
    )
    pool: _Count = Field(
        default=20, description="different images (requests), where they are repeated"
    )
    zipf: _Positive = Field(
        default=1.1,
        description="exponent of Zipf's law: the k-th image comes in proportion to k ** -zipf",
    )
    sides: _Mix = Field(
        default={480: 1, 640: 2, 1024: 1},
        description="longer side of an image, pixels, VALUE=WEIGHT,...",
    )
    images: _Mix = Field(default={1: 1}, description="images a request, VALUE=WEIGHT,...")
    dialect: Literal["vllm", "openai"] = Field(
        default="vllm",
        description="vllm, or openai: without vLLM's own fields; answers may be shorter",
    )
    data: str = Field(
        default="", description="images and questions of your own: a folder or a JSONL file"
    )
    seed: int = Field(default=0, ge=0, description="seed of requests and schedule")


class Workload(RequestOptions):
    """All settings of the requests; equal workloads give the same bytes on every machine."""

    model: str
    """Name of the served model."""
    aspects: dict[str, float] = Field(default={"4/3": 4, "3/4": 2, "1/1": 2, "16/9": 1})
    """Width over height, with weights."""
    formats: dict[Literal["jpeg", "png"], float] = Field(default={"jpeg": 4, "png": 1})
    words: dict[int, float] = Field(default={8: 2, 16: 2, 32: 1})
    """Words in a question."""
    vocabulary: Literal["english", "numbered"] = "english"
    """numbered: the words w1, w2, ..., one token each for a model without weights."""
    first_item: int = 0
    """The first item of the data that is used: the loads of an experiment share none."""


class PrepareOptions(RequestOptions):
    """Preparation of a workload."""

    model: str = Field(description="name of the served model")
    out: Path = Field(description="folder to write")


class SendingOptions(Slo):
    """Sending and objective."""

    burstiness: _Positive = Field(default=1.0, description="1: Poisson arrivals; less: burstier")
    most: _Count = Field(default=512, description="requests in flight per worker that end the run")


class LocustOptions(SendingOptions):
    """Options of a run that are not locust's own."""

    workload: Path = Field(description="folder made by python -m benchmarks.load prepare")
    out: Path = Field(
        default=Path("out/load/run"), description="folder of run.json and records.jsonl"
    )
    rate: _Limit = Field(default=0.0, description="requests/s of an open loop; without it, --users")
    seed: int = Field(default=0, ge=0, description="seed of the arrivals")


class RunOptions(LocustOptions):
    """One run."""

    host: str
    users: _Count | None = None

    @property
    def load(self) -> Load:
        """The open loop where there is a rate, else the closed one."""
        rate = self.rate or None
        users = None if rate else self.users or 1
        return Load(rate=rate, burstiness=self.burstiness, users=users, seed=self.seed)


class OutputOptions(FrozenModel):
    """Output of a command."""

    as_json: bool = Field(default=False, description="print the result as JSON")


class ReportOptions(OutputOptions):
    """Report of a paired experiment."""

    folder: Path


class PairedOptions(RequestOptions, SendingOptions, OutputOptions):
    """Servers and loads of a paired experiment."""

    model: str = Field(
        default=str(LLAVA),
        description=f"checkpoint to serve, or {SHAPE}:LAYERS for LLaVA-1.5-7B's true widths "
        "without weights",
    )
    tower_layers: _Count = Field(
        default=TOWER_LAYERS, description="layers of a shape's vision tower"
    )
    width: int = Field(default=WIDTH, ge=64, description="width of a shape's language model")
    state: str = Field(default="autoprune", description="pruning state, a file or a name")
    budget: _Count | None = Field(default=None, description="K; default: the state's own")
    text_tower: Path | None = Field(
        default=None, description="CLIP checkpoint of the state; default for mini-LLaVA: its own"
    )
    server_flags: Annotated[str, AfterValidator(_check_quotes)] = Field(
        default="--max-model-len 2048 --block-size 32 --enforce-eager",
        description="flags of all servers, in quotation marks",
    )
    kv_cache_gb: _Count = Field(default=1, description="size of a CPU server's KV cache")
    attach: Annotated[tuple[str, ...], AfterValidator(_check_servers)] = Field(
        default=(), title="NAME=URL", description="running servers; the first is the reference"
    )
    served_name: str = Field(default="served", description="name of the served model")
    users: Annotated[tuple[_Count, ...], BeforeValidator(_split_list)] = Field(
        default=(), description="closed loops, such as 1,2,4,8,16,32"
    )
    rates: Annotated[tuple[_Positive, ...] | Literal["find"], BeforeValidator(_split_list)] = Field(
        default=(),
        description="open loops, requests/s, such as 1,2,4; find: choose them by the capacity",
    )
    passes: _Count = Field(default=2, description="passes over all arms (2: ABBA)")
    out: Path = Field(default=Path("out/load/paired"), description="folder of the report")
    workers: int = Field(default=0, ge=0, description="locust workers on this machine")
