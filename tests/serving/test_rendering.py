"""Requests that are rendered before the engine, by another server, or by a client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from benchmarks.server import Server, serve
from benchmarks.yardsticks.examples import format_prompt
from tests.hostile.forgeries import FORGED, Forge, changed, forge
from tests.serving.conftest import COMMON, PRUNED
from tests.serving.engine import LLAVA, STATE, TOKENS, examples, picture, raw_prompt, turn
from tests.serving.http import ask, assert_grows, body, entry, prompt_tokens, text_of
from tests.serving.runners import Runner, in_engine
from vllm_autoprune.ops.dtype import choose_dtype
from vllm_autoprune.serving.plan import FIELD, ItemPlan
from vllm_autoprune.serving.plugin import DISABLE

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

RENDER, GENERATE = "/v1/chat/completions/render", "/inference/v1/generate"


@pytest.mark.only("v1")
@in_engine
def test_renderers_read_an_instruction_once_and_do_not_mix_requests() -> None:
    """100 images and 96,000 words: 47 s and 80 MB where each image has its own copy.

    Conversations that are rendered concurrently have the plans and token ids of single ones.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.renderers import renderer_from_config
    from vllm.renderers.params import ChatParams

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
    question, image = examples(1)[0].question, picture(examples(1)[0].image)
    seconds, sizes = [], []
    for text in (question, "what is left of the red " * 16_000):
        text_of_images = format_prompt(question).replace("<image>", "<image>" * 100)
        asked = raw_prompt(text_of_images, [image] * 100, instructions=[text] * 100)
        begun = time.process_time()
        (request,) = renderer.render_cmpl([asked])
        seconds.append(time.process_time() - begun)
        items = request["mm_kwargs"]["image"]
        sizes.append(sum(item[FIELD].data.nbytes for item in items))
    assert sizes[1] < 1_500_000 and seconds[1] < seconds[0] + 2.0

    talks = [[turn(example.question, example.image)] for example in examples(4)[:8]]

    async def render_together() -> list[Any]:
        jobs = (renderer.render_chat_async([talk], ChatParams()) for talk in talks)
        return [requests[0] for _, requests in await asyncio.gather(*jobs)]

    def read(request: Any) -> object:
        plans = [ItemPlan.decode(item[FIELD].data) for item in request["mm_kwargs"]["image"]]
        return [plan.instruction for plan in plans], list(request["prompt_token_ids"])

    alone = [read(renderer.render_chat([talk], ChatParams())[1][0]) for talk in talks]
    assert [read(request) for request in asyncio.run(render_together())] == alone
    renderer.shutdown()


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
    for name, change in FORGERIES.items():
        status, answer = pruned.post(GENERATE, forge(request, change))
        assert (status, "autoprune_plan" in str(answer)) == (400, True), name
    assert text_of(ask(pruned, examples(2)[1])) == before


def test_rendering_is_not_counted_and_beams_are_one_request(pruned: Server) -> None:
    """What else is not counted, and samples: attacks of ``tests/hostile``."""
    example = examples(2)[0]

    def render_and_be_answered() -> None:
        assert pruned.post(RENDER, body(pruned, example))[0] == 200
        ask(pruned, example, use_beam_search=True, n=2)

    counted, before = {"state=autoprune": 1}, {"stage=before": TOKENS}
    assert_grows(pruned, render_and_be_answered, requests=counted, visual_tokens=before)


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
            expected = ask(generator, examples(2)[number], **entry(**fields))
            assert len(request["token_ids"]) == prompt_tokens(expected), fields
            status, answer = generator.post(GENERATE, request)
            assert status == 200, answer
            ids: Any = answer["choices"]
            said = {"model": generator.model, "tokens": ids[0]["token_ids"]}
            text = str(generator.post("/detokenize", said)[1]["prompt"])
            assert text.removesuffix("</s>").strip() == text_of(expected), fields


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
