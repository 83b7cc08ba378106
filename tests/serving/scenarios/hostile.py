"""Requests that must not stop the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from PIL import Image
from prometheus_client import generate_latest

from benchmarks.yardsticks.examples import Example
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
from tests.tpdsl.samples import edited, sample
from vllm_autoprune.serving.api.choices import load_request_state
from vllm_autoprune.tpdsl import refine as executor

if TYPE_CHECKING:
    from vllm import LLM


@scenario
def hostile() -> Report:
    """Failing policies and invalid requests, and whether the engine still answers after each."""
    llm = start({**STATE, "budget": 8, "requests": "states"})
    model = model_of(llm)
    example, other = examples(2)[0], examples(2)[-1]
    sane = ask(llm, example).plain()
    report: dict[str, Any] = {"sane": sane, "after": {}}
    before = _exported({})

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
        # A new image, whose features are not cached.
        unseen = picture(other.image).rotate(len(name) + 90 * (name == "inf"))
        report[name] = chat(llm, [[turn(f"{name}?", unseen)]])[0].plain()
        broken.remove()
        survived(name)
    report["fallbacks"] = model.autoprune_reporter.meter.counts()

    def raising(*args: object) -> torch.Tensor:
        raise RuntimeError("made to fail")

    with patch.object(executor, "run_fusion", raising):
        report["raised"] = chat(llm, [[turn("raise?", other.image)]])[0].plain()
    report["errors"] = model.autoprune_reporter.meter.errors
    survived("raised")
    report["unsafe"] = _fails_first_image_check(llm, raising)
    survived("unsafe")
    report["exported"] = _exported(before)
    for name, entry in (
        ("zero", {"budget": 0}),
        ("text", {"budget": "8"}),
        ("unknown", {"buget": 8}),
        ("list", [8]),
    ):
        raw = {**prompt(other), "mm_processor_kwargs": {"autoprune": entry}}
        try:
            generate(llm, [raw])
            report[name] = "accepted"
        except ValueError as error:
            report[name] = str(error)
    survived("refused")
    report["repeated"], report["unrefused"] = _refused_and_repeated(llm, other)
    return report


def _refused_and_repeated(llm: LLM, example: Example) -> tuple[Report, Report]:
    """Answers to a request after it was refused for a sampling parameter, and without that."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    raw = prompt(example, instruction="Which one was refused?")
    with pytest.raises(VLLMValidationError, match="allowed_token_ids"):
        llm.generate([raw], SamplingParams(allowed_token_ids=[10**9]), use_tqdm=False)
    repeated = generate(llm, [raw])[0].plain()
    forget(llm)
    return repeated, generate(llm, [raw])[0].plain()


def _exported(before: Mapping[str, float]) -> dict[str, float]:
    """Counters of the plugin in this process's metrics, as differences from ``before``."""
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        - before.get(line.rpartition(" ")[0], 0.0)
        for line in generate_latest().decode().splitlines()
        if line.startswith("autoprune_") and "_created" not in line
    }


def _fails_first_image_check(llm: LLM, raising: Callable[..., object]) -> Report:
    """Answers of a state that fails its check on the first real image, and of its base policy.

    ``broken`` and ``fixed`` are its answers while it fails and after the fault is removed.
    """
    state = edited(sample(), {"/constraints/selector/q_e": 5})
    load_request_state(state)  # passes the checks at start-up
    question, other = examples(3)[1], examples(3)[-2]
    report: dict[str, Any] = {}

    def record_answer(name: str, about: Example, keep: str) -> None:
        entry = {"state": state, "budget": 8, "keep": keep}
        raw = {**prompt(about), "mm_processor_kwargs": {"autoprune": entry}}
        forget(llm)
        report[name] = generate(llm, [raw])[0].plain()

    with patch.object(executor, "run_fusion", raising):
        record_answer("broken", question, "state")
    record_answer("fixed", other, "state")
    record_answer("base", question, "reference")
    record_answer("other_base", other, "reference")
    first = model_of(llm).autoprune_first_check
    report["counted"] = 0 if first is None else first.unsafe
    return report


def breaking(module: Any, value: float) -> Any:
    """Make a module return non-finite values; the handle's ``remove`` undoes it."""

    def spoil(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[:, 5] = value
        return output

    return module.register_forward_hook(spoil)
