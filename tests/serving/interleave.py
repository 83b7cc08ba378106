"""``python -m tests.serving.interleave``: compare mixed concurrent requests with single ones."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM

BUDGETS = (4, 8, 16, 31, 64, 144)
POLICIES = (
    None,
    "visionzip",
    "fastv",
    "prumerge_plus",
    "dart",
    "divprune",
    "off",
    "random",
    "resized",
    "cdpruner with a core",
    "autoprune with a core",
)
LATER_TURNS = (0, 0, 0, 1, 2)
"""Turns of a conversation after the one with the image."""

RECALLS = (0, 3, 8)
CORES: Mapping[str, Mapping[str, object]] = {
    "cdpruner with a core": {"share": 0.75},
    "autoprune with a core": {
        "share": 0.5,
        "policy": {"name": "visionzip"},
        "cover": 0.4,
        "strength": 0.2,
    },
}
"""Cores of states that requests bring, by their name in a request's key."""


def interleaved(count: int, seed: int = 0) -> dict[str, Any]:
    """``apart``: requests whose answers differ; ``requests``, ``distinct``: their numbers.

    ``kept_apart``: images that kept other tokens; ``at_once``: the most images in one selection.
    """
    from tests.serving.engine import STATE, examples, start
    from tests.serving.selection_recorder import watch

    random = Random(seed)
    questions = examples(6)
    keys = [
        (
            random.randrange(len(questions)),
            random.choice(BUDGETS),
            random.choice(POLICIES),
            random.choice(LATER_TURNS),
            random.choice(RECALLS),
        )
        for _ in range(count)
    ]
    llm = start(
        {**STATE, "requests": "states"},
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=640,
    )
    seen = watch()
    prompts = {key: render_prompt(questions, *key) for key in keys}
    together = [tuple(ids) for ids in _tokens(llm, [prompts[key] for key in keys])]
    kept, at_once = dict(seen.kept), max(map(len, seen.budgets))
    seen.kept.clear()
    alone = {key: _alone(llm, prompt) for key, prompt in prompts.items()}
    apart = [
        {"request": list(key), "together": answer, "alone": alone[key]}
        for key, answer in zip(keys, together, strict=True)
        if answer != alone[key]
    ]
    parts = Counter(plan.part for plan in kept)
    kept_apart = [str(plan) for plan, rows in kept.items() if seen.kept.get(plan, rows) != rows]
    return {
        "requests": count,
        "distinct": len(prompts),
        "images_compared": len(kept.keys() & seen.kept.keys()),
        "apart": apart,
        "kept_apart": kept_apart,
        "at_once": at_once,
        "parts": dict(parts),
    }


def render_prompt(
    questions: Sequence[Any], which: int, budget: int, policy: str | None, later: int, recall: int
) -> dict[str, object]:
    from benchmarks.minillava import vocabulary
    from tests.serving.engine import picture
    from vllm_autoprune.tpdsl.states.load import load_state

    entry: dict[str, object] = {"budget": budget}
    if policy == "off":
        entry = {"enabled": False}
    elif policy in ("random", "resized"):
        entry["keep"] = policy
    elif policy is not None and policy in CORES:
        document = load_state(policy.partition(" ")[0]).model_dump(mode="json")
        entry["state"] = {**document, "core": CORES[policy]}
    elif policy is not None:
        entry["state"] = policy
    text = vocabulary.prompt(questions[which].question)
    turns = [questions[(which + at + 1) % len(questions)].question for at in range(later)]
    text += "".join(f" red</s>USER: <image>\n{turn} ASSISTANT:" for turn in turns)
    entry["recall"] = recall
    entry["recall_turns"] = [{"images": 1, "text": turn} for turn in turns]
    return {
        "prompt": text,
        "multi_modal_data": {"image": picture(questions[which].image)},
        "mm_processor_kwargs": {"autoprune": entry},
    }


def _alone(llm: LLM, prompt: dict[str, object]) -> tuple[int, ...]:
    from tests.serving.engine import forget

    forget(llm)
    (ids,) = _tokens(llm, [prompt])
    return tuple(ids)


def _tokens(llm: LLM, prompts: Sequence[dict[str, object]]) -> list[Sequence[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    outputs = llm.generate(list(prompts), sampling, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.serving.interleave", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    report = interleaved(options.count, options.seed)
    print(json.dumps(report, indent=2))
    print(f"{time.monotonic() - begun:.0f} s")
    return 1 if report["apart"] or report["kept_apart"] else 0


if __name__ == "__main__":
    # vLLM reads this variable during its import.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    sys.exit(main())
