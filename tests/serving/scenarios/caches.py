"""Cache sharing between questions about one image, and relevance without a text tower."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from tests.serving.engine import (
    STATE,
    alone,
    ask,
    chat,
    examples,
    forget,
    model_of,
    start,
    turn,
    vision_runs,
)
from tests.serving.scenarios import Report, scenario
from tests.serving.selection_recorder import watch
from vllm_autoprune.serving.api import planner
from vllm_autoprune.serving.plan import make_cache_identity


@scenario
def interleaved() -> Report:
    """Alternating questions about several images, with prefix caching.

    ``orders`` has answers about two images in both orders, each also with empty caches.
    """
    llm = start({**STATE, "budget": 32})
    before = vision_runs(llm)
    report: dict[str, Any] = {"first": [], "again": [], "alone": [], "answers": []}
    questions = examples(3)
    for example in questions:
        report["first"].append(ask(llm, example).plain())
        report["answers"].append(example.answer)
    report["vision_runs"] = vision_runs(llm) - before
    report["images"] = len({e.image_id for e in questions})
    for example in reversed(questions):
        report["again"].insert(0, ask(llm, example).plain())
    report["vision_runs_again"] = vision_runs(llm) - before
    for example in questions:
        forget(llm)
        report["alone"].append(ask(llm, example).plain())
    one, other = questions[0].image, questions[-1].image
    pairs = [[[turn("Which shape is red?", *pair)]] for pair in ((one, other), (other, one))]
    forget(llm)
    report["orders"] = [chat(llm, pair)[0].plain() for pair in pairs]
    for pair in pairs:
        forget(llm)
        report["orders"].append(chat(llm, pair)[0].plain())
    return report


@scenario
def instruction_left_out() -> Report:
    """Negative control: :func:`interleaved` without the instruction in the cache identity."""

    def without(image: str, served: str, budget: int, keep: Any, ids: Any, core: int) -> str:
        return make_cache_identity(image, served, budget, keep, None, core)

    llm = start({**STATE, "budget": 4})
    questions = examples(6)
    right = [ask(llm, e).plain() for e in questions]
    llm.reset_prefix_cache()
    with patch.object(planner, "make_cache_identity", without):
        wrong = [ask(llm, e).plain() for e in questions]
    return {"right": right, "wrong": wrong, "answers": [e.answer for e in questions]}


@scenario
def blind_state() -> Report:
    """A state that does not read the instruction: questions about one image share its rows."""
    llm = start({"state": alone("divprune"), "budget": 32})
    before = vision_runs(llm)
    questions = examples(1)
    return {
        "answers": [ask(llm, e).plain() for e in questions],
        "vision_runs": vision_runs(llm) - before,
    }


@scenario
def embeddings_for_relevance() -> Report:
    """Relevance from the language model's input embeddings, without a text tower."""
    llm = start({"state": "autoprune", "budget": 32})
    seen = watch()
    answers = [ask(llm, e).plain() for e in examples(2)]
    vision = model_of(llm).autoprune
    assert vision is not None
    relevance = vision.relevance()
    assert relevance is not None
    return {
        "answers": answers,
        "kind": type(relevance).__name__,
        "sign": relevance.sign,
        "kept": list(seen.kept.values()),
    }
