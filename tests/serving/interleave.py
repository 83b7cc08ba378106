"""Mixed concurrent requests, compared with single ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from benchmarks.yardsticks.examples import Example, format_prompt
from tests.serving.engine import (
    STATE,
    TOKENS,
    built,
    examples,
    forget,
    model_of,
    picture,
    raw_prompt,
    release,
    start,
    watch,
)
from vllm_autoprune.tpdsl.loading import load_state

if TYPE_CHECKING:
    from vllm import LLM

Key = tuple[Any, ...]
"""What tells a request from others: the arguments of what renders its prompt."""

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

BUDGETS = (4, 8, 16, 31, 64, TOKENS)
POLICIES = (
    *(None, "visionzip", "fastv", "prumerge_plus", "dart", "divprune", "off", "random", "resized"),
    *CORES,
)
LATER_TURNS = (0, 0, 0, 1, 2)
"""Turns of a conversation after the one with the image."""

RECALLS = (0, 3, 8)

TILED = ("llava_next", "llava_onevision", "idefics3", "internvl")
SIZES = ((56, 56), (100, 48), (48, 100), (120, 110), (200, 112), (96, 208), (330, 300))
"""Pictures of mixed tiles."""
TEXTS = ("what colour is the cat", "how many dog are there", "which shape is on the left")
TILED_POLICIES = (None, None, "divprune", "cdpruner", "off", "random")

ENGINE: Mapping[str, object] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 640,
}


def interleaved(count: int) -> dict[str, Any]:
    """Requests of all kinds to mini-LLaVA; a report of :func:`_compare`."""
    random, questions = Random(0), examples(6)
    keys: list[Key] = [
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


def interleaved_tiles(backbone: str, count: int) -> dict[str, Any]:
    """Requests with images of mixed tiles to a tiny model, with a KV cache that is too small.

    A report of :func:`_compare`.
    """
    from vllm_autoprune.selftest.tiny_engine import picture as draw_picture

    random = Random(0)
    pictures = [draw_picture(*size, number) for number, size in enumerate(SIZES)]
    keys: list[Key] = [
        (
            tuple(random.randrange(len(SIZES)) for _ in range(random.choice((1, 1, 2, 3)))),
            random.choice(TEXTS),
            random.choice((4, 7, 16)),
            random.choice(TILED_POLICIES),
        )
        for _ in range(count)
    ]
    # One request of three whole images fits, but not sixteen requests.
    small = {"max_model_len": 640, "num_gpu_blocks_override": 24}
    settings = {"state": "autoprune", "budget": 8, "requests": "states"}
    llm = start(settings, model=str(built(backbone)), **{**ENGINE, **small})
    mark = model_of(llm).get_placeholder_str("image", 1)

    def render(shown: Sequence[int], text: str, budget: int, policy: str | None) -> Any:
        asked = {"instructions": [text] * len(shown), **_choose(budget, policy)}
        images = [pictures[number] for number in shown]
        return raw_prompt(f"user {f'{mark} ' * len(shown)}{text} you", images, **asked)

    report = _compare(llm, keys, {key: render(*key) for key in keys})
    release(llm)
    return report


def _compare(llm: LLM, keys: Sequence[Key], prompts: Mapping[Key, object]) -> dict[str, Any]:
    """Answers to requests sent at once, compared with those to single requests without caches.

    ``apart``: requests whose answers differ; ``kept_apart``: images that kept other tokens.
    ``at_once``: the most images in one selection, ``budgets_at_once``: the most values of K.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def complete(chosen: Sequence[Key]) -> list[list[int]]:
        outputs: Any = llm.generate([prompts[key] for key in chosen], sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    seen = watch()
    together = complete(keys)
    kept = dict(seen.kept)
    at_once = max(map(len, seen.budgets))
    budgets_at_once = max(len({*budgets}) for budgets in seen.budgets)
    seen.kept.clear()
    alone = {}
    for key in prompts:
        forget(llm)
        (alone[key],) = complete([key])
    return {
        "images_compared": len(kept.keys() & seen.kept.keys()),
        "apart": [
            {"request": list(key), "together": answer, "alone": alone[key]}
            for key, answer in zip(keys, together, strict=True)
            if answer != alone[key]
        ],
        # A plan that no single request had is that of an image whose tensors depend on its
        # neighbours.
        "kept_apart": [str(plan) for plan, rows in kept.items() if seen.kept.get(plan) != rows],
        "at_once": at_once,
        "budgets_at_once": budgets_at_once,
    }


def render_prompt(
    questions: Sequence[Example],
    number: int,
    budget: int,
    policy: str | None,
    later: int,
    recall: int,
) -> dict[str, Any]:
    """A conversation about an example's image: K, a state or control, later turns and their K_r."""
    example = questions[number]
    turns = [questions[(number + at + 1) % len(questions)].question for at in range(later)]
    text = format_prompt(example.question)
    text += "".join(f" red</s>USER: <image>\n{turn} ASSISTANT:" for turn in turns)
    recalled = {"recall": recall, "recall_turns": [{"images": 1, "text": turn} for turn in turns]}
    return raw_prompt(text, picture(example.image), **_choose(budget, policy), **recalled)


def _choose(budget: int, policy: str | None) -> dict[str, object]:
    """A request's pruning entry."""
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
