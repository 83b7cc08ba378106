"""Requests that score a reference answer or ask for a greedy one: bodies, responses, retries.

A reference answer is part of the prompt, so that its log-probability costs a prefill and no
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
"""Of a greedy answer."""
# A penalty is in the generation_config.json of some models, such as Qwen2-VL's; then the token that
# is decoded would not be the one of rank 1 that a prefill tells.
_GREEDY = {"temperature": 0.0, "repetition_penalty": 1.0}
_ROUNDING = 1e-3
"""By which a log-probability may be too high."""

_Fields = Mapping[str, object]
_Messages = Sequence[_Fields]


class AnswerChanged(EvaluationFailed):
    """A prompt does not end in the answer that it was given."""


def pruning_options(
    state: PruningState | None, budget: int | str, field: str = "budget"
) -> dict[str, JsonValue]:
    """A request's options for the plugin: a state with K in a field of it, or no pruning."""
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
    """Chat request whose prompt ends with the reference answer, with prompt log-probabilities.

    ``messages`` end with the question; ``fields`` are others of the request, such as the plugin's.
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
    """A token of the prompt: the text that it is decoded to, ln p, and its rank by p."""

    decoded_token: str
    logprob: float
    rank: int


# With ``prompt_logprobs: 0`` the only entry is the token of the prompt itself; the first has none.
_POSITION = TypeAdapter(Annotated[dict[str, _Token], Field(max_length=1)])


class _ScoredChat(ChatAnswer):
    """What is read of a chat completion whose prompt was scored."""

    prompt_logprobs: list[Any]
    """Only positions of the answer are read: to check all takes longer than to decode them."""
    usage: _Usage


_MEANINGS = {
    "prompt_logprobs": "the log-probabilities of the prompt",
    "choices": "a message",
    "usage": "the number of prompt tokens",
}

_Model = TypeVar("_Model", bound=BaseModel)


def _read(model: type[_Model], content: Mapping[str, Any]) -> _Model:
    """The fields of an answer; raises :class:`EvaluationFailed` for one that lacks some."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        missing = _MEANINGS[str(error.errors(include_url=False)[0]["loc"][0])]
        what = f"answers without {missing}: {json.dumps(content)[:120]}"
        raise EvaluationFailed.of(CHAT, what) from None


class _ScoredAnswer(NamedTuple):
    """What a server says of a reference answer."""

    logprob: float
    """ln p of the answer."""
    right: bool
    """Whether greedy decoding gives it."""
    following: str
    """The token after it."""
    prompt_tokens: int
    tokens: int
    """How many the answer has."""
    same: int
    """Those before the first that greedy decoding does not give."""
    matching: int
    """Those that it gives after the ones before them."""


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
    """Score a reference answer, as :func:`chat_with_retries` asks and raises.

    Raises :class:`EvaluationFailed` too for an answer without the log-probabilities of the prompt,
    their number or a message, and what :func:`_find_answer` raises.
    """
    body = scoring_request(model, messages, answer, fields)
    return read_scored_answer(
        await chat_with_retries(servers, body, attempts, first_wait), answer
    )


def read_scored_answer(content: Mapping[str, Any], answer: str) -> _ScoredAnswer:
    """What a chat completion says of a reference answer; raises as :func:`score_answer`."""
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
    # It becomes part of a request, in which no half of a character can stand.
    text = text.encode(errors="replace").decode()
    return text.strip(), choice.finish_reason == "length"


def _read_token(position: Any) -> _Token:
    """The token of a position; raises :class:`EvaluationFailed` for another format."""
    try:
        (token,) = _POSITION.validate_python(position).values()
    except ValidationError:
        missing = _MEANINGS["prompt_logprobs"]
        what = f"answers without {missing}: {json.dumps(position)[:120]}"
        raise EvaluationFailed.of(CHAT, what) from None
    return token


def _find_answer(prompt: Sequence[Any], answer: str) -> list[_Token]:
    """The tokens of the answer at the end of a prompt.

    They are found by decoding the prompt backwards from its end; a token that is decoded alone may
    lose white space, which is left out. Raises :class:`AnswerChanged` for another end,
    :class:`ServerLost` for impossible values.
    """
    tokens = list[_Token]()
    text = ""
    wanted = "".join(answer.split())
    for position in reversed(prompt):
        if not position or len(text) > len(wanted):
            break
        token = _read_token(position)
        # vLLM gives the text of a character of several tokens to the last of them.
        if text == wanted and token.decoded_token:
            break
        text = "".join(token.decoded_token.split()) + text
        # No token has more than 1 / rank of the probability.
        if not token.logprob <= _ROUNDING - math.log(max(token.rank, 1)):
            figures = f"log-probability {token.logprob:g} and rank {token.rank}"
            what = f"shows broken caches: {figures} contradict each other"
            raise ServerLost.of("the server", what, "start it again and resume")
        tokens.append(token)
    if text == wanted:
        return tokens[::-1]
    what = f"the prompt ends in {text!r}, not in the reference answer {answer!r}"
    raise AnswerChanged.of("prompt_logprobs", what)
