"""Benchmarks as tasks of lmms-eval: the paper's 14, named as its columns, and tasks of a folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.records import MME

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
    "paper": tuple(one.name for one in BENCHMARKS),
    "paper-llava": tuple(one.name for one in BENCHMARKS[:10]),
    "paper-qwen": ("TextVQA", "ChartQA", "AI2D", "HallBench", MME, "MMB-EN", "MMB-CN"),
}
"""Sets of columns: all of them, and those of the paper's tables on LLaVA and on Qwen."""

_TASK = re.compile(r"""^task:\s*["']?(?P<name>[\w.-]+)["']?\s*$""", re.MULTILINE)


def select_benchmarks(
    names: str, *, cognition: bool = False, own: Sequence[Benchmark] = ()
) -> Sequence[Benchmark]:
    """Benchmarks by column, task or set, separated by commas, in the order of the paper.

    ``cognition``: add it to MME, as on Qwen. ``own``: further benchmarks, which come last. Raises
    :class:`ConfigError`.
    """
    available = [*BENCHMARKS, *own]
    selected: set[str] = set()
    unknown = []
    for name in filter(None, names.split(",")):
        match = [one.name for one in available if name.lower() in (one.name.lower(), one.task)]
        columns = COLUMN_SETS.get(name, tuple(match))
        selected |= set(columns)
        if not columns:
            unknown.append(name)
    if unknown or not selected:
        options = ", ".join([*COLUMN_SETS, *(one.task for one in available)])
        what = f"does not know {', '.join(unknown)}" if unknown else "names no benchmark"
        fix = f"use: {options}; a task of your own needs --include-path"
        raise ConfigError("eval", [Problem(f"--suite lmms:{names}", what, fix)])
    benchmarks = [one for one in available if one.name in selected]
    return [_with_cognition(one) if one.name == MME and cognition else one for one in benchmarks]


def _with_cognition(mme: Benchmark) -> Benchmark:
    metrics = ("mme_perception_score", "mme_cognition_score")
    return Benchmark(mme.name, mme.task, metrics, mme.scale, mme.mean, "perception and cognition")


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
