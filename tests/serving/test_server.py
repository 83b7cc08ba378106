"""`vllm serve` with a state, over HTTP: token counts, endpoints, refusals, images."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest
from PIL import Image

from benchmarks.server import Server
from benchmarks.yardsticks.examples import draw_examples, png_url
from tests.pins.table import read
from tests.serving.engine import TOKENS, examples, picture
from tests.serving.http import ask, body, entry, prompt_tokens, text_of
from vllm_autoprune import load_state
from vllm_autoprune.http_client import CHAT
from vllm_autoprune.selftest.run import BLOCK
from vllm_autoprune.serving.api.endpoint import PATH

pytestmark = pytest.mark.engine


# ---- counts of tokens ----


def test_prompt_tokens_fall_by_exactly_n_minus_k(stock: Server, pruned: Server) -> None:
    kept = {k: entry(budget=k) for k in (1, 8, 31, 143)} | {32: {}}
    controls = [entry(budget=40, keep=keep) for keep in ("reference", "random", "resized")]
    for example in examples(1)[:3]:
        full = prompt_tokens(ask(stock, example))
        for k, fields in (*kept.items(), *((40, control) for control in controls)):
            assert prompt_tokens(ask(pruned, example, **fields)) == full - TOKENS + k


def test_no_pruning_is_the_stock_answer(stock: Server, pruned: Server) -> None:
    example = examples(1)[1]
    full = ask(stock, example, logprobs=True)
    for fields in ({"enabled": False}, {"budget": TOKENS}, {"budget": 4096}):
        same = ask(pruned, example, logprobs=True, **entry(**fields))
        assert same["choices"][0]["logprobs"] == full["choices"][0]["logprobs"]
        assert prompt_tokens(same) == prompt_tokens(full)


def test_both_front_ends_answer_alike(stock: Server, two_front_ends: Server) -> None:
    example = examples(1)[0]
    full = prompt_tokens(ask(stock, example))
    answers = [ask(two_front_ends, example) for _ in range(24)]
    expected = full - TOKENS + 16, text_of(answers[0])
    assert {(prompt_tokens(answer), text_of(answer)) for answer in answers} == {expected}
    processes = r"\((ApiServer_\d+) pid=\d+\).*Received request"
    assert len(set(re.findall(processes, two_front_ends.logged()))) == 2, "both have answered"


# ---- refusals ----


def test_each_refusal_of_the_table_is_a_bad_request(pruned: Server) -> None:
    """But those by flags of the server of the table, and of fields that the renderer writes."""
    written = {"instructions", "details", "turns", "recall_turns"}
    sent = 0
    for row, message in read("refusals").items():
        request = json.loads(row)
        asked = request.get("entry", {})
        if "level" in request or "256" in message or "images" in message:
            continue
        if isinstance(asked, dict) and written & asked.keys():
            continue
        kwargs = request.get("kwargs", {"autoprune": asked})
        fields = {"mm_processor_kwargs": kwargs, **request.get("body", {})}
        sent_body = body(pruned, examples(1)[0], **fields)
        status, answer = pruned.post(CHAT, sent_body, request.get("headers"))
        assert status == 400, row
        problem = message.splitlines()[1].strip(" -").partition(" -> ")[0]
        assert problem[:60] in answer["error"]["message"], row  # type: ignore[index]
        sent += 1
    assert sent > 35
    ask(pruned, examples(1)[0], **entry(budget=None))  # null means no budget


def test_settings_that_no_flag_allows_are_refused(pruned: Server, two_front_ends: Server) -> None:
    """Of pruning, and other arguments of the processor."""
    size = {"autoprune": {"budget": 8}, "size": {"height": 10_000, "width": 10_000}}
    for server, fields, flag in (
        (two_front_ends, entry(budget=8), "--autoprune-requests budget"),
        (pruned, {"mm_processor_kwargs": size}, "trust-request-mm-kwargs"),
    ):
        status, answer = server.post(CHAT, body(server, examples(1)[0], **fields))
        assert status == 400 and flag in str(answer)


# ---- endpoints ----


def test_endpoint_describes_the_state_on_every_front_end_and_is_off_by_default(
    pruned: Server, two_front_ends: Server
) -> None:
    state = load_state("autoprune")
    for _ in range(8):
        description = json.loads(two_front_ends.get(PATH))
        assert (description["state"], description["digest"]) == (state.name, state.digest)
        assert description["budget"]["k"] == 16
        assert (description["core"], description["recall"]) == (None, 5)
        assert description["evidence"] == state.provenance.model_dump(mode="json")
    assert two_front_ends.post(PATH, {"state": "visionzip"})[0] == 405, "read only"
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        pruned.get(PATH)


TASK: dict[str, object] = {"role": "user", "content": "How many shapes?"}


def agent_chat(urls: Sequence[str]) -> dict[str, object]:
    """What an agent has said after each screenshot of a tool."""
    messages: list[dict[str, object]] = [TASK]
    for i, url in enumerate(urls):
        call = {"id": f"c{i}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        shot = {"type": "image_url", "image_url": {"url": url}}
        messages += [
            {"role": "assistant", "content": f"I look {i}.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{i}", "content": [shot]},
        ]
    return {"messages": messages, "max_tokens": 1}


def agent_responses(urls: Sequence[str]) -> dict[str, object]:
    items: list[dict[str, object]] = [TASK]
    for i, url in enumerate(urls):
        shot = {"type": "input_image", "detail": "auto", "image_url": url}
        items += [
            {"role": "assistant", "content": f"I look {i}."},
            {"type": "function_call", "call_id": f"c{i}", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{i}", "output": [shot]},
        ]
    return {"input": items, "max_output_tokens": 1, "store": False}


def agent_messages(urls: Sequence[str]) -> dict[str, object]:
    """With a word of the tool."""
    messages: list[dict[str, object]] = [TASK]
    for i, url in enumerate(urls):
        data = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        shot = [{"type": "text", "text": "Done."}, {"type": "image", "source": data}]
        use = {"type": "tool_use", "id": f"c{i}", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": f"c{i}", "content": shot}
        messages += [
            {"role": "assistant", "content": [{"type": "text", "text": f"I look {i}."}, use]},
            {"role": "user", "content": [result]},
        ]
    return {"messages": messages, "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "sent", "prefix"),
    [
        (CHAT, agent_chat, "prompt_tokens"),
        ("/v1/responses", agent_responses, "input_tokens"),
        ("/v1/messages", agent_messages, "input_tokens"),
    ],
)
def test_screenshots_of_an_agent_stay_in_the_prefix_cache(
    pruned: Server, path: str, sent: Callable[..., dict[str, object]], prefix: str
) -> None:
    images = {example.image_id: example.image for example in draw_examples("test", 10)}
    urls = [png_url(image) for image in images.values()]
    before = 0
    for turns in range(1, len(urls) + 1):
        request = {"model": pruned.model, "temperature": 0, **sent(urls[:turns])}
        status, answer = pruned.post(path, request)
        assert status == 200, answer
        usage: Any = answer["usage"]
        cached = usage.get(f"{prefix}_details", {}).get("cached_tokens") or 0
        # Anthropic's input tokens are those that were neither read from a cache nor written to one.
        cached += usage.get("cache_read_input_tokens", 0)
        tokens = usage[prefix] + usage.get("cache_read_input_tokens", 0)
        tokens += usage.get("cache_creation_input_tokens", 0)
        # The last token of a prompt may be another one where the answer follows.
        assert cached >= (before - 1) // BLOCK * BLOCK
        assert tokens > before + 32
        before = tokens


# ---- unusual and broken images: a pruned server answers wherever stock vLLM does ----


def encode(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    content = io.BytesIO()
    image.save(content, form, **options)
    return content.getvalue()


def scene(number: int = 0) -> Image.Image:
    return picture(examples(4)[number].image)


IMAGES: dict[str, Callable[[], list[bytes]]] = {
    "truncated": lambda: [encode(scene())[:-200]],
    "header only": lambda: [encode(scene())[:20]],
    "nothing": lambda: [b""],
    "no image": lambda: [b"GIF89a not an image"],
    "one pixel": lambda: [encode(Image.new("RGB", (1, 1), (255, 0, 0)))],
    "thin": lambda: [encode(Image.new("RGB", (10_000, 10), (0, 99, 0)))],
    "tall": lambda: [encode(Image.new("RGB", (10, 10_000), (0, 99, 0)))],
    "cmyk": lambda: [encode(scene().convert("CMYK"), "JPEG")],
    "transparent": lambda: [encode(scene().convert("RGBA"))],
    "palette": lambda: [encode(scene().convert("P"), "GIF")],
    "sixteen bits": lambda: [encode(Image.new("I;16", (40, 40), 40_000))],
    "animated": lambda: [encode(scene(), "GIF", save_all=True, append_images=[scene(1), scene(2)])],
    # None is used by other tests, because stock vLLM fails on these images later, see below.
    "twenty": lambda: [encode(scene().rotate(1 + i)) for i in range(20)],
    "one of two broken": lambda: [encode(scene()), encode(scene())[:-200]],
    # Last. vLLM 0.32 caches images of a prompt that it refuses as too long, and answers 500 to
    # later requests with one of the twenty, because the engine never received it.
    "unseen": lambda: [encode(scene().rotate(45))],
}


def answer_about(server: Server, images: Sequence[bytes]) -> tuple[int, int]:
    """Status, and prompt tokens where there is an answer."""
    urls = ["data:image/png;base64," + base64.b64encode(image).decode() for image in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": "What is it?"}]
    sent = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 2}
    status, reply = server.post(CHAT, {"model": server.model, **sent})
    return status, prompt_tokens(reply) if status == 200 else 0


@pytest.mark.parametrize("name", IMAGES)
def test_a_pruned_server_answers_about_images_as_stock_does(
    stock: Server, pruned: Server, name: str
) -> None:
    images = IMAGES[name]()
    (expected, full), (status, kept) = (answer_about(server, images) for server in (stock, pruned))
    if len(images) * TOKENS > 2048:  # more than the context of stock vLLM, not of a pruned server
        assert (expected, status) == (400, 200)
        assert kept < len(images) * TOKENS
        return
    assert status == expected < 500
    assert (name != "unseen") or status == 200
    if status == 200:
        assert kept == full - len(images) * (TOKENS - 32)
