"""Parser of lmms-eval's output files: `*_results.json`, `*_samples_TASK.jsonl`, and our image list.

lmms-eval scores the error message of a failed request like an answer; here it is a failure.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from vllm_autoprune.evaluation.lmms.benchmarks import Benchmark
from vllm_autoprune.evaluation.lmms.process import IMAGES, LOG
from vllm_autoprune.evaluation.records import MME, Answer, EvaluationError, Question, Total

FAILURE_MARKS = ("[LMMS_EVAL_REQUEST_FAILED", "[LMMS_EVAL_BUDGET_EXCEEDED]")
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

Line = Mapping[str, JsonValue]


@dataclass(frozen=True)
class Output:
    """The output of one task in one case; it has no total if a request failed."""

    questions: Sequence[Question]
    answers: Sequence[Answer]
    total: Total | None


def read_output(folder: Path, benchmark: Benchmark, case: str) -> Output:
    """Parse the files of one run; raises :class:`EvaluationError` if something is missing."""
    samples = _only_file(folder, f"*_samples_{benchmark.task}.jsonl", benchmark)
    stamp = samples.name.removesuffix(f"_samples_{benchmark.task}.jsonl")
    # Tasks write further result files, such as MMBench's submissions/mmbench_en_dev_results.json.
    results_file = _only_file(samples.parent, f"{stamp}_results.json", benchmark)
    results = _read_object(results_file, benchmark)
    lines = _read_lines(samples, benchmark)
    _check_count(results, lines, benchmark)
    benchmark = _with_metrics(benchmark, results)
    images = _read_images(folder, benchmark)
    scored = [line for line in lines if any(metric in line for metric in benchmark.metrics)]
    questions = [_question(line, benchmark, images) for line in scored]
    if len({question.id for question in questions}) != len(questions):
        raise EvaluationError(f"{benchmark.task}: samples occur twice -> name a new --out")
    answers = [
        _answer(line, benchmark, case, question.id)
        for line, question in zip(scored, questions, strict=True)
    ]
    if unjudged := _count_unjudged(folder, scored, benchmark):
        failure = (
            f"{benchmark.name}: the judge gave no usable answer ({unjudged} times), and lmms-eval "
            "scored that as wrong or at random -> give a judge that answers (--judge-url, its key "
            "as OPENAI_API_KEY), and add --resume"
        )
        answers = [
            Answer(case=case, question=question.id, failure=failure) for question in questions
        ]
    failed = any(answer.failure is not None for answer in answers)
    total = None if failed else _total(results, benchmark, case, len(answers))
    return Output(questions, answers, total)


def _only_file(folder: Path, pattern: str, benchmark: Benchmark) -> Path:
    files = sorted(folder.rglob(pattern))
    if len(files) != 1:
        raise EvaluationError(
            f"{benchmark.task}: lmms-eval wrote {len(files)} files {pattern} into {folder}, not "
            "one -> see its log in that folder, fix the cause and add --resume"
        )
    return files[0]


def _with_metrics(benchmark: Benchmark, results: Line) -> Benchmark:
    """The benchmark with the first metric of its task, if it names none."""
    if benchmark.metrics:
        return benchmark
    metrics = _at(_at(results.get("configs"), benchmark.task), "metric_list")
    first = _at(metrics[0], "metric") if isinstance(metrics, list) and metrics else None
    if not isinstance(first, str):
        raise EvaluationError(f"{benchmark.task}: has no metric -> add a metric_list to its YAML")
    return dataclasses.replace(benchmark, metrics=(first,))


def _read_images(folder: Path, benchmark: Benchmark) -> dict[JsonValue, str]:
    """The fingerprint of the image of each ``doc_id``."""
    path = folder / IMAGES
    if not path.exists():
        raise EvaluationError(
            f"{benchmark.task}: lmms-eval did not write {path}, so questions about the same image "
            "cannot be identified -> name a local program that respects PYTHONPATH with --lmms-eval"
        )
    lines = _read_lines(path, benchmark)
    return {line.get("doc_id"): str(line.get("image") or "") for line in lines}


def _read_object(path: Path, benchmark: Benchmark) -> dict[str, JsonValue]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EvaluationError(f"{benchmark.task}: {path} is not JSON ({error})") from None
    return data if isinstance(data, dict) else {}


def _read_lines(path: Path, benchmark: Benchmark) -> list[dict[str, JsonValue]]:
    try:
        text = path.read_text(encoding="utf-8").splitlines()
        values = [json.loads(line) for line in text if line.strip()]
    except ValueError as error:
        raise EvaluationError(f"{benchmark.task}: {path} is incomplete ({error})") from None
    return [value for value in values if isinstance(value, dict)]


def _check_count(results: Line, lines: Sequence[Line], benchmark: Benchmark) -> None:
    """Raise :class:`EvaluationError` unless there are as many samples as lmms-eval reports."""
    counts = _at(_at(results.get("n-samples"), benchmark.task), "effective")
    if not isinstance(counts, int | float) or int(counts) != len(lines):
        raise EvaluationError(
            f"{benchmark.task}: {len(lines)} samples, but lmms-eval reports {counts} -> samples "
            "are missing; run it again with --resume"
        )


def _question(line: Line, benchmark: Benchmark, images: Mapping[JsonValue, str]) -> Question:
    number = line.get("doc_id")
    metric = _metric(line, benchmark)
    category = str(_at(metric, "category") or "") if benchmark.name == MME else ""
    pair = str(_at(metric, "question_id") or "") if benchmark.name == MME else ""
    return Question(
        id=f"{benchmark.task}/{number}",
        benchmark=benchmark.name,
        image=f"{benchmark.task}/{images.get(number) or f'#{number}'}",
        category=category,
        pair=f"{category}/{pair}" if pair else "",
    )


def _answer(line: Line, benchmark: Benchmark, case: str, question: str) -> Answer:
    texts = _texts(line.get("filtered_resps")) or _texts(line.get("resps"))
    counts = line.get("token_counts")
    tokens = _at(counts[0], "input_tokens") if isinstance(counts, list) and counts else None
    failure = _failure([*texts, *_texts(line.get("resps"))], tokens)
    if failure is not None:
        return Answer(case=case, question=question, failure=failure)
    return Answer(
        case=case,
        question=question,
        score=_score(_metric(line, benchmark)),
        prompt_tokens=int(tokens) if isinstance(tokens, int | float) else None,
        text=texts[0],
    )


def _count_unjudged(folder: Path, lines: Sequence[Line], benchmark: Benchmark) -> int:
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


def _failure(texts: Sequence[str], tokens: JsonValue) -> str | None:
    """Why a request failed, if it did; a task's filters may have changed the logged response."""
    failure = next((text for text in texts if text.startswith(FAILURE_MARKS)), None)
    if failure is not None:
        return failure[:300]
    if not texts:
        return "no answer was recorded"
    return None if tokens else "no prompt tokens were counted: the request failed"


