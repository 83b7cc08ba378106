"""Benchmarks through lmms-eval: its tasks, one run of it for every task in every case, its output.

Complete runs are not repeated. lmms-eval scores the error message of a failed request like an
answer; here it is a failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from vllm_autoprune.connection import Connection, api_address, server_address
from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.journal import (
    MME,
    Answer,
    Case,
    EvaluationError,
    Journal,
    Question,
    Setup,
    Total,
)
from vllm_autoprune.evaluation.questions import parse_json, read_objects, refuse
from vllm_autoprune.evaluation.run import Progress, Suite, check_server

PINNED = "0.7.3"
"""The version of lmms-eval whose tasks, metrics and output files are supported."""

_PLUGIN = Path(__file__).with_name("lmms_plugin")
_IMAGES = "images.jsonl"
"""Written into the output by our plugin of lmms-eval: the image of each question."""
_LOG = "lmms-eval.log"


@dataclass(frozen=True)
class _Benchmark:
    """One column: the sum of a task's metrics times ``scale``; by default its first metric."""

    name: str
    task: str
    metrics: tuple[str, ...] = ()
    scale: float = 100.0
    judge: Literal["none", "base", "path"] = "none"
    """What its task takes OPENAI_API_URL for: the base of an OpenAI-compatible API (the judges of
    lmms_eval/llm_judge give it to OpenAI's client), or the address that it posts to
    (tasks/mmbench/mmbench_evals.py, tasks/hallusion_bench/utils.py)."""

    def judge_address(self, url: str) -> str:
        """The value of OPENAI_API_URL for a judge whose address was given in either form."""
        base = api_address(url)
        return base if self.judge == "base" else f"{base}/chat/completions"


_EXACT = ("exact_match",)

# The test splits of VQAv2 and VizWiz are scored by submission only; TextVQA has no OCR tokens in
# its prompt; OCRBench always divides by 1,000.
BENCHMARKS: tuple[_Benchmark, ...] = (
    _Benchmark("VQAv2", "vqav2_val", _EXACT),
    _Benchmark("GQA", "gqa", _EXACT),
    _Benchmark("VizWiz", "vizwiz_vqa_val", _EXACT),
    _Benchmark("SQA-IMG", "scienceqa_img", _EXACT),
    _Benchmark("TextVQA", "textvqa_val", _EXACT),
    _Benchmark("POPE", "pope", ("pope_f1_score",)),
    _Benchmark(MME, "mme", ("mme_perception_score", "mme_cognition_score"), 1.0),
    _Benchmark("MMB-EN", "mmbench_en_dev", ("gpt_eval_score",), 1.0, judge="path"),
    _Benchmark("MMB-CN", "mmbench_cn_dev", ("gpt_eval_score",), 1.0, judge="path"),
    _Benchmark("MM-Vet", "mmvet", ("gpt_eval_score",), 1.0, judge="base"),
    _Benchmark("ChartQA", "chartqa", ("relaxed_overall",)),
    _Benchmark("AI2D", "ai2d", _EXACT),
    _Benchmark("HallBench", "hallusion_bench_image", ("aAcc",), 1.0, judge="path"),
    _Benchmark("OCRBench", "ocrbench", ("ocrbench_accuracy",)),
)

COLUMN_SETS = {
    "paper": tuple(benchmark.name for benchmark in BENCHMARKS),
    "paper-llava": tuple(benchmark.name for benchmark in BENCHMARKS[:10]),
    "paper-qwen": ("TextVQA", "ChartQA", "AI2D", "HallBench", MME, "MMB-EN", "MMB-CN"),
}
"""Sets of columns: all of them, and those of the paper's tables on LLaVA and on Qwen."""


