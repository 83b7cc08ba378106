"""Inputs of the field to ``LLM.generate`` and ``LLM.chat``, on a stock and a pruned engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.yardsticks.examples import CHECKPOINTS
from tests.serving.engine import examples, picture, release, start
from tests.serving.scenarios import Report, scenario
from vllm_autoprune.serving.served_state import served_state

if TYPE_CHECKING:
    from vllm import LLM

Input = Callable[["LLM"], Any]

IMAGE = picture(examples(1)[0].image)
PROMPT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>\n"
ROWS = torch.randn(12, 576, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
EMBEDS = {"image_embeds": ROWS, "image_grid_thw": torch.tensor([[1, 4, 12]])}
ENTRY = {"autoprune": {"budget": 12}}
KWARGS = "mm_processor_kwargs"
WRITE = '"mm_processor_kwargs": {"autoprune": {"budget"'
PART = {"type": "image_pil", "image_pil": IMAGE}


def generate(image: object = IMAGE, data: Mapping[str, object] | None = None, **more: Any) -> Input:
    """``LLM.generate`` with one token about an image; ``more`` is in the prompt's dict."""
    prompt = {"prompt": PROMPT, "multi_modal_data": {"image": image, **(data or {})}, **more}
    return lambda llm: llm.generate([allowed(llm, prompt)], sampling(), use_tqdm=False)


def allowed(llm: LLM, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields without an entry where nothing reads one: on a stock engine."""
    stock = served_state(llm.llm_engine.model_config) is None
    return {name: value for name, value in fields.items() if not (stock and name == KWARGS)}


def chat(part: Mapping[str, object] = PART, message: Any = None, **named: Any) -> Input:
    """``LLM.chat`` with one token about an image."""
    content = [dict(part), {"type": "text", "text": "What?"}]
    turn = {"role": "user", "content": content, **(message or {})}
    return lambda llm: llm.chat([[turn]], sampling(), use_tqdm=False, **allowed(llm, named))


def sampling(**more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=1, **more)


def with_extra_args(llm: LLM) -> Any:
    return llm.generate([PROMPT], sampling(extra_args=ENTRY), use_tqdm=False)


INPUTS: dict[str, tuple[str | None, Input]] = {
    "embeds": (None, generate(EMBEDS)),
    "embeds with a budget": (None, generate(EMBEDS, **{KWARGS: ENTRY})),
    "embeds under a name": (None, generate(EMBEDS, multi_modal_uuids={"image": ["one"]})),
    "two in one": (
        None,
        generate(
            {
                "image_embeds": torch.cat([ROWS, ROWS]),
                "image_grid_thw": torch.tensor([[1, 4, 12]] * 2),
            },
            prompt=PROMPT.replace("What?", "<|vision_start|><|image_pad|><|vision_end|>"),
        ),
    ),
    "rows alone": (None, generate(ROWS[None])),
    "no grid": (None, generate({"image_embeds": ROWS})),
    "no picture": (None, generate(["picture"])),
    "K above N": (None, generate(**{KWARGS: {"autoprune": {"budget": 4000}}})),
    "off": (None, chat(**{KWARGS: {"autoprune": {"enabled": False}}})),
    "other keys": (
        None,
        generate(
            [IMAGE], None, state="CA", budget=None, **{KWARGS: {"autoprune": {"enabled": False}}}
        ),
    ),
    "in the prompt": (WRITE, generate(autoprune={"budget": 12})),
    "false in the prompt": ('{"enabled": false}', generate(autoprune=False)),
    "number in the prompt": ('{"budget": 9}', generate(autoprune=9)),
    "extra body": (WRITE, generate(extra_body={KWARGS: ENTRY})),
    "in the data": (WRITE, generate(data={KWARGS: ENTRY})),
    "entry in the data": (WRITE, generate(data=ENTRY)),
    "one level up": ("one level down", generate(**{KWARGS: {"budget": 12}})),
    "no object": ('{"budget": 12}', generate(**{KWARGS: {"autoprune": 12}})),
    "chat, one level up": ("one level down", chat(**{KWARGS: {"budget": 12}})),
    "chat, part": (WRITE, chat({**PART, **ENTRY})),
    "chat, message": (WRITE, chat(message=ENTRY)),
    "chat, template": (WRITE, chat(chat_template_kwargs=ENTRY)),
    "extra_args": (WRITE, with_extra_args),
}
"""Input -> how it is answered: as by stock (None), or by an exception with a text."""


@scenario
def field_inputs() -> Report:
    """For each input: what is expected, stock's answer, and the pruned engine's."""
    answers: list[dict[str, str]] = []
    settings = {"state": "cen_divprune", "budget": 8, "requests": "budget"}
    for given in (None, settings):
        llm = start(
            given, model=str(CHECKPOINTS["miniqwen"]), max_model_len=512, enable_mm_embeds=True
        )
        answers.append({name: _answer(llm, send) for name, (_, send) in INPUTS.items()})
        release(llm)
    stock, pruned = answers
    return {name: (expected, stock[name], pruned[name]) for name, (expected, _) in INPUTS.items()}


def _answer(llm: LLM, send: Input) -> str:
    """How one token was answered: its prompt's length and its end, or the exception."""
    try:
        (output,) = send(llm)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    end = output.outputs[0].finish_reason
    return f"{len(output.prompt_token_ids)} tokens, {end}, {output.outputs[0].token_ids}"
