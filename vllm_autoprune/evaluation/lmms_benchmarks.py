"""Benchmarks of lmms-eval by the columns of the paper's tables."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.journal import (
    MME,
)

PINNED = "0.7.3"
"""The version of lmms-eval whose tasks, metrics and output files are supported."""


@dataclass(frozen=True)
class Benchmark:
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
BENCHMARKS: tuple[Benchmark, ...] = (
    Benchmark("VQAv2", "vqav2_val", _EXACT),
    Benchmark("GQA", "gqa", _EXACT),
    Benchmark("VizWiz", "vizwiz_vqa_val", _EXACT),
    Benchmark("SQA-IMG", "scienceqa_img", _EXACT),
    Benchmark("TextVQA", "textvqa_val", _EXACT),
    Benchmark("POPE", "pope", ("pope_f1_score",)),
    Benchmark(MME, "mme", ("mme_perception_score", "mme_cognition_score"), 1.0),
    Benchmark("MMB-EN", "mmbench_en_dev", _GPT, 1.0, judge_path=_CHAT),
    Benchmark("MMB-CN", "mmbench_cn_dev", _GPT, 1.0, judge_path=_CHAT),
    Benchmark("MM-Vet", "mmvet", _GPT, 1.0, judge_path=""),
    Benchmark("ChartQA", "chartqa", ("relaxed_overall",)),
    Benchmark("AI2D", "ai2d", _EXACT),
    Benchmark("HallBench", "hallusion_bench_image", ("aAcc",), 1.0, judge_path=_CHAT),
    Benchmark("OCRBench", "ocrbench", ("ocrbench_accuracy",)),
)

BOXES = "ACC@0.5"
"""Suffix of metrics that are the share of boxes whose IoU with the true box is at least 0.5."""

# Tasks of 0.7.3 that ask for boxes; its refcoco_bbox_val and the like ask for captions. Prompts of
# _REC give one expression and ask for fractions of the image's sides; prompts of _JSON give all
# expressions and ask for JSON in pixels or thousandths.
_REC = ("refcoco_" + BOXES,)
_JSON = ("refcoco_grounding_" + BOXES,)
_GROUNDING = tuple(
    Benchmark(f"{task}_{split}", f"{task}_{split}", metrics)
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
) -> list[Benchmark]:
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
    selected += [Benchmark(name, name) for name in unknown]
    metrics = slice(None) if cognition else slice(1)
    return [dataclasses.replace(row, metrics=row.metrics[metrics]) for row in selected]
