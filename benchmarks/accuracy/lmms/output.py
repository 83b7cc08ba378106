"""What lmms-eval leaves behind, as records: `*_results.json` and `*_samples_TASK.jsonl`.

Knows nothing about processes. lmms-eval scores a request that failed as if its text were an answer;
here it is a failure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from benchmarks.accuracy.errors import EvaluationError
from benchmarks.accuracy.lmms.benchmarks import Benchmark
from benchmarks.accuracy.records import MME, Answer, Question, Total

FAILED = ("[LMMS_EVAL_REQUEST_FAILED", "[LMMS_EVAL_BUDGET_EXCEEDED]")
"""What stands in place of an answer that never came."""

_IMAGES = ("image_id", "imageId", "image_source", "image", "img_id", "filename")
"""Where tasks name the image of a question; questions about one image are resampled together."""

Line = Mapping[str, JsonValue]


@dataclass(frozen=True)
class Output:
    """One task of one case; without a total where a request failed."""

    questions: Sequence[Question]
    answers: Sequence[Answer]
    total: Total | None


def read_output(folder: Path, benchmark: Benchmark, case: str) -> Output:
    """Parse what one run wrote; raises :class:`EvaluationError` where something is missing."""
    results = _object(_only(folder, "*_results.json", benchmark), benchmark)
    lines = _lines(_only(folder, f"*_samples_{benchmark.task}.jsonl", benchmark), benchmark)
    _count(results, lines, benchmark)
    kept = [line for line in lines if any(metric in line for metric in benchmark.metrics)]
    questions = [_question(line, benchmark) for line in kept]
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
            "one -> its log lies there; mend that and add --resume"
        )
    return found[0]


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


def _question(line: Line, benchmark: Benchmark) -> Question:
    number = line.get("doc_id")
    scored = _metric(line, benchmark)
    category = str(_at(scored, "category") or "") if benchmark.name == MME else ""
    pair = str(_at(scored, "question_id") or "") if benchmark.name == MME else ""
    doc = line.get("doc")
    named = (str(_at(doc, key)) for key in _IMAGES if isinstance(_at(doc, key), str | int))
    image = pair or next(named, f"#{number}")
    return Question(
        id=f"{benchmark.task}/{number}",
        benchmark=benchmark.name,
        image=f"{benchmark.task}/{image}",
        category=category,
        pair=f"{category}/{pair}" if pair else "",
    )


def _answer(line: Line, benchmark: Benchmark, case: str, question: str) -> Answer:
    said = _texts(line.get("filtered_resps")) or _texts(line.get("resps"))
    every = [*_texts(line.get("resps")), *said]
    failure = next((text for text in every if text.startswith(FAILED)), None)
    if not every:
        failure = "no answer is recorded"
    if failure is not None:
        return Answer(case=case, question=question, failure=failure[:300])
    counts = line.get("token_counts")
    tokens = _at(counts[0], "input_tokens") if isinstance(counts, list) and counts else None
    return Answer(
        case=case,
        question=question,
        score=_score(_metric(line, benchmark)),
        prompt_tokens=int(tokens) if isinstance(tokens, int | float) and tokens else None,
        said=said[0],
    )


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
