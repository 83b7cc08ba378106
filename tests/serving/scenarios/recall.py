"""Conversations whose later turns recall tokens of the images before them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.serving.engine import (
    STATE,
    Answer,
    chat,
    examples,
    forget,
    release,
    start,
    turn,
    vision_runs,
)
from tests.serving.scenarios import Report, scenario
from tests.serving.scenarios.split import state_with_core
from tests.serving.selection_recorder import Watch, watch

if TYPE_CHECKING:
    from vllm import LLM

BUDGET, RECALL = 64, 8
QUESTIONS = ("What colour is the circle?", "How many shapes are there?", "Is there a square?")


@scenario
def recalled_turns() -> Report:
    """A conversation of three turns about one image, then one about two.

    ``turns``: answers in order; ``alone``: each with empty caches; ``parts``: kept tokens by part;
    ``runs`` of the vision tower. ``split``: the same under a state with a core. ``asked``: K_r of
    the request in place of the server's. ``full``: nothing is pruned, and no recall is needed.
    ``two``: a second image in the third turn.
    """
    llm = start({**STATE, "budget": BUDGET, "recall": RECALL, "requests": "states"})
    seen = watch()
    report: dict[str, Any] = _converse(llm, seen)
    image, other = examples(1)[0].image, examples(3)[-1].image
    forget(llm)
    report["asked"] = {
        recall: _ask(llm, _conversation(turn(QUESTIONS[0], image), 3), recall=recall).plain()
        for recall in (0, 3, RECALL)
    }
    report["full"] = {
        recall: _ask(
            llm, _conversation(turn(QUESTIONS[0], image), 3), enabled=False, recall=recall
        ).plain()
        for recall in (0, 3)
    }
    report["all"] = _ask(llm, _conversation(turn(QUESTIONS[0], image), 2), recall=1000).plain()
    forget(llm)
    seen.kept.clear()
    messages = [
        *_conversation(turn(QUESTIONS[0], image), 2),
        _said("yes"),
        turn("And here?", other),
        _said("no"),
        turn("Which one is larger?"),
    ]
    report["two"] = _ask(llm, messages).plain()
    report["two_parts"] = _parts(seen)
    forget(llm)
    report["two_alone"] = _ask(llm, messages).plain()
    report["split"] = _converse(llm, seen, state=state_with_core(), budget=BUDGET)
    release(llm)
    return report


def _converse(llm: LLM, seen: Watch, **entry: object) -> dict[str, Any]:
    forget(llm)
    image = examples(1)[0].image
    conversations = [_conversation(turn(QUESTIONS[0], image), count) for count in (1, 2, 3)]
    before = vision_runs(llm)
    seen.kept.clear()
    report: dict[str, Any] = {
        "turns": [_ask(llm, messages, **entry).plain() for messages in conversations]
    }
    report["runs"] = vision_runs(llm) - before
    report["parts"] = _parts(seen)
    report["alone"] = []
    for messages in conversations:
        forget(llm)
        report["alone"].append(_ask(llm, messages, **entry).plain())
    return report


def _conversation(first: dict[str, Any], turns: int) -> list[dict[str, Any]]:
    messages = [first]
    for question in QUESTIONS[1:turns]:
        messages += [_said("two"), turn(question)]
    return messages


def _said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _ask(llm: LLM, messages: list[dict[str, Any]], **entry: object) -> Answer:
    return chat(llm, [messages], entry=entry or None)[0]


def _parts(seen: Watch) -> list[list[Any]]:
    return [[plan.part, plan.key[0], rows] for plan, rows in seen.kept.items()]
