"""Requests that are rendered before the engine, by another server, or by a client."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from benchmarks.server import Server, serve
from benchmarks.yardsticks.examples import format_prompt
from tests.hostile.attacks.plans import FORGED, Forge, changed, forged
from tests.serving.conftest import COMMON, PRUNED
from tests.serving.engine import LLAVA, STATE, TOKENS, examples, picture, turn
from tests.serving.http import ask, body, entry, measure_increase, prompt_tokens, text_of
from tests.serving.scenarios import Report, Runner, scenario
from vllm_autoprune.ops.dtype import choose_dtype
from vllm_autoprune.serving.plan import FIELD, ItemPlan
from vllm_autoprune.serving.plugin import DISABLE

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

RENDER, GENERATE = "/v1/chat/completions/render", "/inference/v1/generate"


@scenario
def rendering() -> Report:
    """``long``: cost of long instructions of many images; ``side_by_side``: :func:`_side_by_side`.

    Starts no engine.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.renderers import renderer_from_config

    load_general_plugins()
    config = EngineArgs(
        model=str(LLAVA),
        enforce_eager=True,
        dtype=choose_dtype(),
        max_model_len=512,
        limit_mm_per_prompt={"image": 128},
        mm_processor_cache_gb=0,
        renderer_num_workers=4,
        additional_config={"autoprune": {**STATE, "budget": 16, "requests": "budget:1-64"}},
    ).create_engine_config()
    renderer = renderer_from_config(config)
    long = _render_long(renderer)
    side_by_side = asyncio.run(_side_by_side(renderer))
    renderer.shutdown()
    return {"long": long, "side_by_side": side_by_side}


