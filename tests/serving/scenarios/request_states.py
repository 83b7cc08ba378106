"""States in requests to a server of another state, compared with servers of those states."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from benchmarks.yardsticks.examples import Example
from tests.serving.engine import (
    STATE,
    Answer,
    alone,
    examples,
    forget,
    generate,
    picture,
    prompt,
    release,
    start,
)
from tests.serving.interleave import TILED, interleaved, interleaved_tiles
from tests.serving.scenarios import Report, scenario
from tests.serving.selection_recorder import watch
from vllm_autoprune.tpdsl.loading import load_state

if TYPE_CHECKING:
    from vllm import LLM

BUDGETS = (8, 24)
STATES = ("autoprune", "visionzip", "fastv")


@scenario
def request_states() -> Report:
    """Answers and kept tokens of three states at two budgets, of engines and of requests.

    ``native``: as the state of an engine. ``together``: as the states of requests, all at once, to
    an engine that has none of them as its own. ``again``: one by one, nothing cached.
    ``batches``: budgets in each step. ``cached``: tokens from the prefix cache, for a state asked
    first, again, and another state.
    """
    questions = examples(1)[:2]
    report: dict[str, Any] = {"native": {}, "together": {}, "again": {}}
    for name in STATES:
        llm = start({**STATE, "state": name, "requests": "budget"})
        for budget in BUDGETS:
            for i, example in enumerate(questions):
                (answer,) = generate(llm, [prompt(example, budget)])
                report["native"][f"{name}/{budget}/{i}"] = answer.plain()
        release(llm)
    llm = start({**STATE, "state": alone("divprune"), "requests": "states"})
    seen = watch()
    keys = [f"{name}/{k}/{i}" for name in STATES for k in BUDGETS for i in range(len(questions))]
    answers = generate(llm, [_bringing(key, questions) for key in keys])
    report["together"] = {k: a.plain() for k, a in zip(keys, answers, strict=True)}
    report["batches"] = list(seen.budgets)
    forget(llm)
    report["again"] = {key: _answer(llm, key, questions).plain() for key in keys}
    first, again, other = "visionzip/24/0", "visionzip/24/0", "autoprune/24/0"
    forget(llm)
    report["cached"] = [_answer(llm, key, questions).cached for key in (first, again, other)]
    report["images"] = _several(llm, questions)
    return report


def _answer(llm: LLM, key: str, questions: list[Example]) -> Answer:
    (answer,) = generate(llm, [_bringing(key, questions)])
    return answer


def _bringing(key: str, questions: list[Example]) -> dict[str, object]:
    """A raw prompt that brings a state by its name, or whole."""
    name, budget, i = key.split("/")
    whole = json.loads(load_state(name).dumps())
    policy = name if i == "0" else whole
    entry = {"state": policy, "budget": int(budget)}
    return {**prompt(questions[int(i)]), "mm_processor_kwargs": {"autoprune": entry}}


def _several(llm: LLM, questions: list[Example]) -> Report:
    """Prompt tokens of two images under each form of a budget."""
    scenes = [picture(examples(3)[0].image), picture(examples(3)[-1].image)]
    counts = {}
    for budget in (8, [8, 20], {"shared": 21}, {"shared": 1000}):
        raw = {
            "prompt": "USER: <image><image>\nWhich? ASSISTANT:",
            "multi_modal_data": {"image": scenes},
            "mm_processor_kwargs": {"autoprune": {"budget": budget}},
        }
        counts[json.dumps(budget)] = generate(llm, [raw])[0].prompt_tokens
    return counts


@scenario
def every_kind() -> Report:
    """Mixed concurrent requests, compared with single ones."""
    return interleaved(64)


@scenario
def mixed_tiles() -> Report:
    """By backbone: concurrent requests with images of mixed tiles, compared with single ones."""
    return {name: interleaved_tiles(name, 24) for name in TILED}
