"""lmms-eval as a process: its command line, its version, its run.

Knows nothing about what is in the files that it writes.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accuracy.errors import EvaluationError
from benchmarks.accuracy.lmms.benchmarks import PINNED
from vllm_autoprune.errors import ConfigError, Problem

IMAGES = "images.jsonl"
"""What our plugin of lmms-eval writes into the output: which image each question was about."""

_PLUGIN = Path(__file__).with_name("plugin")
_PATIENCE = 3
"""How often in a row a server may not answer, before lmms-eval is not left to go on."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"Error during evaluation: (?P<what>.*?)(?:\. Please set `--verbosity|$)")


@dataclass(frozen=True)
class LmmsEval:
    """An installation of lmms-eval and how it is called."""

    executable: str
    served_name: str
    at_once: int = 32
    limit: int | None = None
    include: Path | None = None
    """A folder of further tasks."""
    look: float = 20.0
    """Seconds from one look at the server to the next, while lmms-eval runs."""

    def command(self, url: str, task: str, output: Path) -> list[str]:
        """One task on one server; greedy as the task says, a prompt as the task has it.

        ``prefix_aware_queue`` is off because it reorders requests by their text;
        ``adaptive_max_concurrency`` bounds the other even where nothing adapts, at 128 if not told.
        """
        arguments = {
            "model_version": self.served_name,
            "base_url": f"{url}/v1",
            "num_concurrent": self.at_once,
            "adaptive_max_concurrency": self.at_once,
            "max_retries": 3,
            "prefix_aware_queue": False,
        }
        told = ",".join(f"{name}={value}" for name, value in arguments.items())
        line = [
            *self._program(), "--model", "openai", "--model_args", told, "--tasks", task,
            "--batch_size", "1", "--output_path", str(output.absolute()), "--log_samples",
        ]  # fmt: skip
        if self.include is not None:
            line += ["--include_path", str(self.include.absolute())]
        return line if self.limit is None else [*line, "--limit", str(self.limit)]

    def check(self) -> None:
        """Raises :class:`ConfigError` where it is not installed, or is another version."""
        where = f"--lmms-eval {self.executable}"
        fix = (
            f"pip install lmms-eval=={PINNED} into an environment of its own, and name its program"
        )
        try:
            ran = subprocess.run(
                [*self._program(), "version"],
                capture_output=True, text=True, timeout=300, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            what = f"cannot be run ({type(error).__name__})"
            raise ConfigError("eval", [Problem(where, what, fix)]) from None
        found = (ran.stdout.split("\n")[0].split() or ["nothing"])[-1]
        if found != PINNED:
            what = f"is version {found}; what {PINNED} writes is what is understood"
            raise ConfigError("eval", [Problem(where, what, fix)])

    def run(self, url: str, task: str, output: Path, answers: Callable[[], bool]) -> None:
        """Run to its end, output into ``lmms-eval.log``; raises :class:`EvaluationError`.

        ``answers`` tells whether the server still does: lmms-eval would go on asking a dead one to
        the last question.
        """
        output.mkdir(parents=True, exist_ok=True)
        log = output / "lmms-eval.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                self.command(url, task, output),
                stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                # It takes a task for a folder of tasks where one of that name lies there.
                cwd=output,
                env=_environment(output),
            )  # fmt: skip
            try:
                told = self._await(process, answers)
            finally:
                process.kill()
                process.wait()
        if not told:
            raise EvaluationError(
                f"{url} does not answer any more, in the middle of {task} -> start it again and "
                "add --resume: what is complete is not run again"
            )
        # An exception within lmms-eval ends it with 0 as well.
        if process.returncode or not any(output.rglob("*_samples_*.jsonl")):
            raise EvaluationError(
                f"lmms-eval ended with {process.returncode} and no samples of {task}: "
                f"{said(log)} (log: {log}) -> fix that and add --resume"
            )

    def _program(self) -> list[str]:
        """With a path that holds from any folder."""
        name, *more = shlex.split(self.executable) or [""]
        return [os.path.abspath(found) if (found := shutil.which(name)) else name, *more]

    def _await(self, process: subprocess.Popen[bytes], answers: Callable[[], bool]) -> bool:
        """Whether it came to its end, which it does not where the server has gone."""
        silent = 0
        while silent < _PATIENCE:
            try:
                process.wait(self.look)
            except subprocess.TimeoutExpired:
                silent = 0 if answers() else silent + 1
            else:
                return True
        return False


def shown(command: Sequence[str]) -> str:
    """A command line as a shell takes it."""
    return shlex.join(command)


def said(log: Path) -> str:
    """Why lmms-eval says that it ended; else its last line."""
    text = _COLOUR.sub("", log.read_text(errors="replace"))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [match["what"] for line in lines if (match := _ERROR.search(line))]
    return [*errors, *lines[-1:], "it said nothing"][0][:300]


def _environment(output: Path) -> dict[str, str]:
    path = [str(_PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        # The client wants a key even where the server does not.
        "OPENAI_API_KEY": "none",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "AUTOPRUNE_IMAGES": str(output.absolute() / IMAGES),
    }
