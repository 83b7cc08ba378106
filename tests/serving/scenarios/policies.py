"""Every shipped state on a real engine.

Knows nothing about what the states are for.
"""

from __future__ import annotations

from typing import Any

from tests.serving.engine import (
    STATE,
    Answer,
    examples,
    generate,
    model_of,
    prompt,
    released,
    start,
)
from tests.serving.paths import TOKENS
from tests.serving.scenarios import Report, scenario
from vllm_autoprune.tpdsl.load import shipped_states

SMALL = {"max_model_len": 512, "num_gpu_blocks_override": 64}
HALF = TOKENS // 2
"""What requests ask for where a state's own budget keeps every token of so small an image."""


@scenario
def shipped() -> Report:
    """By name of a state: K and the answer at its own budget, and at HALF where that prunes none.

    ``full`` is the answer of a server without a state.
    """
    llm = start(None, **SMALL)
    report: dict[str, Any] = {"full": _asked(llm, None).plain(), "states": {}}
    released(llm)
    for name, file in shipped_states().items():
        try:
            report["states"][name] = _served(str(file))
        except Exception as error:  # the others are to be served all the same
            report["states"][name] = {"error": f"{type(error).__name__}: {error}"}
    return report


def _served(file: str) -> Report:
    llm = start({"state": file, "text_tower": STATE["text_tower"]}, **SMALL)
    try:
        model = model_of(llm)
        own = model.autoprune_served.policy().tokens_kept(TOKENS)
        answers = {own: _asked(llm, None).plain()}
        if own >= TOKENS:
            answers[HALF] = _asked(llm, HALF).plain()
        meter = model.autoprune_meter
        return {"answers": answers, "fallbacks": meter.counts(), "errors": meter.raised}
    finally:
        released(llm)


def _asked(llm: Any, budget: int | None) -> Answer:
    (answer,) = generate(llm, [prompt(examples(1)[0], budget)])
    return answer
