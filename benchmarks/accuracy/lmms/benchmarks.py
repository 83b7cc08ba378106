"""The paper's 14 benchmarks as tasks of lmms-eval: which task, which metric, in which unit.

Knows nothing about processes or files. Names are the columns of the paper's tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.accuracy.records import MME
from vllm_autoprune.errors import ConfigError, Problem

PINNED = "0.7.3"
"""The version of lmms-eval whose tasks, metrics and output these are."""


@dataclass(frozen=True)
class Benchmark:
    """One column: the sum of ``metrics`` of a task, times ``scale``; none: the task's first."""

    name: str
    task: str
    metrics: tuple[str, ...]
    scale: float = 100.0
    mean: bool = True
    """Whether the metric is the mean of the scores of single answers."""
    note: str = ""


_EXACT = ("exact_match",)

BENCHMARKS: tuple[Benchmark, ...] = (
    Benchmark("VQAv2", "vqav2_val", _EXACT, note="val; test-dev is by submission only"),
    Benchmark("GQA", "gqa", _EXACT),
    Benchmark("VizWiz", "vizwiz_vqa_val", _EXACT, note="val; test is by submission only"),
    Benchmark("SQA-IMG", "scienceqa_img", _EXACT),
    Benchmark("TextVQA", "textvqa_val", _EXACT, note="no OCR tokens in the prompt"),
    Benchmark("POPE", "pope", ("pope_f1_score",), mean=False, note="F1; samples: accuracy"),
    Benchmark(MME, "mme", ("mme_perception_score",), 1.0, mean=False, note="perception"),
    Benchmark("MMB-EN", "mmbench_en_dev", ("gpt_eval_score",), 1.0, mean=False, note="judge"),
    Benchmark("MMB-CN", "mmbench_cn_dev", ("gpt_eval_score",), 1.0, mean=False, note="judge"),
    Benchmark("MM-Vet", "mmvet", ("gpt_eval_score",), 1.0, note="judge"),
    Benchmark("ChartQA", "chartqa", ("relaxed_overall",)),
    Benchmark("AI2D", "ai2d", _EXACT),
    Benchmark("HallBench", "hallusion_bench_image", ("aAcc",), 1.0, mean=False, note="judge"),
    Benchmark("OCRBench", "ocrbench", ("ocrbench_accuracy",), mean=False, note="of 1,000 always"),
)

PAPER = {
    "paper": tuple(one.name for one in BENCHMARKS),
    "paper-llava": tuple(one.name for one in BENCHMARKS[:10]),
    "paper-qwen": ("TextVQA", "ChartQA", "AI2D", "HallBench", MME, "MMB-EN", "MMB-CN"),
}
"""Sets of columns: all of them, and those of the tables on LLaVA and on Qwen."""


def chosen(
    names: str, *, cognition: bool = False, own: Sequence[Benchmark] = ()
) -> Sequence[Benchmark]:
    """Benchmarks by column, task or set, with commas between; in the order of the paper.

    ``cognition``: MME counts it too, as on Qwen. ``own`` are further ones, which come last. Raises
    :class:`ConfigError`.
    """
    every = [*BENCHMARKS, *own]
    wanted: set[str] = set()
    unknown = []
    for name in filter(None, names.split(",")):
        match = [one.name for one in every if name.lower() in (one.name.lower(), one.task)]
        columns = PAPER.get(name, tuple(match))
        wanted |= set(columns)
        if not columns:
            unknown.append(name)
    if unknown or not wanted:
        known = ", ".join([*PAPER, *(one.task for one in every)])
        what = f"does not know {', '.join(unknown)}" if unknown else "names no benchmark"
        fix = f"use: {known}; a task of your own needs --include-path"
        raise ConfigError("eval", [Problem(f"--suite lmms:{names}", what, fix)])
    found = [one for one in every if one.name in wanted]
    return [_with_cognition(one) if one.name == MME and cognition else one for one in found]


def _with_cognition(mme: Benchmark) -> Benchmark:
    metrics = ("mme_perception_score", "mme_cognition_score")
    return Benchmark(mme.name, mme.task, metrics, mme.scale, mme.mean, "perception and cognition")
