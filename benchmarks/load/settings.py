"""Options of the load test, its loads and its objective.

Flags, help, keys of a YAML file and defaults come from the fields: ``--output-tokens 8`` on the
command line is ``output-tokens: 8`` in a file.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import numpy as np
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic import model_validator as validator
from pydantic_core import PydanticCustomError

from benchmarks.common import BenchmarkError
from benchmarks.common.client import Phase, Record
from benchmarks.common.shapes import TOWER_LAYERS, WIDTH
from benchmarks.yardsticks.examples import LLAVA
from vllm_autoprune.cli.flags import add_flags, flag_problems
from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.tpdsl.loading import suggest_name

M = TypeVar("M", bound=FrozenModel)
K = TypeVar("K")
Cache = Literal["unique", "repeat", "same-image", "off"]
Format = Literal["jpeg", "png"]

CACHES: dict[Cache, str] = {
    "unique": "every image is new, so that no cache helps",
    "repeat": "whole requests are repeated, by Zipf's law",
    "same-image": "images are repeated by Zipf's law, each time with a new question",
    "off": "as repeat, but the server's caches are switched off",
}
"""States of the server's caches: a factor of the experiment."""

SHAPE = "shape"
_OPEN_RAMP = 0.05
"""Share of an open loop's requests that do not count: the first meet an emptier server."""

_NAMES = {"as_json": "--json"}
"""Flags that are not named like their field."""


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
        spans: tuple[tuple[Phase, int], ...] = (
            ("ramp", ramp), ("measured", count - ramp - drain), ("drain", drain),
        )  # fmt: skip
        return [phase for phase, length in spans for _ in range(length)]


class Slo(FrozenModel):
    """Service-level objective: the highest latencies of a good request, seconds; None: any."""

    ttft: float | None = 1.0
    tpot: float | None = None
    e2e: float | None = None

    def good(self, record: Record) -> bool:
        """Whether a request met every limit; one that failed met none."""
        if not record.ok:
            return False
        pairs = ((record.ttft, self.ttft), (record.tpot, self.tpot), (record.e2e, self.e2e))
        return all(value is None or limit is None or value <= limit for value, limit in pairs)

    def describe(self) -> str:
        """In words, milliseconds."""
        limits = {"TTFT": self.ttft, "TPOT": self.tpot, "E2E": self.e2e}
        described = [f"{k} at most {1000 * v:g} ms" for k, v in limits.items() if v is not None]
        return ", ".join(described) or "none declared"


def _problem(message: str, *fields: str) -> PydanticCustomError:
    """An error of validation that names the fields to change; "what: fix"."""
    return PydanticCustomError("load", "{message}", {"message": message, "fields": fields})


def _join(value: object) -> str:
    """Words of the command line, or values of a file, as one text."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _split_mix(value: object) -> object:
    """``A=1,B=2`` as a mapping; a part without ``=`` gets the weight 1."""
    if isinstance(value, Mapping):
        return value
    parts = (part.partition("=") for part in _join(value).split(",") if part)
    return {name.strip(): weight or 1 for name, _, weight in parts}


def _split_list(value: object) -> object:
    parts = tuple(part for part in _join(value).split(",") if part)
    if value and not parts:
        raise _problem(f"{_join(value)!r} is no list: give at least one value")
    return "find" if parts == ("find",) else parts


def _split_words(value: object) -> object:
    text = value if isinstance(value, str) else None
    if isinstance(value, list | tuple) and len(value) == 1:
        text = str(value[0])
    try:
        return value if text is None else tuple(shlex.split(text))
    except ValueError as error:
        raise _problem(f"{error}: close the quotation") from None


def _check_aspect(text: str) -> str:
    try:
        positive = Fraction(text) > 0
    except (ValueError, ZeroDivisionError):
        positive = False
    if not positive:
        raise _problem(f"{text!r} is no aspect: give width/height, such as 4/3")
    return text


def _split_servers(value: object) -> object:
    if isinstance(value, Mapping):
        return tuple(value.items())
    parts = value if isinstance(value, list | tuple) else (value,)
    return tuple(p if isinstance(p, list | tuple) else str(p).split("=", 1) for p in parts)


def _check_servers(pairs: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
    for pair in pairs:
        if len(pair) != 2 or not pair[0] or not pair[1].startswith(("http://", "https://")):
            raise _problem(f"{'='.join(pair)!r} is no server: give NAME=http://HOST:PORT")
    if len({name for name, *_ in pairs}) < len(pairs):
        raise _problem("two servers have the same name: give each its own")
    return pairs


_Count = Annotated[int, Field(ge=1)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Limit = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""0 is no limit."""
_Mix = Annotated[dict[K, _Positive], BeforeValidator(_split_mix), Field(min_length=1)]
"""Values with their weights."""


