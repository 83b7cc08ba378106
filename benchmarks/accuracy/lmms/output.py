"""What lmms-eval leaves behind, as records: `*_results.json`, `*_samples_TASK.jsonl`, images.

Knows nothing about processes. lmms-eval scores a request that failed as if its text were an answer;
here it is a failure.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from benchmarks.accuracy.errors import EvaluationError
from benchmarks.accuracy.lmms.benchmarks import Benchmark
from benchmarks.accuracy.lmms.process import IMAGES
from benchmarks.accuracy.records import MME, Answer, Question, Total

FAILED = ("[LMMS_EVAL_REQUEST_FAILED", "[LMMS_EVAL_BUDGET_EXCEEDED]")
"""What stands in place of an answer that never came."""

Line = Mapping[str, JsonValue]


@dataclass(frozen=True)
class Output:
    """One task of one case; without a total where a request failed."""

    questions: Sequence[Question]
    answers: Sequence[Answer]
    total: Total | None


def read_output(folder: Path, benchmark: Benchmark, case: str) -> Output:
    """Parse what one run wrote; raises :class:`EvaluationError` where something is missing."""
    written = _only(folder, f"*_samples_{benchmark.task}.jsonl", benchmark)
    stamp = written.name.removesuffix(f"_samples_{benchmark.task}.jsonl")
    # Tasks write files of their own, such as MMBench's submissions/mmbench_en_dev_results.json.
    results = _object(_only(written.parent, f"{stamp}_results.json", benchmark), benchmark)
    lines = _lines(written, benchmark)
    _count(results, lines, benchmark)
    benchmark = _with_metrics(benchmark, results)
    images = _images(folder, benchmark)
    kept = [line for line in lines if any(metric in line for metric in benchmark.metrics)]
    questions = [_question(line, benchmark, images) for line in kept]
    if len({question.id for question in questions}) != len(questions):
        raise EvaluationError(f"{benchmark.task}: samples are there twice -> name a new --out")
    answers = [
        _answer(line, benchmark, case, question.id)
        for line, question in zip(kept, questions, strict=True)
    ]
    failed = any(answer.failure is not None for answer in answers)
    total = None if failed else _total(results, benchmark, case, len(answers))
    return Output(questions, answers, total)


def _only(folder: Path, pattern: str, benchmark: Benchmark) -> Path:
    found = sorted(folder.rglob(pattern))
    if len(found) != 1:
        raise EvaluationError(
            f"{benchmark.task}: lmms-eval wrote {len(found)} files {pattern} into {folder}, not "
            "one -> its log lies there; fix that and add --resume"
        )
    return found[0]


def _with_metrics(benchmark: Benchmark, results: Line) -> Benchmark:
    """With the task's own first metric, where none is named."""
    if benchmark.metrics:
        return benchmark
    metrics = _at(_at(results.get("configs"), benchmark.task), "metric_list")
    first = _at(metrics[0], "metric") if isinstance(metrics, list) and metrics else None
    if not isinstance(first, str):
        raise EvaluationError(f"{benchmark.task}: has no metric -> give it a metric_list")
    return dataclasses.replace(benchmark, metrics=(first,))


def _images(folder: Path, benchmark: Benchmark) -> dict[JsonValue, str]:
    """By ``doc_id``, what tells one image from another."""
    path = folder / IMAGES
    if not path.exists():
        raise EvaluationError(
            f"{benchmark.task}: lmms-eval did not write {path}, so it is not known which questions "
            "are about one image -> name a program of this machine, which heeds PYTHONPATH, with "
            "--lmms-eval"
        )
    found = _lines(path, benchmark)
    return {line.get("doc_id"): str(line.get("image") or "") for line in found}


def _object(path: Path, benchmark: Benchmark) -> dict[str, JsonValue]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EvaluationError(f"{benchmark.task}: {path} is no JSON ({error})") from None
    return data if isinstance(data, dict) else {}


def _lines(path: Path, benchmark: Benchmark) -> list[dict[str, JsonValue]]:
    try:
        text = path.read_text(encoding="utf-8").splitlines()
        found = [json.loads(line) for line in text if line.strip()]
    except ValueError as error:
        raise EvaluationError(f"{benchmark.task}: {path} is not whole ({error})") from None
    return [line for line in found if isinstance(line, dict)]


def _count(results: Line, lines: Sequence[Line], benchmark: Benchmark) -> None:
    """As many samples as lmms-eval says that it took."""
    counts = _at(_at(results.get("n-samples"), benchmark.task), "effective")
    if not isinstance(counts, int | float) or int(counts) != len(lines):
        raise EvaluationError(
            f"{benchmark.task}: {len(lines)} samples where lmms-eval took {counts} -> samples are "
            "missing; run it again with --resume"
        )


def _question(line: Line, benchmark: Benchmark, images: Mapping[JsonValue, str]) -> Question:
    number = line.get("doc_id")
    scored = _metric(line, benchmark)
    category = str(_at(scored, "category") or "") if benchmark.name == MME else ""
    pair = str(_at(scored, "question_id") or "") if benchmark.name == MME else ""
    return Question(
        id=f"{benchmark.task}/{number}",
        benchmark=benchmark.name,
        image=f"{benchmark.task}/{images.get(number) or f'#{number}'}",
        category=category,
        pair=f"{category}/{pair}" if pair else "",
    )


def _answer(line: Line, benchmark: Benchmark, case: str, question: str) -> Answer:
    said = _texts(line.get("filtered_resps")) or _texts(line.get("resps"))
    counts = line.get("token_counts")
    tokens = _at(counts[0], "input_tokens") if isinstance(counts, list) and counts else None
    failure = _failure([*said, *_texts(line.get("resps"))], tokens)
    if failure is not None:
        return Answer(case=case, question=question, failure=failure)
    return Answer(
        case=case,
        question=question,
        score=_score(_metric(line, benchmark)),
        prompt_tokens=int(tokens) if isinstance(tokens, int | float) else None,
        said=said[0],
    )


def _failure(texts: Sequence[str], tokens: JsonValue) -> str | None:
    """Why there is no answer; what is logged as the response has been through a task's filters."""
    failure = next((text for text in texts if text.startswith(FAILED)), None)
    if failure is not None:
        return failure[:300]
    if not texts:
        return "no answer is recorded"
    return None if tokens else "no prompt tokens are counted: the request failed"


def _metric(line: Line, benchmark: Benchmark) -> JsonValue:
    return next((line[name] for name in benchmark.metrics if name in line), None)


def _score(value: JsonValue) -> float | None:
    """A metric's share of one sample: a number, or the ``score`` of a record."""
    if isinstance(value, dict):
        value = value.get("score")
    return float(value) if isinstance(value, bool | int | float) else None


def _total(results: Line, benchmark: Benchmark, case: str, count: int) -> Total:
    """The sum of the metrics; a key of results is ``metric,filter``."""
    found = _at(results.get("results"), benchmark.task)
    values = []
    for metric in benchmark.metrics:
        known = found.items() if isinstance(found, dict) else ()
        value = next((v for key, v in known if key.partition(",")[0] == metric), None)
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
    """Every text within nested lists: the shape depends on how many requests a sample has."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for part in value for text in _texts(part)]
    return []


def _at(value: JsonValue, key: str) -> JsonValue:
    return value.get(key) if isinstance(value, dict) else None
