"""``python -m tests.serving.interleave``: compare mixed concurrent requests with single ones."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

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
ENGINE: Mapping[str, object] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 640,
}


TILED = ("llava_next", "llava_onevision", "idefics3", "internvl")
SIZES = ((56, 56), (100, 48), (48, 100), (120, 110), (200, 112), (96, 208), (330, 300))
"""Pictures of mixed tiles."""
TEXTS = ("what colour is the cat", "how many dog are there", "which shape is on the left")
TILED_POLICIES = (None, None, "divprune", "cdpruner", "off", "random")


def interleaved(count: int, seed: int = 0) -> dict[str, Any]:
    """Requests of all kinds to mini-LLaVA; a report of :func:`_compare`."""
    from tests.serving.engine import STATE, examples, start

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
    llm = start({**STATE, "requests": "states"}, **ENGINE)
    return _compare(llm, keys, {key: render_prompt(questions, *key) for key in keys})


def interleaved_tiles(backbone: str, count: int, seed: int = 0) -> dict[str, Any]:
    """Requests with images of mixed tiles to a tiny model, with a KV cache that is too small.

    A report of :func:`_compare`.
    """
    from tests.serving.engine import model_of, release, start
    from vllm_autoprune.selftest.backbones import build
    from vllm_autoprune.selftest.tiny_engine import picture

    random = Random(seed)
    pictures = [picture(*size, number) for number, size in enumerate(SIZES)]
    keys = [
        (
            tuple(random.randrange(len(SIZES)) for _ in range(random.choice((1, 1, 2, 3)))),
            random.choice(TEXTS),
            random.choice((4, 7, 16)),
            random.choice(TILED_POLICIES),
        )
        for _ in range(count)
    ]
    with TemporaryDirectory() as folder:
        model = str(build(backbone, Path(folder)))
        settings = {"state": "autoprune", "budget": 8, "requests": "states"}
        # One request of three whole images fits, but not sixteen requests.
        small = {"max_model_len": 640, "num_gpu_blocks_override": 24}
        llm = start(settings, model=model, **{**ENGINE, **small})
        mark = model_of(llm).get_placeholder_str("image", 1)
        prompts: dict[tuple[Any, ...], dict[str, object]] = {
            key: {
                "prompt": f"user {f'{mark} ' * len(key[0])}{key[1]} you",
                "multi_modal_data": {"image": [pictures[which] for which in key[0]]},
                "mm_processor_kwargs": {
                    "autoprune": {"instructions": [key[1]] * len(key[0]), **_choose(*key[2:])}
                },
            }
            for key in keys
        }
        report = _compare(llm, keys, prompts)
        release(llm)
    return report


def _compare(
    llm: LLM, keys: Sequence[tuple[Any, ...]], prompts: Mapping[tuple[Any, ...], dict[str, object]]
) -> dict[str, Any]:
    """Answers to requests sent at once, compared with those to single requests without caches.

    ``apart``: requests whose answers differ; ``requests``, ``distinct``: their numbers.
    ``kept_apart``: images that kept other tokens; ``at_once``: the most images in one selection.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    from tests.serving.engine import watch

    seen, preempted = watch(), 0
    preempt = Scheduler._preempt_request

    def count_preemption(self: Scheduler, *args: Any, **named: Any) -> None:
        nonlocal preempted
        preempted += 1
        preempt(self, *args, **named)

    with patch.object(Scheduler, "_preempt_request", count_preemption):
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
    # A plan that no single request had is that of an image whose tensors depend on its neighbours.
    kept_apart = [str(plan) for plan, rows in kept.items() if seen.kept.get(plan) != rows]
    return {
        "requests": len(keys),
        "distinct": len(prompts),
        "images_compared": len(kept.keys() & seen.kept.keys()),
        "apart": apart,
        "kept_apart": kept_apart,
        "at_once": at_once,
        "preempted": preempted,
        "parts": dict(parts),
    }


def render_prompt(
    questions: Sequence[Any], which: int, budget: int, policy: str | None, later: int, recall: int
) -> dict[str, object]:
    from benchmarks.yardsticks.examples import format_prompt
    from tests.serving.engine import picture

    entry = _choose(budget, policy)
    text = format_prompt(questions[which].question)
    turns = [questions[(which + at + 1) % len(questions)].question for at in range(later)]
    text += "".join(f" red</s>USER: <image>\n{turn} ASSISTANT:" for turn in turns)
    entry["recall"] = recall
    entry["recall_turns"] = [{"images": 1, "text": turn} for turn in turns]
    return {
        "prompt": text,
        "multi_modal_data": {"image": picture(questions[which].image)},
        "mm_processor_kwargs": {"autoprune": entry},
    }


def _choose(budget: int, policy: str | None) -> dict[str, object]:
    """A request's pruning entry."""
    from vllm_autoprune.tpdsl.loading import load_state

    if policy == "off":
        return {"enabled": False}
    entry: dict[str, object] = {"budget": budget}
    if policy in ("random", "resized"):
        entry["keep"] = policy
    elif policy is not None and policy in CORES:
        document = load_state(policy.partition(" ")[0]).model_dump(mode="json")
        entry["state"] = {**document, "core": CORES[policy]}
    elif policy is not None:
        entry["state"] = policy
    return entry


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
    parser.add_argument("--tiles", choices=TILED, help="images of mixed tiles to this tiny model")
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    if options.tiles:
        report = interleaved_tiles(options.tiles, options.count, options.seed)
    else:
        report = interleaved(options.count, options.seed)
    print(json.dumps(report, indent=2))
    print(f"{time.monotonic() - begun:.0f} s")
    return 1 if report["apart"] or report["kept_apart"] else 0


if __name__ == "__main__":
    # vLLM reads this variable during its import.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    sys.exit(main())