class RequestOptions(FrozenModel):
    """Requests of a workload."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    requests: _Count = Field(default=200, description="measured requests of a run")
    warm_up: int = Field(
        default=8,
        ge=0,
        description="requests before the clock starts, on images that are not measured",
    )
    output_tokens: _Count = Field(
        default=16, description="length of every answer: a shorter answer is never a faster one"
    )
    cache: Cache = Field(
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
    sides: _Mix[_Count] = Field(
        default={480: 1, 640: 2, 1024: 1},
        description="longer side of an image, pixels, VALUE=WEIGHT,...",
    )
    aspects: _Mix[Annotated[str, AfterValidator(_check_aspect)]] = Field(
        default={"4/3": 4, "3/4": 2, "1/1": 2, "16/9": 1},
        description="width over height, VALUE=WEIGHT,...",
    )
    images: _Mix[_Count] = Field(default={1: 1}, description="images a request, VALUE=WEIGHT,...")
    formats: _Mix[Format] = Field(
        default={"jpeg": 4, "png": 1}, description="image formats, jpeg=WEIGHT,png=WEIGHT"
    )
    words: _Mix[_Count] = Field(
        default={8: 2, 16: 2, 32: 1}, description="words in a question, VALUE=WEIGHT,..."
    )
    vocabulary: Literal["english", "numbered"] = Field(
        default="english",
        description="english, or numbered: the words w1, w2, ..., one token each for a model "
        "without weights",
    )
    dialect: Literal["vllm", "openai"] = Field(
        default="vllm",
        description="vllm, or openai: without vLLM's own fields, so that answers may be shorter",
    )
    data: str = Field(
        default="",
        description="images and questions of your own: a folder, a JSONL file, or a data set saved "
        "by datasets.save_to_disk; default: drawn ones",
    )
    seed: int = Field(default=0, ge=0, description="seed of requests and schedule")


class Workload(RequestOptions):
    """All settings of the requests; equal workloads give the same bytes on every machine."""

    model: str
    """Name of the served model."""
    first_item: int = 0
    """The first item of the data that is used: the loads of an experiment share none."""


class PrepareOptions(RequestOptions):
    """Preparation of a workload."""

    model: str = Field(description="name of the served model")
    out: Path = Field(description="folder to write")


class SendingOptions(FrozenModel):
    """Sending and objective."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    burstiness: _Positive = Field(default=1.0, description="1: Poisson arrivals; less: burstier")
    slo_ttft: _Limit = Field(default=1000.0, description="TTFT limit, ms; 0: none")
    slo_tpot: _Limit = Field(default=0.0, description="TPOT limit, ms; 0: none")
    slo_e2e: _Limit = Field(default=0.0, description="end-to-end limit, ms; 0: none")
    patience: _Positive = Field(default=300.0, description="time-out of a request, seconds")
    most: _Count = Field(
        default=512, description="requests in flight per worker at which the run is given up"
    )

    @property
    def slo(self) -> Slo:
        """The objective, in seconds."""
        limits = (self.slo_ttft, self.slo_tpot, self.slo_e2e)
        ttft, tpot, e2e = (limit / 1000 or None for limit in limits)
        return Slo(ttft=ttft, tpot=tpot, e2e=e2e)


class LocustOptions(SendingOptions):
    """Options of one run that locust does not have under a name of its own."""

    workload: Path = Field(description="folder made by python -m benchmarks.load prepare")
    out: Path = Field(default=Path("out/load/run"), description="folder of run.json, records.jsonl")
    label: str = Field(default="", description="name of this run")
    rate: _Limit = Field(default=0.0, description="requests/s of an open loop; without it, --users")
    schedule_seed: int = Field(default=0, ge=0, description="seed of the arrivals")


class OutputOptions(FrozenModel):
    """Output of a command."""

    as_json: bool = Field(default=False, description="print the result as JSON")


