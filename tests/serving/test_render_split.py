"""A render server and a generate server in processes of their own (``vllm launch render``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.server import Server, serve
from tests.serving.conftest import COMMON, PRUNED
from tests.serving.engine import examples
from tests.serving.http import ask, body, prompt_tokens, text_of
from tests.serving.paths import LLAVA
from tests.serving.runners import Runner
from vllm_autoprune.serving.plugin import DISABLE

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, pytest.mark.timeout(900)]

RENDER = ("launch", "render")
FLAGS = (*COMMON, "--dtype", "float32")
REQUESTS = ("--autoprune-requests", "states")
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
    flags = (*FLAGS, *PRUNED, *REQUESTS, "--enable-scale-out")
    with serve(LLAVA, *flags, env=runner.environment) as server:
        yield server


def _render(server: Server, number: int, entry: dict[str, object]) -> dict[str, Any]:
    sent = body(server, examples(2)[number], mm_processor_kwargs={"autoprune": entry})
    status, answer = server.post("/v1/chat/completions/render", sent)
    assert status == 200, answer
    return answer


def _generate(server: Server, rendered: dict[str, Any]) -> str:
    status, answer = server.post("/inference/v1/generate", rendered)
    assert status == 200, answer
    choices: Any = answer["choices"]
    ids = {"model": server.model, "tokens": choices[0]["token_ids"]}
    status, answer = server.post("/detokenize", ids)
    assert status == 200, answer
    return str(answer["prompt"]).removesuffix("</s>").strip()


def test_rendered_elsewhere_is_answered_as_a_whole_request(
    generator: Server, runner: Runner
) -> None:
    flags = (*FLAGS, *PRUNED, *REQUESTS)
    with serve(LLAVA, *flags, env=runner.environment, subcommand=RENDER) as renderer:
        for number, entry in enumerate(ENTRIES):
            rendered = _render(renderer, number, entry)
            fields = {"mm_processor_kwargs": {"autoprune": entry}}
            whole = ask(generator, examples(2)[number], **fields)
            assert len(rendered["token_ids"]) == prompt_tokens(whole), entry
            assert _generate(generator, rendered) == text_of(whole), entry


def test_an_image_without_a_plan_is_refused(generator: Server, runner: Runner) -> None:
    """The render server has no plugin; the generate server does not guess a budget."""
    environment = {**runner.environment, DISABLE: "1"}
    with serve(LLAVA, *FLAGS, env=environment, subcommand=RENDER) as renderer:
        sent = body(renderer, examples(1)[0])
        status, rendered = renderer.post("/v1/chat/completions/render", sent)
        assert status == 200, rendered
    status, answer = generator.post("/inference/v1/generate", rendered)
    assert status == 400, answer
    assert "render" in str(answer)
    ask(generator, examples(1)[0])
