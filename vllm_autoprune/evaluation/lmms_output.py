"""Output of lmms-eval: the files of one run, as questions and scored answers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from vllm_autoprune.evaluation.journal import (
    MME,
    Answer,
    EvaluationError,
    Question,
    Total,
)
from vllm_autoprune.evaluation.lmms_benchmarks import BOXES, Benchmark

IMAGES = "images.jsonl"
LOG = "lmms-eval.log"
"""Files of a run: the image of each question, written by our plugin, and what lmms-eval prints."""

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


def compute_iou(box: Sequence[float], other: Sequence[float]) -> float:
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

    benchmark: Benchmark
    samples: Sequence[_Sample]
    images: Mapping[int | str, str | None]
    metrics: Sequence[str]
    points: float
    """The sum of the metrics over all samples, as lmms-eval reports it."""
    log: str
    """What lmms-eval printed; empty for a task that asks no judge."""

    @classmethod
    def read(cls, folder: Path, benchmark: Benchmark) -> _Output:
        """Read the files in ``folder``; raises OSError or ValueError if one is missing or wrong."""
        task = benchmark.task
        (path,) = folder.rglob(f"*_samples_{task}.jsonl")
        # Tasks write more files of such names: MMBench's submissions/mmbench_en_dev_results.json.
        stamp = path.name.removesuffix(f"_samples_{task}.jsonl")
        text = path.with_name(f"{stamp}_results.json").read_text("utf-8")
        summary = _Summary.model_validate_json(text)
        samples = _read_lines(path, _Sample)
        images = _read_lines(folder / IMAGES, _ImageOfSample)
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
            log = (folder / LOG).read_text(errors="replace")
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
        if metric.endswith(BOXES):
            boxes = _BoxJudgement.model_validate(judgement)
            score = compute_iou(boxes.bbox, boxes.pred) >= 0.5
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


def read_output(
    folder: Path, benchmark: Benchmark, case: str
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
        if output.metrics[0].endswith(BOXES) and len(scored) == len(answers):
            _check_total(scored, output.points, output.metrics[0])
    except (OSError, ValueError, OverflowError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if isinstance(error, ValidationError):
            (detail, *_) = error.errors(include_url=False)
            reason = f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}"
        what = f"its output is incomplete ({reason})"
        fix = f"see {folder / LOG}, fix that and add --resume"
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
