"""Options of the load test: flags, help, keys of a YAML file and defaults come from model fields.

A field with a description is an option: ``--output-tokens 8`` on the command line and
``output-tokens: 8`` in a file. Only the model checks values, so a file and flags cannot differ.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import shlex
import sys
from collections.abc import Collection, Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from benchmarks.common import BenchmarkError, StrictModel
from benchmarks.common.shapes import TOWER_LAYERS, WIDTH
from benchmarks.load.schedule import Load, Slo
from benchmarks.yardsticks.examples import LLAVA

M = TypeVar("M", bound=StrictModel)
T = TypeVar("T")
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
SEVERAL, POSITIONAL = "several values", "positional"
"""Marks of fields: the option takes several words, or has no dashes."""


def _split_pairs(value: object) -> object:
    """``A=1,B=2``, a list of such parts, or a mapping, as pairs; a part without ``=`` gets 1."""
    if isinstance(value, Mapping):
        return tuple(value.items())
    parts = value if isinstance(value, list | tuple) else str(value).split(",")
    pairs: list[object] = []
    for part in parts:
        name, _, weight = str(part).partition("=")
        is_pair = isinstance(part, list | tuple)
        pairs.append(part if is_pair else (name.strip(), weight or 1))
    return tuple(pairs)


def _split_list(value: object) -> object:
    if isinstance(value, list | tuple) or value == "find":
        return value
    return tuple(part for part in str(value).split(",") if part)


def _split_words(value: object) -> object:
    return tuple(shlex.split(value)) if isinstance(value, str) else value


def _check_aspect(text: str) -> str:
    try:
        positive = Fraction(text) > 0
    except (ValueError, ZeroDivisionError):
        positive = False
    if not positive:
        raise ValueError(f"{text!r} is not width/height, such as 4/3")
    return text


def _check_servers(pairs: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    for name, url in pairs:
        if not (name and url.startswith(("http://", "https://"))):
            raise ValueError("expected NAME=http://HOST:PORT")
    if len(dict(pairs)) < len(pairs):
        raise ValueError("two servers have the same name")
    return pairs


Whole = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Limit = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""0 is no limit."""
Aspect = Annotated[str, AfterValidator(_check_aspect)]
Mix = Annotated[tuple[tuple[T, Positive], ...], BeforeValidator(_split_pairs), Field(min_length=1)]
"""Values with their weights, such as ``((480, 1.0), (640, 2.0))``."""


class RequestOptions(StrictModel):
    """Requests of a workload."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    requests: Whole = Field(default=200, description="measured requests of a run")
    warm_up: int = Field(
        default=8,
        ge=0,
        description="requests before the clock starts, on images that are not measured",
    )
    output_tokens: Whole = Field(
        default=16, description="length of every answer: a shorter answer is never a faster one"
    )
    cache: Cache = Field(default="unique", description="state of the server's caches")
    pool: Whole = Field(
        default=20, description="different images (requests), where they are repeated"
    )
    zipf: Positive = Field(
        default=1.1,
        description="exponent of Zipf's law: the k-th image comes in proportion to k ** -zipf",
    )
    sides: Mix[Whole] = Field(
        default=((480, 1.0), (640, 2.0), (1024, 1.0)),
        description="longer side of an image, pixels, VALUE=WEIGHT,...",
    )
    aspects: Mix[Aspect] = Field(
        default=(("4/3", 4.0), ("3/4", 2.0), ("1/1", 2.0), ("16/9", 1.0)),
        description="width over height, VALUE=WEIGHT,...",
    )
    images: Mix[Whole] = Field(
        default=((1, 1.0),), description="images a request, VALUE=WEIGHT,..."
    )
    formats: Mix[Format] = Field(
        default=(("jpeg", 4.0), ("png", 1.0)), description="image formats, jpeg=WEIGHT,png=WEIGHT"
    )
    words: Mix[Whole] = Field(
        default=((8, 2.0), (16, 2.0), (32, 1.0)),
        description="words in a question, VALUE=WEIGHT,...",
    )
    vocabulary: Literal["english", "numbered"] = Field(
        default="english",
        description="numbered: the words w1, w2, ..., one token each for a model without weights",
    )
    dialect: Literal["vllm", "openai"] = Field(
        default="vllm",
        description="openai: without vLLM's own fields, so that answers may be shorter",
    )
    data: str = Field(
        default="",
        description="images and questions of your own: a folder, a JSONL file, or a data set saved "
        "by datasets.save_to_disk (default: drawn ones)",
    )
    seed: int = Field(default=0, ge=0, description="seed of requests and schedule")


class Workload(RequestOptions):
    """All settings of the requests; equal workloads give the same bytes on every machine."""

    model: str
    """Name of the served model."""
    data_digest: str = ""
    first_item: int = 0
    """The first item of the data that is used: the loads of an experiment share none."""


class PrepareOptions(RequestOptions):
    """Preparation of a workload."""

    model: str = Field(description="name of the served model")
    out: Path = Field(description="folder to write")


class SendingOptions(StrictModel):
    """Sending and objective."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    burstiness: Positive = Field(default=1.0, description="1: Poisson arrivals; less: burstier")
    slo_ttft: Limit = Field(default=1000.0, description="TTFT limit, ms; 0: none")
    slo_tpot: Limit = Field(default=0.0, description="TPOT limit, ms; 0: none")
    slo_e2e: Limit = Field(default=0.0, description="end-to-end limit, ms; 0: none")
    patience: Positive = Field(default=300.0, description="time-out of a request, seconds")
    most: Whole = Field(
        default=512, description="requests in flight per worker at which the run is given up"
    )
    workers: int = Field(default=0, ge=0, description="locust workers on this machine")
    as_json: bool = Field(default=False, alias="json", description="print the result as JSON")

    @property
    def slo(self) -> Slo:
        """The objective, in seconds."""
        limits = (self.slo_ttft, self.slo_tpot, self.slo_e2e)
        ttft, tpot, e2e = (limit / 1000 or None for limit in limits)
        return Slo(ttft=ttft, tpot=tpot, e2e=e2e)