def _metric(line: Line, benchmark: Benchmark) -> JsonValue:
    return next((line[name] for name in benchmark.metrics if name in line), None)


def _score(value: JsonValue) -> float | None:
    """The score of one sample: a number, or the ``score`` of a record."""
    if isinstance(value, dict):
        value = value.get("score")
    return float(value) if isinstance(value, bool | int | float) else None


def _total(results: Line, benchmark: Benchmark, case: str, count: int) -> Total:
    """The sum of the metrics; keys of the results have the form ``metric,filter``."""
    scores = _at(results.get("results"), benchmark.task)
    values = []
    for metric in benchmark.metrics:
        items = scores.items() if isinstance(scores, dict) else ()
        value = next((v for key, v in items if key.partition(",")[0] == metric), None)
        if not isinstance(value, int | float):
            raise EvaluationError(f"{benchmark.task}: lmms-eval reports no {metric} ({value})")
        values.append(float(value))
    return Total(
        case=case,
        benchmark=benchmark.name,
        metric=" + ".join(benchmark.metrics),
        value=round(benchmark.scale * sum(values), 4),
        count=count,
    )


def _texts(value: JsonValue) -> list[str]:
    """All texts in nested lists, whose shape depends on the number of requests per sample."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for part in value for text in _texts(part)]
    return []


def _at(value: JsonValue, key: str) -> JsonValue:
    return value.get(key) if isinstance(value, dict) else None
