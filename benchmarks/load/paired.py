"""The paired experiment: every arm, the same requests, the same schedule, in ABBA order.

Knows nothing about pages; what was measured lies in files, from which a report is made.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from benchmarks.load.arms import Arm, in_turn, serving
from benchmarks.load.errors import LoadError
from benchmarks.load.load import Load, Slo
from benchmarks.load.options import Options
from benchmarks.load.plain import Plain
from benchmarks.load.points import Point, Run
from benchmarks.load.prepared import prepare
from benchmarks.load.record import read
from benchmarks.load.result import RECORDS, command, read_result
from benchmarks.load.run import run
from benchmarks.load.sweep import grid, over
from benchmarks.load.workload import Workload

PAIRED = "paired.json"
_BEGUN = time.monotonic()


class Plan(Plain):
    """What is measured."""

    arms: tuple[Arm, ...]
    workload: Workload
    users: tuple[int, ...] = ()
    """Closed loops."""
    rates: tuple[float, ...] = ()
    """Open loops, requests/s, rising."""
    find_rates: bool = False
    """Choose the rates by the first arm's capacity, and climb until each arm is saturated."""
    burstiness: float = 1.0
    passes: int = 2
    slo: Slo
    workers: int = 0
    patience: float = 300.0
    most: int = 512


class Made(Plain):
    """One run that was made, in order; its folder is relative to the experiment's."""

    arm: str
    number: int
    folder: str


class Paired(Plain):
    """The experiment's index."""

    plan: Plan
    made: tuple[Made, ...]
    rates: tuple[float, ...]
    command: tuple[str, ...]
    broken: str | None = None
    """Why it ended early; what was measured before is kept."""

    def runs(self, folder: Path) -> list[Run]:
        """Everything that was measured, read from the experiment's folder."""
        return [_read(made, folder) for made in self.made]


def measure(plan: Plan, out: Path) -> Paired:
    """Serve every arm in turn and send it every load; whatever breaks, the rest is kept."""
    if not (plan.users or plan.rates or plan.find_rates):
        raise LoadError("nothing to measure -> give --users or --rates")
    made: list[Made] = []
    rates, broken = plan.rates, None
    try:
        for number, arm in in_turn(plan.arms, plan.passes):
            name = f"{number}-{arm.name.replace(' ', '-')}"
            _say(f"pass {number + 1} of {plan.passes}, {arm.name}: serve")
            with serving(arm, out / "servers" / f"{name}.log") as url:
                loads = [Load(users=users) for users in plan.users]
                done = [_one(plan, arm, number, load, url, out, made) for load in loads]
                if plan.find_rates and not rates:
                    rates = grid(_capacity(plan, arm, number, url, out, done, made))
                for rate in rates:
                    load = Load(rate=rate, burstiness=plan.burstiness, seed=plan.workload.seed)
                    found = _one(plan, arm, number, load, url, out, made)
                    if plan.find_rates and over(Point(arm.name, load, (found,))):
                        break
    except LoadError as error:
        broken = str(error)
    except KeyboardInterrupt:
        broken = "stopped before its end"
    paired = Paired(plan=plan, made=tuple(made), rates=rates, command=command(), broken=broken)
    out.mkdir(parents=True, exist_ok=True)
    (out / PAIRED).write_text(paired.model_dump_json(indent=1) + "\n")
    return paired


def read_paired(out: Path) -> Paired:
    """The experiment in a folder; raises :class:`LoadError` where there is none."""
    try:
        return Paired.model_validate_json((out / PAIRED).read_text())
    except (OSError, ValidationError) as error:
        raise LoadError(f"{out / PAIRED}: {str(error).splitlines()[0]}") from error


def _capacity(
    plan: Plan,
    arm: Arm,
    number: int,
    url: str,
    out: Path,
    done: Sequence[Run],
    made: list[Made],
) -> float:
    """Requests/s of the fullest closed loop; one of 16 users is made where there is none."""
    known = list(done) or [_one(plan, arm, number, Load(users=16), url, out, made)]
    best = max(found.result.summary.request_rate for found in known)
    if not best:
        raise LoadError(f"{arm.name}: no request was answered, so no rate can be chosen")
    return best


def _one(
    plan: Plan, arm: Arm, number: int, load: Load, url: str, out: Path, made: list[Made]
) -> Run:
    """One run. Every load has images of its own, or the second would find them in a cache."""
    seed = plan.workload.seed + (load.users or 10_000 + round(1000 * (load.rate or 0)))
    workload = plan.workload.model_copy(update={"seed": seed})
    folder = out / "workloads" / f"{load.label}"
    prepare(workload, folder)
    name = f"runs/{number}-{arm.name.replace(' ', '-')}/{load.label}"
    result = run(
        Options(
            url=url,
            workload=folder,
            out=out / name,
            label=f"{arm.name}, pass {number + 1}",
            load=load,
            slo=plan.slo,
            patience=plan.patience,
            most=plan.most,
            first=None,
        ),
        plan.workers,
    )
    made.append(Made(arm=arm.name, number=number, folder=name))
    found, median = _read(made[-1], out), result.summary.ttft
    told = f"TTFT p50 {1000 * median.at(50).value:.0f} ms" if median else "no answer"
    _say(f"  {load.spoken()}: {told}, {result.verdict.spoken()}")
    return found


def _read(made: Made, out: Path) -> Run:
    folder = out / made.folder
    records = tuple(read(folder / RECORDS))
    return Run(made.arm, made.number, read_result(folder), records, made.folder)


def _say(line: str) -> None:
    print(f"[load {time.monotonic() - _BEGUN:6.1f} s] {line}", file=sys.stderr, flush=True)