class RunOptions(LocustOptions, OutputOptions):
    """One run."""

    url: str = Field(description="server, such as http://127.0.0.1:8000")
    users: _Count | None = Field(default=None, description="users of a closed loop")
    workers: int = Field(default=0, ge=0, description="locust workers on this machine")

    @validator(mode="after")
    def _check_load(self) -> RunOptions:
        if bool(self.rate) == (self.users is not None):
            message = "a run has one load: give --rate (open loop) or --users (closed loop)"
            raise _problem(message, "rate", "users")
        return self

    @property
    def load(self) -> Load:
        """The open or closed loop."""
        return Load(
            rate=self.rate or None,
            burstiness=self.burstiness,
            users=self.users,
            seed=self.schedule_seed,
        )

    def locust_flags(self) -> list[str]:
        """The command line of a locust that sends this run."""
        values = self.model_dump(include=set(LocustOptions.model_fields)).items()
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in values]
        return [*flags, f"--host={self.url}", *([f"--users={self.users}"] if self.users else [])]


class PairedOptions(RequestOptions, SendingOptions, OutputOptions):
    """Servers and loads of a paired experiment."""

    model: str = Field(
        default=str(LLAVA),
        description=f"checkpoint to serve, mini-LLaVA by default, or {SHAPE}:LAYERS for "
        "LLaVA-1.5-7B's true widths without weights",
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
    server_flags: Annotated[tuple[str, ...], BeforeValidator(_split_words)] = Field(
        default=("--max-model-len", "2048", "--block-size", "32", "--enforce-eager"),
        description="flags of all servers, in quotation marks",
    )
    kv_cache_gb: _Count = Field(default=1, description="size of a CPU server's KV cache")
    attach: Annotated[
        tuple[tuple[str, ...], ...], BeforeValidator(_split_servers), AfterValidator(_check_servers)
    ] = Field(
        default=(),
        title="NAME=URL",
        description="running servers to compare; the first is the reference",
    )
    served_name: str = Field(default="served", description="name of the served model")
    users: Annotated[tuple[_Count, ...], BeforeValidator(_split_list)] = Field(
        default=(), description="closed loops, such as 1,2,4,8,16,32"
    )
    rates: Annotated[
        Annotated[tuple[_Positive, ...], AfterValidator(lambda rates: tuple(sorted(rates)))]
        | Literal["find"],
        BeforeValidator(_split_list),
    ] = Field(
        default=(),
        description="open loops, requests/s, such as 1,2,4; find: choose them by the capacity",
    )
    passes: _Count = Field(default=2, description="passes over all arms (2: ABBA)")
    out: Path = Field(default=Path("out/load/paired"), description="folder of the report")
    workers: int = Field(default=0, ge=0, description="locust workers on this machine")


class ReportOptions(OutputOptions):
    """Report of a paired experiment."""

    folder: Path


def add_options(parser: argparse.ArgumentParser, model: type[FrozenModel]) -> None:
    """Add a flag for each option."""
    add_flags(parser.add_argument_group((model.__doc__ or "").rstrip(".")), model, _NAMES)


def read_options(model: type[M], flags: Mapping[str, object]) -> M:
    """The options of a YAML file (``config``) and of the command line, which wins.

    Raises :class:`ConfigError`, which names every wrong one.
    """
    values: dict[str, object] = {}
    places = dict(_NAMES)
    fields = {_NAMES.get(name, name).strip("-"): name for name in model.model_fields}
    config = flags.get("config")
    for word, value in _read_file(Path(str(config))).items() if config else ():
        name = fields.get(str(word).replace("-", "_"))
        if name is None:
            known = [field.replace("_", "-") for field in fields]
            problem = Problem(f"{config}:{word}", "is no option", suggest_name(str(word), known))
            raise ConfigError("options", [problem])
        if value is not None:
            values[name], places[name] = value, f"{config}:{word}"
    for name in flags.keys() & model.model_fields.keys():
        values[name] = flags[name]
        places[name] = _NAMES.get(name, f"--{name.replace('_', '-')}")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError("options", flag_problems(error, places)) from None


def _read_file(path: Path) -> Mapping[object, object]:
    import yaml  # type: ignore[import-untyped]  # only a call with a file needs it

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BenchmarkError(f"--config {path}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise BenchmarkError(f"--config {path}: is no mapping -> write OPTION: VALUE lines")
    return content
