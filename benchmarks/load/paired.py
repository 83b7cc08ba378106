"""Paired experiment: every arm gets the same requests on the same schedule, in ABBA order.

An arm is a way to serve the model: stock vLLM, the base policy alone, a state, or a running server.
Locust patches sockets when it is imported, so each run is sent from a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks import BenchmarkError
from benchmarks.common.client import Record
from benchmarks.common.report import command_line, log_progress
from benchmarks.common.shapes import write_shape
from benchmarks.load.report import Experiment, Point, Run
from benchmarks.load.result import RESULT, Result
from benchmarks.load.settings import (
    SHAPE,
    Load,
    PairedOptions,
    RunOptions,
    SendingOptions,
    Workload,
)
from benchmarks.load.workload import prepare
from benchmarks.server import end_group, serve
from benchmarks.yardsticks.examples import CLIP, LLAVA
from vllm_autoprune import AutopruneError, load_state
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.report import Section, Table

_LOG = "locust.log"
_STEPS = (0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 2.7, 3.6)
"""Rates of a sweep, as multiples of the first arm's capacity in a closed loop."""
_PROBE = Load(users=16)
"""The closed loop that measures the capacity if the options name no closed loop."""
_LOCUSTFILE = Path(__file__).resolve().parents[1] / "locustfile.py"


