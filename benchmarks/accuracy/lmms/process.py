"""lmms-eval as a process: its command line, its version, its run.

Knows nothing about what is in the files that it writes.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accuracy.errors import EvaluationError
from benchmarks.accuracy.lmms.benchmarks import PINNED
from vllm_autoprune.errors import ConfigError, Problem


@dataclass(frozen=True)
class LmmsEval:
    """An installation of lmms-eval and how it is called."""

    executable: str
    served_name: str
    at_once: int = 32
    limit: int | None = None

    def command(self, url: str, task: str, output: Path) -> list[str]:
        """One task on one server; greedy as the task says, a prompt as the task has it.

        ``prefix_aware_queue`` is off because it reorders requests by their text.
        """
        arguments = {
            "model_version": self.served_name,
            "base_url": f"{url}/v1",
            "num_concurrent": self.at_once,
            "max_retries": 3,
            "prefix_aware_queue": False,
        }
        told = ",".join(f"{name}={value}" for name, value in arguments.items())
        line = [
            *shlex.split(self.executable), "--model", "openai", "--model_args", told,
            "--tasks", task, "--batch_size", "1", "--output_path", str(output), "--log_samples",
        ]  # fmt: skip
        return line if self.limit is None else [*line, "--limit", str(self.limit)]

    def check(self) -> None:
        """Raises :class:`ConfigError` where it is not installed, or is another version."""
        where = f"--lmms-eval {self.executable}"
        mend = (
            f"pip install lmms-eval=={PINNED} into an environment of its own, and name its program"
        )
        try:
            ran = subprocess.run(
                [*shlex.split(self.executable), "version"],
                capture_output=True, text=True, timeout=300, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            what = f"cannot be run ({type(error).__name__})"
            raise ConfigError("eval", [Problem(where, what, mend)]) from None
        found = (ran.stdout.split("\n")[0].split() or ["nothing"])[-1]
        if found != PINNED:
            what = f"is version {found}; what {PINNED} writes is what is understood"
            raise ConfigError("eval", [Problem(where, what, mend)])

    def run(self, url: str, task: str, output: Path) -> None:
        """Run to its end, output into ``lmms-eval.log``; raises :class:`EvaluationError`."""
        output.mkdir(parents=True, exist_ok=True)
        log = output / "lmms-eval.log"
        # The client wants a key even where the server does not.
        environment = {"OPENAI_API_KEY": "none", **os.environ}
        with log.open("wb") as file:
            ran = subprocess.run(
                self.command(url, task, output),
                stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=environment, check=False,
            )  # fmt: skip
        if ran.returncode:
            raise EvaluationError(
                f"lmms-eval ended with {ran.returncode} on {task}: {_last(log)} (log: {log}) -> "
                "mend that and add --resume"
            )


def shown(command: Sequence[str]) -> str:
    """A command line as a shell takes it."""
    return shlex.join(command)


def _last(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
