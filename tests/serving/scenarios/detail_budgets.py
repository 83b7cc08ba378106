"""Budgets by ``image_url.detail`` in chat conversations."""

from __future__ import annotations

import base64
from typing import Any

from benchmarks.yardsticks.examples import Example, png
from tests.serving.engine import STATE, chat, examples, forget, start
from tests.serving.scenarios import Report, scenario

DETAIL = {"low": 64, "high": 128}
OWN = 96


@scenario
def detail_budgets() -> Report:
    """Prompt tokens at each detail, and cached tokens of a conversation one turn later.

    ``later``: the second turn appends a text, or an image of another detail. ``other_detail``: the
    first turn again, its image with another detail.
    """
    llm = start({**STATE, "budget": OWN, "detail": DETAIL, "requests": "none"})
    one, other = examples(2)[0], examples(2)[-1]
    report: dict[str, Any] = {"tokens": {}, "later": {}}
    for detail in ("low", "high", "auto", None):
        (answer,) = chat(llm, [[_turn(one, detail)]])
        report["tokens"][detail or "none"] = answer.prompt_tokens
    text = {"role": "user", "content": "And what is left of it?"}
    for name, second in (("text", text), ("image", _turn(other, "high"))):
        forget(llm)
        (first,) = chat(llm, [[_turn(one, "low")]])
        said = {"role": "assistant", "content": first.text}
        (later,) = chat(llm, [[_turn(one, "low"), said, second]])
        report["later"][name] = {"first": first.plain(), "later": later.plain()}
    report["other_detail"] = chat(llm, [[_turn(one, "high")]])[0].plain()
    return report


def _turn(example: Example, detail: str | None) -> dict[str, object]:
    url = "data:image/png;base64," + base64.b64encode(png(example.image)).decode()
    image = {"url": url} if detail is None else {"url": url, "detail": detail}
    content = [
        {"type": "image_url", "image_url": image},
        {"type": "text", "text": example.question},
    ]
    return {"role": "user", "content": content}
