"""Paired experiment: every arm gets the same requests on the same schedule, in ABBA order.

An arm is a way to serve the model: stock vLLM, the base policy alone, a state, or a running server.
Locust sends each run from processes of its own, because importing it patches sockets.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from benchmarks import BenchmarkError
from benchmarks.common.report import command_line, log_progress, show_stage
from benchmarks.common.shapes import write_shape
from benchmarks.load.compare import Point, Run
from benchmarks.load.result import RESULT, read_result
from benchmarks.load.settings import (
    SHAPE,
    Load,
    PairedOptions,
    RunOptions,
    SendingOptions,
)
from benchmarks.load.workload import make_workload, prepare
from benchmarks.server import end_group, free_port, serve
from benchmarks.yardsticks.examples import CLIP, LLAVA
from vllm_autoprune import AutopruneError, load_state
from vllm_autoprune.record_file import FrozenModel

_PAIRED, _LOG = "paired.json", "locust.log"
_STEPS = (0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 2.7, 3.6)
"""Rates of a sweep, as multiples of the first arm's capacity in a closed loop."""
_PROBE = Load(users=16)
"""The closed loop that measures the capacity, where none is asked for."""
_SILENCE = 15.0
"""Seconds between two lines on the progress of a run."""
_LOCUSTFILE = Path(__file__).resolve().parents[1] / "locustfile.py"


class Arm(FrozenModel):
    """One way to serve the model."""

    name: str
    url: str | None = None
    """Of a running server; None: one is started for every pass."""
    model: str = ""
    flags: tuple[str, ...] = ()
    digest: str | None = None
    """Of the state; None for stock."""
    kv_cache_gb: int = 1


class Paired(FrozenModel):
    """The experiment's index."""

    options: PairedOptions
    arms: tuple[Arm, ...]
    runs: tuple[tuple[str, int, str], ...]
    """Arm, pass and folder of each, in order of time."""
    command: tuple[str, ...]
    broken: str | None = None
    """Why it ended early; runs before that are kept."""


def write_paired(out: Path, paired: Paired) -> None:
    """Write the index of an experiment to its folder."""
    out.mkdir(parents=True, exist_ok=True)
    (out / _PAIRED).write_text(paired.model_dump_json(indent=1) + "\n")


def read_paired(out: Path) -> tuple[Paired, list[Run]]:
    """The experiment in a folder; raises :class:`BenchmarkError` where there is none."""
    try:
        paired = Paired.model_validate_json((out / _PAIRED).read_bytes())
    except (OSError, ValidationError) as error:
        raise BenchmarkError(f"{out / _PAIRED}: {str(error).splitlines()[0]}") from error
    return paired, [Run(*entry, *read_result(out / entry[-1])) for entry in paired.runs]


def choose_arms(options: PairedOptions) -> tuple[Arm, ...]:
    """The running servers; else stock, the state's base policy alone, and the state.

    These three have the same flags otherwise. Raises :class:`BenchmarkError` for a model that does
    not exist.
    """
    if options.attach:
        pairs = [server.partition("=") for server in options.attach]
        return tuple(Arm(name=name, url=url) for name, _, url in pairs)
    model, tower = Path(options.model), options.text_tower
    flags = ["--served-model-name", options.served_name, *shlex.split(options.server_flags)]
    shape, _, layers = options.model.partition(":")
    if shape == SHAPE:
        if not layers.isdecimal() or int(layers) < 1:
            raise BenchmarkError(f"--model {options.model}: {layers!r} is not a whole number")
        folder = Path("out/load") / f"llava-{layers}-{options.tower_layers}-{options.width}"
        sizes = {"tower_layers": options.tower_layers, "width": options.width}
        model = write_shape("llava-1.5-7b", folder, int(layers), **sizes)
        flags += ["--load-format", "dummy"]
    elif model == LLAVA:
        tower = tower or CLIP
    elif not model.exists() and len(model.parts) != 2:
        raise BenchmarkError(
            f"--model {model}: no such folder -> name a checkpoint, ORGANISATION/NAME on the "
            f"Hub, or {SHAPE}:LAYERS"
        )
    pruning = [] if options.budget is None else ["--autoprune-budget", str(options.budget)]
    if tower is not None:
        pruning += ["--autoprune-text-tower", str(tower)]
    if options.cache == "off":
        flags += ["--no-enable-prefix-caching", "--mm-processor-cache-gb", "0"]
        pruning += ["--autoprune-feature-cache-gb", "0"]
    base = load_state(options.state).base_policy.name
    arms = []
    for name, state in (("stock", None), ("base policy", base), ("AutoPrune", options.state)):
        served = flags if state is None else [*flags, "--autoprune-state", state, *pruning]
        arms.append(
            Arm(
                name=name,
                model=str(model),
                flags=tuple(served),
                digest=None if state is None else load_state(state).digest,
                kv_cache_gb=options.kv_cache_gb,
            )
        )
    return tuple(arms)


