"""Processed inputs of a client (``/inference/v1/generate``): only the forged plan is refused."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.server import Server, serve
from tests.serving.conftest import COMMON, PRUNED
from tests.serving.engine import examples
from tests.serving.http import ask, body, text_of
from tests.serving.paths import LLAVA, TOKENS
from tests.serving.runners import Runner
from tests.serving.test_metrics import measure_increase
from tests.tpdsl.samples import state
from vllm_autoprune import load_state
from vllm_autoprune.serving.plan import FIELD, ItemPlan, encode_state

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(500),
    # vLLM's decoder of processed inputs reads tensors from the message's own bytes.
    pytest.mark.filterwarnings("ignore:The given buffer is not writable"),
]


@pytest.fixture(scope="module")
def server(runner: Runner) -> Iterator[Server]:
    """A server that accepts processed inputs; requests may set a budget."""
    flags = (*COMMON, *PRUNED, "--enable-scale-out", "--autoprune-requests", "budget:1-64")
    with serve(LLAVA, *flags, env=runner.environment) as started:
        yield started


_NAMES = itertools.count(1)


def rendered(server: Server, number: int = 0) -> dict[str, Any]:
    """A chat request as rendered by the server."""
    sent = body(server, examples(2)[number], logprobs=False)
    status, answer = server.post("/v1/chat/completions/render", sent)
    assert status == 200, answer
    return answer


def forged(request: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The request with another plan and a new identity."""
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import (
        decode_mm_kwargs_item,
        encode_mm_kwargs_item,
    )

    request = copy.deepcopy(request)
    features = request["features"]
    for name in ("kwargs_data", "mm_metadata"):
        items = (features.get(name) or {}).get("image", [])
        for i, item in enumerate(items):
            if item is None:
                continue
            opened = decode_mm_kwargs_item(item)
            if FIELD in opened:
                row = change(opened[FIELD].data)
                opened[FIELD] = replace(opened[FIELD], data=row)
            items[i] = encode_mm_kwargs_item(opened)
    features["mm_hashes"]["image"] = [f"{next(_NAMES):064x}"]
    return request


def with_plan(**changes: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda row: replace(ItemPlan.decode(row), **changes).encode()


def at(place: int, value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda row: row.index_fill(0, torch.tensor([place]), value)


FORGERIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "keep out of range": at(2, 9),
    "version": at(0, 77),
    "more tokens than room": with_plan(budget=40),
    "more tokens than allowed": with_plan(budget=100),
    "more tokens than there are": with_plan(budget=60_000),
    "no tokens": at(1, 0),
    "profiling": with_plan(profile=True),
    "shipped state": with_plan(state=encode_state(load_state("visionzip"))),
    "state": with_plan(state=encode_state(state({"/constraints/selector/q_e": 3}))),
    "no state": with_plan(state=b"{" * 99),
    "unknown words": with_plan(instruction=(2**40,)),
    "unknown words of the language model": with_plan(language=(10**6,)),
    "negative size": at(6, -5),
    "cut off": lambda row: row[:4],
    "empty": lambda row: row[:0],
    "fractions": lambda row: row.float(),
    "two rows": lambda row: torch.stack([row, row]),
}


def test_rendered_request_is_answered(server: Server) -> None:
    status, answer = server.post("/inference/v1/generate", rendered(server))
    assert status == 200, answer
    assert answer["choices"]


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_plan_is_refused_and_the_engine_survives(server: Server, name: str) -> None:
    example = examples(2)[1]
    before = text_of(ask(server, example))
    status, answer = server.post(
        "/inference/v1/generate", forged(rendered(server), FORGERIES[name])
    )
    assert status == 400, answer
    assert "autoprune_plan" in str(answer)
    assert text_of(ask(server, example)) == before


def test_only_accepted_requests_are_counted(server: Server) -> None:
    example = examples(2)[0]
    chat = body(server, example)

    def send_requests() -> None:
        looked_at = {"model": server.model, "messages": chat["messages"]}
        assert server.post("/tokenize", looked_at)[0] == 200
        url = chat["messages"][0]["content"][0]["image_url"]["url"]  # type: ignore[index]
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        content = [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]
        counted = {"model": server.model, "messages": [{"role": "user", "content": content}]}
        status, answer = server.post("/v1/messages/count_tokens", counted)
        assert status == 200, answer
        assert server.post("/v1/chat/completions/render", chat)[0] == 200
        long = copy.deepcopy(chat)
        long["messages"][0]["content"][1]["text"] = "red " * 4000  # type: ignore[index]
        assert server.post("/v1/chat/completions", long)[0] == 400

    by = measure_increase(server, send_requests)
    served = by("autoprune_requests_total state=autoprune")
    assert served == 0 and by("autoprune_visual_tokens_total stage=before") == 0

    def answered() -> None:
        ask(server, example)
        ask(server, example, n=2, temperature=0.5)
        ask(server, example, use_beam_search=True, n=2)

    by = measure_increase(server, answered)
    assert by("autoprune_requests_total state=autoprune") == 3
    assert by("autoprune_visual_tokens_total stage=before") == 3 * TOKENS
