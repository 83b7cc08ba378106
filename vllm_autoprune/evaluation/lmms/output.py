"""Benchmarks as tasks of lmms-eval, and its output: results, samples, and our list of images.

The benchmarks are the paper's 14, named as its columns, and tasks of a folder. lmms-eval scores the
error message of a failed request like an answer; here it is a failure.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, JsonValue, TypeAdapter

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.journal import MME, Answer, EvaluationError, Question, Total

IMAGES = "images.jsonl"
"""Written into the output by our plugin of lmms-eval: the image of each question."""

LOG = "lmms-eval.log"

PINNED = "0.7.3"
"""The version of lmms-eval whose tasks, metrics and output files are supported."""


@dataclass(frozen=True)
class Benchmark:
    """One column: the sum of a task's metrics times ``scale``; by default its first metric."""

    name: str
    task: str
    metrics: tuple[str, ...]
    scale: float = 100.0
    mean: bool = True
    """Whether the metric is the mean over the scores of single answers."""
    note: str = ""
    judge: Literal["none", "base", "path"] = "none"
    """What its task takes OPENAI_API_URL for: the base of an OpenAI-compatible API (the judges of
    lmms_eval/llm_judge give it to OpenAI's client), or the address that it posts to
    (tasks/mmbench/mmbench_evals.py, tasks/hallusion_bench/utils.py)."""

    def judge_address(self, url: str) -> str:
        """The value of OPENAI_API_URL for a judge whose address was given in either form."""
        base = url.rstrip("/").removesuffix("/chat/completions")
        base = base if urlsplit(base).path else f"{base}/v1"
        return base if self.judge == "base" else f"{base}/chat/completions"


_EXACT = ("exact_match",)

BENCHMARKS: tuple[Benchmark, ...] = (
    Benchmark("VQAv2", "vqav2_val", _EXACT, note="val; test-dev is by submission only"),
    Benchmark("GQA", "gqa", _EXACT),
    Benchmark("VizWiz", "vizwiz_vqa_val", _EXACT, note="val; test is by submission only"),
    Benchmark("SQA-IMG", "scienceqa_img", _EXACT),
    Benchmark("TextVQA", "textvqa_val", _EXACT, note="no OCR tokens in the prompt"),
    Benchmark("POPE", "pope", ("pope_f1_score",), mean=False, note="F1; samples: accuracy"),
    Benchmark(MME, "mme", ("mme_perception_score",), 1.0, mean=False, note="perception"),
    Benchmark("MMB-EN", "mmbench_en_dev", ("gpt_eval_score",), 1.0, mean=False, judge="path"),
    Benchmark("MMB-CN", "mmbench_cn_dev", ("gpt_eval_score",), 1.0, mean=False, judge="path"),
    Benchmark("MM-Vet", "mmvet", ("gpt_eval_score",), 1.0, judge="base"),
    Benchmark("ChartQA", "chartqa", ("relaxed_overall",)),
    Benchmark("AI2D", "ai2d", _EXACT),
    Benchmark("HallBench", "hallusion_bench_image", ("aAcc",), 1.0, mean=False, judge="path"),
    Benchmark("OCRBench", "ocrbench", ("ocrbench_accuracy",), mean=False, note="of 1,000 always"),
)

COLUMN_SETS = {
    "paper": tuple(benchmark.name for benchmark in BENCHMARKS),
    "paper-llava": tuple(benchmark.name for benchmark in BENCHMARKS[:10]),
    "paper-qwen": ("TextVQA", "ChartQA", "AI2D", "HallBench", MME, "MMB-EN", "MMB-CN"),
}
"""Sets of columns: all of them, and those of the paper's tables on LLaVA and on Qwen."""

_TASK = re.compile(r"""^task:\s*["']?(?P<name>[\w.-]+)["']?\s*$""", re.MULTILINE)


