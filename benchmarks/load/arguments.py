"""The command line's options, and the data that each set of them stands for.

Knows nothing about what is done with it.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from benchmarks.load import options
from benchmarks.load.arms import Arm, attached, three
from benchmarks.load.crosscheck import CrossCheck
from benchmarks.load.load import Load
from benchmarks.load.mix import parsed, spoken
from benchmarks.load.options import Options
from benchmarks.load.paired import Plan
from benchmarks.load.workload import CACHES, Workload
from benchmarks.minillava.split import CLIP, LLAVA
from benchmarks.overhead.shape import TOWER_LAYERS, WIDTH, write_llava

DEFAULT = Workload(model="")
SERVED_NAME = "served"
SHAPE = "shape"
SMALL_SERVER = "--max-model-len 2048 --block-size 32 --enforce-eager --dtype bfloat16"


def add_prepare(parser: argparse.ArgumentParser) -> None:
    """Options of ``prepare``."""
    parser.add_argument("--model", required=True, help="name that requests ask for")
    parser.add_argument("--out", required=True, help="folder to write")
    _add_workload(parser, requests=DEFAULT.requests)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Options of ``run``."""
    parser.add_argument("--url", required=True, help="server, such as http://127.0.0.1:8000")
    parser.add_argument("--workload", required=True, help="folder made by prepare")
    parser.add_argument("--rate", type=float, help="requests/s of an open loop")
    parser.add_argument("--users", type=int, help="users of a closed loop")
    parser.add_argument("--burstiness", type=float, default=1.0, help="1: Poisson; less: burstier")
    parser.add_argument("--first", type=int, help="only so many of the requests")
    parser.add_argument("--out", default="out/load/run", help="folder of run.json, records.jsonl")
    _add_sending(parser)


def add_paired(parser: argparse.ArgumentParser) -> None:
    """Options of ``paired``."""
    parser.add_argument(
        "--model",
        default=str(LLAVA),
        help=f"what is served: a checkpoint (mini-LLaVA is the default), or {SHAPE}:LAYERS for "
        "LLaVA-1.5-7B's true widths without weights",
    )
    parser.add_argument(
        "--tower-layers", type=int, default=TOWER_LAYERS, help="of a shape's vision tower"
    )
    parser.add_argument("--width", type=int, default=WIDTH, help="of a shape's language model")
    parser.add_argument("--state", default="autoprune", help="a file or a name")
    parser.add_argument("--budget", type=int, help="K, instead of the state's own")
    parser.add_argument(
        "--text-tower", help="CLIP of the state; default: mini-LLaVA's own, for mini-LLaVA"
    )
    parser.add_argument("--server-flags", default=SMALL_SERVER, help="of all servers")
    parser.add_argument("--kv-cache-gb", type=int, default=1, help="KV cache of a CPU server")
    parser.add_argument(
        "--attach",
        nargs="+",
        default=[],
        metavar="NAME=URL",
        help="compare servers that run already; the first is the reference",
    )
    parser.add_argument("--served-name", default=SERVED_NAME, help="model that requests ask for")
    parser.add_argument("--users", default="", help="closed loops, such as 1,2,4,8,16,32")
    parser.add_argument("--rates", default="", help="open loops, requests/s: 1,2,4; or find")
    parser.add_argument("--burstiness", type=float, default=1.0, help="1: Poisson; less: burstier")
    parser.add_argument("--passes", type=int, default=2, help="2: ABBA")
    parser.add_argument("--out", default="out/load/paired", help="folder of the report")
    _add_workload(parser, requests=DEFAULT.requests)
    _add_sending(parser)


def add_report(parser: argparse.ArgumentParser) -> None:
    """Options of ``report``."""
    parser.add_argument("folder", help="of a paired experiment")


def add_check(parser: argparse.ArgumentParser) -> None:
    """Options of ``check``."""
    parser.add_argument("--url", help="server; default: mini-LLaVA, served for the check")
    parser.add_argument("--mock", action="store_true", help="against the mock server instead")
    parser.add_argument("--model", default="", help="name that requests ask for, with --url")
    parser.add_argument("--requests", type=int, default=100, help="a round")
    parser.add_argument("--users", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4, help="alternating, ABBA")
    parser.add_argument("--tolerance", type=float, default=0.1, help="share, declared beforehand")
    parser.add_argument("--out", default="out/load/check")


def workload(chosen: argparse.Namespace) -> Workload:
    """What is asked."""
    return Workload(
        model=chosen.model,
        requests=chosen.requests,
        warm_up=chosen.warm_up,
        output_tokens=chosen.output_tokens,
        cache=chosen.cache,
        pool=chosen.pool,
        zipf=chosen.zipf,
        sides=parsed(chosen.sides, int),
        aspects=parsed(chosen.aspects, str),
        images=parsed(chosen.images, int),
        formats=parsed(chosen.formats, str),
        words=parsed(chosen.words, int),
        vocabulary=chosen.vocabulary,
        dialect=chosen.dialect,
        seed=chosen.seed,
    )


