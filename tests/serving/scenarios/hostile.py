"""Requests that an engine has to survive.

Knows nothing about what it should answer.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from PIL import Image

from tests.serving.engine import (
    STATE,
    ask,
    chat,
    examples,
    forget,
    generate,
    model_of,
    picture,
    prompt,
    start,
    turn,
)
from tests.serving.scenarios import Report, scenario
from vllm_autoprune.tpdsl import refine as executor


@scenario
def hostile() -> Report:
    """Requests that must not stop the engine, and whether it still answers after each."""
    llm = start({**STATE, "budget": 8})
    model = model_of(llm)
    example, other = examples(2)[0], examples(2)[-1]
    sane = ask(llm, example).plain()
    report: dict[str, Any] = {"sane": sane, "after": {}}

    def survived(name: str) -> None:
        forget(llm)
        report["after"][name] = ask(llm, example).plain()

    tiny = Image.new("RGB", (1, 1), (255, 0, 0))
    report["one_pixel"] = chat(llm, [[turn("What is it?", tiny)]])[0].plain()
    survived("one_pixel")
    report["empty"] = chat(llm, [[turn("", other.image)]])[0].plain()
    survived("empty")
    long = " ".join(["red"] * 10_000)
    report["long"] = generate(llm, [prompt(other, instruction=long)])[0].plain()
    survived("long")
    for name, value in (("nan", float("nan")), ("inf", float("inf"))):
        broken = breaking(model.multi_modal_projector, value)
        # An image not seen before, whose features are not cached yet.
        unseen = picture(other.image).rotate(len(name) + 90 * (name == "inf"))
        report[name] = chat(llm, [[turn(f"{name}?", unseen)]])[0].plain()
        broken.remove()
        survived(name)
    report["fallbacks"] = model.autoprune_meter.counts()

    def raising(*args: object) -> torch.Tensor:
        raise RuntimeError("made to fail")

    with patch.object(executor, "run_fusion", raising):
        report["raised"] = chat(llm, [[turn("raise?", other.image)]])[0].plain()
    report["errors"] = model.autoprune_meter.raised
    survived("raised")
    for name, asked in (
        ("zero", {"budget": 0}),
        ("text", {"budget": "8"}),
        ("unknown", {"buget": 8}),
        ("list", [8]),
    ):
        raw = {**prompt(other), "mm_processor_kwargs": {"autoprune": asked}}
        try:
            generate(llm, [raw])
            report[name] = "accepted"
        except ValueError as error:
            report[name] = str(error)
    survived("refused")
    return report


def breaking(module: Any, value: float) -> Any:
    """Make a module give a number that is none; the handle's ``remove`` mends it."""

    def spoil(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[:, 5] = value
        return output

    return module.register_forward_hook(spoil)