def select_benchmarks(
    names: str, *, cognition: bool = False, tasks: Sequence[Benchmark] = ()
) -> Sequence[Benchmark]:
    """Benchmarks by column, task or set, separated by commas, in the order of the paper.

    ``cognition``: add it to MME, as on Qwen. ``tasks``: further ones, which come last. Raises
    :class:`ConfigError`.
    """
    available = [*BENCHMARKS, *tasks]
    selected: set[str] = set()
    unknown = []
    for name in filter(None, names.split(",")):
        columns = COLUMN_SETS.get(name) or [
            benchmark.name
            for benchmark in available
            if name.lower() in (benchmark.name.lower(), benchmark.task)
        ]
        selected |= set(columns)
        if not columns:
            unknown.append(name)
    if unknown or not selected:
        options = ", ".join([*COLUMN_SETS, *(benchmark.task for benchmark in available)])
        what = f"does not know {', '.join(unknown)}" if unknown else "names no benchmark"
        fix = f"use: {options}; a task of your own needs --include-path"
        raise ConfigError("eval", [Problem(f"--suite lmms:{names}", what, fix)])
    both = dataclasses.replace(
        next(benchmark for benchmark in BENCHMARKS if benchmark.name == MME),
        metrics=("mme_perception_score", "mme_cognition_score"),
        note="perception and cognition",
    )
    return [
        both if cognition and benchmark.name == MME else benchmark
        for benchmark in available
        if benchmark.name in selected
    ]


def find_tasks(folder: Path) -> Sequence[Benchmark]:
    """Every task that a YAML file below ``folder`` declares; raises :class:`ConfigError`.

    The first metric of each counts, and has to be a mean of scores between 0 and 1. The files are
    searched, not parsed, because lmms-eval's YAML has tags that name functions.
    """
    names = [
        match["name"]
        for path in sorted(folder.rglob("*.yaml"))
        if (match := _TASK.search(path.read_text(encoding="utf-8")))
    ]
    if not names:
        what, fix = "declares no task", "name a folder with a YAML file that says `task: NAME`"
        raise ConfigError("eval", [Problem(f"--include-path {folder}", what, fix)])
    return [Benchmark(name, name, ()) for name in names]


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


@dataclass(frozen=True)
class Output:
    """The output of one task in one case; it has no total if a request failed."""

    questions: Sequence[Question]
    answers: Sequence[Answer]
    total: Total | None


_Line = dict[str, JsonValue]


class _Results(BaseModel):
    """What is read of lmms-eval's summary, each by task."""

    results: dict[str, dict[str, JsonValue]]
    configs: dict[str, dict[str, JsonValue]] = Field(default_factory=dict)
    counts: dict[str, dict[str, int]] = Field(alias="n-samples")


def read_output(folder: Path, benchmark: Benchmark, case: str) -> Output:
    """Parse the files of one run; raises :class:`EvaluationError` if something is missing."""
    task = benchmark.task
    samples = _only_file(folder, f"*_samples_{task}.jsonl", task)
    stamp = samples.name.removesuffix(f"_samples_{task}.jsonl")
    # Tasks write further result files, such as MMBench's submissions/mmbench_en_dev_results.json.
    summary = _only_file(samples.parent, f"{stamp}_results.json", task)
    if not (folder / IMAGES).exists():
        raise EvaluationError(
            f"{task}: lmms-eval did not write {folder / IMAGES}, so questions about the same image "
            "cannot be identified -> name a local program that respects PYTHONPATH with --lmms-eval"
        )
    try:
        results = _Results.model_validate_json(summary.read_text(encoding="utf-8"))
        lines, images = _read(samples), _read(folder / IMAGES)
    except ValueError as error:
        raise EvaluationError(f"{task}: {samples.parent} is incomplete ({error})") from None
    expected = results.counts.get(task, {}).get("effective")
    if expected != len(lines):
        raise EvaluationError(
            f"{task}: {len(lines)} samples, but lmms-eval reports {expected} -> samples "
            "are missing; run it again with --resume"
        )
    if not benchmark.metrics:  # a task of one's own
        metrics = results.configs.get(task, {}).get("metric_list")
        name = _at(metrics[0], "metric") if isinstance(metrics, list) and metrics else None
        if not isinstance(name, str):
            raise EvaluationError(f"{task}: has no metric -> add a metric_list to its YAML")
        benchmark = dataclasses.replace(benchmark, metrics=(name,))
    by_number = {line.get("doc_id"): str(line.get("image") or "") for line in images}
    lines = [line for line in lines if any(metric in line for metric in benchmark.metrics)]
    questions = [_question(line, benchmark, by_number) for line in lines]
    if len({question.id for question in questions}) != len(questions):
        raise EvaluationError(f"{task}: samples occur twice -> name a new --out")
    answers = [
        _answer(line, benchmark, case, question.id)
        for line, question in zip(lines, questions, strict=True)
    ]
    if unjudged := _count_unjudged(folder, lines, benchmark):
        failure = (
            f"{benchmark.name}: the judge gave no usable answer ({unjudged} times), and lmms-eval "
            "scored that as wrong or at random -> give a judge that answers (--judge-url, its key "
            "as OPENAI_API_KEY), and add --resume"
        )
        answers = [
            Answer(case=case, question=question.id, failure=failure) for question in questions
        ]
    if any(answer.failure is not None for answer in answers):
        return Output(questions, answers, None)
    # Keys of the results have the form ``metric,filter``.
    scores = {key.partition(",")[0]: score for key, score in results.results[task].items()}
    values = []
    for metric in benchmark.metrics:
        value = scores.get(metric)
        if not isinstance(value, int | float):
            raise EvaluationError(f"{task}: lmms-eval reports no {metric} ({value})")
        values.append(float(value))
    total = Total(
        case=case,
        benchmark=benchmark.name,
        metric=" + ".join(benchmark.metrics),
        value=round(benchmark.scale * sum(values), 4),
        count=len(answers),
    )
    return Output(questions, answers, total)


