"""Benchmarks through lmms-eval, another program: one run of it for every task in every case.

Complete runs are not repeated. lmms-eval scores the error message of a failed request like an
answer; here such a request counts as failed.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from tqdm import tqdm

from vllm_autoprune.connection import api_address, server_address
from vllm_autoprune.errors import ConfigError
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
from vllm_autoprune.evaluation.run import Server
from vllm_autoprune.http_client import ServerClient

PINNED = "0.7.3"
"""The version of lmms-eval whose tasks, metrics and output files are supported."""

_PLUGIN = Path(__file__).with_name("lmms_plugin")
_IMAGES = "images.jsonl"
_LOG = "lmms-eval.log"
"""Files of a run: the image of each question, written by our plugin, and what lmms-eval prints."""


@dataclass(frozen=True)
class _Benchmark:
    """A column of the tables: the sum of a task's ``metrics``, times ``scale``.

    Without ``metrics`` it is the first metric of the task.
    """

    name: str
    task: str
    metrics: tuple[str, ...] = ()
    scale: float = 100.0
    judge_path: str | None = None
    """Path that OPENAI_API_URL has behind ``/v1``; None if the task asks no judge. It is empty for
    the judges of lmms_eval/llm_judge, which pass the URL to OpenAI's client; other tasks post to
    the URL itself (tasks/mmbench/mmbench_evals.py, tasks/hallusion_bench/utils.py)."""


_EXACT = ("exact_match",)
_GPT = ("gpt_eval_score",)
_CHAT = "/chat/completions"

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
    _Benchmark("MMB-EN", "mmbench_en_dev", _GPT, 1.0, judge_path=_CHAT),
    _Benchmark("MMB-CN", "mmbench_cn_dev", _GPT, 1.0, judge_path=_CHAT),
    _Benchmark("MM-Vet", "mmvet", _GPT, 1.0, judge_path=""),
    _Benchmark("ChartQA", "chartqa", ("relaxed_overall",)),
    _Benchmark("AI2D", "ai2d", _EXACT),
    _Benchmark("HallBench", "hallusion_bench_image", ("aAcc",), 1.0, judge_path=_CHAT),
    _Benchmark("OCRBench", "ocrbench", ("ocrbench_accuracy",)),
)

_BOXES = "ACC@0.5"
"""Suffix of metrics that are the share of boxes whose IoU with the true box is at least 0.5."""

# Tasks of 0.7.3 that ask for boxes; its refcoco_bbox_val and the like ask for captions. Prompts of
# _REC give one expression and ask for fractions of the image's sides; prompts of _JSON give all
# expressions and ask for JSON in pixels or thousandths.
_REC = ("refcoco_" + _BOXES,)
_JSON = ("refcoco_grounding_" + _BOXES,)
_GROUNDING = tuple(
    _Benchmark(f"{task}_{split}", f"{task}_{split}", metrics)
    for task, splits, metrics in (
        ("refcoco_bbox_rec", "val test testA testB", _REC),
        ("refcoco+_bbox_rec", "val testA testB", _REC),
        ("refcocog_bbox_rec", "val test", _REC),
        ("refcoco_grounding", "test testA testB", _JSON),
        ("refcoco_plus_grounding", "testA testB", _JSON),
        ("refcocog_grounding", "test", _JSON),
    )
    for split in splits.split()
)

COLUMN_SETS = {
    "paper": tuple(benchmark.name for benchmark in BENCHMARKS),
    "paper-llava": tuple(benchmark.name for benchmark in BENCHMARKS[:10]),
    "paper-qwen": ("TextVQA", "ChartQA", "AI2D", "HallBench", MME, "MMB-EN", "MMB-CN"),
}
"""Sets of columns: all of them, and those of the paper's tables on LLaVA and on Qwen."""