class Arm(FrozenModel):
    """One way to serve the model."""

    name: str
    url: str | None = None
    """Address of a running server; None if a server is started for every pass."""
    model: str = ""
    flags: tuple[str, ...] = ()
    digest: str | None = None
    """Digest of the state; None for stock vLLM."""

    @property
    def label(self) -> str:
        """The name, fit for a file name."""
        return self.name.replace(" ", "-")

    @classmethod
    def choose(cls, options: PairedOptions) -> tuple[Arm, ...]:
        """The servers of ``--attach``; else stock vLLM, the state's base policy, and the state.

        The arms of started servers differ only in flags of the plugin. Raises
        :class:`BenchmarkError` for a model that does not exist.
        """
        if options.attach:
            pairs = [server.partition("=") for server in options.attach]
            return tuple(cls(name=name, url=url) for name, _, url in pairs)
        model = Path(options.model)
        tower = options.text_tower
        flags = [
            "--served-model-name",
            options.served_name,
            *shlex.split(options.server_flags),
        ]
        shape, _, layers = options.model.partition(":")
        if shape == SHAPE:
            if not (layers.isascii() and layers.isdecimal()) or int(layers) < 1:
                raise BenchmarkError.of(
                    f"--model {options.model}", f"{layers!r} is not a whole number"
                )
            model = write_shape(
                "llava-1.5-7b", Path("out/load") / f"llava-{layers}", int(layers)
            )
            flags += ["--load-format", "dummy"]
        elif model == LLAVA:
            tower = tower or CLIP
        elif not model.exists() and len(model.parts) != 2:
            raise BenchmarkError.of(
                f"--model {model}",
                "no such folder",
                f"name a checkpoint, ORGANISATION/NAME on the Hub, or {SHAPE}:LAYERS",
            )
        pruning = []
        if options.budget is not None:
            pruning += ["--autoprune-budget", str(options.budget)]
        if tower is not None:
            pruning += ["--autoprune-text-tower", str(tower)]
        if options.cache == "off":
            flags += ["--no-enable-prefix-caching", "--mm-processor-cache-gb", "0"]
            pruning += ["--autoprune-feature-cache-gb", "0"]
        arms = [cls(name="stock", model=str(model), flags=tuple(flags))]
        base = load_state(options.state).base_policy.name
        states = (("base policy", base), ("AutoPrune", options.state))
        # A state that equals its own base policy makes only one arm.
        by_digest = {load_state(state).digest: (name, state) for name, state in states}
        for digest, (name, state) in by_digest.items():
            served = (*flags, "--autoprune-state", state, *pruning)
            arms.append(cls(name=name, model=str(model), flags=served, digest=digest))
        return tuple(arms)

    @contextlib.contextmanager
    def serve(self, log: Path, kv_cache_gb: int) -> Iterator[str]:
        """Serve this arm while the context is open, and yield the server's address."""
        if self.url is not None:
            yield self.url
            return
        log.parent.mkdir(parents=True, exist_ok=True)
        log_progress(f"{self.name}: start the server, whose log is {log}")
        kv = {"VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gb)}
        with serve(self.model, *self.flags, env=kv, log=log, patience=600) as server:
            yield server.url


@dataclass
class _Session:
    """Progress of an experiment: its runs so far, and the workloads and rates of the next ones."""

    options: PairedOptions
    arm_count: int
    runs: list[Run] = field(default_factory=list)
    rates: tuple[float, ...] = ()
    """Rates of the open loops; empty until they are chosen from the measured capacity."""
    folders: dict[Load, Path] = field(default_factory=dict)
    """Folder of the prepared workload of each load."""

    def __post_init__(self) -> None:
        open_loops = len(_STEPS) + 1
        if self.options.rates != "find":
            self.rates = tuple(sorted(self.options.rates))
            open_loops = len(self.rates)
        loads = len(self.options.users) + open_loops
        self._total = self.arm_count * self.options.passes * loads

    @property
    def finds_rates(self) -> bool:
        """Whether rates are chosen from the capacity and raised until an arm is saturated."""
        return self.options.rates == "find"

    def measure_arm(self, arm: Arm, number: int) -> None:
        """Send every load to a server of ``arm``; ``number`` is that of the pass."""
        options = self.options
        log = options.out / "servers" / f"{number}-{arm.label}.log"
        with arm.serve(log, options.kv_cache_gb) as url:
            send = partial(self.send, arm, number, url)
            closed = [send(Load(users=users)) for users in options.users]
            if self.finds_rates and not self.rates:
                self.rates = _choose_rates(closed or [send(_PROBE)])
            for rate in self.rates:
                load = Load(rate=rate, seed=options.seed)
                run = send(load)
                if self.finds_rates and Point(arm.name, load, (run,)).past_saturation:
                    break

    def send(self, arm: Arm, number: int, url: str, load: Load) -> Run:
        """Send one load to an arm, and record the run."""
        options = self.options
        at_most = "at most " if self.finds_rates else ""
        title = f"{arm.name}, {load.title}"
        log_progress(f"run {len(self.runs) + 1} of {at_most}{self._total}: {title}")
        if load not in self.folders:
            self.folders[load] = self.prepare(load)
        folder = f"runs/{number}-{arm.label}/{load.label}"
        # model_dump would leave out the API key and the headers.
        fields: dict[str, object] = {
            name: value
            for name, value in options
            if name in SendingOptions.model_fields
        }
        fields |= {"host": url, "workload": self.folders[load]}
        fields |= {"out": options.out / folder, "seed": load.seed}
        fields |= {"rate": load.rate or 0.0, "users": load.users}
        result, records = _run(RunOptions.model_validate(fields))
        run = Run(arm.name, number, folder, result, records)
        self.runs.append(run)
        median = result.summary.percentile("TTFT", 50)
        latency = f"TTFT p50 {1000 * median.value:.0f} ms" if median else "no answer"
        log_progress(f"  {latency}, {result.verdict}")
        return run

    def prepare(self, load: Load) -> Path:
        """The folder of a load's workload; no two loads share an image."""
        options = self.options
        workload = Workload.of(options, options.served_name)
        seed = load.users or 10_000 + round(1000 * (load.rate or 0))
        changes: dict[str, object] = {"seed": workload.seed + seed}
        if options.data is not None:
            changes = {"part": len(self.folders)}
        if options.model.startswith(f"{SHAPE}:"):
            changes["vocabulary"] = "numbered"
        folder = options.out / "workloads" / load.label
        prepare(workload.model_copy(update=changes), folder)
        return folder


def _choose_rates(closed: Sequence[Run]) -> tuple[float, ...]:
    """Rates around the capacity; this is the highest throughput of a closed loop."""
    capacity = max(run.result.summary.request_rate for run in closed)
    if not capacity:
        raise BenchmarkError.of(
            "--rates find", "no request was answered, so no rate can be chosen"
        )
    return tuple(float(f"{capacity * step:.3g}") for step in _STEPS)


def measure(options: PairedOptions, arms: Sequence[Arm]) -> tuple[str, int, str]:
    """Serve every arm in turn, send it every load, and write the page.

    Returns the answer in a sentence, the number of runs that are not valid, and why the experiment
    ended early. If it ended early, the runs before the failure are reported. Raises
    :class:`BenchmarkError` if there was no run before it.
    """
    if not (options.users or options.rates):
        raise BenchmarkError.of(
            "paired", "nothing to measure", "give --users or --rates"
        )
    session = _Session(options, len(arms))
    broken = ""
    try:
        for number in range(options.passes):
            # ABBA order (ABCCBA), so that drift affects all arms alike.
            for arm in arms[:: -1 if number % 2 else 1]:
                session.measure_arm(arm, number)
    except AutopruneError as error:
        if not session.runs:
            raise
        broken = str(error)
    except KeyboardInterrupt:
        broken = "stopped before its end"
    runs = session.runs
    if not runs:
        raise BenchmarkError.of("paired", broken or "nothing was measured")
    experiment = Experiment(runs, options, broken)
    environment = runs[0].result.environment
    experiment.write(options.out, _describe_settings(options, arms, environment))
    return experiment.answer[0], sum(not run.result.valid for run in runs), broken


def _describe_settings(
    options: PairedOptions, arms: Sequence[Arm], environment: Mapping[str, str]
) -> Section:
    """The page's section on how every arm is served, all options, and the client's environment."""
    served = [
        [
            arm.name,
            (arm.digest or "none")[:16],
            arm.url or " ".join([arm.model, *arm.flags]),
        ]
        for arm in arms
    ]
    settings = {**options.model_dump(), **environment}
    rows = [[name.replace("_", "-"), str(value)] for name, value in settings.items()]
    return Section(
        "Settings",
        code=shlex.join(command_line()),
        tables=[
            Table("", ["arm", "digest of the state", "served as"], served, "lll"),
            Table("", ["setting", "value"], rows, "ll"),
        ],
        folded=True,
    )


def _run(options: RunOptions) -> tuple[Result, list[Record]]:
    """Send the workload once; the result is valid or says why it is not.

    Raises :class:`BenchmarkError` if the run leaves no result.
    """
    variables = {**os.environ, "PYTHONPATH": str(_LOCUSTFILE.parents[1])}
    if options.api_key:  # not as a flag, which anyone who lists processes can read
        variables["VLLM_API_KEY"] = options.api_key.get_secret_value()
    values = options.model_dump(mode="json", exclude_none=True)
    switches = [name for name in ("shared", "insecure") if values.pop(name)]
    command = [
        sys.executable,
        "-m",
        "locust",
        "-f",
        str(_LOCUSTFILE),
        "--headless",
        "--only-summary",
        *(f"--{name.replace('_', '-')}={value}" for name, value in values.items()),
        *(f"--{name}" for name in switches),
        *(f"--header={header}" for header in options.header),
    ]
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / RESULT).unlink(missing_ok=True)
        with (options.out / _LOG).open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=variables,
                start_new_session=True,
                preexec_fn=_raise_priority,
            )
            try:
                status = process.wait()
            finally:
                end_group(process)
    except OSError as error:
        raise BenchmarkError.of(
            str(options.out), f"cannot be written: {error}"
        ) from error
    if not (options.out / RESULT).is_file():
        lines = (options.out / _LOG).read_text(errors="replace").strip().splitlines()
        causes = [line for line in lines if line.startswith("load: ")] or lines[-5:]
        raise BenchmarkError.of(
            str(options.out),
            f"locust ended with {status} and no result: {' | '.join(causes)}",
        )
    return Result.read(options.out)


def _raise_priority() -> None:
    """Raise the scheduling priority of this process, so that the server does not delay its clock.

    With real-time scheduling (``sched(7)``) the client gets a core as soon as a request is due. It
    sleeps most of the time, and the kernel reserves a twentieth of each second for other processes.
    Only root on Linux may do this; otherwise nothing changes.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
