"""Questions about one image share its core; later turns of a conversation recall tokens.

That answers do not depend on what is cached of cores, deltas and recalls, the selftest checks of
every backbone (``test_backbones.py``).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from tests.serving.conftest import V2_EXHAUSTIVE
from tests.serving.engine import (
    STATE,
    TOKENS,
    Answer,
    Watch,
    chat,
    examples,
    forget,
    generate,
    picture,
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


BLOCK, BUDGET, RECALL = 32, 64, 8
QUESTIONS = ("What colour is the circle?", "How many shapes are there?", "Is there a square?")


def state_with_core(share: float = 0.75) -> dict[str, object]:
    """CDPruner's state with a core by DivPrune."""
    return {**load_state("cdpruner").model_dump(mode="json"), "core": {"share": share}}


@scenario
def split_images() -> Report:
    """Questions about one image under a state with a core.

    ``turns``: answers to each question; ``parts``: kept tokens by part and question. ``two``:
    questions about two images. ``equal``: a conversation that asks one question about two images in
    turn. ``tasks``: what is kept of a screenshot without text under two tasks. ``reversed_parts``:
    the question stands before the image. ``uncached``: an engine without a prefix cache; ``whole``:
    the same tokens, served as one item there.
    """
    llm = start({**STATE, "state": state_with_core(), "budget": BUDGET, "requests": "states"})
    seen = watch()
    image, other = examples(1)[0].image, examples(3)[-1].image
    report: dict[str, Any] = {}
    report["turns"] = [_ask(llm, [turn(question, image)]).plain() for question in QUESTIONS]
    report["parts"] = _parts(seen)
    forget(llm)
    report["two"] = [_ask(llm, [turn(each, image, other)]).plain() for each in QUESTIONS[:2]]
    forget(llm)
    first, again = turn(QUESTIONS[0], image), turn(QUESTIONS[0], other)
    report["equal"] = [_ask(llm, talk).plain() for talk in ([first], [first, _said("red"), again])]
    report["tasks"] = []
    shot = {"role": "tool", "content": turn("Done.", image)["content"]}
    for task in QUESTIONS[:2]:
        seen.kept.clear()
        _ask(llm, [{"role": "user", "content": task}, _said("I look."), shot])
        report["tasks"] += _parts(seen)
    seen.kept.clear()
    question_first = {
        "prompt": f"USER: {QUESTIONS[0]} <image>\nASSISTANT:",
        "multi_modal_data": {"image": picture(image)},
        "mm_processor_kwargs": {"autoprune": {"instructions": [QUESTIONS[0]]}},
    }
    generate(llm, [question_first])
    report["reversed_parts"] = sorted({plan.part for plan in seen.kept})
    release(llm)
    seen.kept.clear()
    llm = start(
        {**STATE, "state": state_with_core(61 / 64), "budget": BUDGET},
        enable_prefix_caching=False,
    )
    report["uncached"] = [_ask(llm, [turn(question, image)]).plain() for question in QUESTIONS]
    report["whole"] = [sorted(rows) for plan, rows in seen.kept.items() if plan.part == "whole"]
    return report


def _ask(llm: LLM, messages: list[dict[str, Any]], **entry: object) -> Answer:
    return chat(llm, [messages], entry=entry or None)[0]


def _said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _parts(seen: Watch) -> list[list[Any]]:
    """Part, K_c, image and kept tokens of each item."""
    return [[plan.part, plan.core, plan.key[0], rows] for plan, rows in seen.kept.items()]


def test_questions_share_the_core_and_choose_a_delta_each(runner: Runner) -> None:
    report = runner.run("split_images")
    assert [answer["cached"] for answer in report["turns"]] == [0, 2 * BLOCK, 2 * BLOCK]
    cores = [rows for part, *_, rows in report["parts"] if part == "core"]
    deltas = [rows for part, *_, rows in report["parts"] if part == "delta"]
    assert len(cores) == 1 and len(deltas) == 3
    for rows in deltas:
        assert not set(rows) & set(cores[0])
        assert len(rows) + len(cores[0]) == BUDGET
    assert len({tuple(rows) for rows in deltas}) > 1
    first, second = report["two"]
    # 48 tokens of the first core and most of the second one: cores come before all deltas.
    assert first["cached"] < second["cached"] == 3 * BLOCK
    first, second = report["equal"]
    assert first["cached"] == 0
    assert second["cached"] >= first["prompt_tokens"] // BLOCK * BLOCK


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
    parts = report["parts"]
    ((_, core, _, shared),) = (part for part in parts if part[0] == "core")
    assert core == 61, "the state below has a core of the size that was aligned to blocks"
    kept = [sorted([*shared, *rows]) for part, *_, rows in parts if part == "delta"]
    assert report["whole"] == kept
    prompts = [[a["prompt_tokens"] for a in report[key]] for key in ("turns", "uncached")]
    assert prompts[0] == prompts[1]


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
    report: dict[str, Any] = {"right": _ask_under_two_prefixes(llm)}
    forget(llm)
    with (
        patch.object(planner, "make_core_identity", core),
        patch.object(planner, "make_cache_identity", delta),
    ):
        try:
            report["wrong"] = _ask_under_two_prefixes(llm)
        except Exception as error:
            report["wrong"] = f"{type(error).__name__}: {error}"
    return report