def select_benchmarks(
    names: str, *, cognition: bool, with_tasks: bool
) -> list[_Benchmark]:
    """Benchmarks that ``names`` lists by column, task or set, in the order of the paper.

    ``names`` are separated by commas. ``cognition``: whether MME includes its cognition score, as
    on Qwen. ``with_tasks``: whether an unknown name is a task of the user's; those come last.
    Raises :class:`ConfigError`.
    """
    rows = (*BENCHMARKS, *_GROUNDING)
    columns = {key.lower(): row.name for row in rows for key in (row.name, row.task)}
    words = [word for word in names.split(",") if word]
    chosen = [
        c
        for word in words
        for c in COLUMN_SETS.get(word, [columns.get(word.lower(), word)])
    ]
    unknown = [name for name in dict.fromkeys(chosen) if name not in columns.values()]
    if not chosen or (unknown and not with_tasks):
        what = (
            f"does not know {', '.join(unknown)}" if unknown else "names no benchmark"
        )
        choices = ", ".join([*COLUMN_SETS, *(row.task for row in rows)])
        fix = f"use: {choices}; a task of your own needs --include-path"
        raise ConfigError.of(f"--suite lmms:{names}", what, fix, subject="eval")
    selected = [row for row in rows if row.name in chosen]
    selected += [_Benchmark(name, name) for name in unknown]
    metrics = slice(None) if cognition else slice(1)
    return [dataclasses.replace(row, metrics=row.metrics[metrics]) for row in selected]