def measure(options: PairedOptions, arms: Sequence[Arm]) -> Paired:
    """Serve every arm in turn and send it every load; runs before a failure are kept."""
    if not (options.users or options.rates):
        raise BenchmarkError("nothing to measure -> give --users or --rates")
    out, finds = options.out, options.rates == "find"
    rates = () if options.rates == "find" else tuple(sorted(options.rates))
    loads = len(options.users) + (len(_STEPS) + 1 if finds else len(rates))
    workload = make_workload(options, options.served_name, loads)
    if options.model.startswith(f"{SHAPE}:"):
        workload = workload.model_copy(update={"vocabulary": "numbered"})
    total, at_most = options.passes * len(arms) * loads, "at most " if finds else ""
    folders: dict[Load, Path] = {}
    entries, broken = list[tuple[str, int, str]](), None

    def send(load: Load, arm: Arm, number: int, url: str) -> Run:
        """Send one load to an arm, each load with images of its own."""
        log_progress(f"run {len(entries) + 1} of {at_most}{total}: {arm.name}, {load.describe()}")
        if load not in folders:
            log_progress(f"  draw {workload.requests + workload.warm_up} requests")
            changes = {
                "seed": workload.seed + (load.users or 10_000 + round(1000 * (load.rate or 0)))
            }
            if workload.data and workload.cache == "unique":
                changes["first_item"] = len(folders) * (workload.requests + workload.warm_up)
            folders[load] = out / "workloads" / load.label
            prepare(workload.model_copy(update=changes), folders[load])
        folder = f"runs/{number}-{arm.name.replace(' ', '-')}/{load.label}"
        _run(
            RunOptions(
                **{name: v for name, v in options if name in SendingOptions.model_fields},
                host=url,
                workload=folders[load],
                out=out / folder,
                rate=load.rate or 0.0,
                users=load.users,
                seed=load.seed,
            ),
            options.workers,
        )
        entries.append((arm.name, number, folder))
        run = Run(*entries[-1], *read_result(out / folder))
        median = run.result.summary.percentile("TTFT", 50)
        latency = f"TTFT p50 {1000 * median.value:.0f} ms" if median else "no answer"
        log_progress(f"  {latency}, {run.result.verdict}")
        return run

    try:
        # ABBA order (ABCCBA), so that drift affects all arms alike.
        order = [(n, arm) for n in range(options.passes) for arm in arms[:: -1 if n % 2 else 1]]
        for number, arm in order:
            log = out / "servers" / f"{number}-{arm.name.replace(' ', '-')}.log"
            with _serve(arm, log) as url:
                served = (arm, number, url)
                closed = [send(Load(users=users), *served) for users in options.users]
                if finds and not rates:
                    # Around the capacity: the highest throughput of a closed loop.
                    closed = closed or [send(_PROBE, *served)]
                    capacity = max(r.result.summary.request_rate for r in closed)
                    if not capacity:
                        raise BenchmarkError("no request was answered, so no rate can be chosen")
                    rates = tuple(float(f"{capacity * step:.3g}") for step in _STEPS)
                for rate in rates:
                    load = Load(rate=rate, burstiness=options.burstiness, seed=options.seed)
                    latest = send(load, *served)
                    # Each arm is measured until it is saturated.
                    if finds and Point(arm.name, load, (latest,)).past_saturation:
                        break
    except AutopruneError as error:
        broken = str(error)
    except KeyboardInterrupt:
        broken = "stopped before its end"
    paired = Paired(
        options=options,
        arms=tuple(arms),
        runs=tuple(entries),
        command=command_line(),
        broken=broken,
    )
    write_paired(out, paired)
    return paired


@contextlib.contextmanager
def _serve(arm: Arm, log: Path) -> Iterator[str]:
    """The address of a server of this arm, for as long as the block lasts."""
    if arm.url is not None:
        yield arm.url
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    kv = {"VLLM_CPU_KVCACHE_SPACE": str(arm.kv_cache_gb)}
    with contextlib.ExitStack() as stack:
        with show_stage(f"{arm.name}: start the server, whose log is {log}"):
            serving = serve(arm.model, *arm.flags, env=kv, log=log, patience=600)
            server = stack.enter_context(serving)
        yield server.url


def _run(options: RunOptions, workers: int = 0) -> None:
    """Send the workload once; the result is in the folder, valid or with the reasons why not.

    Where there are workers, locust starts so many, and a master, on this machine. Raises
    :class:`BenchmarkError` where there is no result at all.
    """
    # The key is nobody's who lists processes.
    key = options.api_key and {"VLLM_API_KEY": options.api_key.get_secret_value()}
    values = options.model_dump(mode="json", exclude_none=True)
    switches = [name for name in ("shared", "insecure") if values.pop(name)]
    command = [
        *(sys.executable, "-m", "locust", "-f", str(_LOCUSTFILE), "--headless", "--only-summary"),
        *(f"--{name.replace('_', '-')}={value}" for name, value in values.items()),
        *(f"--{name}" for name in switches),
        *(f"--header={header}" for header in options.header),
    ]
    if workers:
        port = str(free_port())
        command += ["--processes", str(workers), "--master-bind-port", port, "--master-port", port]
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / RESULT).unlink(missing_ok=True)
        with (options.out / _LOG).open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(key or {}), "PYTHONPATH": str(_LOCUSTFILE.parents[1])},
                start_new_session=True,
                preexec_fn=_raise_priority,
            )
            try:
                while process.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(_SILENCE)
                        break
                    text = (options.out / _LOG).read_text(errors="replace")
                    answered = re.findall("^answered (.*)$", text, re.MULTILINE)
                    log_progress(f"  answered: {answered[-1] if answered else 'none yet'}")
                status = process.returncode
            finally:
                end_group(process)
    except OSError as error:
        raise BenchmarkError(f"{options.out}: cannot be written: {error}") from error
    if not (options.out / RESULT).is_file():
        lines = (options.out / _LOG).read_text(errors="replace").strip().splitlines()
        causes = [line for line in lines if line.startswith("load: ")] or lines[-5:]
        raise BenchmarkError(
            f"{options.out}: locust ended with {status} and no result: {' | '.join(causes)}"
        )


def _raise_priority() -> None:
    """Raise the scheduling priority of this process, so that the server does not delay its clock.

    With real-time scheduling (``sched(7)``) the client gets a core as soon as it is due; it sleeps
    most of the time, and the kernel reserves a twentieth of each second for other processes. Only
    root on Linux may; else nothing changes.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
