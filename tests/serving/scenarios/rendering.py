"""Requests from the renderer to the input processor, without an engine."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY

from tests.serving.engine import examples, picture, turn
from tests.serving.paths import CLIP, LLAVA
from tests.serving.scenarios import Report, scenario
from vllm_autoprune.ops.dtype import choose_dtype
from vllm_autoprune.serving.plan import FIELD, ItemPlan

if TYPE_CHECKING:
    from vllm.config import VllmConfig

STATE = {"state": "autoprune", "budget": 16, "text_tower": str(CLIP), "requests": "budget:1-64"}
LONG = "what is left of the red circle and " * 12_000


@scenario
def rendering() -> Report:
    """Counting and refusal of requests, and the cost of long instructions of many images."""
    from vllm import SamplingParams
    from vllm.renderers import renderer_from_config
    from vllm.renderers.params import ChatParams
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor

    config = _config()
    renderer = renderer_from_config(config)
    door, outputs = (
        InputProcessor(config, renderer),
        OutputProcessor(renderer.tokenizer, log_stats=False),
    )
    example = examples(1)[0]
    report: dict[str, Any] = {}

    def chat(*images: object, text: str = example.question) -> Any:
        _, (prompt,) = renderer.render_chat([[turn(text, *images)]], ChatParams())  # type: ignore[arg-type]
        return prompt

    def request(name: str, prompt: Any, **sampling: int) -> Any:
        params = SamplingParams(**{"max_tokens": 4, **sampling})
        engine_request = door.process_inputs(name, prompt, params, ("generate",))
        door.assign_request_id(engine_request)
        return engine_request

    def refusal(name: str, prompt: Any) -> str:
        try:
            request(name, prompt)
        except Exception as error:  # a server answers these with 400
            return f"{type(error).__name__}: {error}"
        return ""

    counts = [_counted()]
    rendered = chat(example.image)
    counts.append(_counted())
    engine_request = request("first", rendered)
    counts.append(_counted())
    outputs.add_request(engine_request, None)
    counts.append(_counted())
    report["too_many"] = refusal("second", chat(*[example.image] * 32))
    counts.append(_counted())
    report["counts"] = counts

    made_elsewhere = {**rendered, "mm_hashes": dict(rendered["mm_hashes"])}
    report["elsewhere"] = refusal("third", made_elsewhere)
    (item,) = rendered["mm_kwargs"]["image"]
    sound = item[FIELD]
    plan = ItemPlan.decode(sound.data)
    forged = {
        "index": sound.data.index_fill(0, sound.data.new_tensor([2]), 9),
        "rows": replace(plan, budget=32).encode(),
        "profile": replace(plan, profile=True).encode(),
        "state": replace(plan, state=b"{}").encode(),
        "words": replace(plan, instruction=(10**9,)).encode(),
        "short": sound.data[:4],
        "floats": sound.data.double(),
        "list": [sound.data],
    }
    report["forged"] = {}
    for name, row in forged.items():
        item[FIELD] = replace(sound, data=row)
        report["forged"][name] = refusal(name, made_elsewhere)
    del item[FIELD]
    report["forged"]["missing"] = refusal("missing", made_elsewhere)
    item[FIELD] = sound

    report["long"] = _long(renderer, example)
    report["side_by_side"] = asyncio.run(_side_by_side(renderer))
    # Both modify the tokenizer's settings, so they run one after the other.
    report["odd"] = _send_damaged_prompts(renderer, config)
    renderer.shutdown()
    unpruned = _config(pruned=False)
    other = renderer_from_config(unpruned)
    report["odd_stock"] = _send_damaged_prompts(other, unpruned)
    other.shutdown()
    return report


def _send_damaged_prompts(renderer: Any, config: VllmConfig) -> dict[str, str]:
    """Send prompts whose image placeholders are cut off or repeated: error type, or "served"."""
    from vllm import SamplingParams
    from vllm.renderers.params import ChatParams
    from vllm.v1.engine.input_processor import InputProcessor

    door, example = InputProcessor(config, renderer), examples(1)[0]
    words = example.question

    def outcome(text: str, **truncation: object) -> str:
        try:
            params = renderer.default_chat_tok_params.with_kwargs(**truncation)
            conversation = [turn(text, example.image)]
            _, (prompt,) = renderer.render_chat([conversation], ChatParams(), params)
            door.process_inputs("odd", prompt, SamplingParams(max_tokens=4), ("generate",))
        except Exception as error:  # the type decides the server's status code
            return type(error).__name__
        return "served"

    cut = {
        f"cut to {tokens} from the {side}": outcome(
            words, truncate_prompt_tokens=tokens, truncation_side=side
        )
        for tokens in (1, 3, 8, 12, 20, 40, 150, 400)
        for side in ("left", "right")
    }
    typed = {text: outcome(text) for text in ("<image>", f"<image> {words} <image>", "</s> <s>")}
    return {**cut, **typed}


def _config(*, pruned: bool = True) -> VllmConfig:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return EngineArgs(
        model=str(LLAVA),
        enforce_eager=True,
        dtype=choose_dtype(),
        max_model_len=512,
        limit_mm_per_prompt={"image": 128},
        mm_processor_cache_gb=0,
        renderer_num_workers=4,
        additional_config={"autoprune": STATE} if pruned else {},
    ).create_engine_config()


def _counted() -> float:
    return REGISTRY.get_sample_value("autoprune_requests_total", {"state": "autoprune"}) or 0.0


def _long(renderer: Any, example: Any) -> dict[str, float]:
    """100 images and one instruction of 96,000 words: seconds, and bytes of all plans."""
    from benchmarks.yardsticks.examples import format_prompt

    image = picture(example.image)
    spent = {}
    for name, text in (("short", example.question), ("long", LONG)):
        words = format_prompt(example.question)
        head, mark, tail = words.partition("<image>")
        prompt = {
            "prompt": head + mark * 100 + tail,
            "multi_modal_data": {"image": [image] * 100},
            "mm_processor_kwargs": {"autoprune": {"instructions": [text] * 100}},
        }
        begun = time.process_time()
        (engine_request,) = renderer.render_cmpl([prompt])
        spent[f"{name}_seconds"] = time.process_time() - begun
        items = engine_request["mm_kwargs"]["image"]
        spent[f"{name}_bytes"] = sum(item[FIELD].data.nbytes for item in items)
    return spent


async def _side_by_side(renderer: Any) -> list[bool]:
    """Whether conversations rendered concurrently equal those rendered one by one."""
    from vllm.renderers.params import ChatParams

    conversations = [[turn(one.question, one.image)] for one in examples(4)[:8]]
    alone = [renderer.render_chat([each], ChatParams())[1][0] for each in conversations]
    together = await asyncio.gather(
        *(renderer.render_chat_async([each], ChatParams()) for each in conversations)
    )
    return [_same(a, b[1][0]) for a, b in zip(alone, together, strict=True)]


def _same(one: Any, other: Any) -> bool:
    plans = [
        [ItemPlan.decode(item[FIELD].data).instruction for item in each["mm_kwargs"]["image"]]
        for each in (one, other)
    ]
    return bool(plans[0] == plans[1] and one["prompt_token_ids"] == other["prompt_token_ids"])
