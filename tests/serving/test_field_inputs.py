"""Inputs of the field, offline and over HTTP: answered as by stock vLLM, or told what to write."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import httpx
import pytest
import torch

from benchmarks.server import Server, serve
from benchmarks.yardsticks.examples import CHECKPOINTS, as_picture
from tests.serving.conftest import COMMON
from tests.serving.engine import LLAVA, Engine, examples, greedy, start
from tests.serving.runners import Runner, in_engine
from vllm_autoprune.http_client import CHAT
from vllm_autoprune.serving.api.endpoint import NAME, PATH
from vllm_autoprune.serving.served_state import served_state
from vllm_autoprune.stream import parse_stream

pytestmark = pytest.mark.engine

K = 8
N = 36
"""Tokens that are kept of the picture, and all of them."""
STATE = ("--autoprune-state", "cen_divprune", "--autoprune-budget", str(K))
KWARGS = "mm_processor_kwargs"
ENTRY: dict[str, object] = {"budget": 12}
RIGHT = {KWARGS: {"autoprune": ENTRY}}
OFF = {KWARGS: {"autoprune": {"enabled": False}}}
WRITE = '"mm_processor_kwargs": {"autoprune": {"budget"'
BUDGET = "x-autoprune-budget"
SHIPPED = "x-autoprune-state"
ENABLED = "x-autoprune-enabled"
GRID = [1, 4, 12]
UNREAD = "send the picture"

IMAGE = as_picture(examples(1)[0].image)
URL = examples(1)[0].png_url

# ---- LLM.generate and LLM.chat ----

Input = Callable[[Engine], Any]

PROMPT = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>\n"
)
EMBEDS = {"image_embeds": torch.ones(12, 576), "image_grid_thw": torch.tensor([GRID])}
PART = {"type": "image_pil", "image_pil": IMAGE}


def generate(
    image: object = IMAGE, data: Mapping[str, object] | None = None, **more: Any
) -> Input:
    """``LLM.generate`` with one token about an image; ``more`` is in the prompt's dict."""
    prompt = {
        "prompt": PROMPT,
        "multi_modal_data": {"image": image, **(data or {})},
        **more,
    }
    return lambda engine: engine.llm.generate(
        [_allow(engine, prompt)], greedy(1), use_tqdm=False
    )


def chat_offline(
    part: Mapping[str, object] = PART, message: Any = None, **named: Any
) -> Input:
    """``LLM.chat`` with one token about an image."""
    content = [dict(part), {"type": "text", "text": "What?"}]
    turn = {"role": "user", "content": content, **(message or {})}
    return lambda engine: engine.llm.chat(
        [[turn]], greedy(1), use_tqdm=False, **_allow(engine, named)
    )


