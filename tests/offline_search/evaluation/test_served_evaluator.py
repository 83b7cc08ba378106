from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from offline_search.dataset import Dataset
from offline_search.evaluator import EvaluationJob, RetryPolicy, ServedEvaluator
from tests.offline_search.endpoint import (
    Answer,
    Body,
    FakeEndpoint,
    endpoint,
    error,
    model_list,
)
from vllm_autoprune import load_state
from vllm_autoprune.errors import ConfigError, EvaluationFailed, SearchError

FAST_RETRIES = RetryPolicy(attempts=3, first_wait=0.01)
STATE = load_state("visionzip")


def token(text: str, logprob: float, rank: int = 1) -> dict[str, Any]:
    return {str(hash(text) % 1000): {"logprob": logprob, "rank": rank, "decoded_token": text}}


def prompt(*answer: dict[str, Any]) -> Answer:
    before = [None, token("USER:", -3.0, 5), token(" ASSISTANT:", -2.0, 7)]
    body = {"choices": [], "prompt_logprobs": [*before, *answer]}
    return 200, json.dumps(body).encode(), {}


def echo_answer(body: Body, number: int) -> Answer:
    """Echoes the reference answer as two tokens."""
    answer = body["messages"][-1]["content"]
    return prompt(token(f" {answer[0]}", -0.25), token(answer[1:], -0.5))


async def evaluate(
    server: FakeEndpoint, data: Dataset, job: EvaluationJob, model: str = "m"
) -> Any:
    evaluator = ServedEvaluator([server.url], data, model=model, retry_policy=FAST_RETRIES)
    try:
        return await evaluator.evaluate(job)
    finally:
        await evaluator.close()


JOB = EvaluationJob(STATE, 8, "search", 0, 4)


async def test_the_reference_answer_is_scored_at_the_end_of_the_prompt(data: Dataset) -> None:
    with endpoint(echo_answer) as server:
        answers = await evaluate(server, data, JOB)
    assert answers.logprob == (-0.75,) * 4 and answers.right == (True,) * 4
    body = server.requests[0]
    assert body["mm_processor_kwargs"]["autoprune"]["budget"] == 8
    assert load_state(json.dumps(body["mm_processor_kwargs"]["autoprune"]["state"])) == (
        STATE.model_copy(update={"provenance": type(STATE.provenance)()})
    )
    assert body["messages"][0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64")
    questions = {body["messages"][0]["content"][1]["text"] for body in server.requests}
    assert questions == {example.question for example in data.examples("search")[:4]}


async def test_pruning_is_disabled_without_a_state(data: Dataset) -> None:
    with endpoint(echo_answer) as server:
        await evaluate(server, data, EvaluationJob(None, 0, "search", 0, 1))
    assert server.requests[0]["mm_processor_kwargs"] == {"autoprune": {"enabled": False}}


async def test_an_answer_that_greedy_decoding_would_not_give_is_wrong(data: Dataset) -> None:
    def answer(body: Body, number: int) -> Answer:
        text = body["messages"][-1]["content"]
        return prompt(token(f" {text[0]}", -0.25), token(text[1:], -4.0, rank=2))

    with endpoint(answer) as server:
        answers = await evaluate(server, data, EvaluationJob(STATE, 8, "search", 0, 1))
    assert answers.right == (False,) and answers.logprob == (-4.25,)


async def test_a_temporary_failure_is_retried(data: Dataset) -> None:
    seen: set[str] = set()

    def answer(body: Body, number: int) -> Answer:
        key = json.dumps(body["messages"])
        if key in seen:
            return echo_answer(body, number)
        seen.add(key)
        return error(503)

    with endpoint(answer) as server:
        answers = await evaluate(server, data, JOB)
    assert answers.right == (True,) * 4 and len(server.requests) == 8


Answering = Callable[[Body, int], Answer]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda b, n: error(503), "after 3 attempts"),
        (lambda b, n: (200, b"not json", {}), "after 3 attempts"),
        (lambda b, n: (200, b"{}", {}), "after 3 attempts"),
        (lambda b, n: error(400, "no states here"), "no states here"),
        (lambda b, n: prompt(token(" other", -0.1)), "not in the reference answer"),
        (lambda b, n: prompt(), "not in the reference answer"),
    ],
    ids=["down", "no JSON", "no logprobs", "refused", "other answer", "no answer"],
)
async def test_a_failed_request_is_an_error_and_not_a_wrong_answer(
    answer: Answering, message: str, data: Dataset
) -> None:
    with endpoint(answer) as server, pytest.raises(EvaluationFailed, match=message):
        await evaluate(server, data, EvaluationJob(STATE, 8, "search", 0, 1))