def _ask_under_two_prefixes(llm: LLM) -> list[dict[str, object]]:
    example = examples(1)[0]
    return [
        generate(
            llm,
            [
                {
                    "prompt": f"{prefix}USER: <image>\n{example.question} ASSISTANT:",
                    "multi_modal_data": {"image": picture(example.image)},
                }
            ],
        )[0].plain()
        for prefix in ("", "red green blue yellow white black ")
    ]


@pytest.mark.parametrize("runner", V2_EXHAUSTIVE, indirect=True)
def test_negative_control_without_the_size_of_the_core_in_the_identity(runner: Runner) -> None:
    report = runner.run("core_size_left_out")
    assert report["wrong"] != report["right"]


@scenario
def recalled_turns() -> Report:
    """A conversation of three turns about one image, then one about two.

    ``turns``: answers in order; ``parts``: kept tokens by part; ``runs`` of the vision tower.
    ``asked``: K_r of the request in place of the server's. ``full``: nothing is pruned, and no
    recall is needed. ``two``: a second image in the third turn.
    """
    llm = start({**STATE, "budget": BUDGET, "recall": RECALL, "requests": "states"})
    seen, before = watch(), vision_runs(llm)
    image, other = examples(1)[0].image, examples(3)[-1].image
    talks = [_conversation(turn(QUESTIONS[0], image), count) for count in (1, 2, 3)]
    report: dict[str, Any] = {"turns": [_ask(llm, talk).plain() for talk in talks]}
    report["runs"], report["parts"] = vision_runs(llm) - before, _parts(seen)
    forget(llm)
    report["asked"] = {k: _ask(llm, talks[2], recall=k).plain() for k in (0, 3, RECALL)}
    report["full"] = {k: _ask(llm, talks[2], enabled=False, recall=k).plain() for k in (0, 3)}
    report["all"] = _ask(llm, talks[1], recall=1000).plain()
    forget(llm)
    seen.kept.clear()
    later = [_said("yes"), turn("And here?", other), _said("no"), turn("Which one is larger?")]
    report["two"] = _ask(llm, [*talks[1], *later]).plain()
    report["two_parts"] = _parts(seen)
    return report


def _conversation(first: dict[str, Any], turns: int) -> list[dict[str, Any]]:
    messages = [first]
    for question in QUESTIONS[1:turns]:
        messages += [_said("two"), turn(question)]
    return messages


def test_each_later_turn_recalls_tokens_that_were_not_kept(runner: Runner) -> None:
    report = runner.run("recalled_turns")
    kept = [rows for *_, rows in report["parts"]]
    assert [[part, len(rows)] for part, *_, rows in report["parts"]] == [
        ["whole", BUDGET],
        ["recall", RECALL],
        ["recall", RECALL],
    ]
    assert len({token for rows in kept for token in rows}) == BUDGET + 2 * RECALL
    assert report["runs"] == 1
    assert report["turns"][0]["cached"] == 0
    for before, after in itertools.pairwise(report["turns"]):
        # All full blocks of the turn before, whose answer is part of the conversation.
        assert after["cached"] >= before["prompt_tokens"] // BLOCK * BLOCK > 0


def test_a_request_says_how_much_is_recalled(runner: Runner) -> None:
    asked = runner.run("recalled_turns")["asked"]
    lengths = {int(recall): answer["prompt_tokens"] for recall, answer in asked.items()}
    # Each turn's tokens end in a line break, as the chat template writes images, and a space.
    breaks = lengths[3] - lengths[0] - 2 * 3
    assert 0 <= breaks <= 2 * 2
    assert lengths[8] - lengths[3] == 2 * 5


def test_what_is_left_of_an_image_bounds_its_recall(runner: Runner) -> None:
    report = runner.run("recalled_turns")
    asked = report["asked"]["0"]["prompt_tokens"]
    assert TOKENS - BUDGET < report["all"]["prompt_tokens"] < asked + TOKENS - BUDGET + 3


def test_an_image_that_keeps_everything_recalls_nothing(runner: Runner) -> None:
    full = runner.run("recalled_turns")["full"]
    assert full["0"]["text"] == full["3"]["text"]
    assert full["0"]["prompt_tokens"] == full["3"]["prompt_tokens"]


def test_a_turn_after_two_images_recalls_tokens_of_both(runner: Runner) -> None:
    parts = runner.run("recalled_turns")["two_parts"]
    recalls = [[key, len(rows)] for part, _, key, rows in parts if part == "recall"]
    first, second = (key for part, _, key, _ in parts if part == "whole")
    assert sorted(recalls) == sorted([[first, RECALL], [first, RECALL // 2], [second, RECALL // 2]])
