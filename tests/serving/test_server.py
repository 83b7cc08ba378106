"""`vllm serve` with a state, over HTTP: counts, refusals, endpoints, images, rendered requests."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from benchmarks.server import Server, serve
from benchmarks.yardsticks.examples import as_picture, draw_examples, format_prompt
from tests.pins.table import read
from tests.serving.conftest import COMMON, PRUNED
from tests.serving.engine import CLIP, LLAVA, STATE, TOKENS, examples, raw_prompt
from tests.serving.http import ask, assert_grows, body, entry, prompt_tokens, text_of
from tests.serving.runners import Runner, in_engine
from tests.tables import parametrize_from_file
from vllm_autoprune import load_state
from vllm_autoprune.http_client import CHAT
from vllm_autoprune.ops.dtype import choose_dtype
from vllm_autoprune.selftest.run import BLOCK
from vllm_autoprune.serving.api.endpoint import PATH, PLAN
from vllm_autoprune.serving.plan import FIELD
from vllm_autoprune.serving.plugin import DISABLE

pytestmark = pytest.mark.engine


def test_prompt_tokens_fall_by_exactly_n_minus_k(stock: Server, pruned: Server) -> None:
    entries = {k: entry(budget=k) for k in (1, 8, 31, 143)} | {32: {}}
    entries |= {18: entry(budget="1/8"), 48: entry(budget="1/3:8-64")}  # exact: not 47
    controls = [
        entry(budget=40, keep=keep) for keep in ("reference", "random", "resized")
    ]
    for example in examples(1)[:3]:
        full = prompt_tokens(ask(stock, example))
        for k, fields in (*entries.items(), *((40, control) for control in controls)):
            assert prompt_tokens(ask(pruned, example, **fields)) == full - TOKENS + k


# ---- refusals ----


def test_each_refusal_of_the_table_is_a_bad_request(pruned: Server) -> None:
    """But those by flags of the server of the table, and of fields that the renderer writes."""
    written = {"instructions", "details", "turns", "recall_turns"}
    sent = 0
    for row, message in read("refusals").items():
        request = json.loads(row)
        fields = request.get("entry", {})
        if "level" in request or "256" in message or "images" in message:
            continue
        if isinstance(fields, dict) and written & fields.keys():
            continue
        kwargs = request.get("kwargs", {"autoprune": fields})
        extra = {"mm_processor_kwargs": kwargs, **request.get("body", {})}
        sent_body = body(pruned, examples(1)[0], **extra)
        status, answer = pruned.post(CHAT, sent_body, request.get("headers"))
        assert status == 400, row
        problem = message.splitlines()[-1].strip(" -").partition(" -> ")[0]
        problem = problem.removeprefix("request: ")
        assert problem[:60] in answer["error"]["message"], row  # type: ignore[index]
        sent += 1
    assert sent > 35
    ask(pruned, examples(1)[0], **entry(budget=None))  # null means no budget


@parametrize_from_file("fields", "headers", "param")
def test_a_refusal_has_its_place_and_kind_in_a_field(
    pruned: Server, fields: dict[str, Any], headers: dict[str, str], param: str
) -> None:
    sent = body(pruned, examples(1)[0], **fields)
    status, answer = pruned.post(CHAT, sent, headers)
    error: Any = answer["error"]
    assert (status, error["type"], error["param"]) == (400, "BadRequestError", param)
    assert param.partition("#")[0] in error["message"]
    assert "parameter=" not in error["message"], "as without the field"


# ---- endpoints ----


def test_endpoint_describes_the_state_on_every_front_end_and_is_off_by_default(
    pruned: Server, two_front_ends: Server
) -> None:
    state = load_state("autoprune")
    for _ in range(8):
        description = json.loads(two_front_ends.get(PATH))
        assert (description["state"], description["digest"]) == (
            state.name,
            state.digest,
        )
        assert description["budget"]["k"] == "1/9:8-64"
        assert (description["core"], description["recall"]) == (None, 5)
        assert description["evidence"] == state.provenance.model_dump(mode="json")
        assert str(CLIP) not in str(description), "no path of the server"
    assert two_front_ends.post(PATH, {"state": "visionzip"})[0] == 405, "read only"
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        pruned.get(PATH)


def test_screenshots_of_an_agent_stay_in_the_prefix_cache(pruned: Server) -> None:

    def chat_shot(number: int, url: str) -> list[dict[str, object]]:
        """What an agent says and calls, and the screenshot that its tool returns."""
        function = {"name": "look", "arguments": "{}"}
        call = {"id": f"c{number}", "type": "function", "function": function}
        shot = {"type": "image_url", "image_url": {"url": url}}
        return [
            {"role": "assistant", "content": f"I look {number}.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": [shot]},
        ]

    images = {example.image_id: example for example in draw_examples("test", 10)}
    talk: list[object] = [{"role": "user", "content": "How many shapes?"}]
    previous = 0
    for number, example in enumerate(images.values()):
        talk += chat_shot(number, example.png_url)
        request = {
            "model": pruned.model,
            "temperature": 0,
            "messages": talk,
            "max_tokens": 1,
        }
        status, answer = pruned.post(CHAT, request)
        assert status == 200, answer
        usage: Any = answer["usage"]
        # The last token of a prompt may be another one where the answer follows.
        assert (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0) >= (
            (previous - 1) // BLOCK * BLOCK
        )
        assert usage["prompt_tokens"] > previous + 32
        previous = usage["prompt_tokens"]


# ---- requests that are rendered before the engine, by another server, or by a client ----

RENDER = f"{CHAT}/render"


@pytest.mark.only("v1")
@in_engine
def test_renderers_read_an_instruction_once() -> None:
    """100 images and 96,000 words: 47 s and 80 MB where each image has its own copy."""
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
        additional_config={
            "autoprune": {**STATE, "budget": 16, "requests": "budget:1-64"}
        },
    ).create_engine_config()
    renderer = renderer_from_config(config)
    question = examples(1)[0].question
    image = as_picture(examples(1)[0].image)
    seconds = []
    sizes = []
    for text in (question, "what is left of the red " * 16_000):
        text_of_images = format_prompt(question).replace("<image>", "<image>" * 100)
        prompt = raw_prompt(text_of_images, [image] * 100, instructions=[text] * 100)
        begun = time.process_time()
        (request,) = renderer.render_cmpl([prompt])
        seconds.append(time.process_time() - begun)
        items = request["mm_kwargs"]["image"]
        sizes.append(sum(item[FIELD].data.nbytes for item in items))
    assert sizes[1] < 1_500_000 and seconds[1] < seconds[0] + 2.0
    renderer.shutdown()


def rendered(server: Server, number: int = 0, **fields: object) -> dict[str, Any]:
    """A chat request as rendered by a server."""
    status, answer = server.post(RENDER, body(server, examples(2)[number], **fields))
    assert status == 200, answer
    return answer


def test_rendering_is_not_counted_and_beams_are_one_request(pruned: Server) -> None:
    """What else is not counted, and samples: attacks of ``tests/hostile``."""

    def render_and_be_answered() -> None:
        rendered(pruned)
        ask(pruned, examples(2)[0], use_beam_search=True, n=2)

    counted = {"requests state=autoprune": 1, "visual_tokens stage=before": TOKENS}
    assert_grows(pruned, render_and_be_answered, counted)


def test_a_plan_has_the_tokens_and_identities_that_the_engine_gets(
    two_front_ends: Server,
) -> None:
    """Without pixels, and on whichever API server."""
    server = two_front_ends
    images = {example.image_id: example for example in draw_examples("test", 3)}
    urls = [example.png_url for example in images.values()]

    def chat(pictures: list[str]) -> dict[str, object]:
        parts: list[object] = [
            {"type": "image_url", "image_url": {"url": url}} for url in pictures
        ]
        text = {"type": "text", "text": "How many shapes?"}
        turns = [
            {"role": "user", "content": [*parts, text]},
            {"role": "assistant", "content": "3"},
            {"role": "user", "content": "And which are red?"},
        ]
        return {"model": server.model, "messages": turns}

    def post(path: str, pictures: list[str]) -> Any:
        status, answer = server.post(path, chat(pictures))
        assert status == 200, answer
        return answer

    plan = post(PLAN, urls)
    rendered_prompt = post(RENDER, urls)
    assert plan["tokens"] == rendered_prompt["token_ids"]
    assert plan["tokens"] == post("/tokenize", urls)["tokens"]
    identities = [item["identity"] for item in plan["items"]]
    assert identities == rendered_prompt["features"]["mm_hashes"]["image"]
    lengths = [item["length"] for item in plan["items"]]
    assert lengths[:3] == [16, 16, 16] and sum(lengths[3:]) == 5, "and recall"
    for _ in range(4):
        assert post(PLAN, plan["pictures"]) == plan
    status, answer = server.post(PLAN, chat(["picture:8x8;ab"]))
    assert (status, "as an earlier plan" in str(answer)) == (400, True)


FLAGS = (*COMMON, "--dtype", "float32")


@pytest.mark.exhaustive
def test_rendered_elsewhere_is_answered_as_a_whole_request(runner: Runner) -> None:
    """By ``vllm launch render``; the generate server does not guess a budget without the plugin."""
    generate = "/inference/v1/generate"
    states = (*PRUNED, "--autoprune-requests", "states")
    entries: tuple[dict[str, object], ...] = (
        {},
        {"budget": 8},
        {"state": "visionzip", "budget": 16},
        {"keep": "random"},
        {"enabled": False},
    )
    render = ("launch", "render")
    env = runner.environment
    with serve(LLAVA, *FLAGS, *states, "--enable-scale-out", env=env) as generator:
        with serve(LLAVA, *FLAGS, *states, env=env, subcommand=render) as renderer:
            for number, fields in enumerate(entries):
                request = rendered(renderer, number, **entry(**fields))
                expected = ask(generator, examples(2)[number], **entry(**fields))
                assert len(request["token_ids"]) == prompt_tokens(expected), fields
                status, answer = generator.post(generate, request)
                assert status == 200, answer
                ids: Any = answer["choices"]
                said = {"model": generator.model, "tokens": ids[0]["token_ids"]}
                text = str(generator.post("/detokenize", said)[1]["prompt"])
                assert text.removesuffix("</s>").strip() == text_of(expected), fields
        with serve(
            LLAVA, *FLAGS, env={**env, DISABLE: "1"}, subcommand=render
        ) as renderer:
            request = rendered(renderer)
        status, answer = generator.post(generate, request)
        assert (status, "render" in str(answer)) == (400, True), answer
        ask(generator, examples(1)[0])