def _allow(engine: Engine, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields without an entry where nothing reads one: on a stock engine."""
    stock = served_state(engine.llm.llm_engine.model_config) is None
    return {
        name: value for name, value in fields.items() if not (stock and name == KWARGS)
    }


INPUTS: dict[str, tuple[str | None, Input]] = {
    "embeds": (UNREAD, generate(EMBEDS)),
    "embeds, off": (None, generate(EMBEDS, **OFF)),
    "off": (None, chat_offline(**OFF)),
    "other keys": (None, generate([IMAGE], state="CA", budget=None, **OFF)),
    "in the prompt": (WRITE, generate(autoprune=ENTRY)),
    "one level up": ("one level down", generate(**{KWARGS: ENTRY})),
    "chat, part": (WRITE, chat_offline({**PART, "autoprune": ENTRY})),
    "chat, template": (WRITE, chat_offline(chat_template_kwargs={"autoprune": ENTRY})),
    "extra_args": (
        WRITE,
        lambda engine: engine.llm.generate(
            [PROMPT], greedy(1, extra_args={"autoprune": ENTRY}), use_tqdm=False
        ),
    ),
}
"""Input -> how it is answered: as by stock (None), or by an exception with a text."""


@in_engine
def test_offline_inputs_are_answered_as_by_stock_or_told_what_to_write() -> None:
    """By the prompt's length, a token and its end, or by the exception."""
    replies: list[dict[str, str]] = []
    for settings in (
        None,
        {"state": "cen_divprune", "budget": K, "requests": "budget"},
    ):
        options: dict[str, Any] = {"max_model_len": 512, "enable_mm_embeds": True}
        engine = start(settings, CHECKPOINTS["miniqwen"], **options)
        replies.append({})
        for name, (expected, send) in INPUTS.items():
            if settings is None and expected is not None:
                continue  # stock's answer is not compared, and its engine may not survive
            try:
                (output,) = send(engine)
                end = output.outputs[0].finish_reason
                ids = output.outputs[0].token_ids
                replies[-1][name] = (
                    f"{len(output.prompt_token_ids)} tokens, {end}, {ids}"
                )
            except Exception as error:  # noqa: BLE001
                replies[-1][name] = f"{type(error).__name__}: {error}"
        engine.stop()
    stock, pruned = replies
    for name, (expected, _) in INPUTS.items():
        if expected is None:
            assert pruned[name] == stock[name], name
        else:
            assert expected in pruned[name], name


# ---- requests over HTTP ----


def encoded(values: torch.Tensor) -> str:
    """A tensor as clients send embeddings."""
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def noise(*shape: int) -> str:
    return encoded(torch.randn(shape, generator=torch.Generator().manual_seed(0)))


PICTURE = {"type": "image_url", "image_url": {"url": URL}}
UNSENT = {"type": "image_url", "image_url": None, "uuid": "unknown"}
TEXT = {"type": "text", "text": "What?"}
ON_GRID = {
    "image_embeds": noise(12, 576),
    "image_grid_thw": encoded(torch.tensor(GRID)),
}
ROWS = {"type": "image_embeds", "image_embeds": ON_GRID}
ROWS_OF_LLAVA = {"type": "image_embeds", "image_embeds": noise(144, 192)}


def messages(*parts: object, **more: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": [*(parts or (PICTURE,)), TEXT], **more}]


def chat(*parts: object, **more: object) -> dict[str, object]:
    greedily = {"max_tokens": 1, "temperature": 0, "ignore_eos": True}
    return {"messages": messages(*parts), **greedily, **more}


def responses(**more: object) -> dict[str, object]:
    image = {"type": "input_image", "detail": "auto", "image_url": URL}
    turn = {"role": "user", "content": [image, {"type": "input_text", "text": "What?"}]}
    return {
        "input": [turn],
        "max_output_tokens": 1,
        "store": False,
        "temperature": 0,
        **more,
    }


def anthropic(**more: object) -> dict[str, object]:
    source = {
        "type": "base64",
        "media_type": "image/png",
        "data": URL.partition(",")[2],
    }
    content = [{"type": "image", "source": source}, TEXT]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **more}


def words(**more: object) -> dict[str, object]:
    return {"prompt": "What?", "max_tokens": 1, "temperature": 0, **more}


def pooled(*parts: object, **more: object) -> dict[str, object]:
    return {"messages": messages(*parts), **more}


class Case(NamedTuple):
    """An input: answered as by stock, or with K tokens of its image, or by 400 with a text."""

    path: str
    body: Mapping[str, object]
    expected: int | str | None = None
    headers: Mapping[str, str] = {}


COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
EMBED = "/v1/embeddings"
POOL = "/pooling"
COHERE = "/v2/embed"
TWELVE = {BUDGET: "12"}

CHATS: dict[str, Case] = {
    "picture": Case(CHAT, chat()),
    "embeds": Case(CHAT, chat(ROWS), UNREAD),
    "embeds, off": Case(CHAT, chat(ROWS, **OFF)),
    "prompt embeds": Case(CHAT, chat({"type": "prompt_embeds", "data": noise(4, 192)})),
    "no picture": Case(CHAT, chat(TEXT)),
    "uuid alone": Case(CHAT, chat(UNSENT)),
    # What only looks like a setting: more of them in `unit/test_request.py`.
    "unknown fields": Case(
        CHAT, chat(autotune=True, autorun={"a": 1}, budget=64, extra={"a": 1})
    ),
    # Settings where they are read.
    "entry": Case(CHAT, chat(**RIGHT), 12),
    "entry of responses": Case(RESPONSES, responses(**RIGHT), 12),
    "header": Case(CHAT, chat(), 12, TWELVE),
    "header and entry": Case(CHAT, chat(**RIGHT), 12, TWELVE),
    "header of responses": Case(RESPONSES, responses(), 12, TWELVE),
    "header of messages": Case(MESSAGES, anthropic(), 12, TWELVE),
    "header of counting": Case(
        f"{MESSAGES}/count_tokens", anthropic(), 12, {"X-AutoPrune-Budget": "12"}
    ),
    "off by a header of messages": Case(MESSAGES, anthropic(), N, {ENABLED: "false"}),
    "header with underscores": Case(
        MESSAGES, anthropic(), "is not a known header", {"x_autoprune_budget": "12"}
    ),
    "header of completions": Case(COMPLETIONS, words(), None, TWELVE),
    "state in a header": Case(CHAT, chat(), K, {SHIPPED: "divprune", BUDGET: "8"}),
    # Malformed settings at an endpoint of another form; those of chats are pinned refusals.
    "header out of range": Case(MESSAGES, anthropic(), "65", {BUDGET: "65"}),
    # Settings in the wrong place.
    "data": Case(CHAT, chat(multi_modal_data=RIGHT), WRITE),
    "vllm_xargs": Case(CHAT, chat(vllm_xargs={"autoprune": 64}), WRITE),
    "part": Case(CHAT, chat({**PICTURE, "autoprune": ENTRY}), WRITE),
    "completions": Case(COMPLETIONS, words(autoprune=ENTRY), WRITE),
    "responses": Case(RESPONSES, responses(autoprune=ENTRY), WRITE),
}
IMAGES = {"images": [URL], "embedding_types": ["float"]}
PAIR = {"text_1": "What?", "text_2": {"content": [PICTURE]}}
POOLS: dict[str, Case] = {
    "embed": Case(EMBED, pooled()),
    "embed rows": Case(EMBED, pooled(ROWS_OF_LLAVA), UNREAD),
    "pool": Case(POOL, pooled(task="embed")),
    "embed rows, off": Case(
        EMBED, pooled(ROWS_OF_LLAVA, **OFF), "keeps all 144 tokens"
    ),
    "score a picture": Case("/v1/score", PAIR),
    "classify": Case("/classify", pooled()),
    "cohere": Case(COHERE, IMAGES),
    "embed entry": Case(EMBED, pooled(**RIGHT), 12),
    "embed header": Case(EMBED, pooled(), 12, TWELVE),
    "embed top": Case(EMBED, pooled(autoprune=ENTRY), WRITE),
    "score part": Case("/v1/score", {**PAIR, "autoprune": 64}, WRITE),
}


class Servers(NamedTuple):
    stock: Server
    pruned: Server


def start_servers(runner: Runner, model: object, *flags: str) -> Iterator[Servers]:
    """A stock server and a pruned one, started together."""
    env = {**runner.environment, "VLLM_PLUGINS": f"autoprune,{NAME}"}
    both = ((), (*STATE, "--autoprune-requests", "shipped-states:1-64"))
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        starting = [
            serve(str(model), *COMMON, *flags, "--enable-mm-embeds", *pruning, env=env)
            for pruning in both
        ]
        yield Servers(*pool.map(stack.enter_context, starting))


@pytest.fixture(scope="module")
def chats(runner: Runner) -> Iterator[Servers]:
    yield from start_servers(runner, CHECKPOINTS["miniqwen"], "--enable-prompt-embeds")


@pytest.fixture(scope="module")
def pools(runner: Runner) -> Iterator[Servers]:
    yield from start_servers(runner, LLAVA, "--runner", "pooling", "--convert", "embed")


@pytest.mark.parametrize("name", CHATS)
def test_chats_are_answered_as_by_stock_or_told_what_to_write(
    chats: Servers, name: str
) -> None:
    check(chats, CHATS[name])


@pytest.mark.parametrize("name", POOLS)
def test_pooling_servers_answer_like_chat_servers(pools: Servers, name: str) -> None:
    check(pools, POOLS[name])


def check(servers: Servers, case: Case) -> None:
    stock, pruned = servers
    body = {"model": pruned.model, **case.body}
    status, answer = pruned.post(case.path, body, case.headers)
    if isinstance(case.expected, str):
        assert status == 400, answer
        assert "trust-request-mm-kwargs" not in str(answer)
        assert ("error" in answer) and (
            case.path != MESSAGES or answer["type"] == "error"
        )
        assert case.expected in str(answer).replace("\\", "")
        return
    bare = {key: value for key, value in body.items() if key != KWARGS}
    expected, stock_answer = stock.post(case.path, {**bare, "model": stock.model})
    assert (status, finish(answer)) == (expected, finish(stock_answer)), (
        answer,
        stock_answer,
    )
    if case.expected:
        _, usual = pruned.post(case.path, bare)
        assert tokens(answer) - tokens(usual) == case.expected - K


def finish(answer: Mapping[str, Any]) -> list[object]:
    """How the samples of an answer ended, by the words of its endpoint."""
    ends = [choice.get("finish_reason") for choice in answer.get("choices", [])]
    return [
        *ends,
        answer.get("status"),
        answer.get("stop_reason"),
        len(answer.get("data", [])),
    ]


def tokens(answer: Mapping[str, Any]) -> int:
    """Tokens of the prompt, by the words of its endpoint."""
    usage = answer.get("usage", answer)
    # Anthropic's input tokens are those that were neither read from a cache nor written to one.
    cached = ("cache_read_input_tokens", "cache_creation_input_tokens")
    total = usage.get("prompt_tokens") or usage.get("input_tokens") or 0
    return int(total + sum(usage.get(name) or 0 for name in cached))


def test_settings_of_one_request_do_not_reach_another(chats: Servers) -> None:
    """64 requests at once, with headers and without, of three endpoints."""
    kinds = [(CHAT, chat()), (RESPONSES, responses()), (MESSAGES, anthropic())]
    model = {"model": chats.pruned.model}
    usual = [
        tokens(chats.pruned.post(path, {**model, **body})[1]) for path, body in kinds
    ]

    def ask(i: int) -> int:
        path, body = kinds[i % 3]
        budget = 1 + i % 30 if i % 2 else K
        headers = {BUDGET: str(budget)} if i % 2 else None
        status, answer = chats.pruned.post(path, {**model, **body}, headers)
        assert status == 200, answer
        return tokens(answer) - usual[i % 3] - budget + K

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(64))) == [0] * 64


def test_a_stream_is_the_whole_answer_with_the_budget_of_its_header(
    chats: Servers,
) -> None:
    body = {"model": chats.pruned.model, **chat(), "max_tokens": 4}
    _, answer = chats.pruned.post(CHAT, body, TWELVE)
    sent = {**body, "stream_options": {"include_usage": True}, "stream": True}
    stream = httpx.post(chats.pruned.url + CHAT, json=sent, headers=TWELVE, timeout=300)
    streamed = parse_stream([(0.0, stream.content)])
    message = answer["choices"][0]["message"]  # type: ignore[index]
    assert streamed.error is None
    assert streamed.text == message["content"]
    usual = tokens(chats.pruned.post(CHAT, body)[1])
    assert streamed.prompt_tokens == tokens(answer) == usual + 12 - K


def test_the_state_of_a_pooling_server_is_described(pools: Servers) -> None:
    assert '"cen_divprune"' in pools.pruned.get(PATH)
