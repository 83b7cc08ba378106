"""Bodies that answer the request for a reference answer: what is read, or the line that is said."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.fake_server import Answer
from tests.offline_search.synthetic import completion, endpoint, token
from tests.tables import parametrize_from_file
from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.evaluation.scoring_request import generate_answer, score_answer
from vllm_autoprune.http_client import AsyncServerClient

PROMPT = [None, token("USER:", -3.0, 5), token(" y", -0.5), token("es", -1.5, 3)]


def answer(prompt: object = PROMPT, message: object = None, **fields: Any) -> Answer:
    """A chat completion with these log-probabilities of its prompt and this message."""
    status, body, headers = completion(".", prompt_logprobs=prompt, **fields)
    content = json.loads(body)
    if message is not None:
        content["choices"][0]["message"] = message
    return status, json.dumps(content).encode(), headers


def scored(logprob: float, rank: int = 1) -> Answer:
    return answer([None, token(" yes", logprob, rank)])


async def score(body: Answer, attempts: int = 1) -> Any:
    with endpoint(lambda _, number: body) as server:
        client = AsyncServerClient(server.url, 1)
        try:
            return await score_answer([client], "m", [], "yes", {}, attempts=attempts)
        finally:
            await client.close()


async def test_an_answer_is_read_as_servers_send_it() -> None:
    for body, following, tokens in (
        (answer(), ".", 10),
        (answer(usage={"prompt_tokens": "11"}), ".", 11),
        (answer(message={"role": "assistant"}), "", 10),
    ):
        result = await score(body)
        assert (result.logprob, result.right) == (-2.0, False)
        assert (result.following, result.prompt_tokens) == (following, tokens)
    for logprob, rank in (
        (0.0, 1),
        (-math.log(2), 2),
        (-9.0, 9),
    ):  # as likely as a rank can be
        assert (await score(scored(logprob, rank))).logprob == logprob


async def test_positions_before_the_answer_are_not_read() -> None:
    """Other servers may send them in another form; checking thousands of them takes time."""
    result = await score(answer([None, {"7": {"decoded_token": None}}, *PROMPT[1:]]))
    assert result.logprob == -2.0


async def test_half_a_character_in_an_answer_is_replaced() -> None:
    """The answer becomes part of the next request, which could not be encoded."""
    message = {"role": "assistant", "content": "yes \ud83d"}
    with endpoint(lambda _, number: answer(message=message)) as server:
        client = AsyncServerClient(server.url, 1)
        text, _ = await generate_answer([client], "m", [], {})
        await client.close()
    assert text == "yes ?"


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ((200, b"{}", {}), "answers without a message: {}"),
        (answer(None), "answers without the log-probabilities of the prompt: {"),
        (answer([None, {}]), "the prompt ends in ''"),
        (answer([None, "yes"]), 'answers without the log-probabilities of the prompt: "yes"'),
        (answer(usage=None), "answers without the number of prompt tokens: {"),
        (answer(choices=[]), "answers without a message: {"),
        # A server whose caches were broken answered so; a rank says how likely a token may be.
        *((scored(logprob, rank), f"log-probability {logprob:g} and rank {rank} contradict")
          for logprob, rank in ((-1e-6, 2), (0.0, 7), (0.5, 1), (math.nan, 1))),
    ],
)  # fmt: skip
async def test_what_is_no_answer_is_said_in_one_line(body: Answer, line: str) -> None:
    with pytest.raises(AutopruneError) as caught:
        await score(body)
    assert line in str(caught.value) and "\n" not in str(caught.value)


@parametrize_from_file("words", "reference", "tokens", "same")
async def test_the_tokens_of_an_answer_are_told_apart_from_the_prompt(
    words: str, reference: str, tokens: int, same: int
) -> None:
    """``?`` is behind a token that greedy decoding does not give."""
    prompt = [
        token(word.rstrip("?"), -1.0, 1 + word.endswith("?"))
        for word in words.split("|")
    ]
    with endpoint(lambda _, number: answer([None, *prompt])) as server:
        client = AsyncServerClient(server.url, 1)
        scored = await score_answer([client], "m", [], reference, {}, attempts=1)
        await client.close()
    assert (scored.tokens, scored.same, scored.right) == (tokens, same, same == tokens)
    assert (scored.logprob, scored.matching) == (-tokens, tokens - words.count("?"))
