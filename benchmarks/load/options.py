"""Command line of the locustfile, beside locust's own options (``--host``, ``--users``)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import BenchmarkError, StrictModel
from benchmarks.load.option_types import limit, positive_number, whole_number
from benchmarks.load.schedule import Load, Slo


class Options(StrictModel):
    """Settings of one run, the same on master and workers."""

    url: str
    workload: Path
    out: Path
    label: str
    load: Load
    slo: Slo
    patience: float
    most: int
    """Requests in flight per worker at which the run ends as over-saturated."""
    first: int | None
    """How many of the workload's requests are sent; None: all."""


def add_options(parser: argparse.ArgumentParser, *, need_workload: bool = False) -> None:
    """Add the options of a run to a parser."""
    group = parser.add_argument_group("load test of a vision-language model")
    group.add_argument(
        "--workload",
        default="",
        required=need_workload,
        help="folder made by python -m benchmarks.load prepare",
    )
    group.add_argument("--out", default="out/load/run", help="folder of run.json, records.jsonl")
    group.add_argument("--label", default="", help="name of this run")
    group.add_argument(
        "--rate", type=limit, default=0.0, help="requests/s of an open loop; without it, --users"
    )
    group.add_argument(
        "--burstiness", type=positive_number, default=1.0, help="1: Poisson; less: burstier"
    )
    group.add_argument(
        "--schedule-seed", type=whole_number(0), default=0, help="seed of the arrivals"
    )
    group.add_argument(
        "--first", type=whole_number(0), default=0, help="send the first N requests; 0: all"
    )
    add_slo(group)
    add_limits(group)


def add_limits(group: argparse._ArgumentGroup) -> None:
    """Add the limits at which a request, or the whole run, is given up."""
    group.add_argument(
        "--patience", type=positive_number, default=300.0, help="time-out of a request, seconds"
    )
    group.add_argument(
        "--most",
        type=whole_number(1),
        default=512,
        help="requests in flight at which the run is given up",
    )


def add_slo(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the service-level objective."""
    parser.add_argument("--slo-ttft", type=limit, default=1000.0, help="TTFT limit, ms; 0: none")
    parser.add_argument("--slo-tpot", type=limit, default=0.0, help="TPOT limit, ms; 0: none")
    parser.add_argument("--slo-e2e", type=limit, default=0.0, help="end-to-end limit, ms; 0: none")


def parse_slo(parsed: argparse.Namespace) -> Slo:
    """The objective, in seconds."""
    return Slo(
        ttft=_seconds(parsed.slo_ttft),
        tpot=_seconds(parsed.slo_tpot),
        e2e=_seconds(parsed.slo_e2e),
    )


def parse_options(parsed: argparse.Namespace) -> Options:
    """The options as data; raises :class:`BenchmarkError` naming what is missing."""
    missing = [
        f"{flag} is missing: {why}"
        for flag, value, why in (
            ("--host", parsed.host, "address of the server, such as http://127.0.0.1:8000"),
            (
                "--workload",
                parsed.workload,
                "create one: python -m benchmarks.load prepare --out DIR",
            ),
        )
        if not value
    ]
    if missing:
        raise BenchmarkError("; ".join(missing))
    return build_options(parsed, parsed.host, None if parsed.rate else parsed.num_users or 1)


def build_options(parsed: argparse.Namespace, url: str, users: int | None) -> Options:
    """The options of a run against the server at ``url``; ``users``: of a closed loop."""
    load = Load(
        rate=parsed.rate or None,
        burstiness=parsed.burstiness,
        users=users,
        seed=parsed.schedule_seed,
    )
    return Options(
        url=url,
        workload=Path(parsed.workload),
        out=Path(parsed.out),
        label=parsed.label or load.label,
        load=load,
        slo=parse_slo(parsed),
        patience=parsed.patience,
        most=parsed.most,
        first=parsed.first or None,
    )


def to_arguments(options: Options) -> Sequence[str]:
    """The command line for these options."""
    values = {
        "host": options.url,
        "workload": options.workload,
        "out": options.out,
        "label": options.label,
        "rate": options.load.rate or 0,
        "burstiness": options.load.burstiness,
        "schedule-seed": options.load.seed,
        "users": options.load.users,
        "first": options.first or 0,
        "slo-ttft": _milliseconds(options.slo.ttft),
        "slo-tpot": _milliseconds(options.slo.tpot),
        "slo-e2e": _milliseconds(options.slo.e2e),
        "patience": options.patience,
        "most": options.most,
    }
    return [part for key, v in values.items() if v is not None for part in (f"--{key}", str(v))]


def count_users(load: Load, workers: int) -> int:
    """Locust users of a run: those of a closed loop, or one for each worker.

    Raises :class:`BenchmarkError` where a worker would have none.
    """
    if load.users is None:
        return workers
    if load.users < workers:
        raise BenchmarkError(
            f"{workers} workers cannot share {load.users} users -> give each worker at least one"
        )
    return load.users


def _seconds(milliseconds: float) -> float | None:
    return milliseconds / 1000 if milliseconds else None


def _milliseconds(seconds: float | None) -> float:
    return 1000 * seconds if seconds is not None else 0.0
