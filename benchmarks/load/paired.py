"""The paired experiment: every arm gets the same requests on the same schedule, in ABBA order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from benchmarks.common import BenchmarkError, StrictModel
from benchmarks.common.progress import log_progress
from benchmarks.common.report import command_line
from benchmarks.common.request_record import read_journal
from benchmarks.load.arms import Arm, choose_arms, interleave, serve_arm
from benchmarks.load.points import Point, Run
from benchmarks.load.result import RECORDS, read_result
from benchmarks.load.run import run
from benchmarks.load.schedule import Load, Slo
from benchmarks.load.settings import SHAPE, PairedOptions, RunOptions, Workload
from benchmarks.load.sweep import STEPS, choose_rates, is_past_saturation
from benchmarks.load.workload import make_workload, prepare

PAIRED = "paired.json"


class Plan(StrictModel):
    """Settings of the experiment."""

    arms: tuple[Arm, ...]
    workload: Workload
    users: tuple[int, ...] = ()
    """Closed loops."""
    rates: tuple[float, ...] = ()
    """Open loops, requests/s, rising."""
    find_rates: bool = False
    """Choose the rates by the first arm's capacity; each arm is measured until it is saturated."""
    burstiness: float = 1.0
    passes: int = 2
    slo: Slo
    workers: int = 0
    patience: float = 300.0
    most: int = 512


class RunEntry(StrictModel):
    """One run, in order of time; its folder is relative to the experiment's."""

    arm: str
    number: int
    folder: str


class Paired(StrictModel):
    """The experiment's index."""

    plan: Plan
    made: tuple[RunEntry, ...]
    rates: tuple[float, ...]
    command: tuple[str, ...]
    broken: str | None = None
    """Why it ended early; runs before that are kept."""

    def runs(self, folder: Path) -> list[Run]:
        """All runs, read from the experiment's folder."""
        return [_read_run(entry, folder) for entry in self.made]


def make_plan(options: PairedOptions) -> Plan:
    """The experiment of these options; raises :class:`BenchmarkError` for its data or its model."""
    arms = choose_arms(options)
    rates = () if options.rates == "find" else options.rates
    find_rates = options.rates == "find"
    loads = len(options.users) + (len(STEPS) + 1 if find_rates else len(rates))
    workload = make_workload(options, options.served_name, max(loads, 1))
    if options.model.startswith(f"{SHAPE}:"):
        workload = workload.model_copy(update={"vocabulary": "numbered"})
    return Plan(
        arms=arms,
        workload=workload,
        users=options.users,
        rates=rates,
        find_rates=find_rates,
        burstiness=options.burstiness,
        passes=options.passes,
        slo=options.slo,
        workers=options.workers,
        patience=options.patience,
        most=options.most,
    )


def measure(plan: Plan, out: Path) -> Paired:
    """Serve every arm in turn and send it every load; runs before a failure are kept."""
    if not (plan.users or plan.rates or plan.find_rates):
        raise BenchmarkError("nothing to measure -> give --users or --rates")
    entries: list[RunEntry] = []
    rates, broken = plan.rates, None
    try:
        for number, arm in interleave(plan.arms, plan.passes):
            name = f"{number}-{arm.name.replace(' ', '-')}"
            log_progress(f"pass {number + 1} of {plan.passes}, {arm.name}: serve")
            with serve_arm(arm, out / "servers" / f"{name}.log") as url:
                loads = [Load(users=users) for users in plan.users]
                done = [_run_once(plan, arm, number, load, url, out, entries) for load in loads]
                if plan.find_rates and not rates:
                    rates = choose_rates(
                        _measure_capacity(plan, arm, number, url, out, done, entries)
                    )
                for rate in rates:
                    load = Load(rate=rate, burstiness=plan.burstiness, seed=plan.workload.seed)
                    last = _run_once(plan, arm, number, load, url, out, entries)
                    if plan.find_rates and is_past_saturation(Point(arm.name, load, (last,))):
                        break
    except BenchmarkError as error:
        broken = str(error)
    except KeyboardInterrupt:
        broken = "stopped before its end"
    paired = Paired(
        plan=plan, made=tuple(entries), rates=rates, command=command_line(), broken=broken
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / PAIRED).write_text(paired.model_dump_json(indent=1) + "\n")
    return paired


def read_paired(out: Path) -> Paired:
    """The experiment in a folder; raises :class:`BenchmarkError` where there is none."""
    try:
        return Paired.model_validate_json((out / PAIRED).read_text())
    except (OSError, ValidationError) as error:
        raise BenchmarkError(f"{out / PAIRED}: {str(error).splitlines()[0]}") from error


def _measure_capacity(
    plan: Plan,
    arm: Arm,
    number: int,
    url: str,
    out: Path,
    done: Sequence[Run],
    entries: list[RunEntry],
) -> float:
    """Requests/s of the closed loop with the highest throughput (of 16 users, if there is none)."""
    known = list(done) or [_run_once(plan, arm, number, Load(users=16), url, out, entries)]
    best = max(one.result.summary.request_rate for one in known)
    if not best:
        raise BenchmarkError(f"{arm.name}: no request was answered, so no rate can be chosen")
    return best


def _run_once(
    plan: Plan, arm: Arm, number: int, load: Load, url: str, out: Path, entries: list[RunEntry]
) -> Run:
    """One run; every load has images of its own, so that none is in a cache from an earlier run."""
    seed = plan.workload.seed + (load.users or 10_000 + round(1000 * (load.rate or 0)))
    changes: dict[str, int] = {"seed": seed}
    if plan.workload.data and plan.workload.cache == "unique":
        labels = [*dict.fromkeys(Path(entry.folder).name for entry in entries), load.label]
        items = plan.workload.requests + plan.workload.warm_up
        changes["first_item"] = labels.index(load.label) * items
    workload = plan.workload.model_copy(update=changes)
    folder = out / "workloads" / f"{load.label}"
    prepare(workload, folder)
    name = f"runs/{number}-{arm.name.replace(' ', '-')}/{load.label}"
    result = run(
        RunOptions(
            url=url,
            workload=folder,
            out=out / name,
            label=f"{arm.name}, pass {number + 1}",
            rate=load.rate or 0.0,
            users=load.users,
            burstiness=load.burstiness,
            schedule_seed=load.seed,
            slo_ttft=1000 * (plan.slo.ttft or 0.0),
            slo_tpot=1000 * (plan.slo.tpot or 0.0),
            slo_e2e=1000 * (plan.slo.e2e or 0.0),
            patience=plan.patience,
            most=plan.most,
            workers=plan.workers,
        )
    )
    entries.append(RunEntry(arm=arm.name, number=number, folder=name))
    latest, median = _read_run(entries[-1], out), result.summary.ttft
    latency = f"TTFT p50 {1000 * median.at(50).value:.0f} ms" if median else "no answer"
    log_progress(f"  {load.describe()}: {latency}, {result.verdict.describe()}")
    return latest


def _read_run(entry: RunEntry, out: Path) -> Run:
    folder = out / entry.folder
    records = tuple(read_journal(folder / RECORDS))
    return Run(entry.arm, entry.number, read_result(folder), records, entry.folder)
