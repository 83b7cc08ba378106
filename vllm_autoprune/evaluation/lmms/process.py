"""lmms-eval as a process: its command line, its version and its runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.lmms.benchmarks import PINNED, Benchmark
from vllm_autoprune.evaluation.records import EvaluationError

IMAGES = "images.jsonl"
"""Written into the output by our plugin of lmms-eval: the image of each question."""

LOG = "lmms-eval.log"

_PLUGIN = Path(__file__).with_name("plugin")
_MAX_SILENCE = 3
"""Failed checks of the server in a row after which lmms-eval is stopped."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"Error during evaluation: (?P<what>.*?)(?:\. Please set `--verbosity|$)")


@dataclass(frozen=True)
class LmmsEval:
    """An installation of lmms-eval and its options."""

    executable: str
    served_name: str
    max_in_flight: int = 32
    limit: int | None = None
    include: Path | None = None
    """A folder of further tasks."""
    judge_url: str | None = None
    """Address of an OpenAI-compatible judge, for the tasks that ask one."""
    check_interval: float = 20.0
    """Seconds between checks of the server while lmms-eval runs."""

    def command(self, url: str, task: str, output: Path) -> list[str]:
        """The command line for one task on one server; decoding and prompts are the task's.

        ``prefix_aware_queue`` is off because it reorders requests by their text.
        ``adaptive_max_concurrency`` limits ``num_concurrent`` even if nothing adapts; its default
        is 128.
        """
        arguments = {
            "model_version": self.served_name,
            "base_url": f"{url}/v1",
            "num_concurrent": self.max_in_flight,
            "adaptive_max_concurrency": self.max_in_flight,
            "max_retries": 3,
            "prefix_aware_queue": False,
        }
        model_args = ",".join(f"{name}={value}" for name, value in arguments.items())
        line = [
            *self._program(), "--model", "openai", "--model_args", model_args, "--tasks", task,
            "--batch_size", "1", "--output_path", str(output.absolute()), "--log_samples",
        ]  # fmt: skip
        if self.include is not None:
            line += ["--include_path", str(self.include.absolute())]
        return line if self.limit is None else [*line, "--limit", str(self.limit)]

    def check(self) -> None:
        """Raise :class:`ConfigError` if it is not installed, or is another version."""
        where = f"--lmms-eval {self.executable}"
        fix = f"pip install lmms-eval=={PINNED} into a separate environment, and name its program"
        try:
            process = subprocess.run(
                [*self._program(), "version"],
                capture_output=True, text=True, timeout=300, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            what = f"cannot be run ({type(error).__name__})"
            raise ConfigError("eval", [Problem(where, what, fix)]) from None
        version = (process.stdout.split("\n")[0].split() or ["nothing"])[-1]
        if version != PINNED:
            what = f"is version {version}; only the output files of {PINNED} are supported"
            raise ConfigError("eval", [Problem(where, what, fix)])

    def run(
        self,
        url: str,
        benchmark: Benchmark,
        pruning: Mapping[str, JsonValue],
        output: Path,
        is_alive: Callable[[], bool],
    ) -> None:
        """Run one task, with output in ``lmms-eval.log``; raises :class:`EvaluationError`.

        ``pruning``: the options that every request carries; none where the server has its own.
        ``is_alive`` checks the server, because lmms-eval would ask a dead one every question.
        """
        output.mkdir(parents=True, exist_ok=True)
        task, log = benchmark.task, output / LOG
        with log.open("wb") as file:
            process = subprocess.Popen(
                self.command(url, task, output),
                stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                # In any other folder it would take a subfolder of the task's name for the task.
                cwd=output,
                env=self._environment(benchmark, pruning, output),
            )  # fmt: skip
            try:
                ended = self._wait(process, is_alive)
            finally:
                process.kill()
                process.wait()
        if not ended:
            raise EvaluationError(
                f"{url} stopped answering during {task} -> start it again and add --resume: "
                "complete tasks are not repeated"
            )
        # lmms-eval exits with 0 even after an exception.
        if process.returncode or not any(output.rglob("*_samples_*.jsonl")):
            raise EvaluationError(
                f"lmms-eval ended with {process.returncode} and no samples of {task}: "
                f"{last_error(log)} (log: {log}) -> fix that and add --resume"
            )

    def _environment(
        self, benchmark: Benchmark, pruning: Mapping[str, JsonValue], output: Path
    ) -> dict[str, str]:
        path = [str(_PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {
            # The client needs a key even if the server does not.
            "OPENAI_API_KEY": "none",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "AUTOPRUNE_IMAGES": str(output.absolute() / IMAGES),
            "AUTOPRUNE_PRUNING": json.dumps(pruning),
        }
        judge = self.judge_url or os.environ.get("OPENAI_API_URL")
        if judge and benchmark.judge != "none":
            variables["OPENAI_API_URL"] = benchmark.judge_address(judge)
        return variables

    def _program(self) -> list[str]:
        """The program as an absolute path, because it runs in another folder."""
        name, *more = shlex.split(self.executable) or [""]
        return [os.path.abspath(path) if (path := shutil.which(name)) else name, *more]

    def _wait(self, process: subprocess.Popen[bytes], is_alive: Callable[[], bool]) -> bool:
        """Wait for the process; False if the server stopped answering before its end."""
        silence = 0
        while silence < _MAX_SILENCE:
            try:
                process.wait(self.check_interval)
            except subprocess.TimeoutExpired:
                silence = 0 if is_alive() else silence + 1
            else:
                return True
        return False


def last_error(log: Path) -> str:
    """The error that lmms-eval reports in its log, or else the last line."""
    text = _COLOUR.sub("", log.read_text(errors="replace"))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [match["what"] for line in lines if (match := _ERROR.search(line))]
    return [*errors, *lines[-1:], "its log is empty"][0][:300]
