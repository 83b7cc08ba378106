"""Benchmarks through lmms-eval, another program: one run of it for every task in every case.

Complete runs are not repeated. lmms-eval scores the error message of a failed request like an
answer; here such a request counts as failed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from vllm_autoprune.connection import api_address, server_address
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.journal import (
    Case,
    EvaluationError,
    Journal,
    Setup,
)
from vllm_autoprune.evaluation.lmms_benchmarks import PINNED, Benchmark
from vllm_autoprune.evaluation.lmms_output import IMAGES, LOG, read_output
from vllm_autoprune.evaluation.run import Server
from vllm_autoprune.http_client import ServerClient

_PLUGIN = Path(__file__).with_name("lmms_plugin")


@dataclass
class LmmsSuite:
    """Benchmarks that lmms-eval runs on one server, once for each case."""

    server: Server
    cases: Sequence[Case]
    benchmarks: Sequence[Benchmark]
    program: str
    folder: Path
    """Folder for the output files of lmms-eval."""
    mme_divisor: float
    limit: int | None = None
    include: Path | None = None
    """Folder with further tasks."""
    judge_url: str | None = None
    """Address of an OpenAI-compatible judge, for the tasks that ask one."""

    def __post_init__(self) -> None:
        limit = "" if self.limit is None else f", the first {self.limit} of each"
        self.setup = Setup(
            suite="lmms",
            model=self.server.model or "",
            data=", ".join(f"{row.name} ({row.task})" for row in self.benchmarks)
            + limit,
            scorer=f"lmms-eval {PINNED}",
            mme_divisor=self.mme_divisor,
        )

    def plan(self) -> str:
        """The number of runs of lmms-eval."""
        cases = len(self.cases)
        tasks = len(self.benchmarks)
        return f"{cases} cases x {tasks} tasks: {cases * tasks:,} runs of lmms-eval"

    def measure(self, journal: Journal) -> None:
        """Run the tasks whose totals ``journal`` lacks, after checking lmms-eval and the server."""
        runs = [
            (case, benchmark)
            for case, benchmark in itertools.product(self.cases, self.benchmarks)
            if not case.refused
            and benchmark.name not in journal.contents.totals.get(case.name, {})
        ]
        if not runs:
            return
        name, *more = shlex.split(self.program) or [""]
        program = [
            os.path.abspath(path) if (path := shutil.which(name)) else name,
            *more,
        ]
        # The version is checked before the first task, because a task may take hours.
        version = ""
        with contextlib.suppress(OSError):
            process = subprocess.run(
                [*program, "version"], capture_output=True, text=True, check=False
            )
            version = (process.stdout.split("\n")[0].split() or ["nothing"])[-1]
        if version != PINNED:
            what = "cannot be run"
            if version:
                what = f"is version {version}; only the output files of {PINNED} are supported"
            fix = f"pip install lmms-eval=={PINNED} into an environment of its own, and name it"
            raise ConfigError.of(
                f"--lmms-eval {self.program}", what, fix, subject="eval"
            )
        _, names = self.server.check(self.cases, journal)
        runs = [run for run in runs if run[0].name in names]
        progress = tqdm(runs, unit="task")
        for case, benchmark in progress:
            progress.set_description(f"{case.name}: {benchmark.task}")
            # Without this check, lmms-eval would send every question to a server that has died.
            client = ServerClient(self.server.url, self.server.connection)
            with client, client.reporting_failures():
                client.list_models()
            # Absolute, because it is lmms-eval's working directory.
            folder = self.folder.absolute() / case.name / benchmark.task
            shutil.rmtree(folder, ignore_errors=True)  # files of an incomplete run
            folder.mkdir(parents=True)
            self._run(program, case, benchmark, folder)
            journal.append(read_output(folder, benchmark, case.name))

    def _run(
        self, program: Sequence[str], case: Case, benchmark: Benchmark, folder: Path
    ) -> None:
        """Run one task with the task's own decoding and prompts, and write its files to ``folder``.

        Raises :class:`EvaluationError`.
        """
        url, connection, model, max_in_flight = self.server
        arguments = {
            "model_version": model,
            "base_url": f"{server_address(url)}/v1",
            "num_concurrent": max_in_flight,
            # This limits num_concurrent even without adaptive concurrency; its default is 128.
            "adaptive_max_concurrency": max_in_flight,
            "max_retries": 3,
            "prefix_aware_queue": False,  # it reorders requests by their text
        }
        model_args = ",".join(f"{name}={value}" for name, value in arguments.items())
        command = [
            *program,
            "--model",
            "openai",
            "--model_args",
            model_args,
            "--tasks",
            benchmark.task,
            "--batch_size",
            "1",
            "--output_path",
            str(folder),
            "--log_samples",
        ]
        command += (
            ["--include_path", str(self.include.absolute())] if self.include else []
        )
        command += ["--limit", str(self.limit)] if self.limit is not None else []
        run = {
            "pruning": case.pruning,
            # Title case, because older releases of OpenAI's client merge headers by exact name: a
            # lower-case "authorization" would not replace their own "Authorization".
            "headers": {name.title(): v for name, v in connection.headers(url).items()},
            "insecure": connection.insecure,
            "images": str(folder / IMAGES),
        }
        path = [str(_PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {
            # OpenAI's client refuses to start without a key. This one is for the judge; a key of
            # the server under test is in `headers`.
            "OPENAI_API_KEY": "none",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "AUTOPRUNE_RUN": json.dumps(run),
        }
        if connection.ca_file:
            variables["SSL_CERT_FILE"] = str(connection.ca_file.absolute())
        judge_url = self.judge_url or os.environ.get("OPENAI_API_URL")
        if judge_url and benchmark.judge_path is not None:
            variables["OPENAI_API_URL"] = api_address(judge_url) + benchmark.judge_path
        with (folder / LOG).open("wb") as log:
            process = subprocess.run(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                check=False,
                # lmms-eval reads a task from a folder of its name in the working directory, if
                # there is one. This working directory has no folders yet.
                cwd=folder,
                env=variables,
            )
        # lmms-eval exits with 0 even after an exception.
        has_samples = any(folder.rglob("*_samples_*.jsonl"))
        if process.returncode or not has_samples:
            what = f"ended with {process.returncode}"
            if not has_samples:
                what += f" and no samples of {benchmark.task}"
            fix = f"see {folder / LOG}, fix the cause and add --resume"
            raise EvaluationError.of("lmms-eval", what, fix)
