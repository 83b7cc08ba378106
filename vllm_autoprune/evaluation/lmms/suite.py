"""The lmms-eval suite: one run of lmms-eval for every benchmark in every case.

Complete runs are not repeated, so servers can be measured one after another on one machine. A case
is a state that requests bring, or a server of its own that prunes by itself.
"""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from pydantic import JsonValue

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.journal import (
    RESIZED,
    Case,
    Contents,
    EvaluationError,
    Journal,
    Setup,
)
from vllm_autoprune.evaluation.lmms.output import IMAGES, LOG, PINNED, Benchmark, read_output
from vllm_autoprune.evaluation.run import Progress, Refusals, prompt_lengths
from vllm_autoprune.http_client import (
    FAILURES,
    RequestRefused,
    ServerClient,
    choose_model,
    reporting_failures,
)
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

_ARM = re.compile(
    r"(?:(?P<full>full)|(?:(?P<base>\w+?)(?P<plus>\+autoprune)?)@(?P<budget>\d+))=(?P<url>https?://.+)"
)
_RESIZED = "resized"
"""Name of the arm of a stock server that makes every image so small (``max_pixels``)."""
_FIX = "write full=URL, resized@64=URL, cdpruner@64=URL or cdpruner+autoprune@64=URL"


@dataclass(frozen=True)
class Server:
    """A case and the address that serves it, without ``/v1``."""

    case: Case
    url: str


def parse_servers(arms: Sequence[str]) -> list[Server]:
    """Parse ``NAME=URL``; raises :class:`ConfigError` with every argument that is wrong."""
    servers, problems = list[Server](), list[Problem]()
    for arm in arms:
        match = _ARM.fullmatch(arm)
        base, plus = (match["base"], match["plus"]) if match else (None, None)
        if match is None or (base and base not in BASE_POLICIES and (base != _RESIZED or plus)):
            problems.append(Problem(f"--arm {arm}", "is not a valid arm", _FIX))
            continue
        budget = int(match["budget"] or 0)
        name = f"{base}@{budget}"
        if not base:
            case = Case(name="full", arm="full", label="full")
        elif base == _RESIZED:
            case = Case(name=name, arm="resized", label=RESIZED, budget=budget)
        elif plus:
            label, residual = f"{base} + AutoPrune", f"{base}+autoprune@{budget}"
            case = Case(name=residual, arm="autoprune", label=label, budget=budget, base=name)
        else:
            case = Case(name=name, arm="base", label=base, budget=budget)
        servers.append(Server(case, match["url"].rstrip("/").removesuffix("/v1")))
    counts = Counter(server.case.name for server in servers)
    problems += [Problem(f"--arm {name}", "is given twice", "give it once")
                 for name, count in sorted(counts.items()) if count > 1]  # fmt: skip
    if not arms:
        fix = f"give --server-url, a server with --autoprune-requests states; or {_FIX}"
        problems.append(Problem("--arm", "is missing", fix))
    if problems:
        raise ConfigError("eval", problems)
    return servers


_PLUGIN = Path(__file__).with_name("plugin")
_MAX_SILENCE = 3
"""Failed checks of the server in a row after which lmms-eval is stopped."""

_START_AGAIN = "start it again and add --resume: complete tasks are not repeated"

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
        silence = 0
        with log.open("wb") as file:
            process = subprocess.Popen(
                self.command(url, task, output),
                stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                # In any other folder it would take a subfolder of the task's name for the task.
                cwd=output,
                env=variables,
            )  # fmt: skip
            try:
                while process.returncode is None and silence < _MAX_SILENCE:
                    try:
                        process.wait(self.check_interval)
                    except subprocess.TimeoutExpired:
                        silence = 0 if is_alive() else silence + 1
            finally:
                process.kill()
                process.wait()
        if silence == _MAX_SILENCE:
            raise EvaluationError(f"{url} stopped answering during {task} -> {_START_AGAIN}")
        # lmms-eval exits with 0 even after an exception.
        if process.returncode or not any(output.rglob("*_samples_*.jsonl")):
            raise EvaluationError(
                f"lmms-eval ended with {process.returncode} and no samples of {task}: "
                f"{last_error(log)} (log: {log}) -> fix that and add --resume"
            )

    def _program(self) -> list[str]:
        """The program as an absolute path, because it runs in another folder."""
        name, *more = shlex.split(self.executable) or [""]
        return [os.path.abspath(path) if (path := shutil.which(name)) else name, *more]


def last_error(log: Path) -> str:
    """The error that lmms-eval reports in its log, or else the last line."""
    text = _COLOUR.sub("", log.read_text(errors="replace"))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [match["what"] for line in lines if (match := _ERROR.search(line))]
    return [*errors, *lines[-1:], "its log is empty"][0][:300]


_TOLERANCE = 0.05
"""Points by which a total may differ from the mean of its samples, as both are rounded."""