def _render_long(renderer: Any) -> dict[str, float]:
    """100 images and one instruction of 96,000 words: seconds, and bytes of all plans."""
    example = examples(1)[0]
    spent = {}
    for name, text in (("short", example.question), ("long", "what is left of the red " * 16_000)):
        head, mark, tail = format_prompt(example.question).partition("<image>")
        prompt = {
            "prompt": head + mark * 100 + tail,
            "multi_modal_data": {"image": [picture(example.image)] * 100},
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

    conversations = [[turn(example.question, example.image)] for example in examples(4)[:8]]
    alone = [renderer.render_chat([each], ChatParams())[1][0] for each in conversations]
    together = await asyncio.gather(
        *(renderer.render_chat_async([each], ChatParams()) for each in conversations)
    )

    def parts(rendered: Any) -> tuple[object, object]:
        plans = [ItemPlan.decode(item[FIELD].data) for item in rendered["mm_kwargs"]["image"]]
        return [plan.instruction for plan in plans], rendered["prompt_token_ids"]

    return [parts(a) == parts(b[1][0]) for a, b in zip(alone, together, strict=True)]


def test_a_long_instruction_of_many_images_costs_little() -> None:
    """100 images and 96,000 words: 47 s and 80 MB where each image has its own copy."""
    spent = Runner("v1").run("rendering")["long"]
    assert spent["long_bytes"] < 1_500_000
    assert spent["long_seconds"] < spent["short_seconds"] + 2.0


def test_concurrent_renderers_do_not_mix_instructions() -> None:
    assert Runner("v1").run("rendering")["side_by_side"] == [True] * 8


# ---- processed inputs of a client ----


def rendered(server: Server, number: int = 0, **fields: object) -> dict[str, Any]:
    """A chat request as rendered by a server."""
    status, answer = server.post(RENDER, body(server, examples(2)[number], **fields))
    assert status == 200, answer
    return answer


FORGERIES: Mapping[str, Forge] = {
    "more tokens than room": changed(budget=40),
    "profiling": changed(profile=True),
    "no state": changed(state=b"{" * 99),
    "unknown words": changed(instruction=(2**40,)),
    "unknown words of the language model": changed(language=(10**6,)),
    **{name: FORGED[name] for name in ("word 0 = 33", "empty", "short", "fractions", "two rows")},
}


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # vLLM's decoder
def test_forged_plans_are_refused_and_sound_ones_answered(pruned: Server) -> None:
    request = rendered(pruned, logprobs=False)
    status, answer = pruned.post(GENERATE, request)
    assert status == 200 and answer["choices"]
    before = text_of(ask(pruned, examples(2)[1]))
    for number, (name, forge) in enumerate(FORGERIES.items()):
        status, answer = pruned.post(GENERATE, forged(request, [forge], (1 << 48) + number))
        assert (status, "autoprune_plan" in str(answer)) == (400, True), name
    assert text_of(ask(pruned, examples(2)[1])) == before


def test_only_accepted_requests_are_counted(pruned: Server) -> None:
    example = examples(2)[0]
    chat: Any = body(pruned, example)

    def look_and_be_refused() -> None:
        looked_at = {"model": pruned.model, "messages": chat["messages"]}
        assert pruned.post("/tokenize", looked_at)[0] == 200
        url = chat["messages"][0]["content"][0]["image_url"]["url"]
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        content = [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]
        counted = {"model": pruned.model, "messages": [{"role": "user", "content": content}]}
        assert pruned.post("/v1/messages/count_tokens", counted)[0] == 200
        assert pruned.post(RENDER, chat)[0] == 200
        long = copy.deepcopy(chat)
        long["messages"][0]["content"][1]["text"] = "red " * 4000
        assert pruned.post("/v1/chat/completions", long)[0] == 400

    by = measure_increase(pruned, look_and_be_refused)
    assert by("autoprune_requests_total state=autoprune") == 0
    assert by("autoprune_visual_tokens_total stage=before") == 0

    def be_answered() -> None:
        ask(pruned, example)
        ask(pruned, example, n=2, temperature=0.5)
        ask(pruned, example, use_beam_search=True, n=2)

    by = measure_increase(pruned, be_answered)
    assert by("autoprune_requests_total state=autoprune") == 3
    assert by("autoprune_visual_tokens_total stage=before") == 3 * TOKENS


# ---- a render server and a generate server (``vllm launch render``) ----

FLAGS = (*COMMON, "--dtype", "float32")
STATES = (*PRUNED, "--autoprune-requests", "states")
ENTRIES: tuple[dict[str, object], ...] = (
    {},
    {"budget": 8},
    {"state": "visionzip", "budget": 16},
    {"keep": "random"},
    {"enabled": False},
)


@pytest.fixture(scope="module")
def generator(runner: Runner) -> Iterator[Server]:
    """Answers rendered requests, and whole ones to compare with."""
    with serve(LLAVA, *FLAGS, *STATES, "--enable-scale-out", env=runner.environment) as server:
        yield server


@pytest.mark.exhaustive
def test_rendered_elsewhere_is_answered_as_a_whole_request(
    generator: Server, runner: Runner
) -> None:
    render = ("launch", "render")
    with serve(LLAVA, *FLAGS, *STATES, env=runner.environment, subcommand=render) as renderer:
        for number, fields in enumerate(ENTRIES):
            request = rendered(renderer, number, **entry(**fields))
            whole = ask(generator, examples(2)[number], **entry(**fields))
            assert len(request["token_ids"]) == prompt_tokens(whole), fields
            status, answer = generator.post(GENERATE, request)
            assert status == 200, answer
            ids: Any = answer["choices"]
            said = {"model": generator.model, "tokens": ids[0]["token_ids"]}
            text = str(generator.post("/detokenize", said)[1]["prompt"])
            assert text.removesuffix("</s>").strip() == text_of(whole), fields


@pytest.mark.exhaustive
def test_an_image_without_a_plan_is_refused(generator: Server, runner: Runner) -> None:
    """The render server has no plugin; the generate server does not guess a budget."""
    environment = {**runner.environment, DISABLE: "1"}
    with serve(LLAVA, *FLAGS, env=environment, subcommand=("launch", "render")) as renderer:
        request = rendered(renderer)
    status, answer = generator.post(GENERATE, request)
    assert status == 400, answer
    assert "render" in str(answer)
    ask(generator, examples(1)[0])
