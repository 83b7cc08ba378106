"""Questions about one image share its core; later turns of a conversation recall tokens.

That a core is shared, that deltas and recalls are disjoint from it, and that answers do not depend
on what is cached of them, the selftest checks of every backbone (``test_backbones.py``).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from tests.serving.conftest import V2_EXHAUSTIVE
from tests.serving.engine import (
    BLOCK,
    STATE,
    TOKENS,
    Answer,
    Watch,
    chat,
    examples,
    forget,
    generate_each,
    picture,
    raw_prompt,
    release,
    start,
    turn,
    vision_runs,
    watch,
)
from tests.serving.scenarios import Report, Runner, scenario
from vllm_autoprune.serving.api import planner
from vllm_autoprune.serving.plan import make_cache_identity, make_core_identity
from vllm_autoprune.tpdsl.loading import load_state

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = [pytest.mark.engine, pytest.mark.both, pytest.mark.timeout(500)]


BUDGET, RECALL = 64, 8
QUESTIONS = ("What colour is the circle?", "How many shapes are there?", "Is there a square?")


def state_with_core(share: float = 0.75) -> dict[str, object]:
    """CDPruner's state with a core by DivPrune."""
    return {**load_state("cdpruner").model_dump(mode="json"), "core": {"share": share}}


def _ask(llm: LLM, *messages: dict[str, Any], **entry: object) -> Answer:
    return chat(llm, [messages], entry=entry or None)[0]


def _said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _take_parts(seen: Watch) -> list[list[Any]]:
    """Part, image, K_c and kept tokens of each item since the last call."""
    parts = [[plan.part, plan.key[0], plan.core, rows] for plan, rows in seen.kept.items()]
    seen.kept.clear()
    return parts


@scenario
def split_images() -> Report:
    """Questions about images under a state with a core.

    ``parts``: what questions about one image keep; ``whole``: the same, served as one item by an
    engine without a prefix cache. ``lengths``: their prompts in both. ``two``: questions about two
    images. ``equal``: a conversation that asks one question about two images in turn. ``tasks``:
    what is kept of a screenshot without text under two tasks. ``reversed_parts``: the question
    stands before the image.
    """
    llm = start({**STATE, "state": state_with_core(), "budget": BUDGET, "requests": "states"})
    seen = watch()
    image, other = examples(1)[0].image, examples(3)[-1].image
    questions = [turn(question, image) for question in QUESTIONS]
    report: dict[str, Any] = {"lengths": [[_ask(llm, q)["prompt_tokens"] for q in questions]]}
    report["parts"] = _take_parts(seen)
    forget(llm)
    report["two"] = [_ask(llm, turn(each, image, other)) for each in QUESTIONS[:2]]
    forget(llm)
    again = turn(QUESTIONS[0], other)
    report["equal"] = [_ask(llm, questions[0]), _ask(llm, questions[0], _said("red"), again)]
    seen.kept.clear()
    shot = {"role": "tool", "content": turn("Done.", image)["content"]}
    for task in QUESTIONS[:2]:
        _ask(llm, {"role": "user", "content": task}, _said("I look."), shot)
    report["tasks"] = _take_parts(seen)
    text = f"USER: {QUESTIONS[0]} <image>\nASSISTANT:"
    generate_each(llm, [raw_prompt(text, picture(image), instructions=[QUESTIONS[0]])])
    report["reversed_parts"] = sorted({part for part, *_ in _take_parts(seen)})
    release(llm)
    llm = start(
        {**STATE, "state": state_with_core(61 / 64), "budget": BUDGET},
        enable_prefix_caching=False,
    )
    report["lengths"].append([_ask(llm, question)["prompt_tokens"] for question in questions])
    report["whole"] = _take_parts(seen)
    return report


def test_cores_come_before_all_deltas_and_are_shared_between_turns(runner: Runner) -> None:
    report = runner.run("split_images")
    question, other_question = report["two"]
    # 48 tokens of the first core and most of the second one.
    assert question["cached"] < other_question["cached"] == 3 * BLOCK
    question, later = report["equal"]
    assert question["cached"] == 0
    assert later["cached"] >= question["prompt_tokens"] // BLOCK * BLOCK


def test_images_whose_prefix_has_the_question_stay_whole(runner: Runner) -> None:
    report = runner.run("split_images")
    assert report["reversed_parts"] == ["whole"]
    (part, *_, rows), (*_, others) = report["tasks"]
    assert part == "whole", "the task is part of the prefix"
    assert rows != others, "and chooses the tokens of a screenshot that follows it"