def one(chosen: argparse.Namespace) -> Options:
    """One run."""
    load = Load(rate=chosen.rate, users=chosen.users, burstiness=chosen.burstiness)
    return Options(
        url=chosen.url,
        workload=Path(chosen.workload),
        out=Path(chosen.out),
        label=load.label,
        load=load,
        slo=options.slo(chosen),
        patience=chosen.patience,
        most=chosen.most,
        first=chosen.first,
    )


def plan(chosen: argparse.Namespace) -> Plan:
    """A paired experiment."""
    arms, vocabulary = _arms(chosen), chosen.vocabulary
    if chosen.model.startswith(f"{SHAPE}:"):
        vocabulary = "numbered"
    asked = workload(chosen).model_copy(
        update={"model": chosen.served_name, "vocabulary": vocabulary}
    )
    rates = "" if chosen.rates == "find" else chosen.rates
    return Plan(
        arms=arms,
        workload=asked,
        users=tuple(int(part) for part in chosen.users.split(",") if part),
        rates=tuple(sorted(float(part) for part in rates.split(",") if part)),
        find_rates=chosen.rates == "find",
        burstiness=chosen.burstiness,
        passes=chosen.passes,
        slo=options.slo(chosen),
        workers=chosen.workers,
        patience=chosen.patience,
        most=chosen.most,
    )


def cross(chosen: argparse.Namespace) -> CrossCheck:
    """A cross-check."""
    return CrossCheck(
        url=chosen.url,
        mock=chosen.mock,
        model=chosen.model,
        requests=chosen.requests,
        users=chosen.users,
        rounds=chosen.rounds,
        tolerance=chosen.tolerance,
        out=Path(chosen.out),
    )


def _arms(chosen: argparse.Namespace) -> tuple[Arm, ...]:
    if chosen.attach:
        return attached(chosen.attach)
    model, tower = Path(chosen.model), chosen.text_tower
    common = shlex.split(chosen.server_flags)
    if chosen.model.startswith(f"{SHAPE}:"):
        layers, tower_layers, width = (
            int(chosen.model.partition(":")[2]),
            chosen.tower_layers,
            chosen.width,
        )
        folder = Path("out/load") / f"llava-{layers}-{tower_layers}-{width}"
        model = write_llava(folder, layers, tower_layers=tower_layers, width=width)
        common += ["--load-format", "dummy"]
    elif model == LLAVA:
        tower = tower or CLIP
    return three(
        model,
        chosen.state,
        budget=chosen.budget,
        text_tower=Path(tower) if tower else None,
        served_name=chosen.served_name,
        common=common,
        cache=chosen.cache,
        environment=(("VLLM_CPU_KVCACHE_SPACE", str(chosen.kv_cache_gb)),),
    )


def _add_workload(parser: argparse.ArgumentParser, requests: int) -> None:
    add = parser.add_argument_group("workload").add_argument
    add("--requests", type=int, default=requests, help="measured requests of a run")
    add("--warm-up", type=int, default=DEFAULT.warm_up, help="requests before the clock starts")
    add("--output-tokens", type=int, default=DEFAULT.output_tokens, help="of every answer")
    add("--cache", choices=tuple(CACHES), default=DEFAULT.cache, help="state of the caches")
    add("--pool", type=int, default=DEFAULT.pool, help="images (requests) that come again")
    add("--zipf", type=float, default=DEFAULT.zipf, help="exponent of how often")
    for name, mix in (
        ("sides", spoken(DEFAULT.sides)),
        ("aspects", spoken(DEFAULT.aspects)),
        ("images", spoken(DEFAULT.images)),
        ("formats", spoken(DEFAULT.formats)),
        ("words", spoken(DEFAULT.words)),
    ):
        add(f"--{name}", default=mix, help=f"VALUE=WEIGHT,...; default {mix}")
    add("--vocabulary", choices=("english", "numbered"), default=DEFAULT.vocabulary)
    add("--dialect", choices=("vllm", "openai"), default=DEFAULT.dialect)
    add("--seed", type=int, default=DEFAULT.seed, help="of requests and schedule")


def _add_sending(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sending")
    group.add_argument("--workers", type=int, default=0, help="locust workers on this machine")
    group.add_argument("--patience", type=float, default=300.0, help="seconds until a time-out")
    group.add_argument("--most", type=int, default=512, help="requests under way before giving up")
    options.add_slo(group)