class LmmsSuite:
    """Benchmarks through lmms-eval."""

    def __init__(
        self,
        servers: Sequence[Server],
        benchmarks: Sequence[Benchmark],
        lmms_eval: LmmsEval,
        folder: Path,
        *,
        backbone: str,
        mme_divisor: float,
    ) -> None:
        """``folder`` receives the files of lmms-eval."""
        self._benchmarks, self._lmms_eval, self._folder = benchmarks, lmms_eval, folder
        self._runs = [(server, benchmark) for server in servers for benchmark in benchmarks]
        self.cases = [server.case for server in servers]
        limit = "" if lmms_eval.limit is None else f", the first {lmms_eval.limit} of each"
        self.setup = Setup(
            suite="lmms",
            model=lmms_eval.served_name,
            data=", ".join(f"{each.name} ({each.task})" for each in benchmarks) + limit,
            scorer=f"lmms-eval {PINNED}",
            backbone=backbone,
            mme_divisor=mme_divisor,
        )

    def plan(self) -> Sequence[str]:
        """Every command line that will be run."""
        return [
            shlex.join(
                self._lmms_eval.command(
                    server.url, benchmark.task, self._folder_of(server, benchmark, 1)
                )
            )
            for server, benchmark in self._runs
        ]

    def measure(self, journal: Journal, progress: Progress) -> None:
        """Run what is not complete, after checking all servers."""
        contents, questions = journal.contents, dict[str, list[str]]()
        for question in contents.questions.values():
            questions.setdefault(question.benchmark, []).append(question.id)
        todo = [
            (server, benchmark)
            for server, benchmark in self._runs
            if not server.case.refused
            and not (
                benchmark.name in contents.totals.get(server.case.name, {})
                and all(contents.is_answered(server.case.name, question)
                        for question in questions.get(benchmark.name, ()))
            )
        ]  # fmt: skip
        total = sum(not server.case.refused for server, _ in self._runs)
        progress.begin(total, total - len(todo))
        if not todo:
            return
        # Before the first task, which may take hours.
        self._lmms_eval.check()
        problems = [p for url in {server.url: 0 for server, _ in todo} for p in self._problems(url)]
        if problems:
            raise ConfigError("eval", problems)
        refused = self._find_refused({s.case.name: s for s, _ in todo}.values(), journal)
        for server, benchmark in todo:
            if server.case.name not in refused:
                progress.write(f"{server.case.name}: {benchmark.task} ...")
                self._run(server, benchmark, journal)
            progress.advance()

    def _find_refused(self, servers: Iterable[Server], journal: Journal) -> Collection[str]:
        """Cases whose states a server refuses, by a small request; recorded with its reason.

        Raises :class:`ConfigError` where a server refuses every state.
        """
        asked = [server for server in servers if server.case.pruning]
        if not asked:
            return ()
        cases = [server.case for server in asked]
        refusals = Refusals(asked[0].url, cases, journal.contents)
        buffer = io.BytesIO()
        Image.new("RGB", (224, 224), "grey").save(buffer, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
        for server in asked:
            body = {
                "model": self._lmms_eval.served_name,
                "messages": [{"role": "user", "content": content}],
                "max_tokens": 1,
                "mm_processor_kwargs": {"autoprune": server.case.pruning},
            }
            # A server that fails otherwise fails in the task as well, which tells how.
            with contextlib.suppress(*FAILURES), ServerClient(server.url) as client:
                try:
                    client.chat(body)
                except RequestRefused as error:
                    refusals.refuse(server.case, str(error))
        journal.append(refusals.records(cases))
        return refusals.reasons.keys()

    def _run(self, server: Server, benchmark: Benchmark, journal: Journal) -> None:
        folders = (self._folder_of(server, benchmark, attempt) for attempt in itertools.count(1))
        folder = next(path for path in folders if not path.exists())

        def is_alive() -> bool:
            return not self._problems(server.url)

        self._lmms_eval.run(server.url, benchmark, server.case.pruning, folder, is_alive)
        output = read_output(folder, benchmark, server.case.name)
        journal.append([*output.questions, *output.answers])
        if output.total is not None:
            journal.append([output.total])
        elif not is_alive():
            raise EvaluationError(f"{server.url} stopped answering -> {_START_AGAIN}")

    def _folder_of(self, server: Server, benchmark: Benchmark, attempt: int) -> Path:
        return self._folder / server.case.name / benchmark.task / str(attempt)

    def _problems(self, url: str) -> Sequence[Problem]:
        """Whether a server does not answer, or serves another model."""
        try:
            with reporting_failures(url), ServerClient(url) as client:
                models = client.list_models()
            choose_model(url, models, self._lmms_eval.served_name)
        except ConfigError as error:
            return error.problems
        return ()

    def objections(self, contents: Contents) -> Iterator[str]:
        """Totals that differ from the mean of their samples, and servers that do not prune.

        Covers every case in the journal, as some may be from an earlier run.
        """
        for case in contents.cases.values():
            for benchmark in self._benchmarks:
                total = contents.totals.get(case.name, {}).get(benchmark.name)
                scores = [
                    answer.score
                    for question, answer in contents.answers.get(case.name, {}).items()
                    if contents.questions[question].benchmark == benchmark.name
                ]
                known = [score for score in scores if score is not None]
                if total is None or not benchmark.mean or len(known) != len(scores):
                    continue
                mean = 100 * sum(known) / len(known)
                if abs(mean - total.value) > _TOLERANCE:
                    yield (
                        f"{case.name}: lmms-eval reports {total.value:.2f} for {benchmark.name}, "
                        f"but its samples have a mean of {mean:.2f}"
                    )
            lengths = prompt_lengths(contents, case)
            if unpruned := sum(length >= full for length, full in lengths):
                yield (
                    f"{case.name}: {unpruned} of {len(lengths)} prompts are as long as with all "
                    "tokens: its server does not prune"
                )