@dataclass
class LmmsSuite:
    """Benchmarks that lmms-eval runs on one server, once for each case."""

    server: Server
    cases: Sequence[Case]
    benchmarks: Sequence[_Benchmark]
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
            journal.append(_read_output(folder, benchmark, case.name))

    def _run(
        self, program: Sequence[str], case: Case, benchmark: _Benchmark, folder: Path
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
            "images": str(folder / _IMAGES),
        }
        path = [str(_PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {
            # OpenAI's client refuses to start without a key. This variable is the judge's; the key
            # of the server under test is among its headers.
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
        with (folder / _LOG).open("wb") as log:
            process = subprocess.run(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                check=False,
                # lmms-eval mistakes a folder of its working directory that has a task's name for
                # the task. The report's own folder has none.
                cwd=folder,
                env=variables,
            )
        # lmms-eval exits with 0 even after an exception.
        has_samples = any(folder.rglob("*_samples_*.jsonl"))
        if process.returncode or not has_samples:
            what = f"ended with {process.returncode}"
            if not has_samples:
                what += f" and no samples of {benchmark.task}"
            fix = f"see {folder / _LOG}, fix the cause and add --resume"
            raise EvaluationError.of("lmms-eval", what, fix)


_FAILED = re.compile(r'\[LMMS_EVAL_(REQUEST_FAILED|BUDGET_EXCEEDED)[^"]{,300}')
"""How lmms-eval marks a failed request in place of its answer."""

_UNJUDGED = re.compile(
    r"failed to get a score"  # tasks/mmvet/utils.py: the score is then 0.0
    # tasks/hallusion_bench/utils.py: the verdict is then "unclear", or that on the question before
    r"|All \d+ attempts failed\. Last error message"
    # tasks/mmbench/mmbench_evals.py: after the last attempt an option is drawn at random
    r"|GPT API failed to answer|GPT output includes 0"
)
"""What lmms-eval logs if a judge does not answer or its answer cannot be parsed. The sample is
scored all the same, and most of these failures appear only in the log."""


def _compute_iou(box: Sequence[float], other: Sequence[float]) -> float:
    """Intersection over union of two boxes ``(left, top, right, bottom)``."""
    boxes = np.asarray([box, other], dtype=np.float64).reshape(2, 2, 2)
    near, far = boxes[:, 0], boxes[:, 1]
    overlap = (far.min(axis=0) - near.max(axis=0)).clip(min=0.0).prod()
    union = (far - near).prod(axis=1).sum() - overlap
    return float(overlap / union) if union > 0 else 0.0


def _check_total(scores: Sequence[float], total: float, metric: str) -> None:
    """Raise ValueError if the mean of ``scores`` differs from the ``total`` of lmms-eval."""
    if not scores:
        raise ValueError(f"no box has the score {metric}")
    mean = float(np.mean(scores))
    if abs(mean - total) > 1e-6:
        raise ValueError(
            f"{metric} is {total:.4f}, but {mean:.4f} of the boxes are right"
        )


class _TokenCounts(BaseModel):
    input_tokens: int | None = None


class _Sample(BaseModel, extra="allow"):
    """A line of the samples file: logged responses, and a further field for each metric."""

    doc_id: int | str
    filtered_resps: Any
    resps: Any = None
    token_counts: list[_TokenCounts | None] | None = None

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the first response's prompt; 0 or None where its request failed."""
        counts = self.token_counts[0] if self.token_counts else None
        return counts.input_tokens if counts else None


class _MmeJudgement(BaseModel):
    category: Any
    question_id: Any


class _BoxJudgement(BaseModel):
    bbox: tuple[float, float, float, float]
    pred: tuple[float, float, float, float]


class _ImageOfSample(BaseModel):
    """A line of the images file, which our plugin writes."""

    doc_id: int | str
    image: str | None


class _Metric(BaseModel):
    metric: str


class _TaskConfig(BaseModel):
    metric_list: list[_Metric] = []


class _SampleCount(BaseModel):
    effective: int


class _Summary(BaseModel):
    """The results file of one run, by task."""

    results: dict[str, dict[str, Any]]
    """Keys of the results have the form ``metric,filter``."""
    configs: dict[str, _TaskConfig]
    counts: dict[str, _SampleCount] = Field(alias="n-samples")


_NUMBER = TypeAdapter(float)
_M = TypeVar("_M", bound=BaseModel)


@dataclass(frozen=True)
class _Output:
    """The output files of one run, which are complete: they have every sample of the task."""

    benchmark: _Benchmark
    samples: Sequence[_Sample]
    images: Mapping[int | str, str | None]
    metrics: Sequence[str]
    points: float
    """The sum of the metrics over all samples, as lmms-eval reports it."""
    log: str
    """What lmms-eval printed; empty for a task that asks no judge."""

    @classmethod
    def read(cls, folder: Path, benchmark: _Benchmark) -> _Output:
        """Read the files in ``folder``; raises OSError or ValueError if one is missing or wrong."""
        task = benchmark.task
        (path,) = folder.rglob(f"*_samples_{task}.jsonl")
        # Tasks write more files of such names: MMBench's submissions/mmbench_en_dev_results.json.
        stamp = path.name.removesuffix(f"_samples_{task}.jsonl")
        text = path.with_name(f"{stamp}_results.json").read_text("utf-8")
        summary = _Summary.model_validate_json(text)
        samples = _read_lines(path, _Sample)
        images = _read_lines(folder / _IMAGES, _ImageOfSample)
        for part in (summary.results, summary.configs, summary.counts):
            if task not in part:
                raise ValueError(f"no results of {task}")
        metrics = benchmark.metrics
        if not metrics:
            metrics = tuple(row.metric for row in summary.configs[task].metric_list[:1])
        scores = {
            key.partition(",")[0]: score for key, score in summary.results[task].items()
        }
        if not metrics or not scores.keys() >= {*metrics}:
            raise ValueError(f"no {' and '.join(metrics) or 'metric'} in the results")
        expected = summary.counts[task].effective
        if len({sample.doc_id for sample in samples}) != expected:
            raise ValueError(
                f"{len(samples)} samples, but lmms-eval reports {expected}"
            )
        log = ""
        if benchmark.judge_path is not None:
            log = (folder / _LOG).read_text(errors="replace")
        return cls(
            benchmark,
            samples,
            {line.doc_id: line.image for line in images},
            metrics,
            sum(_NUMBER.validate_python(scores[metric]) for metric in metrics),
            log,
        )

    def read_sample(
        self, sample: _Sample, metric: str, case: str
    ) -> tuple[Question, Answer]:
        """The question of ``sample``, and its answer in ``case`` with the score of ``metric``."""
        task = self.benchmark.task
        fields = sample.model_extra or {}
        judgement = fields[metric]
        if not isinstance(judgement, dict):
            judgement = {"score": judgement}
        category = ""
        pair = ""
        if self.benchmark.name == MME:
            mme = _MmeJudgement.model_validate(judgement)
            category = str(mme.category)
            pair = f"{category}/{mme.question_id}" if category else ""
        question = Question(
            id=f"{task}/{sample.doc_id}",
            benchmark=self.benchmark.name,
            image=f"{task}/{self.images.get(sample.doc_id) or f'#{sample.doc_id}'}",
            category=category,
            pair=pair,
        )
        # A task's filter may have rewritten the error message of a failed request, so the
        # unfiltered response is searched too.
        failed = _FAILED.search(json.dumps([sample.filtered_resps, sample.resps]))
        if failed or not sample.prompt_tokens:
            failure = "no prompt tokens were counted: the request failed"
            if failed:
                failure = failed[0]
            return question, Answer(case=case, question=question.id, failure=failure)
        score = judgement.get("score")
        if metric.endswith(_BOXES):
            boxes = _BoxJudgement.model_validate(judgement)
            score = _compute_iou(boxes.bbox, boxes.pred) >= 0.5
        answer = Answer(
            case=case,
            question=question.id,
            prompt_tokens=sample.prompt_tokens,
            text=str(sample.filtered_resps),
            score=float(score) if isinstance(score, bool | int | float) else None,
        )
        return question, answer


def _read_lines(path: Path, model: type[_M]) -> list[_M]:
    lines = path.read_text("utf-8").split("\n")
    return [model.model_validate_json(line) for line in lines if line]


def _read_output(
    folder: Path, benchmark: _Benchmark, case: str
) -> Sequence[Question | Answer | Total]:
    """Questions and answers in the files of one run, and last the total unless a request failed.

    Raises :class:`EvaluationError` for files that are missing, incomplete or of another form.
    """
    questions = list[Question]()
    answers = list[Answer]()
    try:
        output = _Output.read(folder, benchmark)
        for sample in output.samples:
            named = sample.model_extra or {}
            # A sample of MME has one of its two metrics: perception or cognition.
            for metric in [name for name in output.metrics if name in named][:1]:
                question, answer = output.read_sample(sample, metric, case)
                questions.append(question)
                answers.append(answer)
        scored = [answer.score for answer in answers if answer.score is not None]
        if output.metrics[0].endswith(_BOXES) and len(scored) == len(answers):
            _check_total(scored, output.points, output.metrics[0])
    except (OSError, ValueError, OverflowError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if isinstance(error, ValidationError):
            (detail, *_) = error.errors(include_url=False)
            reason = f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}"
        what = f"its output is incomplete ({reason})"
        fix = f"see {folder / _LOG}, fix that and add --resume"
        raise EvaluationError.of(benchmark.task, what, fix) from None
    if unjudged := len(_UNJUDGED.findall(output.log)):
        failure = (
            f"{benchmark.name}: the judge gave no usable answer ({unjudged} times), and lmms-eval "
            "scored that as wrong or at random -> give a judge that answers (--judge-url, its key "
            "as OPENAI_API_KEY), and add --resume"
        )
        answers = [
            Answer(case=case, question=answer.question, failure=failure)
            for answer in answers
        ]
    records: list[Question | Answer | Total] = [*questions, *answers]
    if all(answer.failure is None for answer in answers):
        total = Total(
            case=case,
            benchmark=benchmark.name,
            metric=" + ".join(output.metrics),
            value=round(benchmark.scale * output.points, 4),
            count=len(answers),
        )
        records.append(total)
    return records
