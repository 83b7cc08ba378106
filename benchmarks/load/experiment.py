"""Paired experiment: every arm gets the same requests on the same schedule, in ABBA order.

An arm is a way to serve the model: stock vLLM, the base policy alone, a state, or a running server.
Locust sends each run from processes of its own, because importing it patches sockets.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from benchmarks.common import BenchmarkError, StrictModel
from benchmarks.common.client import read_journal
from benchmarks.common.metrics import list_models
from benchmarks.common.report import command_line, log_progress
from benchmarks.common.shapes import write_llava
from benchmarks.load.client import raise_priority
from benchmarks.load.compare import Point, Run
from benchmarks.load.result import RECORDS, RESULT, Result, read_result
from benchmarks.load.schedule import Load, Slo
from benchmarks.load.settings import (
    LOCUST_OWN,
    SHAPE,
    PairedOptions,
    RunOptions,
    Workload,
    to_flags,
)
from benchmarks.load.workload import load_prepared, make_workload, prepare
from benchmarks.server import ServerDied, free_port, serve
from benchmarks.yardsticks.examples import CLIP, LLAVA
from vllm_autoprune import PruningState, load_state

PAIRED, LOG = "paired.json", "locust.log"
LOCUSTFILE = Path(__file__).resolve().parents[1] / "locustfile.py"
STEPS = (0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 2.7, 3.6)
"""Rates of a sweep, as multiples of the first arm's capacity in a closed loop."""


class Arm(StrictModel):
    """One way to serve the model."""

    name: str
    url: str | None = None
    """Of a running server; None: one is started for every pass."""
    model: str = ""
    flags: tuple[str, ...] = ()
    digest: str | None = None
    """Of the state; None for stock."""
    environment: tuple[tuple[str, str], ...] = ()


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

    def read(self, out: Path) -> Run:
        """The run, from the experiment's folder."""
        folder = out / self.folder
        records = tuple(read_journal(folder / RECORDS))
        return Run(self.arm, self.number, read_result(folder), records, self.folder)


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
        return [entry.read(folder) for entry in self.made]


def make_plan(options: PairedOptions) -> Plan:
    """The experiment of these options; raises :class:`BenchmarkError` for its data or its model."""
    arms = _choose_arms(options)
    find_rates = options.rates == "find"
    rates = () if options.rates == "find" else options.rates
    loads = len(options.users) + (len(STEPS) + 1 if find_rates else len(rates))
    workload = make_workload(options, options.served_name, max(loads, 1))
    if options.model.startswith(f"{SHAPE}:"):
        workload = workload.model_copy(update={"vocabulary": "numbered"})
    shared = ("users", "burstiness", "passes", "slo", "workers", "patience", "most")
    values = {name: getattr(options, name) for name in shared}
    return Plan(arms=arms, workload=workload, rates=rates, find_rates=find_rates, **values)


def _choose_arms(options: PairedOptions) -> tuple[Arm, ...]:
    """The running servers; else stock, the state's base policy alone, and the state.

    These three have the same flags otherwise.
    """
    if options.attach:
        return tuple(Arm(name=name, url=url.rstrip("/")) for name, url in options.attach)
    model, tower, common = Path(options.model), options.text_tower, options.server_flags
    if options.model.startswith(f"{SHAPE}:"):
        layers = options.model.partition(":")[2]
        if not layers.isdecimal() or int(layers) < 1:
            raise BenchmarkError(f"--model {options.model}: {layers!r} is not a whole number")
        folder = Path("out/load") / f"llava-{layers}-{options.tower_layers}-{options.width}"
        model = write_llava(
            folder, int(layers), tower_layers=options.tower_layers, width=options.width
        )
        common = (*common, "--load-format", "dummy")
    elif model == LLAVA:
        tower = tower or CLIP
    elif not model.exists() and len(model.parts) != 2:
        raise BenchmarkError(
            f"--model {model}: no such folder -> name a checkpoint, ORGANISATION/NAME on the "
            f"Hub, or {SHAPE}:LAYERS"
        )
    shared = ["--served-model-name", options.served_name, *common]
    pruning: list[str] = []
    if options.budget is not None:
        pruning += ["--autoprune-budget", str(options.budget)]
    if tower is not None:
        pruning += ["--autoprune-text-tower", str(tower)]
    if options.cache == "off":
        shared += ["--no-enable-prefix-caching", "--mm-processor-cache-gb", "0"]
        pruning += ["--autoprune-feature-cache-gb", "0"]
    state = load_state(options.state)
    base = state.base_policy.name

    def arm(name: str, flag: str = "", served: PruningState | None = None) -> Arm:
        return Arm(
            name=name,
            model=str(model),
            flags=(*shared, *(("--autoprune-state", flag, *pruning) if served else ())),
            digest=served.digest if served else None,
            environment=(("VLLM_CPU_KVCACHE_SPACE", str(options.kv_cache_gb)),),
        )

    return (
        arm("stock"),
        arm("base policy", base, load_state(base)),
        arm("AutoPrune", options.state, state),
    )