def test_image_stays_whole_without_a_prefix_cache_and_keeps_the_same_tokens(
    runner: Runner,
) -> None:
    report = runner.run("split_images")
    (core,) = (part for part in report["parts"] if part[0] == "core")
    assert core[2] == 61, "the state below has a core of the size that was aligned to blocks"
    kept = [sorted([*core[-1], *rows]) for part, *_, rows in report["parts"] if part == "delta"]
    assert len({tuple(rows) for rows in kept}) > 1 and len(kept) == len(QUESTIONS)
    assert [(part, sorted(rows)) for part, *_, rows in report["whole"]] == [
        ("whole", rows) for rows in kept
    ]
    split, unsplit = report["lengths"]
    assert split == unsplit


@scenario
def core_size_left_out() -> Report:
    """Negative control: K_c is not part of the identities.

    The same question under system prompts of two lengths has cores of two sizes.
    """

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
    report: dict[str, Any] = {"right": generate_each(llm, prompts)}
    forget(llm)
    with (
        patch.object(planner, "make_core_identity", core),
        patch.object(planner, "make_cache_identity", delta),
    ):
        try:
            report["wrong"] = generate_each(llm, prompts)
        except Exception as error:
            report["wrong"] = f"{type(error).__name__}: {error}"
    return report


@pytest.mark.parametrize("runner", V2_EXHAUSTIVE, indirect=True)
def test_negative_control_without_the_size_of_the_core_in_the_identity(runner: Runner) -> None:
    report = runner.run("core_size_left_out")
    assert report["wrong"] != report["right"]


@scenario
def recalled_turns() -> Report:
    """Conversations of three turns about one image, the last one with a second image.

    ``turns``: the three answers; ``runs`` of the vision tower for them. ``lengths``: prompt tokens
    of the third turn by the K_r of the request, ``unpruned`` where nothing is pruned, and no recall
    is needed.
    ``two_parts``: what is kept where the third turn has a second image.
    """
    llm = start({**STATE, "budget": BUDGET, "recall": RECALL, "requests": "states"})
    seen, runs = watch(), vision_runs(llm)
    image, other = examples(1)[0].image, examples(3)[-1].image
    talk = [turn(QUESTIONS[0], image)]
    for question in QUESTIONS[1:]:
        talk += [_said("two"), turn(question)]
    report: dict[str, Any] = {"turns": [_ask(llm, *talk[:count]) for count in (1, 3, 5)]}
    report |= {"runs": vision_runs(llm) - runs, "lengths": {}}
    forget(llm)
    for asked in (0, 3, RECALL, 1000):
        report["lengths"][asked] = _ask(llm, *talk, recall=asked)["prompt_tokens"]
    report["unpruned"] = [_ask(llm, *talk, enabled=False, recall=asked) for asked in (0, 3)]
    forget(llm)
    seen.kept.clear()
    later = [_said("yes"), turn("And here?", other), _said("no"), turn("Which one is larger?")]
    _ask(llm, *talk[:3], *later)
    report["two_parts"] = [[part, key, len(rows)] for part, key, _, rows in _take_parts(seen)]
    return report


def test_a_request_says_how_much_of_the_image_is_recalled(runner: Runner) -> None:
    report = runner.run("recalled_turns")
    assert report["runs"] == 1
    for answer, later in itertools.pairwise(report["turns"]):
        # All full blocks of the turn before, whose answer is part of the conversation.
        assert later["cached"] >= answer["prompt_tokens"] // BLOCK * BLOCK > 0
    lengths = {int(recall): tokens for recall, tokens in report["lengths"].items()}
    # Each turn's tokens end in a line break, as the chat template writes images, and a space.
    breaks = lengths[3] - lengths[0] - 2 * 3
    assert 0 <= breaks <= 2 * 2
    assert lengths[RECALL] - lengths[3] == 2 * (RECALL - 3)
    # Not more than is left of it.
    assert TOKENS - BUDGET <= lengths[1000] - lengths[0] <= TOKENS - BUDGET + 2 * 2


def test_an_image_that_keeps_everything_recalls_nothing(runner: Runner) -> None:
    without, with_recall = runner.run("recalled_turns")["unpruned"]
    assert with_recall["text"] == without["text"]
    assert with_recall["prompt_tokens"] == without["prompt_tokens"]


def test_a_turn_after_two_images_recalls_tokens_of_both(runner: Runner) -> None:
    parts = runner.run("recalled_turns")["two_parts"]
    recalls = [[key, count] for part, key, count in parts if part == "recall"]
    image, other = (key for part, key, _ in parts if part == "whole")
    expected = [[image, RECALL], [image, RECALL // 2], [other, RECALL // 2]]
    assert sorted(recalls) == sorted(expected)
