"""Measure everything on a rented GPU in half an hour, with the standard library only.

Each step is a shell command in a process group of its own, with a deadline. After every step its
result is written, and the report of all steps so far. Another run goes on with the steps that have
no result, then repeats those that did not pass. docs/gpu.md says what to send back.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_MARK = "AUTOPRUNE_GPU_DAY"
"""Environment variable of all processes of a run, by which they are found: a server has a process
group of its own, so that ending a step's group does not end it."""
_GRACE = 30.0
"""Seconds that a step has to end its servers after its deadline."""
_SHORTEST = 20.0
"""Seconds below which no further step is started."""
_LARGEST = 1 << 20
"""Bytes of the largest file that is sent back."""
_CPU_PATIENCE = 5
"""How many times its deadline a step has where it is only tried: engines start in minutes there."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Step:
    """A step: what it shows, its deadline in seconds, and its command.

    ``tiny`` is the command that tries the step on a CPU. Both are run by bash in the repository,
    with ``$PYTHON`` (the environment's interpreter), ``$BASE`` (the interpreter of this process),
    ``$VLLM`` (the version to install) and ``$OUT`` (the step's own folder).
    """

    name: str
    what: str
    seconds: float
    command: str
    tiny: str


STEPS = (
    Step(
        "machine",
        "card, driver, processor cores, disk and memory",
        20,
        "nvidia-smi; nproc; df -h .; grep MemTotal /proc/meminfo",
        "nproc; df -h .; grep MemTotal /proc/meminfo",
    ),
    Step(
        "install",
        "vLLM and this project in an environment of its own",
        420,
        '"$BASE" -m venv --clear "$ENV"; "$PYTHON" -m pip install -q uv; '
        '"$PYTHON" -m uv pip install -q --python "$PYTHON" "vllm==$VLLM" -e ".[dev,bench,search]"; '
        '"$PYTHON" -m uv pip list --python "$PYTHON" | grep -E "^(vllm|torch|triton) "',
        '"$BASE" scripts/setup_env.py "$ENV"',
    ),
    Step(
        "doctor",
        "whether this installation can serve",
        90,
        '"$PYTHON" -m vllm_autoprune doctor',
        '"$PYTHON" -m vllm_autoprune doctor',
    ),
    Step(
        "selftest",
        "every base policy on the GPU, then two tiny backbones, served",
        430,
        '"$PYTHON" -m vllm_autoprune selftest --gpu',
        '"$PYTHON" -m vllm_autoprune selftest llava_next qwen3_vl --runner v1',
    ),
    Step(
        "tests",
        "tests that need a GPU: kernels, stop-watch, a server with CUDA graphs",
        240,
        '"$PYTHON" -m pytest -q -m gpu -rs tests/ops tests/selftest tests/serving',
        '"$PYTHON" -m pytest -q -m gpu -rs tests/ops tests/selftest tests/serving/unit',
    ),
    Step(
        "kernels",
        "selections by kernels and by loops, beside their modelled times",
        120,
        '"$PYTHON" -m benchmarks.cost kernels --out "$OUT"',
        '"$PYTHON" -m benchmarks.cost kernels --out "$OUT" --sizes 5x16:10,64:8 --rounds 5',
    ),
    Step(
        "efficiency",
        "the published efficiency table on LLaVA-NeXT-7B's shape, at 1, 8 and 32 users",
        480,
        '"$PYTHON" -m benchmarks.cost efficiency --out "$OUT" --model llava-next-7b --layers 32 '
        "--budget 320 --policies fastv,cdpruner,cen_divprune --users 1,8,32",
        '"$PYTHON" -m benchmarks.cost efficiency --out "$OUT" --policies cen_divprune '
        "--users 1,2 --requests 2",
    ),
    Step(
        "offline",
        "LLM() in Python: prompts and answers, stock and pruned",
        150,
        '"$PYTHON" -m benchmarks.cost offline --out "$OUT" --model llava-next-7b --layers 32 '
        "--budget 320",
        '"$PYTHON" -m benchmarks.cost offline --out "$OUT"',
    ),
    Step(
        "photo",
        "a photo of twelve megapixels, 16,384 tokens at most, 0.3 of the memory",
        180,
        '"$PYTHON" -m benchmarks.cost photo --out "$OUT"',
        '"$PYTHON" -m benchmarks.cost photo --out "$OUT" --model tiny --size 448x336 '
        "--max-model-len 1024",
    ),
    Step(
        "curve",
        "load curves of `vllm bench serve` with one and four API servers",
        600,
        '"$PYTHON" -m benchmarks.cost curve --out "$OUT" --model llava-next-7b --layers 32 '
        "--budget 320 --users 1,8,32,128,2,4,16,64",
        '"$PYTHON" -m benchmarks.cost curve --out "$OUT" --users 1,2 --requests 4 '
        "--api-servers 1,2",
    ),
)
"""Steps in the order in which a failure tells most; the last one fills the time that remains."""


@dataclass(frozen=True)
class Result:
    """How a step ended: ``passed``, ``failed`` or ``late`` (at its deadline)."""

    status: str
    seconds: float
    command: str
    ended: str

    @property
    def passed(self) -> bool:
        """Whether the step need not be repeated."""
        return self.status == "passed"


@dataclass(frozen=True)
class Day:
    """Steps, the folder of their results, and the environment of their commands."""

    steps: Mapping[str, str]
    """Command of each step."""
    deadlines: Mapping[str, float]
    out: Path
    environment: Mapping[str, str]

    def read(self) -> dict[str, Result]:
        """Results so far; that of a step whose command has changed does not count."""
        results = {}
        for name, command in self.steps.items():
            file = self.out / name / "result.json"
            if file.is_file():
                result = Result(**json.loads(file.read_text()))
                if result.command == command:
                    results[name] = result
        return results

    def plan(self) -> list[str]:
        """Names of the steps to run: those without a result, then those that did not pass."""
        results = self.read()
        untried = [name for name in self.steps if name not in results]
        return untried + [n for n, result in results.items() if not result.passed]

    def run(self, seconds: float) -> bool:
        """Run what is left to run within so many seconds; returns whether all steps passed."""
        end = time.monotonic() + seconds
        self._end_processes()  # of a run that was killed
        for name in self.plan():
            remaining = end - time.monotonic()
            if remaining < _SHORTEST:
                _say(f"{name}: not started, {remaining:.0f} s remain; run this again")
                continue
            deadline = min(self.deadlines[name], remaining)
            _say(f"{name}: at most {deadline:.0f} s")
            result = self._run_step(name, deadline)
            _write(self.out / name / "result.json", json.dumps(asdict(result)))
            self.write_report()
            print((self.out / name / "output.txt").read_text(errors="replace"))
            _say(f"{name}: {result.status} after {result.seconds:.0f} s")
        self.write_report()
        results = self.read()
        return all(name in results and results[name].passed for name in self.steps)

    def _run_step(self, name: str, deadline: float) -> Result:
        """Run one step until it ends, or is ended at its deadline with all that it started."""
        folder = self.out / name
        folder.mkdir(parents=True, exist_ok=True)
        command = self.steps[name]
        environment = {**os.environ, **self.environment, "OUT": str(folder)}
        begin = time.monotonic()
        with (
            (folder / "output.txt").open("wb") as output,
            (folder / "log.txt").open("wb") as log,
        ):
            process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", command],
                cwd=ROOT,
                env={**environment, _MARK: str(self.out)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
            try:
                code = process.wait(deadline)
                status = "failed" if code else "passed"
            except subprocess.TimeoutExpired:
                status = "late"
            finally:
                self._end_processes(process)
        ended = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        return Result(status, time.monotonic() - begin, command, ended)

    def _end_processes(self, step: subprocess.Popen[bytes] | None = None) -> None:
        """End what a step has started: politely, and after some seconds by force."""
        for sent, patience in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, 5.0)):
            begin = time.monotonic()
            running = list(self._find_processes())
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, sent)
            while running and time.monotonic() < begin + patience:
                time.sleep(0.2)
                if step is not None:
                    step.poll()  # reaps it
                running = list(self._find_processes())

    def _find_processes(self) -> Iterator[int]:
        """Process ids of all steps that write to this folder."""
        mark = f"{_MARK}={self.out}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            # A process may end meanwhile, or belong to another user.
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name)

    def write_report(self) -> None:
        """Write the report of all steps so far, and pack everything that it is made of."""
        results = self.read()
        lines = ["# A day on a GPU", "", f"Commit {_read_version()}."]
        lines += ["", "| step | result | seconds |", "|---|---|--:|"]
        for name in self.steps:
            result = results.get(name)
            row = f"{result.status} | {result.seconds:.0f}" if result else "not run |"
            lines.append(f"| {name} | {row} |")
        for name, result in results.items():
            text = (self.out / name / "output.txt").read_text(errors="replace")
            lines += ["", f"## {name}", "", f"`{result.command}`", "", text.strip()]
            if not result.passed:
                log = (self.out / name / "log.txt").read_text(errors="replace")
                lines += ["", "```", *log.splitlines()[-40:], "```"]
        _write(self.out / "report.md", "\n".join(lines) + "\n")
        archive = self.out / "results.tar.gz"
        partial_archive = archive.with_suffix(".part")
        with tarfile.open(partial_archive, "w:gz") as file:
            file.add(self.out / "report.md", "gpu-day/report.md")
            for name in results:
                file.add(self.out / name, f"gpu-day/{name}", filter=_leave_out_large)
        partial_archive.replace(archive)


def _end_with_parent() -> None:
    """Let the kernel end a step when this process is killed, as when a connection breaks."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _leave_out_large(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave weights and pictures out of the archive: they are random."""
    return None if member.size > _LARGEST else member


def _read_version() -> str:
    """The commit of this checkout; a bare machine may have neither git nor a history."""
    if shutil.which("git") is None:
        return "unknown"
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def _say(line: str) -> None:
    print(f"gpu_day: {line}", flush=True)


def _write(file: Path, text: str) -> None:
    """Write a file as a whole or not at all, whenever this process is killed."""
    unfinished = file.with_suffix(".part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Hold the folder of results; ends this process if another one does."""
    with (out / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"gpu_day: another run writes to {out}; wait") from None
        yield


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("out/gpu-day"), help="folder of the results")
    add(
        "--minutes", type=float, default=30, help="time of this run, all steps together"
    )
    add("--vllm", default="0.32.0", help="version of vLLM to install")
    add("--python", help="interpreter that has all packages: nothing is installed")
    add("--tiny", action="store_true", help="try the steps on a CPU, with tiny models")
    add("--again", nargs="+", default=(), metavar="STEP", help="forget these results")
    return parser.parse_args(arguments)


def main() -> int:
    """Run the steps; returns 0 if all of them passed, else 1."""
    options = parse_arguments()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    steps = [step for step in STEPS if not (options.python and step.name == "install")]
    environment = {
        "BASE": sys.executable,
        "ENV": str(out / "env"),
        "PYTHON": options.python or str(out / "env/bin/python"),
        "VLLM": options.vllm,
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # its lines are no results
    }
    patience = _CPU_PATIENCE if options.tiny else 1
    with _alone(out):
        for name in options.again:
            (out / name / "result.json").unlink(missing_ok=True)
        day = Day(
            {step.name: step.tiny if options.tiny else step.command for step in steps},
            {step.name: step.seconds * patience for step in steps},
            out,
            environment,
        )
        passed = day.run(60 * options.minutes)
    _say(f"send back {out / 'results.tar.gz'}; report: {out / 'report.md'}")
    return 0 if passed else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        _say("stopped; run this again to go on")
        sys.exit(130)
