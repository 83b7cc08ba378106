"""Options of each command of ``python -m benchmarks.load``, and the settings made from them."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.common import BenchmarkError
from benchmarks.common.shapes import TOWER_LAYERS, WIDTH, write_llava
from benchmarks.load import options
from benchmarks.load.arms import Arm, build_arms, parse_attached
from benchmarks.load.option_types import (
    aspect_mix,
    format_mix_type,
    positive_number,
    rates_list,
    shell_words,
    users_list,
    whole_number,
    whole_number_mix,
)
from benchmarks.load.own_data import open_data
from benchmarks.load.paired import Plan
from benchmarks.load.requests import require_items
from benchmarks.load.sweep import STEPS
from benchmarks.load.workload import CACHES, Workload, format_mix
from benchmarks.minillava.split import CLIP, LLAVA

DEFAULT = Workload(model="")
SERVED_NAME = "served"
SHAPE = "shape"
WORKERS_HELP = "locust workers on this machine"
SMALL_SERVER = "--max-model-len 2048 --block-size 32 --enforce-eager"


def add_prepare(parser: argparse.ArgumentParser) -> None:
    """Options of ``prepare``."""
    parser.add_argument("--model", required=True, help="name of the served model")
    parser.add_argument("--out", required=True, help="folder to write")
    _add_workload(parser, requests=DEFAULT.requests)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Options of ``run``."""
    parser.add_argument("--url", required=True, help="server, such as http://127.0.0.1:8000")
    parser.add_argument("--users", type=whole_number(1), help="users of a closed loop")
    parser.add_argument("--workers", type=whole_number(0), default=0, help=WORKERS_HELP)
    options.add_options(parser, need_workload=True)
    add_json(parser)


def add_paired(parser: argparse.ArgumentParser) -> None:
    """Options of ``paired``."""
    parser.add_argument(
        "--model",
        default=str(LLAVA),
        help=f"checkpoint to serve (default: mini-LLaVA), or {SHAPE}:LAYERS for LLaVA-1.5-7B's "
        "true widths without weights",
    )
    parser.add_argument(
        "--tower-layers",
        type=whole_number(1),
        default=TOWER_LAYERS,
        help="layers of a shape's vision tower",
    )
    parser.add_argument(
        "--width", type=whole_number(64), default=WIDTH, help="width of a shape's language model"
    )
    parser.add_argument("--state", default="autoprune", help="pruning state, a file or a name")
    parser.add_argument("--budget", type=whole_number(1), help="K (default: the state's own)")
    parser.add_argument(
        "--text-tower", help="CLIP checkpoint of the state (default for mini-LLaVA: its own)"
    )
    parser.add_argument(
        "--server-flags",
        type=shell_words,
        default=shell_words(SMALL_SERVER),
        help=f"flags of all servers (default: {SMALL_SERVER})",
    )
    parser.add_argument(
        "--kv-cache-gb", type=whole_number(1), default=1, help="size of a CPU server's KV cache"
    )
    parser.add_argument(
        "--attach",
        nargs="+",
        default=[],
        metavar="NAME=URL",
        help="compare running servers instead; the first is the reference",
    )
    parser.add_argument("--served-name", default=SERVED_NAME, help="name of the served model")
    parser.add_argument(
        "--users", type=users_list, default=(), help="closed loops, such as 1,2,4,8,16,32"
    )
    parser.add_argument(
        "--rates",
        type=rates_list,
        default=(),
        help="open loops, requests/s, such as 1,2,4; find: choose them by the capacity",
    )
    parser.add_argument(
        "--burstiness", type=positive_number, default=1.0, help="1: Poisson; less: burstier"
    )
    parser.add_argument(
        "--passes", type=whole_number(1), default=2, help="passes over all arms (2: ABBA)"
    )
    parser.add_argument("--out", default="out/load/paired", help="folder of the report")
    _add_workload(parser, requests=DEFAULT.requests)
    _add_sending(parser)
    add_json(parser)


def add_report(parser: argparse.ArgumentParser) -> None:
    """Options of ``report``."""
    parser.add_argument("folder", help="folder of a paired experiment")
    add_json(parser)


def parse_workload(given: argparse.Namespace) -> Workload:
    """The workload; raises :class:`BenchmarkError` where its own data cannot be read."""
    computed = ("data_digest", "first_item")
    fields = {name: vars(given)[name] for name in Workload.model_fields if name not in computed}
    if given.data:
        fields["data"] = str(Path(given.data).resolve())
        fields["data_digest"] = open_data(Path(fields["data"])).digest
    workload = Workload.model_validate(fields)
    require_items(workload)
    return workload


