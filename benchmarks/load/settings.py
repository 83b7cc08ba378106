"""Options of the load test, a load, and the objective; flags and help come from the fields."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field

from benchmarks.common.client import Record
from benchmarks.yardsticks.examples import LLAVA
from offline_search.settings import Budget
from vllm_autoprune.connection import Connection, server_address
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.flags import refuse_value
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.tpdsl.loading import DEFAULT_STATE

CACHES = {
    "unique": "every image is new, so that no cache helps",
    "repeat": "whole requests are repeated, by Zipf's law",
    "same-image": "images are repeated by Zipf's law, each time with a new question",
    "off": "as repeat, but the server's caches are switched off",
}
"""States of the server's caches: a factor of the experiment."""

SHAPE = "shape"
_OPEN_RAMP = 0.05
"""Share of an open loop's requests that are not measured, because the first meet an emptier
server."""


class Load(FrozenModel):
    """A load: an open loop of ``rate`` requests a second, or a closed loop of ``users``."""

    rate: float | None = None
    users: int | None = None
    seed: int = 0

    @property
    def label(self) -> str:
        """Short, unique name of the load, fit for a file name."""
        return f"rate-{self.rate:g}" if self.rate is not None else f"users-{self.users}"

    @property
    def title(self) -> str:
        """The load in words."""
        if self.rate is None:
            return "1 user" if self.users == 1 else f"{self.users} users"
        return "1 request/s" if self.rate == 1 else f"{self.rate:g} requests/s"

    def due(self, count: int) -> list[float]:
        """Seconds from the start when each of ``count`` requests is due; 0 in a closed loop.

        Requests follow a Poisson process. The ramp and the measured part are each scaled to exactly
        ``rate``, since the mean of a few hundred random gaps would be several per cent off. A seed
        gives the same pattern at every rate, only faster or slower, so that points of a sweep
        differ in the rate alone.
        """
        if self.rate is None:
            return [0.0] * count
        gaps = np.random.default_rng(self.seed).exponential(size=count)
        # The gap before the first measured request belongs to the ramp.
        ramp = self.select_measured(count).index(True) + 1
        for part in (gaps[:ramp], gaps[ramp:]):
            part *= len(part) / part.sum()
        return [float(seconds) for seconds in np.cumsum(gaps) / self.rate]

    def select_measured(self, count: int) -> list[bool]:
        """Which of ``count`` requests are measured, by their index in the schedule.

        The first requests meet an emptier server. So do the last ones of a closed loop, because
        some users have already finished. If fewer than half would remain, all requests are
        measured.
        """
        ramp = round(_OPEN_RAMP * count) if self.users is None else self.users
        drain = self.users or 0
        if ramp + drain > count // 2:
            ramp = drain = 0
        return [False] * ramp + [True] * (count - ramp - drain) + [False] * drain


def _split_mix(value: object) -> object:
    """Parse ``A=1,B=2`` into a mapping; a part without ``=`` has the weight 1."""
    if not isinstance(value, str):
        return value
    parts = (part.partition("=") for part in value.split(","))
    return {name: weight or 1 for name, _, weight in parts}


def _split_list(value: object) -> object:
    """Parse ``1,2,4`` into a list, and ``find`` into itself."""
    words = [value] if isinstance(value, str) else value
    if not words or not isinstance(words, list):
        return words
    numbers = ",".join(map(str, words)).split(",")
    return "find" if numbers == ["find"] else numbers


def _check_quotes(text: str) -> str:
    try:
        shlex.split(text)
    except ValueError as error:
        raise refuse_value(str(error), "close the quotation") from None
    return text


def _check_servers(servers: tuple[str, ...]) -> tuple[str, ...]:
    for server in servers:
        name, _, url = server.partition("=")
        try:
            server_address(url if name else "")
        except ConfigError:
            what = f"{server!r} is no server"
            raise refuse_value(what, "give NAME=http://HOST:PORT") from None
    if len({server.partition("=")[0] for server in servers}) < len(servers):
        raise refuse_value("two servers have the same name", "give each its own")
    return servers


_Count = Annotated[int, Field(ge=1)]
_Positive = Annotated[float, Field(gt=0)]
_Limit = Annotated[float, Field(ge=0)]
_Mix = Annotated[
    dict[_Count, _Positive], BeforeValidator(_split_mix), Field(min_length=1)
]
"""Values with their weights."""


def _option(default: Any, text: str, **more: Any) -> Any:
    """A field with its default and its help."""
    return Field(default=default, description=text, **more)