def interleave(arms: Sequence[Arm], passes: int) -> list[tuple[int, Arm]]:
    """ABBA order (ABCCBA): every second pass backwards, so that drift affects all arms alike."""
    return [
        (number, arm)
        for number in range(passes)
        for arm in (arms if number % 2 == 0 else tuple(reversed(arms)))
    ]


@contextlib.contextmanager
def serve_arm(arm: Arm, log: Path) -> Iterator[str]:
    """The address of a server of this arm, for as long as the block lasts."""
    if arm.url is not None:
        yield arm.url
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(
                serve(arm.model, *arm.flags, env=dict(arm.environment), log=log, patience=600)
            )
        except ServerDied as error:
            last = str(error).splitlines()[-1]
            raise BenchmarkError(
                f"{arm.name}: the server did not start: {last} (log: {log})"
            ) from error
        yield server.url


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
                send = partial(_run_once, plan, arm, number, url, out, entries)
                closed = [send(Load(users=users)) for users in plan.users]
                if plan.find_rates and not rates:
                    # Around the capacity: the highest throughput of a closed loop.
                    known = closed or [send(Load(users=16))]
                    rates = choose_rates(max(r.result.summary.request_rate for r in known))
                    if not rates:
                        raise BenchmarkError(
                            f"{arm.name}: no request was answered, so no rate can be chosen"
                        )
                for rate in rates:
                    load = Load(rate=rate, burstiness=plan.burstiness, seed=plan.workload.seed)
                    latest = send(load)
                    if plan.find_rates and Point(arm.name, load, (latest,)).past_saturation:
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


def choose_rates(capacity: float) -> tuple[float, ...]:
    """Rates around a capacity in requests/s, to three digits, rising; none for a capacity of 0."""
    return tuple(float(f"{capacity * step:.3g}") for step in STEPS if capacity)


def _run_once(
    plan: Plan, arm: Arm, number: int, url: str, out: Path, entries: list[RunEntry], load: Load
) -> Run:
    """One run; every load has images of its own, so that none is in a cache from an earlier run."""
    seed = plan.workload.seed + (load.users or 10_000 + round(1000 * (load.rate or 0)))
    changes = {"seed": seed}
    if plan.workload.data and plan.workload.cache == "unique":
        labels = [*dict.fromkeys(Path(entry.folder).name for entry in entries), load.label]
        items = plan.workload.requests + plan.workload.warm_up
        changes["first_item"] = labels.index(load.label) * items
    workload = out / "workloads" / load.label
    prepare(plan.workload.model_copy(update=changes), workload)
    name = f"runs/{number}-{arm.name.replace(' ', '-')}/{load.label}"
    options = RunOptions(
        url=url,
        workload=workload,
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
    result = run(options)
    entries.append(RunEntry(arm=arm.name, number=number, folder=name))
    median = result.summary.ttft
    latency = f"TTFT p50 {1000 * median.at(50).value:.0f} ms" if median else "no answer"
    log_progress(f"  {load.describe()}: {latency}, {result.verdict.describe()}")
    return entries[-1].read(out)


def run(options: RunOptions) -> Result:
    """Send the workload once; the result is valid or has the reasons why not.

    Where there are workers, a master and so many workers are started on this machine. Raises
    :class:`BenchmarkError` where there is no result at all, as where the server is down.
    """
    names, model = list_models(options.url), load_prepared(options.workload).workload.model
    if model not in names:
        raise BenchmarkError(
            f"server {options.url}: does not serve {model!r}, only {', '.join(names)} "
            "-> prepare the workload with --model"
        )
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / RESULT).unlink(missing_ok=True)
        with (options.out / LOG).open("wb") as log:
            status = _run_locust(options, log.fileno())
    except OSError as error:
        raise BenchmarkError(f"{options.out}: cannot be written: {error}") from error
    if not (options.out / RESULT).is_file():
        tail = (options.out / LOG).read_text(errors="replace").strip().splitlines()[-5:]
        raise BenchmarkError(
            f"{options.out}: locust ended with {status} and no result: {' | '.join(tail)}"
        )
    return read_result(options.out)


def _run_locust(options: RunOptions, log: int) -> int:
    common = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE)]
    head = [*common, "--headless", "--only-summary", *to_flags(options, LOCUST_OWN)]
    head += ["--host", options.url]
    head += ["--users", str(options.users)] if options.users else []
    with contextlib.ExitStack() as stack:
        if options.workers:
            port = str(free_port())
            head += ["--master", "--expect-workers", str(options.workers)]
            head += ["--master-bind-port", port]
            for _ in range(options.workers):
                join = [*common, "--worker", "--master-port", port]
                stack.enter_context(_start_process(join, log))
        return stack.enter_context(_start_process(head, log)).wait()


@contextlib.contextmanager
def _start_process(command: Sequence[str], log: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, of raised priority; it is ended with the block."""
    process = subprocess.Popen(
        command,
        stdout=log,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(LOCUSTFILE.parents[1])},
        start_new_session=True,
        preexec_fn=raise_priority,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
