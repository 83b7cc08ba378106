"""Invariants 2 to 4: the plugin without a state changes nothing; caches share what they may.

That K >= N equals stock vLLM, and what chunked prefill, other questions and later turns change, is
what the selftest checks of every backbone, mini-LLaVA among them (``test_backbones.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest

from benchmarks.yardsticks.examples import Example, png_url
from tests.serving.conftest import V2_EXHAUSTIVE
from tests.serving.engine import (
    BLOCK,
    STATE,
    alone,
    ask,
    chat,
    examples,
    forget,
    release,
    start,
    turn,
    vision_runs,
    watch,
)
from tests.serving.scenarios import Report, Runner, scenario
from vllm_autoprune.serving.api import planner
from vllm_autoprune.serving.plan import make_cache_identity

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]


@scenario
def plain() -> Report:
    """Tokens and exact log-probabilities of a model without a state."""
    llm = start(None)
    conversations = [[turn(e.question, e.image)] for e in examples(2)]
    both = [turn("Which shape is red?", examples(2)[0].image, examples(2)[-1].image)]
    return [chat(llm, [each], tokens=8)[0] for each in (*conversations, both)]


@pytest.mark.parametrize("runner", V2_EXHAUSTIVE, indirect=True)
def test_without_a_state_the_plugin_changes_no_bit(runner: Runner) -> None:
    inert = runner.run("plain")
    absent = runner.run("plain", {"VLLM_AUTOPRUNE_DISABLE": "1"})
    assert inert == absent


@scenario
def caches() -> Report:
    """Answers to questions about several images and kept tokens; every prompt in one step.

    ``with`` and ``without`` prefix cache, multi-modal caches and feature cache.
    """
    off = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}
    return {
        "with": _answer_and_watch({}),
        "without": _answer_and_watch({"feature_cache_gb": 0}, **off),
    }


def _answer_and_watch(settings: Mapping[str, object], **options: object) -> Report:
    llm = start({**STATE, **settings}, max_num_batched_tokens=4096, **options)
    seen = watch()
    questions = examples(3)[:8]
    answers = [ask(llm, example) for example in questions]
    pair = turn("What digit is on the red shape?", questions[0].image, questions[-1].image)
    report = {
        "answers": [*answers, *chat(llm, [[pair]])],
        "kept": [[list(plan.instruction), rows] for plan, rows in seen.kept.items()],
    }
    release(llm)
    return report


def test_caches_do_not_change_what_is_kept(runner: Runner) -> None:
    report = runner.run("caches")
    kept = [{str(entry) for entry in report[how]["kept"]} for how in ("with", "without")]
    assert kept[0] == kept[1]
    answers = zip(report["with"]["answers"], report["without"]["answers"], strict=True)
    for with_cache, without in answers:
        assert with_cache["text"] == without["text"]
        assert with_cache["logprob"] == pytest.approx(without["logprob"], abs=2e-2)
        assert with_cache["prompt_tokens"] == without["prompt_tokens"]


def make_identity_without_question(
    image: str, served: str, budget: int, keep: Any, ids: Any, core: int
) -> str:
    """A cache identity as it must not be."""
    return make_cache_identity(image, served, budget, keep, None, core)


@scenario
def instruction_left_out() -> Report:
    """Answers to questions with the instruction in the cache identity, and without it."""
    llm = start({**STATE, "budget": 4})
    questions = examples(6)
    right = [ask(llm, e) for e in questions]
    llm.reset_prefix_cache()
    with patch.object(planner, "make_cache_identity", make_identity_without_question):
        wrong = [ask(llm, e) for e in questions]
    return {"right": right, "wrong": wrong, "answers": [e.answer for e in questions]}


def test_negative_control_without_the_instruction_in_the_identity(runner: Runner) -> None:
    """Shows that answers tell a missing instruction: a trained model then gives wrong ones."""
    report = runner.run("instruction_left_out")
    answers = zip(report["right"], report["wrong"], report["answers"], strict=True)
    assert any(right["text"] == answer != wrong["text"] for right, wrong, answer in answers)


@scenario
def blind_state() -> Report:
    """A state that does not read the instruction: questions about one image share its rows."""
    llm = start({"state": alone("divprune"), "budget": 32})
    runs = vision_runs(llm)
    cached = [ask(llm, example)["cached"] for example in examples(1)]
    return {"cached": cached, "vision_runs": vision_runs(llm) - runs}


def test_a_state_that_does_not_read_the_instruction_shares_across_questions(runner: Runner) -> None:
    report = runner.run("blind_state")
    assert report["cached"][0] == 0
    assert min(report["cached"][1:]) >= BLOCK
    assert report["vision_runs"] == 1


# ---- budgets by ``image_url.detail`` ----

DETAIL = {"low": 64, "high": 128}
BUDGET = 96


@scenario
def detail_budgets() -> Report:
    """Prompt tokens at each detail, and answers to a conversation one turn later.

    ``later``: a turn and what follows it, a text, or an image of another detail. ``other_detail``:
    the first turn again, its image with another detail.
    """
    llm = start({**STATE, "budget": BUDGET, "detail": DETAIL, "requests": "none"})
    example, other = examples(2)[0], examples(2)[-1]
    report: dict[str, Any] = {"later": []}
    report["tokens"] = {
        detail or "none": chat(llm, [[_turn(example, detail)]])[0]["prompt_tokens"]
        for detail in ("low", "high", "auto", None)
    }
    for later in ({"role": "user", "content": "And what is left of it?"}, _turn(other, "high")):
        forget(llm)
        (answer,) = chat(llm, [[_turn(example, "low")]])
        said = {"role": "assistant", "content": answer["text"]}
        report["later"].append([answer, *chat(llm, [[_turn(example, "low"), said, later]])])
    report["other_detail"] = chat(llm, [[_turn(example, "high")]])[0]
    return report


def _turn(example: Example, detail: str | None) -> dict[str, object]:
    url = png_url(example.image)
    image = {"url": url} if detail is None else {"url": url, "detail": detail}
    text = {"type": "text", "text": example.question}
    return {"role": "user", "content": [{"type": "image_url", "image_url": image}, text]}


def test_detail_sets_the_tokens_of_an_image_and_a_later_turn_changes_nothing(
    runner: Runner,
) -> None:
    report = runner.run("detail_budgets")
    tokens = report["tokens"]
    assert tokens["none"] == tokens["auto"]
    assert tokens["low"] - tokens["auto"] == DETAIL["low"] - BUDGET
    assert tokens["high"] - tokens["auto"] == DETAIL["high"] - BUDGET
    for answer, later in report["later"]:
        assert answer["cached"] == 0
        assert later["cached"] >= answer["prompt_tokens"] // BLOCK * BLOCK >= DETAIL["low"]
    assert report["other_detail"]["cached"] == 0
