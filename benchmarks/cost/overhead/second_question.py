"""Runs of the vision tower for first and further questions on an image, and size of its cache.

They are counted in an engine in a process of its own, because servers do not report them; that
process is ``python -m benchmarks.cost.overhead.second_question MODEL TOWER``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence

from benchmarks.common.pictures import draw_picture
from benchmarks.common.progress import log_progress
from benchmarks.common.report import Claim, Section
from benchmarks.cost.overhead.settings import Settings
from benchmarks.server import run_engine
from vllm_autoprune.ops.dtype import choose_dtype
from vllm_autoprune.statistics import verdict_of

IMAGES, QUESTIONS, MORE = 4, 5, 60
CACHE_GB = 0.002
SIDE = 168


def measure(settings: Settings) -> Section:
    """Start the process and read its counts."""
    log_progress("second question: start an engine")
    line = run_engine(
        "benchmarks.cost.overhead.second_question",
        settings.model,
        settings.text_tower,
        log=settings.log("second-question"),
    )
    return build_section(json.loads(line))


def build_section(counted: Mapping[str, int]) -> Section:
    """Claims and figures."""
    later = IMAGES * (QUESTIONS - 1)
    mib = {name: counted[name] / (1 << 20) for name in ("held", "limit")}
    return Section(
        name="second-question",
        title="A second question on the same image",
        setup=[
            f"mini-LLaVA in one process; {IMAGES} images, {QUESTIONS} different questions on each",
            f"then {MORE} further images, more than the feature cache holds",
        ],
        claims=[
            Claim(
                f"the vision tower runs for the first question on an image ({IMAGES} times) "
                f"and for none of {later} further ones",
                f"{counted['first']} runs, then {counted['later']}",
                verdict_of((counted["first"], counted["later"]) == (IMAGES, 0)),
            ),
            Claim(
                f"the feature cache stays within its bound of {mib['limit']:.2f} MiB",
                f"at most {mib['held']:.2f} MiB",
                verdict_of(0 < counted["held"] <= counted["limit"]),
            ),
        ],
        tables=[],
        data=dict(counted),
    )


def count_vision_runs(model: str, tower: str) -> Mapping[str, int]:
    """Runs of the vision tower for first and further questions, and bytes in the cache."""
    from vllm import LLM, SamplingParams

    settings = {"state": "autoprune", "text_tower": tower, "feature_cache_gb": CACHE_GB}
    llm = LLM(
        model=model,
        enforce_eager=True,
        dtype=choose_dtype(),
        max_model_len=2048,
        additional_config={"autoprune": settings},
    )
    vision = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model.autoprune
    number = 0

    def count_runs(seed: int) -> int:
        nonlocal number
        number += 1
        before: int = vision.runs
        parts = [
            {"type": "image_pil", "image_pil": draw_picture(seed, SIDE, SIDE)},
            {"type": "text", "text": f"What is number {number} here?"},
        ]
        sampling = SamplingParams(temperature=0, max_tokens=1)
        llm.chat([[{"role": "user", "content": parts}]], sampling, use_tqdm=False)
        return vision.runs - before

    first = sum(count_runs(seed) for seed in range(IMAGES))
    later = sum(count_runs(seed) for _ in range(1, QUESTIONS) for seed in range(IMAGES))
    largest = 0
    for seed in range(IMAGES, IMAGES + MORE):
        count_runs(seed)
        largest = max(largest, vision.cache.used_bytes)
    return {"first": first, "later": later, "held": largest, "limit": vision.cache.limit}


def main(arguments: Sequence[str]) -> None:
    """Print the counts of one engine as JSON, in the last line."""
    model, tower = arguments
    print(json.dumps(count_vision_runs(model, tower)))


if __name__ == "__main__":
    main(sys.argv[1:])
