"""What the locustfile is told on the command line, beside locust's own options.

Knows nothing about runners. `--host` is the server and `--users` the closed loop's users, as
everywhere in locust.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.load.errors import LoadError
from benchmarks.load.load import Load, Slo
from benchmarks.load.plain import Plain


class Options(Plain):
    """All that a run needs to know, the same on master and workers."""

    url: str
    workload: Path
    out: Path
    label: str
    load: Load
    slo: Slo
    patience: float
    most: int
    """Requests under way at once, a worker, above which the run ends as over-saturated."""
    first: int | None
    """Only so many of the workload's requests."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add our options to a parser."""
    group = parser.add_argument_group("load test of a vision-language model")
    group.add_argument(
        "--workload", default="", help="folder made by python -m benchmarks.load prepare"
    )
    group.add_argument("--out", default="out/load/run", help="folder of run.json, records.jsonl")
    group.add_argument("--label", default="", help="what this run is called")
    group.add_argument(
        "--rate", type=float, default=0.0, help="requests/s of an open loop; without it, --users"
    )
    group.add_argument("--burstiness", type=float, default=1.0, help="1: Poisson; less: burstier")
    group.add_argument("--schedule-seed", type=int, default=0, help="seed of the arrivals")
    group.add_argument("--first", type=int, default=0, help="only so many requests; 0: all")
    add_slo(group)
    group.add_argument("--patience", type=float, default=300.0, help="seconds until a time-out")
    group.add_argument("--most", type=int, default=512, help="requests under way before giving up")


def add_slo(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """The promises, in milliseconds; 0 promises nothing."""
    parser.add_argument("--slo-ttft", type=float, default=1000.0, help="ms, 0: none")
    parser.add_argument("--slo-tpot", type=float, default=0.0, help="ms, 0: none")
    parser.add_argument("--slo-e2e", type=float, default=0.0, help="ms, 0: none")


def slo(parsed: argparse.Namespace) -> Slo:
    """The promises in seconds."""
    return Slo(
        ttft=_seconds(parsed.slo_ttft),
        tpot=_seconds(parsed.slo_tpot),
        e2e=_seconds(parsed.slo_e2e),
    )


def options(parsed: argparse.Namespace) -> Options:
    """The options as data; raises :class:`LoadError` naming what is missing."""
    missing = [
        f"{flag} is missing: {why}"
        for flag, value, why in (
            ("--host", parsed.host, "address of the server, such as http://127.0.0.1:8000"),
            (
                "--workload",
                parsed.workload,
                "make one: python -m benchmarks.load prepare --out DIR",
            ),
        )
        if not value
    ]
    if missing:
        raise LoadError("; ".join(missing))
    rate = parsed.rate or None
    load = Load(
        rate=rate,
        burstiness=parsed.burstiness,
        users=None if rate else parsed.num_users or 1,
        seed=parsed.schedule_seed,
    )
    return Options(
        url=parsed.host,
        workload=Path(parsed.workload),
        out=Path(parsed.out),
        label=parsed.label or load.label,
        load=load,
        slo=slo(parsed),
        patience=parsed.patience,
        most=parsed.most,
        first=parsed.first or None,
    )


def arguments(chosen: Options) -> Sequence[str]:
    """The command line that says the same."""
    told = {
        "host": chosen.url,
        "workload": chosen.workload,
        "out": chosen.out,
        "label": chosen.label,
        "rate": chosen.load.rate or 0,
        "burstiness": chosen.load.burstiness,
        "schedule-seed": chosen.load.seed,
        "users": chosen.load.users,
        "first": chosen.first or 0,
        "slo-ttft": _milliseconds(chosen.slo.ttft),
        "slo-tpot": _milliseconds(chosen.slo.tpot),
        "slo-e2e": _milliseconds(chosen.slo.e2e),
        "patience": chosen.patience,
        "most": chosen.most,
    }
    return [part for key, v in told.items() if v is not None for part in (f"--{key}", str(v))]


def users(load: Load, workers: int) -> int:
    """How many locust users a run has: those of a closed loop, or one a worker.

    Raises :class:`LoadError` where a worker would have none.
    """
    if load.users is None:
        return workers
    if load.users < workers:
        raise LoadError(
            f"{workers} workers cannot share {load.users} users -> give each worker at least one"
        )
    return load.users


def _seconds(milliseconds: float) -> float | None:
    return milliseconds / 1000 if milliseconds else None


def _milliseconds(seconds: float | None) -> float:
    return 1000 * seconds if seconds is not None else 0.0
