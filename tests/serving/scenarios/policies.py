"""Every shipped state on a real engine."""

from __future__ import annotations

from typing import Any

from tests.serving.engine import (
    STATE,
    Answer,
    examples,
    forget,
    generate,
    model_of,
    prompt,
    release,
    start,
)
from tests.serving.paths import TOKENS
from tests.serving.scenarios import Report, scenario
from vllm_autoprune import materialize
from vllm_autoprune.tpdsl.loading import load_state, shipped_states

SMALL = {"max_model_len": 512, "num_gpu_blocks_override": 64}
HALF = TOKENS // 2
"""What requests ask for where a state's own budget keeps every token of so small an image."""


@scenario
def shipped_by_request() -> Report:
    """Every shipped state, named by requests to one engine that runs another state."""
    llm = start(None, **SMALL)
    report: dict[str, Any] = {"full": _asked(llm, {}).plain(), "states": {}}
    release(llm)
    llm = start({**STATE, "state": "divprune", "requests": "states"}, **SMALL)
    meter = model_of(llm).autoprune_reporter.meter
    for name, file in shipped_states().items():
        own = materialize(load_state(file)).tokens_kept(TOKENS)
        forget(llm)  # names of one state share their cached rows
        before = meter.counts()
        entries: dict[int, dict[str, object]] = {own: {"state": name}}
        if own >= TOKENS:
            entries[HALF] = {"state": name, "budget": HALF}
        report["states"][name] = {
            "answers": {kept: _asked(llm, entry).plain() for kept, entry in entries.items()},
            "fallbacks": {kind: count - before[kind] for kind, count in meter.counts().items()},
            "errors": dict(meter.errors),
        }
    return report


@scenario
def sample() -> Report:
    """By state name: K and the answer at its own budget, and at HALF if its own keeps all.

    One engine per state; ``full`` is the answer of an engine without a state.
    """
    llm = start(None, **SMALL)
    report: dict[str, Any] = {"full": _asked(llm, {}).plain(), "states": {}}
    release(llm)
    for name, file in shipped_states().items():
        try:
            report["states"][name] = _served(str(file))
        except Exception as error:  # the other states are still served
            report["states"][name] = {"error": f"{type(error).__name__}: {error}"}
    return report


def _served(file: str) -> Report:
    llm = start({"state": file, "text_tower": STATE["text_tower"]}, **SMALL)
    try:
        model = model_of(llm)
        own = model.autoprune_state.policy().tokens_kept(TOKENS)
        answers = {own: _asked(llm, {}).plain()}
        if own >= TOKENS:
            answers[HALF] = _asked(llm, {"budget": HALF}).plain()
        meter = model.autoprune_reporter.meter
        return {"answers": answers, "fallbacks": meter.counts(), "errors": meter.errors}
    finally:
        release(llm)


def _asked(llm: Any, entry: dict[str, object]) -> Answer:
    raw = {**prompt(examples(1)[0]), "mm_processor_kwargs": {"autoprune": entry}}
    (answer,) = generate(llm, [raw])
    return answer