class RunOptions(SendingOptions):
    """One run."""

    url: str = Field(description="server, such as http://127.0.0.1:8000")
    workload: Path = Field(description="folder made by python -m benchmarks.load prepare")
    out: Path = Field(default=Path("out/load/run"), description="folder of run.json, records.jsonl")
    label: str = Field(default="", description="name of this run")
    rate: Limit = Field(default=0.0, description="requests/s of an open loop; without it, --users")
    schedule_seed: int = Field(default=0, ge=0, description="seed of the arrivals")
    first: int = Field(default=0, ge=0, description="send the first N requests; 0: all")
    users: Whole | None = Field(default=None, description="users of a closed loop")

    @model_validator(mode="after")
    def _check_load(self) -> RunOptions:
        if bool(self.rate) == (self.users is not None):
            raise ValueError("give a --rate (open loop) or --users (closed loop)")
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


LOCUST_OWN = ("url", "users", "workers", "as_json")
"""Options of a run that locust has under its own names (``--host``), or that it does not know."""


class PairedOptions(RequestOptions, SendingOptions):
    """Servers and loads of a paired experiment."""

    model: str = Field(
        default=str(LLAVA),
        description=f"checkpoint to serve (default: mini-LLaVA), or {SHAPE}:LAYERS for "
        "LLaVA-1.5-7B's true widths without weights",
    )
    tower_layers: Whole = Field(
        default=TOWER_LAYERS, description="layers of a shape's vision tower"
    )
    width: int = Field(default=WIDTH, ge=64, description="width of a shape's language model")
    state: str = Field(default="autoprune", description="pruning state, a file or a name")
    budget: Whole | None = Field(default=None, description="K (default: the state's own)")
    text_tower: Path | None = Field(
        default=None, description="CLIP checkpoint of the state (default for mini-LLaVA: its own)"
    )
    server_flags: Annotated[tuple[str, ...], BeforeValidator(_split_words)] = Field(
        default=("--max-model-len", "2048", "--block-size", "32", "--enforce-eager"),
        description="flags of all servers",
    )
    kv_cache_gb: Whole = Field(default=1, description="size of a CPU server's KV cache")
    attach: Annotated[
        tuple[tuple[str, str], ...],
        SEVERAL,
        BeforeValidator(_split_pairs),
        AfterValidator(_check_servers),
    ] = Field(
        default=(), description="NAME=URL of running servers to compare; the first is the reference"
    )
    served_name: str = Field(default="served", description="name of the served model")
    users: Annotated[tuple[Whole, ...], BeforeValidator(_split_list)] = Field(
        default=(), min_length=1, description="closed loops, such as 1,2,4,8,16,32"
    )
    rates: Annotated[
        Annotated[
            tuple[Positive, ...],
            Field(min_length=1),
            AfterValidator(lambda rates: tuple(sorted(rates))),
        ]
        | Literal["find"],
        BeforeValidator(_split_list),
    ] = Field(
        default=(),
        description="open loops, requests/s, such as 1,2,4; find: choose them by the capacity",
    )
    passes: Whole = Field(default=2, description="passes over all arms (2: ABBA)")
    out: Path = Field(default=Path("out/load/paired"), description="folder of the report")


class ReportOptions(StrictModel):
    """Report of a paired experiment."""

    folder: Annotated[Path, POSITIONAL] = Field(description="folder of a paired experiment")
    as_json: bool = Field(default=False, alias="json", description="print the result as JSON")