def select_benchmarks(names: str, *, cognition: bool, with_tasks: bool) -> list[_Benchmark]:
    """Benchmarks by column, task or set, separated by commas, in the order of the paper.

    ``cognition``: it is part of MME, as on Qwen. ``with_tasks``: any other name is a task of the
    user's, and comes last. Raises :class:`ConfigError`.
    """
    columns = {key.lower(): row.name for row in BENCHMARKS for key in (row.name, row.task)}
    words = [word for word in names.split(",") if word]
    chosen = [c for word in words for c in COLUMN_SETS.get(word, [columns.get(word.lower(), word)])]
    unknown = [name for name in dict.fromkeys(chosen) if name not in COLUMN_SETS["paper"]]
    if not chosen or (unknown and not with_tasks):
        what = f"does not know {', '.join(unknown)}" if unknown else "names no benchmark"
        known = ", ".join([*COLUMN_SETS, *(row.task for row in BENCHMARKS)])
        fix = f"use: {known}; a task of your own needs --include-path"
        raise ConfigError("eval", [Problem(f"--suite lmms:{names}", what, fix)])
    metrics = slice(None) if cognition else slice(1)
    selected = [row for row in BENCHMARKS if row.name in chosen]
    selected += [_Benchmark(name, name) for name in unknown]
    return [dataclasses.replace(row, metrics=row.metrics[metrics]) for row in selected]