class RequestOptions(FrozenModel):
    """Requests of a workload."""

    requests: _Count = _option(200, "measured requests of a run")
    warm_up: int = _option(8, "requests on other images before the clock starts", ge=0)
    output_tokens: _Count = _option(16, "length of every answer")
    cache: Literal["unique", "repeat", "same-image", "off"] = _option(
        "unique", ", ".join(CACHES)
    )
    pool: _Count = _option(20, "different images (requests), where they are repeated")
    zipf: _Positive = _option(1.1, "the k-th image comes in proportion to k ** -zipf")
    sides: _Mix = _option(
        {480: 1, 640: 2, 1024: 1}, "longer side of an image, pixels, VALUE=WEIGHT,..."
    )
    images: _Mix = _option({1: 1}, "images a request, VALUE=WEIGHT,...")
    data: Path | None = _option(
        None,
        "questions of your own, as vllm-autoprune eval --data reads them, in place of drawn ones; "
        "with --cache unique one a picture",
    )
    dialect: Literal["vllm", "openai"] = _option(
        "vllm", "openai: without vLLM's own fields"
    )
    seed: int = _option(0, "seed of requests and schedule", ge=0)


class Workload(RequestOptions):
    """All settings of the requests; equal workloads give the same bytes on every machine."""

    model: str
    """Name of the served model."""
    part: int = 0
    """Number of the part of one's own data that is sent; loads send different parts."""
    vocabulary: Literal["english", "numbered"] = "english"
    """``numbered`` are the words w1, w2, ..., each of which is one token of a model without
    weights."""

    @classmethod
    def of(cls, options: RequestOptions, model: str) -> Workload:
        """The workload with these options, for the served model ``model``."""
        return cls(
            model=model, **options.model_dump(include=set(RequestOptions.model_fields))
        )


class SendingOptions(Connection):
    """Options of sending, and the service-level objective: the latency limits of a good request."""

    slo_ttft: _Limit = _option(1000.0, "TTFT limit, ms; 0: none")
    slo_tpot: _Limit = _option(0.0, "TPOT limit, ms; 0: none")
    slo_e2e: _Limit = _option(0.0, "end-to-end limit, ms; 0: none")
    most: _Count = _option(512, "requests in flight that end the run")
    shared: bool = _option(
        False, "accept delays of the client and requests of other clients"
    )

    @property
    def limits(self) -> dict[str, float]:
        """Limits of the objective that are set, in milliseconds, by name of the latency."""
        limits = {"TTFT": self.slo_ttft, "TPOT": self.slo_tpot, "E2E": self.slo_e2e}
        return {name: limit for name, limit in limits.items() if limit}

    def is_good(self, record: Record) -> bool:
        """Whether a request met every limit; a failed request met none."""
        if not record.ok:
            return False
        times = {"TTFT": record.ttft, "TPOT": record.tpot or 0.0, "E2E": record.e2e}
        return all(1000 * times[name] <= limit for name, limit in self.limits.items())

    def describe_objective(self) -> str:
        """The service-level objective in words, in milliseconds."""
        described = [
            f"{name} at most {limit:g} ms" for name, limit in self.limits.items()
        ]
        return ", ".join(described) or "none declared"


class RunOptions(SendingOptions):
    """Options of one run."""

    workload: Path = Field(
        description="folder made by python -m benchmarks.load prepare"
    )
    out: Path = _option(Path("out/load/run"), "folder of run.json and records.jsonl")
    rate: _Limit = _option(0.0, "requests/s of an open loop; without it, --users")
    seed: int = _option(0, "seed of the arrivals", ge=0)
    host: str
    """Address of the server; ``host`` and ``users`` are options of locust itself."""
    users: _Count | None = None

    @property
    def load(self) -> Load:
        """The open loop if a rate is set, else the closed loop."""
        if self.rate:
            return Load(rate=self.rate, seed=self.seed)
        return Load(users=self.users or 1)


LOCUST_FIELDS = tuple(
    name for name in RunOptions.model_fields if name not in ("host", "users")
)
"""Options of a run that locust does not have itself."""


class PairedOptions(RequestOptions, SendingOptions):
    """Options of a paired experiment: its servers and its loads."""

    model: str = _option(
        str(LLAVA), f"checkpoint, or {SHAPE}:LAYERS: LLaVA-1.5-7B without weights"
    )
    state: str = _option(DEFAULT_STATE, "pruning state, a file or a name")
    budget: Budget | None = _option(
        None, "K, or a share of N; default: the state's own"
    )
    text_tower: Path | None = _option(None, "CLIP checkpoint of the state")
    server_flags: Annotated[str, AfterValidator(_check_quotes)] = _option(
        "--max-model-len 2048 --block-size 32 --enforce-eager", "flags of all servers"
    )
    kv_cache_gb: _Count = _option(1, "size of a CPU server's KV cache")
    attach: Annotated[tuple[str, ...], AfterValidator(_check_servers)] = _option(
        (), "running servers; the first is the reference", title="NAME=URL"
    )
    served_name: str = _option("served", "name of the served model")
    users: Annotated[tuple[_Count, ...], BeforeValidator(_split_list)] = _option(
        (), "closed loops, such as 1,2,4,8,16,32"
    )
    rates: Annotated[
        tuple[_Positive, ...] | Literal["find"], BeforeValidator(_split_list)
    ] = _option(
        (), "open loops, requests/s, such as 1,2,4; find: choose them by the capacity"
    )
    passes: _Count = _option(2, "passes over all arms (2: ABBA)")
    out: Path = _option(Path("out/load/paired"), "folder of the report")