class OptionError(BenchmarkError):
    """A wrong option, on the command line or in a file."""


class Parser(argparse.ArgumentParser):
    """A parser that answers a mistake in one line and exits with status 2."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake, and the option that was probably meant."""
        text = message.removeprefix("argument ")
        if text.startswith("unrecognized arguments: "):
            unknown = text.removeprefix("unrecognized arguments: ").split()[0].partition("=")[0]
            text = f"{unknown} is not an option; {_suggest(unknown, self._option_string_actions)}"
        print(f"load: {text}", file=sys.stderr)
        sys.exit(2)


def list_options(model: type[StrictModel], without: Collection[str] = ()) -> dict[str, FieldInfo]:
    """Fields that are options, by their keys in a file, such as ``output_tokens``."""
    return {
        field.alias or name: field
        for name, field in model.model_fields.items()
        if field.description is not None and name not in without
    }


def add_flags(
    parser: argparse.ArgumentParser, model: type[StrictModel], without: Collection[str] = ()
) -> None:
    """Add an option for each field; the parser leaves their values as text, None where absent."""
    groups: dict[type, argparse._ArgumentGroup] = {}
    for key, field in list_options(model, without).items():
        flag, text = _as_flag(key), (field.description or "").replace("%", "%%")
        default = _format_default(field.default)
        if default and "default" not in text:
            text += f" (default: {default})"
        name = "as_json" if key == "json" else key
        owner = next(base for base in model.__mro__ if name in inspect.get_annotations(base))
        if owner not in groups:
            groups[owner] = parser.add_argument_group((inspect.getdoc(owner) or "").rstrip("."))
        if POSITIONAL in field.metadata:
            groups[owner].add_argument(key, help=text)
        elif field.annotation is bool:
            groups[owner].add_argument(flag, action="store_true", default=None, help=text)
        elif SEVERAL in field.metadata:
            groups[owner].add_argument(flag, nargs="+", metavar="NAME=URL", help=text)
        else:
            choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
            metavar = f"{{{','.join(choices)}}}" if choices else None
            groups[owner].add_argument(flag, metavar=metavar, help=text)


def read_options(model: type[M], flags: Mapping[str, object]) -> M:
    """The options of a YAML file (``config``) and of the command line, which wins.

    Raises :class:`OptionError`, which names every wrong one.
    """
    known = list_options(model)
    values: dict[str, object] = {}
    places: dict[str, str] = {}
    config = flags.get("config")
    for word, value in _read_file(Path(str(config))).items() if config else ():
        key = str(word).replace("-", "_")
        if key not in known:
            near = _suggest(_as_flag(key), map(_as_flag, known))
            raise OptionError(f"{config}:{word}: is not an option; {near}")
        if value is not None:
            values[key], places[key] = value, f"{config}:{word}"
    for key in known:
        if flags.get(key) is not None:
            values[key], places[key] = flags[key], _as_flag(key)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems: dict[str, str] = {}
        for problem in error.errors():
            reason = problem["msg"].removeprefix("Value error, ")
            key = str(next(iter(problem["loc"]), ""))
            if key in known:
                value = f" {values[key]!r}:" if key in values else ""
                place = places.get(key, _as_flag(key))
                reason = f"{place}:{value} {reason}; {known[key].description}"
            problems.setdefault(key, reason)
        raise OptionError("; ".join(problems.values())) from None


def to_flags(options: StrictModel, without: Collection[str] = ()) -> list[str]:
    """The command line of options that have one value each."""
    values = {key: getattr(options, key) for key in list_options(type(options), without)}
    return [f"{_as_flag(key)}={value}" for key, value in values.items() if value is not None]


def _format_mix(mix: tuple[tuple[object, float], ...]) -> str:
    """The mix as the command line writes it."""
    return ",".join(f"{value}={weight:g}" for value, weight in mix)


def _read_file(path: Path) -> dict[object, object]:
    import yaml  # type: ignore[import-untyped]  # only a call with a file needs it

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise OptionError(f"--config {path}: {reason}; name a readable YAML file") from None
    if not isinstance(content, dict):
        raise OptionError(f"--config {path}: is not a mapping; write OPTION: VALUE lines")
    return content


def _as_flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _suggest(unknown: str, flags: Iterable[str]) -> str:
    near = difflib.get_close_matches(unknown, list(flags), n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else "see --help"


def _format_default(value: object) -> str:
    """A default as the command line writes it; empty where there is none."""
    if value is None or value is PydanticUndefined or value in ("", (), False):
        return ""
    if isinstance(value, tuple):
        return _format_mix(value) if isinstance(value[0], tuple) else " ".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