async def test_an_unreachable_server_stops_the_search(
    data: Dataset,
) -> None:
    unreachable = ServedEvaluator(
        ["http://127.0.0.1:9"], data, model="m", retry_policy=FAST_RETRIES
    )
    with pytest.raises(SearchError, match="start it and resume") as caught:
        await unreachable.evaluate(EvaluationJob(STATE, 8, "search", 0, 1))
    await unreachable.close()
    assert not isinstance(caught.value, EvaluationFailed)


async def test_servers_share_the_images_and_replace_a_broken_server(data: Dataset) -> None:
    job = EvaluationJob(STATE, 8, "search", 0, len(data.examples("search")))
    with endpoint(echo_answer) as one, endpoint(echo_answer) as other:
        evaluator = ServedEvaluator(
            [one.url, other.url], data, model="m", retry_policy=FAST_RETRIES
        )
        answers = await evaluator.evaluate(job)
        await evaluator.close()
        assert (
            len(answers) == len(one.requests) + len(other.requests)
            and one.requests
            and other.requests
        )
        images = [{b["messages"][0]["content"][0]["image_url"]["url"] for b in server.requests}
                  for server in (one, other)]  # fmt: skip
        assert not images[0] & images[1]
    with endpoint(echo_answer) as one, endpoint(lambda b, n: error(500)) as broken:
        evaluator = ServedEvaluator(
            [one.url, broken.url], data, model="m", retry_policy=FAST_RETRIES
        )
        assert len(await evaluator.evaluate(job)) == len(one.requests)
        await evaluator.close()


async def test_concurrent_requests_are_limited(data: Dataset) -> None:
    ended: list[int] = []
    under_way: list[int] = []

    def slowly(body: Body, number: int) -> Answer:
        under_way.append(number + 1 - len(ended))
        time.sleep(0.1)
        ended.append(number)
        return echo_answer(body, number)

    with endpoint(slowly) as server:
        evaluator = ServedEvaluator(
            [server.url], data, model="m", max_in_flight=3, retry_policy=FAST_RETRIES
        )
        jobs = [EvaluationJob(STATE, budget, "search", 0, 6) for budget in (4, 8)]
        first, second = await asyncio.gather(*(evaluator.evaluate(job) for job in jobs))
        await evaluator.close()
    assert len(first) == len(second) == 6
    assert max(under_way) == 3 and len(server.ports) == 3


async def test_sequential_requests_use_one_connection(data: Dataset) -> None:
    with endpoint(echo_answer) as server:
        evaluator = ServedEvaluator([server.url], data, model="m", retry_policy=FAST_RETRIES)
        for start in range(4):
            await evaluator.evaluate(EvaluationJob(STATE, 8, "search", start, start + 1))
        await evaluator.close()
    assert len(server.requests) == 4 and len(server.ports) == 1


async def test_the_name_identifies_model_and_data(data: Dataset) -> None:
    with endpoint(echo_answer) as server:
        evaluator = ServedEvaluator([server.url], data, retry_policy=FAST_RETRIES)
        await evaluator.prepare()
        await evaluator.close()
    assert evaluator.name.startswith("m through vLLM") and data.digest[:12] in evaluator.name