def parse_plan(given: argparse.Namespace) -> Plan:
    """A paired experiment."""
    arms, vocabulary = _arms(given), given.vocabulary
    if given.model.startswith(f"{SHAPE}:"):
        vocabulary = "numbered"
    workload = parse_workload(given).model_copy(
        update={"model": given.served_name, "vocabulary": vocabulary}
    )
    rates = len(STEPS) + 1 if given.rates is None else len(given.rates)
    require_items(workload, len(given.users) + rates)
    return Plan(
        arms=arms,
        workload=workload,
        users=given.users,
        rates=given.rates or (),
        find_rates=given.rates is None,
        burstiness=given.burstiness,
        passes=given.passes,
        slo=options.parse_slo(given),
        workers=given.workers,
        patience=given.patience,
        most=given.most,
    )


def _arms(given: argparse.Namespace) -> tuple[Arm, ...]:
    if given.attach:
        return parse_attached(given.attach)
    model, tower = Path(given.model), given.text_tower
    common = list(given.server_flags)
    if given.model.startswith(f"{SHAPE}:"):
        layers, tower_layers, width = (
            _shape_layers(given.model),
            given.tower_layers,
            given.width,
        )
        folder = Path("out/load") / f"llava-{layers}-{tower_layers}-{width}"
        model = write_llava(folder, layers, tower_layers=tower_layers, width=width)
        common += ["--load-format", "dummy"]
    elif model == LLAVA:
        tower = tower or CLIP
    elif not model.exists() and len(model.parts) != 2:
        raise BenchmarkError(
            f"--model {given.model}: no such folder -> name a checkpoint, ORGANISATION/NAME on the "
            f"Hub, or {SHAPE}:LAYERS"
        )
    return build_arms(
        model,
        given.state,
        budget=given.budget,
        text_tower=Path(tower) if tower else None,
        served_name=given.served_name,
        common=common,
        cache=given.cache,
        environment=(("VLLM_CPU_KVCACHE_SPACE", str(given.kv_cache_gb)),),
    )


def _shape_layers(model: str) -> int:
    try:
        return whole_number(1)(model.partition(":")[2])
    except argparse.ArgumentTypeError as error:
        raise BenchmarkError(f"--model {model}: {error}") from None


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _add_workload(parser: argparse.ArgumentParser, requests: int) -> None:
    add = parser.add_argument_group("workload").add_argument
    add("--requests", type=whole_number(1), default=requests, help="measured requests of a run")
    add(
        "--warm-up",
        type=whole_number(0),
        default=DEFAULT.warm_up,
        help="requests before the clock starts",
    )
    add(
        "--output-tokens",
        type=whole_number(1),
        default=DEFAULT.output_tokens,
        help="length of every answer",
    )
    add(
        "--cache", choices=tuple(CACHES), default=DEFAULT.cache, help="state of the server's caches"
    )
    add(
        "--pool",
        type=whole_number(1),
        default=DEFAULT.pool,
        help="different images (requests), where they are repeated",
    )
    add(
        "--zipf",
        type=positive_number,
        default=DEFAULT.zipf,
        help="exponent of Zipf's law of repetitions",
    )
    for name, mix, convert in (
        ("sides", DEFAULT.sides, whole_number_mix),
        ("aspects", DEFAULT.aspects, aspect_mix),
        ("images", DEFAULT.images, whole_number_mix),
        ("formats", DEFAULT.formats, format_mix_type),
        ("words", DEFAULT.words, whole_number_mix),
    ):
        text = format_mix(mix)
        add(f"--{name}", type=convert, default=mix, help=f"VALUE=WEIGHT,...; default {text}")
    add("--vocabulary", choices=("english", "numbered"), default=DEFAULT.vocabulary)
    add("--dialect", choices=("vllm", "openai"), default=DEFAULT.dialect)
    add(
        "--data",
        default="",
        help="images and questions of your own: a folder, a JSONL file, or a data set saved by "
        "datasets.save_to_disk (default: drawn ones)",
    )
    add("--seed", type=whole_number(0), default=DEFAULT.seed, help="seed of requests and schedule")


def _add_sending(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sending")
    group.add_argument("--workers", type=whole_number(0), default=0, help=WORKERS_HELP)
    options.add_limits(group)
    options.add_slo(group)
