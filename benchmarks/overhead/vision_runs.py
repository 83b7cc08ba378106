"""A process of its own that counts runs of the vision tower: `... vision_runs MODEL TOWER`.

Knows nothing about the report; its last line is JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence

from benchmarks.overhead.content import picture

IMAGES, QUESTIONS, MORE = 4, 5, 60
CACHE_GB = 0.002
SIDE = 168


def main(arguments: Sequence[str]) -> None:
    """Ask, count, print."""
    model, tower = arguments
    # The engine has to live in this process to be looked into.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    print(json.dumps(count(model, tower)))


def count(model: str, tower: str) -> Mapping[str, int]:
    """Runs of the vision tower for first and for further questions, and what the cache holds."""
    from vllm import LLM, SamplingParams

    settings = {"state": "autoprune", "text_tower": tower, "feature_cache_gb": CACHE_GB}
    llm = LLM(
        model=model,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=2048,
        additional_config={"autoprune": settings},
    )
    vision = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model.autoprune
    asked = 0

    def ask(seed: int) -> int:
        nonlocal asked
        asked += 1
        before: int = vision.runs
        parts = [
            {"type": "image_pil", "image_pil": picture(seed, SIDE, SIDE)},
            {"type": "text", "text": f"What is number {asked} here?"},
        ]
        sampling = SamplingParams(temperature=0, max_tokens=1)
        llm.chat([[{"role": "user", "content": parts}]], sampling, use_tqdm=False)
        return vision.runs - before

    first = sum(ask(seed) for seed in range(IMAGES))
    later = sum(ask(seed) for _ in range(1, QUESTIONS) for seed in range(IMAGES))
    most = 0
    for seed in range(IMAGES, IMAGES + MORE):
        ask(seed)
        most = max(most, vision.cache.held)
    return {"first": first, "later": later, "held": most, "limit": vision.cache.limit}


if __name__ == "__main__":
    main(sys.argv[1:])
