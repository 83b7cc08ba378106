"""Requests that score a reference answer or ask for a greedy one: bodies, responses, retries.

A reference answer is made part of the prompt, so that its log-probability takes a prefill and no
decoding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import BaseModel, Field, JsonValue, TypeAdapter, ValidationError

from vllm_autoprune.errors import EvaluationFailed
from vllm_autoprune.http_client import (
    CHAT,
    AsyncServerClient,
    ChatAnswer,
    ServerLost,
    chat_with_retries,
)
from vllm_autoprune.stream import read_message
from vllm_autoprune.tpdsl.state import PruningState

MAX_TOKENS = 64
"""Maximum length of a greedy answer, in tokens."""
# Some models have a penalty in generation_config.json, such as Qwen2-VL. With it, the decoded token
# would not be the one of rank 1 that a prefill reports.
_GREEDY = {"temperature": 0.0, "repetition_penalty": 1.0}
_ROUNDING = 1e-3
"""Tolerance for a log-probability that is too high for its rank."""

_Fields = Mapping[str, object]
_Messages = Sequence[_Fields]


class AnswerChanged(EvaluationFailed):
    """The prompt that the server built does not end with the reference answer."""


def pruning_options(
    state: PruningState | None, budget: int | str, field: str = "budget"
) -> dict[str, JsonValue]:
    """A request's options for the plugin: ``state`` with K in ``field``; None disables pruning."""
    if state is None:
        return {"enabled": False}
    return {
        "state": state.model_dump(mode="json", exclude={"provenance"}),
        field: budget,
    }


def scoring_request(
    model: str,
    messages: _Messages,
    answer: str,
    fields: _Fields,
) -> dict[str, object]:
    """Chat request for prompt log-probabilities, whose prompt ends with the reference answer.

    ``messages`` ends with the question; ``fields`` are further fields, such as the plugin's.
    """
    return {
        "model": model,
        "messages": [*messages, {"role": "assistant", "content": answer}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "max_tokens": 1,
        **_GREEDY,
        "prompt_logprobs": 0,
        **fields,
    }


class _Usage(BaseModel):
    prompt_tokens: int


class _Token(BaseModel):
    """A token of the prompt: its decoded text, ln p, and rank by p."""

    decoded_token: str
    logprob: float
    rank: int


# With ``prompt_logprobs: 0`` a position has one entry, the prompt's token; the first has none.
_POSITION = TypeAdapter(Annotated[dict[str, _Token], Field(max_length=1)])


class _ScoredChat(ChatAnswer):
    """The fields that are read of a chat completion whose prompt was scored."""

    prompt_logprobs: list[Any]
    """Entry of every position, unchecked: to validate all takes longer than to decode them, so
    only those of the answer are."""
    usage: _Usage


_MEANINGS = {
    "prompt_logprobs": "the log-probabilities of the prompt",
    "choices": "a message",
    "usage": "the number of prompt tokens",
}

_Model = TypeVar("_Model", bound=BaseModel)


def _read(model: type[_Model], content: Mapping[str, Any]) -> _Model:
    """Validate a server's answer; raises :class:`EvaluationFailed` if it lacks fields."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        missing = _MEANINGS[str(error.errors(include_url=False)[0]["loc"][0])]
        what = f"answers without {missing}: {json.dumps(content)[:120]}"
        raise EvaluationFailed.of(CHAT, what) from None


class _ScoredAnswer(NamedTuple):
    """Score of a reference answer by a server."""

    logprob: float
    """ln p of the answer."""
    right: bool
    """Whether greedy decoding gives the answer."""
    following: str
    """Text of the token after the answer."""
    prompt_tokens: int
    tokens: int
    """Number of tokens of the answer."""
    same: int
    """Number of them before the first that greedy decoding does not give."""
    matching: int
    """Number of them that greedy decoding gives after the tokens before them."""


async def score_answer(
    servers: Sequence[AsyncServerClient],
    model: str,
    messages: _Messages,
    answer: str,
    fields: _Fields,
    *,
    attempts: int = 4,
    first_wait: float = 1.0,
) -> _ScoredAnswer:
    """Score a reference answer by one request.

    Raises :class:`EvaluationFailed` if the response lacks a message, the log-probabilities of the
    prompt, or its number of tokens. :func:`chat_with_retries` and :func:`_find_answer` may raise
    other errors.
    """
    body = scoring_request(model, messages, answer, fields)
    return read_scored_answer(
        await chat_with_retries(servers, body, attempts, first_wait), answer
    )


def read_scored_answer(content: Mapping[str, Any], answer: str) -> _ScoredAnswer:
    """Read a reference answer's score from a completion; raises as :func:`score_answer`."""
    scored = _read(_ScoredChat, content)
    tokens = _find_answer(scored.prompt_logprobs, answer)
    following, _ = read_message(scored.choices[0].message)
    agreeing = [token.rank == 1 for token in tokens]
    return _ScoredAnswer(
        logprob=sum(token.logprob for token in tokens),
        right=all(agreeing),
        following=following,
        prompt_tokens=scored.usage.prompt_tokens,
        tokens=len(tokens),
        same=[*agreeing, False].index(False),
        matching=sum(agreeing),
    )


async def generate_answer(
    servers: Sequence[AsyncServerClient],
    model: str,
    messages: _Messages,
    fields: _Fields,
) -> tuple[str, bool]:
    """The greedy answer, and whether :data:`MAX_TOKENS` cut it; raises as :func:`score_answer`."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": MAX_TOKENS,
        **_GREEDY,
        **fields,
    }
    choice = _read(ChatAnswer, await chat_with_retries(servers, body)).choices[0]
    text, _ = read_message(choice.message)
    # The text becomes part of a request, which cannot hold half of a surrogate pair.
    text = text.encode(errors="replace").decode()
    return text.strip(), choice.finish_reason == "length"


def _read_token(position: Any) -> _Token:
    """The token at a prompt position; raises :class:`EvaluationFailed` if its format is wrong."""
    try:
        (token,) = _POSITION.validate_python(position).values()
    except ValidationError:
        missing = _MEANINGS["prompt_logprobs"]
        what = f"answers without {missing}: {json.dumps(position)[:120]}"
        raise EvaluationFailed.of(CHAT, what) from None
    return token


def _find_answer(prompt: Sequence[Any], answer: str) -> list[_Token]:
    """The tokens of ``answer``, which is the end of ``prompt``.

    They are found by decoding the prompt backwards from its end. A token decoded by itself may lose
    white space, so white space is ignored. Raises :class:`AnswerChanged` if the prompt ends
    otherwise, and :class:`ServerLost` for impossible values.
    """
    tokens = list[_Token]()
    text = ""
    wanted = "".join(answer.split())
    for position in reversed(prompt):
        if not position or len(text) > len(wanted):
            break
        token = _read_token(position)
        # If a character has several tokens, vLLM gives its text to the last of them.
        if text == wanted and token.decoded_token:
            break
        text = "".join(token.decoded_token.split()) + text
        # The token of rank r has a probability of at most 1 / r.
        if not token.logprob <= _ROUNDING - math.log(max(token.rank, 1)):
            figures = f"log-probability {token.logprob:g} and rank {token.rank}"
            what = f"shows broken caches: {figures} contradict each other"
            raise ServerLost.of("the server", what, "start it again and resume")
        tokens.append(token)
    if text == wanted:
        return tokens[::-1]
    what = f"the prompt ends in {text!r}, not in the reference answer {answer!r}"
    raise AnswerChanged.of("prompt_logprobs", what)