@dataclass
class LmmsSuite(Suite):
    """Benchmarks that lmms-eval, another program, asks one server in every case."""

    cases: Sequence[Case]
    benchmarks: Sequence[_Benchmark]
    url: str
    """The address of the server."""
    connection: Connection
    served_name: str
    program: str
    folder: Path
    """It receives the files of lmms-eval."""
    backbone: str
    mme_divisor: float
    max_in_flight: int = 32
    limit: int | None = None
    include: Path | None = None
    """A folder of further tasks."""
    judge_url: str | None = None
    """Address of an OpenAI-compatible judge, for the tasks that ask one."""

    def __post_init__(self) -> None:
        self.folder = self.folder.absolute()  # lmms-eval runs in another one
        limit = "" if self.limit is None else f", the first {self.limit} of each"
        self.setup = Setup(
            suite="lmms",
            model=self.served_name,
            data=", ".join(f"{each.name} ({each.task})" for each in self.benchmarks) + limit,
            scorer=f"lmms-eval {PINNED}",
            backbone=self.backbone,
            mme_divisor=self.mme_divisor,
        )

    def plan(self) -> Sequence[str]:
        """Every command line that will be run."""
        return [
            shlex.join(self._command(benchmark.task, self._new_folder(case, benchmark)))
            for case in self.cases
            for benchmark in self.benchmarks
        ]

    def measure(self, journal: Journal, progress: Progress) -> None:
        """Run what is not complete, after checking lmms-eval and the server."""
        runs = [
            (case, benchmark)
            for case in self.cases
            for benchmark in self.benchmarks
            if not case.refused and benchmark.name not in journal.contents.totals.get(case.name, {})
        ]
        if not runs:
            return
        # Before the first task, which may take hours.
        self._check_version()
        _, changed = check_server(self.url, self.connection, self.served_name, self.cases)
        journal.append([*self.cases, *changed])
        names = {case.name for case in changed if case.refused}
        runs = [run for run in runs if run[0].name not in names]
        progress.begin(len(runs))
        for case, benchmark in runs:
            # lmms-eval would ask a dead one every question.
            check_server(self.url, self.connection, self.served_name, [])
            progress.write(f"{case.name}: {benchmark.task} ...")
            folder = self._new_folder(case, benchmark)
            self._run(case, benchmark, folder)
            journal.append(_read_output(folder, benchmark, case.name))
            progress.advance()

    def _new_folder(self, case: Case, benchmark: _Benchmark) -> Path:
        folder = self.folder / case.name / benchmark.task
        return next(path for n in itertools.count(1) if not (path := folder / str(n)).exists())

    def _command(self, task: str, output: Path) -> list[str]:
        """The command line for one task; decoding and prompts are the task's.

        ``prefix_aware_queue`` is off because it reorders requests by their text.
        ``adaptive_max_concurrency`` limits ``num_concurrent`` even if nothing adapts; its default
        is 128.
        """
        arguments = {
            "model_version": self.served_name,
            "base_url": f"{server_address(self.url)}/v1",
            "num_concurrent": self.max_in_flight,
            "adaptive_max_concurrency": self.max_in_flight,
            "max_retries": 3,
            "prefix_aware_queue": False,
        }
        model_args = ",".join(f"{name}={value}" for name, value in arguments.items())
        line = [
            *self._program(), "--model", "openai", "--model_args", model_args, "--tasks", task,
            "--batch_size", "1", "--output_path", str(output), "--log_samples",
        ]  # fmt: skip
        if self.include is not None:
            line += ["--include_path", str(self.include.absolute())]
        return line if self.limit is None else [*line, "--limit", str(self.limit)]

    def _program(self) -> list[str]:
        name, *more = shlex.split(self.program) or [""]
        return [os.path.abspath(path) if (path := shutil.which(name)) else name, *more]

    def _check_version(self) -> None:
        what = "cannot be run"
        with contextlib.suppress(OSError):
            command = [*self._program(), "version"]
            process = subprocess.run(command, capture_output=True, text=True, check=False)
            version = (process.stdout.split("\n")[0].split() or ["nothing"])[-1]
            if version == PINNED:
                return
            what = f"is version {version}; only the output files of {PINNED} are supported"
        fix = f"pip install lmms-eval=={PINNED} into a separate environment, and name its program"
        raise ConfigError("eval", [Problem(f"--lmms-eval {self.program}", what, fix)])

    def _run(self, case: Case, benchmark: _Benchmark, folder: Path) -> None:
        """Run one task; raises :class:`EvaluationError`."""
        folder.mkdir(parents=True)
        path = [str(_PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {
            # The client needs a key even if the server does not.
            "OPENAI_API_KEY": "none",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "AUTOPRUNE_IMAGES": str(folder / _IMAGES),
            "AUTOPRUNE_PRUNING": json.dumps(case.pruning),
            # Not OPENAI_API_KEY, which is the judge's.
            "AUTOPRUNE_HEADERS": json.dumps(
                {name.title(): v for name, v in self.connection.headers(self.url).items()}
            ),
        }
        if ca_file := self.connection.ca_file:
            variables["SSL_CERT_FILE"] = str(ca_file.absolute())
        judge = self.judge_url or os.environ.get("OPENAI_API_URL")
        if judge and benchmark.judge != "none":
            variables["OPENAI_API_URL"] = benchmark.judge_address(judge)
        with (folder / _LOG).open("wb") as log:
            process = subprocess.run(
                self._command(benchmark.task, folder),
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False,
                # In any other folder it would take a subfolder of the task's name for the task.
                cwd=folder, env=variables,
            )  # fmt: skip
        # It exits with 0 even after an exception.
        if process.returncode or not any(folder.rglob("*_samples_*.jsonl")):
            raise EvaluationError(
                f"lmms-eval ended with {process.returncode} and no samples of {benchmark.task} -> "
                f"see {folder / _LOG}, fix the cause and add --resume"
            )


_FAILURE_MARKS = ("[LMMS_EVAL_REQUEST_FAILED", "[LMMS_EVAL_BUDGET_EXCEEDED]")
"""How lmms-eval marks a failed request in place of its answer."""

_UNJUDGED = re.compile(
    r"failed to get a score"  # tasks/mmvet/utils.py: the score is then 0.0
    # tasks/hallusion_bench/utils.py: "unclear", or what the judge said of the question before
    r"|All \d+ attempts failed\. Last error message"
    # tasks/mmbench/mmbench_evals.py: in the end an option is drawn at random
    r"|GPT API failed to answer|GPT output includes 0"
)
"""What lmms-eval logs where a judge did not answer or cannot be understood; it goes on all the
same, and most of it is nowhere else."""


def _read_output(
    folder: Path, benchmark: _Benchmark, case: str
) -> Sequence[Question | Answer | Total]:
    """The files of one run: questions, answers, and last the total, unless a request failed.

    Raises :class:`EvaluationError` if something is missing.
    """
    try:
        return list(_parse_output(folder, benchmark, case))
    except (
        ConfigError, OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError
    ) as error:  # fmt: skip
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        what = f"{benchmark.task}: its output is incomplete ({reason})"
        raise EvaluationError(f"{what} -> see {folder / _LOG}, fix that and add --resume") from None


_LINE = TypeAdapter(dict[str, Any])


def _parse_output(
    folder: Path, benchmark: _Benchmark, case: str
) -> Iterator[Question | Answer | Total]:
    """The records of :func:`_read_output`; raises various errors for files of another form."""
    task = benchmark.task

    def read(path: Path) -> list[dict[str, Any]]:
        problems: list[Problem] = []
        lines = read_objects(path, _LINE, problems, "run the task again", "run the task again")
        refuse("files", problems)
        return [line for _, line in lines]

    (samples,) = folder.rglob(f"*_samples_{task}.jsonl")
    # Tasks write more such files, as MMBench its submissions/mmbench_en_dev_results.json.
    stamp = samples.name.removesuffix(f"_samples_{task}.jsonl")
    summary = parse_json(samples.with_name(f"{stamp}_results.json").read_text("utf-8"))
    lines = read(samples)
    images = {line["doc_id"]: line["image"] for line in read(folder / _IMAGES)}
    metrics = benchmark.metrics or (summary["configs"][task]["metric_list"][0]["metric"],)
    # Keys of the results have the form ``metric,filter``.
    scores = {key.partition(",")[0]: score for key, score in summary["results"][task].items()}
    points = sum(float(scores[metric]) for metric in metrics)
    expected = summary["n-samples"][task]["effective"]
    if len({line["doc_id"] for line in lines}) != expected:
        what = f"{task}: {len(lines)} samples, but lmms-eval reports {expected}"
        raise EvaluationError(f"{what} -> some are missing; run it again with --resume")
    answers = []
    for line in lines:
        name = next((name for name in metrics if name in line), None)
        if name is None:  # MME's other half
            continue
        judgement = line[name] if isinstance(line[name], dict) else {"score": line[name]}
        category = str(judgement["category"]) if benchmark.name == MME else ""
        number = line["doc_id"]
        question = Question(
            id=f"{task}/{number}",
            benchmark=benchmark.name,
            image=f"{task}/{images.get(number) or f'#{number}'}",
            category=category,
            pair=f"{category}/{judgement['question_id']}" if category else "",
        )
        yield question
        # A task's filters may have changed the logged response, also of a failed request.
        texts = [*_list_texts(line.get("filtered_resps")), *_list_texts(line.get("resps"))]
        marked = [text[:300] for text in texts if text.startswith(_FAILURE_MARKS)]
        tokens = ((line.get("token_counts") or [None])[0] or {}).get("input_tokens")
        if not texts or marked or not tokens:
            reason = [*marked, "no answer, or no prompt tokens were counted: the request failed"][0]
            answers.append(Answer(case=case, question=question.id, failure=reason))
            continue
        score = judgement.get("score")
        value = float(score) if isinstance(score, bool | int | float) else None
        answers.append(
            Answer(case=case, question=question.id, score=value, prompt_tokens=tokens,
                   text=texts[0])
        )  # fmt: skip
    log = "" if benchmark.judge == "none" else (folder / _LOG).read_text(errors="replace")
    if unjudged := len(_UNJUDGED.findall(log)):
        failure = (
            f"{benchmark.name}: the judge gave no usable answer ({unjudged} times), and lmms-eval "
            "scored that as wrong or at random -> give a judge that answers (--judge-url, its key "
            "as OPENAI_API_KEY), and add --resume"
        )
        answers = [Answer(case=case, question=a.question, failure=failure) for a in answers]
    yield from answers
    if all(answer.failure is None for answer in answers):
        yield Total(
            case=case,
            benchmark=benchmark.name,
            metric=" + ".join(metrics),
            value=round(benchmark.scale * points, 4),
            count=len(answers),
        )


def _list_texts(value: object) -> list[str]:
    """All texts in nested lists, whose shape depends on the number of requests a sample."""
    if isinstance(value, list):
        return [text for part in value for text in _list_texts(part)]
    return [value] if isinstance(value, str) else []