_LINES: TypeAdapter[list[_Line]] = TypeAdapter(list[_Line])


def _read(path: Path) -> list[_Line]:
    text = path.read_text(encoding="utf-8").splitlines()
    return _LINES.validate_python([json.loads(line) for line in text if line.strip()])


def _only_file(folder: Path, pattern: str, task: str) -> Path:
    files = sorted(folder.rglob(pattern))
    if len(files) != 1:
        raise EvaluationError(
            f"{task}: lmms-eval wrote {len(files)} files {pattern} into {folder}, not "
            "one -> see its log in that folder, fix the cause and add --resume"
        )
    return files[0]


def _question(line: _Line, benchmark: Benchmark, images: Mapping[JsonValue, str]) -> Question:
    number = line.get("doc_id")
    metric = _metric(line, benchmark) if benchmark.name == MME else None
    category, pair = str(_at(metric, "category") or ""), str(_at(metric, "question_id") or "")
    return Question(
        id=f"{benchmark.task}/{number}",
        benchmark=benchmark.name,
        image=f"{benchmark.task}/{images.get(number) or f'#{number}'}",
        category=category,
        pair=f"{category}/{pair}" if pair else "",
    )


def _answer(line: _Line, benchmark: Benchmark, case: str, question: str) -> Answer:
    counts = line.get("token_counts")
    tokens = _at(counts[0], "input_tokens") if isinstance(counts, list) and counts else None
    # A task's filters may have changed the logged response.
    responses = _texts(line.get("resps"))
    texts = _texts(line.get("filtered_resps")) or responses
    marked = [text for text in (*texts, *responses) if text.startswith(_FAILURE_MARKS)]
    if not texts or marked or not tokens:
        failure = "no prompt tokens were counted: the request failed"
        if not texts or marked:
            failure = marked[0][:300] if marked else "no answer was recorded"
        return Answer(case=case, question=question, failure=failure)
    score = _metric(line, benchmark)
    score = _at(score, "score") if isinstance(score, dict) else score
    return Answer(
        case=case,
        question=question,
        score=float(score) if isinstance(score, bool | int | float) else None,
        prompt_tokens=int(tokens) if isinstance(tokens, int | float) else None,
        text=texts[0],
    )


def _count_unjudged(folder: Path, lines: Sequence[_Line], benchmark: Benchmark) -> int:
    """Judgements that are missing, by the log and by the samples."""
    log = folder / LOG
    if benchmark.judge == "none":
        return 0
    logged = len(_UNJUDGED.findall(log.read_text(errors="replace"))) if log.exists() else 0
    metrics = [_metric(line, benchmark) for line in lines]
    # MM-Vet keeps the judge's name, HallusionBench the prompt with the judgement behind it.
    empty = sum(
        _at(metric, "eval_model") == ""
        or str(_at(metric, "gpt_answer")).rstrip().endswith("\nOutput:")
        for metric in metrics
    )
    return max(logged, empty)


def _metric(line: _Line, benchmark: Benchmark) -> JsonValue:
    return next((line[name] for name in benchmark.metrics if name in line), None)


def _texts(value: JsonValue) -> list[str]:
    """All texts in nested lists, whose shape depends on the number of requests per sample."""
    if isinstance(value, list):
        return [text for part in value for text in _texts(part)]
    return [value] if isinstance(value, str) else []


def _at(value: JsonValue, key: str) -> JsonValue:
    return value.get(key) if isinstance(value, dict) else None
