"""Images that are served as a core, which questions share, and a delta behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from tests.serving.engine import (
    STATE,
    Answer,
    chat,
    examples,
    forget,
    generate,
    picture,
    release,
    start,
    turn,
    vision_runs,
)
from tests.serving.scenarios import Report, scenario
from tests.serving.selection_recorder import Watch, watch
from vllm_autoprune.serving.api import planner
from vllm_autoprune.serving.plan import make_cache_identity, make_core_identity
from vllm_autoprune.tpdsl.loading import load_state

if TYPE_CHECKING:
    from torch import Tensor
    from vllm import LLM

BUDGET = 64
QUESTIONS = ("What colour is the circle?", "How many shapes are there?", "Is there a square?")


def state_with_core(share: float = 0.75) -> dict[str, object]:
    """CDPruner's state with a core by DivPrune."""
    return {**load_state("cdpruner").model_dump(mode="json"), "core": {"share": share}}


@scenario
def split_images() -> Report:
    """Questions about one image under a state with a core.

    ``first`` to last: answers to each question in turn; ``alone``: each with empty caches;
    ``parts``: kept tokens by part and question; ``runs`` of the vision tower. ``two``: questions
    about two images. ``equal``: a conversation that asks one question about two images in turn.
    ``tasks``: what is kept of a screenshot without text under two tasks.
    ``reversed_parts``: the question stands before the image. ``uncached``: an
    engine without a prefix cache; ``whole``: the same tokens, served as one item there.
    """
    llm = start({**STATE, "state": state_with_core(), "budget": BUDGET, "requests": "states"})
    seen = watch()
    image, other = examples(1)[0].image, examples(3)[-1].image
    report: dict[str, Any] = {"turns": [], "alone": [], "two": [], "two_alone": []}
    before = vision_runs(llm)
    for question in QUESTIONS:
        report["turns"].append(_ask(llm, turn(question, image)).plain())
    report["runs"] = vision_runs(llm) - before
    report["parts"] = _parts(seen)
    for question in QUESTIONS:
        forget(llm)
        report["alone"].append(_ask(llm, turn(question, image)).plain())
    forget(llm)
    for key in ("two", "two_alone"):
        for question in QUESTIONS[:2]:
            if key == "two_alone":
                forget(llm)
            report[key].append(_ask(llm, turn(question, image, other)).plain())
    forget(llm)
    first, again = turn(QUESTIONS[0], image), turn(QUESTIONS[0], other)
    talk = [first, {"role": "assistant", "content": "red"}, again]
    report["equal"] = [answer.plain() for talk in ([first], talk) for answer in chat(llm, [talk])]
    report["tasks"] = []
    shot = {"role": "tool", "content": turn("Done.", image)["content"]}
    for task in QUESTIONS[:2]:
        seen.kept.clear()
        said = {"role": "assistant", "content": "I look."}
        chat(llm, [[{"role": "user", "content": task}, said, shot]])
        report["tasks"] += _parts(seen)
    seen.kept.clear()
    generate(llm, [_question_before(image, question) for question in QUESTIONS[:2]])
    report["reversed_parts"] = sorted({plan.part for plan in seen.kept})
    release(llm)
    seen.kept.clear()
    llm = start(
        {**STATE, "state": state_with_core(61 / 64), "budget": BUDGET},
        enable_prefix_caching=False,
    )
    report["uncached"] = [_ask(llm, turn(question, image)).plain() for question in QUESTIONS]
    report["whole"] = [sorted(rows) for plan, rows in seen.kept.items() if plan.part == "whole"]
    return report


def _ask(llm: LLM, message: dict[str, Any]) -> Answer:
    return chat(llm, [[message]])[0]


def _question_before(image: Tensor, question: str) -> dict[str, object]:
    return {
        "prompt": f"USER: {question} <image>\nASSISTANT:",
        "multi_modal_data": {"image": picture(image)},
        "mm_processor_kwargs": {"autoprune": {"instructions": [question]}},
    }


def _parts(seen: Watch) -> list[list[Any]]:
    return [[plan.part, plan.core, rows] for plan, rows in seen.kept.items()]


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
