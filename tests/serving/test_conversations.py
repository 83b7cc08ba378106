"""Questions about one image share its core; later turns of a conversation recall tokens.

That a core is shared, that deltas and recalls are disjoint from it, and that answers do not depend
on what is cached of them, the selftest checks of every backbone (``test_backbones.py``).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from tests.serving.engine import (
    STATE,
    TOKENS,
    Answer,
    Watch,
    chat,
    examples,
    generate_each,
    picture,
    raw_prompt,
    release,
    said,
    start,
    state_with_core,
    turn,
    vision_runs,
    watch,
)
from tests.serving.runners import in_engine
from vllm_autoprune.selftest.run import BLOCK
from vllm_autoprune.selftest.serve import empty_caches
from vllm_autoprune.serving.api import planner
from vllm_autoprune.serving.plan import make_cache_identity, make_core_identity

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]


BUDGET, RECALL = 64, 8
QUESTIONS = ("What colour is the circle?", "How many shapes are there?", "Is there a square?")


def _ask(llm: LLM, *messages: dict[str, Any], **entry: object) -> Answer:
    return chat(llm, [messages], entry=entry or None)[0]


def _take_parts(seen: Watch) -> list[tuple[str, tuple[int, int], int, list[int]]]:
    """Part, image, K_c and kept tokens of each item since the last call."""
    return [(plan.part, plan.key, plan.core, rows) for plan, rows in seen.take().items()]


@pytest.mark.both
@in_engine
def test_images_are_split_where_questions_follow_them() -> None:
    llm = start({**STATE, "state": state_with_core(), "budget": BUDGET, "requests": "states"})
    seen = watch()
    image, other = examples(1)[0].image, examples(3)[-1].image
    questions = [turn(question, image) for question in QUESTIONS]
    lengths = [_ask(llm, question)["prompt_tokens"] for question in questions]
    parts = _take_parts(seen)

    # Cores come before all deltas: 48 tokens of the first core and most of the second are shared.
    empty_caches(llm)
    question, other_question = (_ask(llm, turn(each, image, other)) for each in QUESTIONS[:2])
    assert question["cached"] < other_question["cached"] == 3 * BLOCK

    # One question about two images in turn.
    empty_caches(llm)
    question = _ask(llm, questions[0])
    later = _ask(llm, questions[0], said("red"), turn(QUESTIONS[0], other))
    assert question["cached"] == 0
    assert later["cached"] >= question["prompt_tokens"] // BLOCK * BLOCK

    # Where the prefix has the question, an image stays whole: the task of a screenshot, or a text
    # before the image.
    seen.take()
    shot = {"role": "tool", "content": turn("Done.", image)["content"]}
    for task in QUESTIONS[:2]:
        _ask(llm, {"role": "user", "content": task}, said("I look."), shot)
    (part, *_, rows), (*_, other_rows) = _take_parts(seen)
    assert part == "whole" and rows != other_rows, "the task chooses a screenshot's tokens"
    text = f"USER: {QUESTIONS[0]} <image>\nASSISTANT:"
    generate_each(llm, [raw_prompt(text, picture(image), instructions=[QUESTIONS[0]])])
    assert {part for part, *_ in _take_parts(seen)} == {"whole"}
    release(llm)

    # Without a prefix cache too, and it keeps the same tokens.
    (core,) = (part for part in parts if part[0] == "core")
    aligned = state_with_core(share=61 / 64)
    assert core[2] == 61, "the state below has a core of the size that was aligned to blocks"
    llm = start({**STATE, "state": aligned, "budget": BUDGET}, enable_prefix_caching=False)
    assert lengths == [_ask(llm, question)["prompt_tokens"] for question in questions]
    kept = [sorted([*core[-1], *rows]) for part, *_, rows in parts if part == "delta"]
    assert len({str(rows) for rows in kept}) > 1 and len(kept) == len(QUESTIONS)
    unsplit = [(part, sorted(rows)) for part, *_, rows in _take_parts(seen)]
    assert unsplit == [("whole", rows) for rows in kept]


@in_engine
def test_negative_control_without_the_size_of_the_core_in_the_identity() -> None:
    """The same question under system prompts of two lengths has cores of two sizes."""

    def core(image: str, chosen_by: str, core: int) -> str:
        return make_core_identity(image, chosen_by, 0)

    def delta(image: str, served: str, budget: int, keep: Any, ids: Any, core: int) -> str:
        return make_cache_identity(image, served, budget, keep, ids, min(core, 1))

    llm = start({**STATE, "state": state_with_core(), "budget": BUDGET})
    example = examples(1)[0]
    prompts = [
        {
            "prompt": f"{prefix}USER: <image>\n{example.question} ASSISTANT:",
            "multi_modal_data": {"image": picture(example.image)},
        }
        for prefix in ("", "red green blue yellow white black ")
    ]
    right: object = generate_each(llm, prompts)
    empty_caches(llm)
    wrong: object
    with (
        patch.object(planner, "make_core_identity", core),
        patch.object(planner, "make_cache_identity", delta),
    ):
        try:
            wrong = generate_each(llm, prompts)
        except Exception as error:
            wrong = error
    assert wrong != right


@pytest.mark.both
@in_engine
def test_a_request_says_how_much_of_an_image_later_turns_recall() -> None:
    llm = start({**STATE, "budget": BUDGET, "recall": RECALL, "requests": "states"})
    seen, runs = watch(), vision_runs(llm)
    image, other = examples(1)[0].image, examples(3)[-1].image
    talk = [turn(QUESTIONS[0], image)]
    for question in QUESTIONS[1:]:
        talk += [said("two"), turn(question)]
    for answer, later in itertools.pairwise(_ask(llm, *talk[:count]) for count in (1, 3, 5)):
        # All full blocks of the turn before, whose answer is part of the conversation.
        assert later["cached"] >= answer["prompt_tokens"] // BLOCK * BLOCK > 0
    assert vision_runs(llm) - runs == 1

    empty_caches(llm)
    lengths = {k: _ask(llm, *talk, recall=k)["prompt_tokens"] for k in (0, 3, RECALL, 1000)}
    # Each turn's tokens end in a line break, as the chat template writes images, and a space.
    assert 0 <= lengths[3] - lengths[0] - 2 * 3 <= 2 * 2
    assert lengths[RECALL] - lengths[3] == 2 * (RECALL - 3)
    # Not more than is left of it.
    assert TOKENS - BUDGET <= lengths[1000] - lengths[0] <= TOKENS - BUDGET + 2 * 2

    # An image that keeps everything recalls nothing.
    plain, recalling = (_ask(llm, *talk, enabled=False, recall=asked) for asked in (0, 3))
    assert recalling["text"] == plain["text"]
    assert recalling["prompt_tokens"] == plain["prompt_tokens"]

    # A turn after two images recalls tokens of both.
    empty_caches(llm)
    seen.take()
    later_turns = (said("yes"), turn("And here?", other), said("no"), turn("Which is larger?"))
    _ask(llm, *talk[:3], *later_turns)
    parts = _take_parts(seen)
    first_key, other_key = (key for part, key, *_ in parts if part == "whole")
    recalls = sorted((key, len(rows)) for part, key, _, rows in parts if part == "recall")
    half = RECALL // 2
    assert recalls == sorted([(first_key, RECALL), (first_key, half), (other_key, half)])