async def test_an_unusable_server_is_reported_before_the_search(
    data: Dataset,
) -> None:
    cases: list[tuple[list[str], str | None, str]] = []
    with endpoint(lambda b, n: error(400, "requests may not bring states")) as refusing:
        cases.append(([refusing.url], None, "--autoprune-requests states"))
        cases.append(([refusing.url], "another", "serves m, not another"))
        cases.append((["http://127.0.0.1:9"], None, "does not answer"))
        for urls, model, message in cases:
            evaluator = ServedEvaluator(urls, data, model=model, retry_policy=FAST_RETRIES)
            with pytest.raises(ConfigError, match=message):
                await evaluator.prepare()
            await evaluator.close()


async def check(urls: list[str], data: Dataset, model: str | None = None) -> list[tuple[str, str]]:
    """What is wrong with servers, and how to fix it."""
    evaluator = ServedEvaluator(urls, data, model=model, retry_policy=FAST_RETRIES)
    with pytest.raises(ConfigError) as caught:
        await evaluator.prepare()
    await evaluator.close()
    return [(problem.what, problem.fix) for problem in caught.value.problems]


ADDRESS = "give the address of a vllm serve"


@pytest.mark.parametrize(
    ("models", "answer", "what", "fix"),
    [
        ((200, b"<html>", {}), echo_answer, "lists no model", ADDRESS),
        ((200, b'{"object": "list"}', {}), echo_answer, "lists no model", ADDRESS),
        (model_list(), echo_answer, "lists no model", ADDRESS),
        (error(404, "no page"), echo_answer, "answers with status 404: no page", ADDRESS),
        (error(401, "who"), echo_answer, "answers with status 401: who", "without an API key"),
        (error(500, "boom"), echo_answer, "answers with status 500: boom", "server's log"),
        (
            model_list("m"),
            lambda b, n: (200, b"<html>", {}),
            "without the log-probabilities",
            ADDRESS,
        ),
        (
            model_list("m"),
            lambda b, n: (200, b'{"choices": []}', {}),
            "without the log-probabilities of the prompt (KeyError: 'prompt_logprobs')",
            ADDRESS,
        ),
        (
            model_list("m"),
            lambda b, n: (200, b'{"prompt_logprobs": ["x"]}', {}),
            "without the log-probabilities",
            ADDRESS,
        ),
        (model_list("m"), lambda b, n: error(500, "boom"), "status 500: boom", "server's log"),
        (
            model_list("m"),
            lambda b, n: error(400, "no states"),
            "status 400: no states",
            "--autoprune-requests states",
        ),
        (
            model_list("m"),
            lambda b, n: prompt(token(" other", -0.1)),
            "not in the reference answer",
            "chat template",
        ),
    ],
)
async def test_an_odd_server_is_reported_with_its_fix(
    models: Answer, answer: Answering, what: str, fix: str, data: Dataset
) -> None:
    with endpoint(answer) as server:
        server.models = models
        ((found, advice),) = await check([server.url], data)
    assert what in found and fix in advice


@pytest.mark.parametrize("url", ["http://localhost:80a0", "localhost:8000", "http://"])
async def test_what_is_no_address_is_reported(url: str, data: Dataset) -> None:
    ((what, fix),) = await check([url], data)
    assert "is no address of a server" in what and "http://localhost:8000" in fix


async def test_servers_of_different_models_are_reported(data: Dataset) -> None:
    with endpoint(echo_answer) as one, endpoint(echo_answer) as other:
        one.models, other.models = model_list("a", "c"), model_list("b", "c")
        ((what, fix),) = await check([one.url, other.url], data)
        assert what == "serve different models: a, b" and "--server-model" in fix
        ((what, fix),) = await check([one.url, other.url], data, model="a")
        assert what == "serves b, c, not a" and "--server-model" in fix
        evaluator = ServedEvaluator([one.url, other.url], data, model="c")
        await evaluator.prepare()
        await evaluator.close()
        assert evaluator.name.startswith("c through vLLM")
        assert {body["model"] for body in other.requests} == {"c"}


async def test_all_servers_are_checked(data: Dataset) -> None:
    refuse = endpoint(lambda b, n: error(400, "no states"))
    with endpoint(echo_answer) as broken, refuse as refusing:
        broken.models = error(500)
        problems = await check([broken.url, refusing.url], data)
    assert [what for what, _ in problems] == [
        "answers with status 500: no",
        "status 400: no states",
    ]
