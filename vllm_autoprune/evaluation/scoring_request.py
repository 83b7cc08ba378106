"""Requests that score a reference answer or ask for a greedy one: bodies, responses, retries.

A reference answer is part of the prompt, so that its log-probability costs a prefill and no
decoding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import JsonValue

from vllm_autoprune.errors import EvaluationFailed
from vllm_autoprune.http_client import AsyncServerClient, ServerLost, chat_with_retries
from vllm_autoprune.stream import read_message
from vllm_autoprune.tpdsl.state import PruningState

MAX_TOKENS = 64
"""Of a greedy answer."""
# A penalty is in the generation_config.json of some models, such as Qwen2-VL's; then the token that
# is decoded would not be the one of rank 1 that a prefill tells.
_GREEDY = {"temperature": 0.0, "repetition_penalty": 1.0}
_ROUNDING = 1e-3
"""By which a log-probability may be too high."""


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
    messages: Sequence[Mapping[str, object]],
    answer: str,
    fields: Mapping[str, object],
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
    messages: Sequence[Mapping[str, object]],
    answer: str,
    fields: Mapping[str, object],
    *,
    attempts: int = 4,
    first_wait: float = 1.0,
) -> _ScoredAnswer:
    """Score a reference answer, as :func:`chat_with_retries` asks and raises.

    Raises :class:`EvaluationFailed` too for an answer without the log-probabilities of the prompt
    or their number, or without a message.
    """
    body = scoring_request(model, messages, answer, fields)
    content = await chat_with_retries(servers, body, attempts, first_wait)
    what = "the log-probabilities of the prompt"
    try:
        prompt = content["prompt_logprobs"]
        scores = read_reference_answer(prompt, answer)
        what = "a message"
        following, _ = read_message(content["choices"][0]["message"])
        what = "the number of prompt tokens"
        tokens = int(content["usage"]["prompt_tokens"])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        received = json.dumps(content)[:120]
        raise EvaluationFailed(f"answers without {what}: {received}") from None
    same = next(
        (place for place, (_, rank) in enumerate(scores) if rank != 1), len(scores)
    )
    logprob = sum(logprob for logprob, _ in scores)
    right = same == len(scores)
    matching = sum(rank == 1 for _, rank in scores)
    return _ScoredAnswer(logprob, right, following, tokens, len(scores), same, matching)


async def generate_answer(
    servers: Sequence[AsyncServerClient],
    model: str,
    messages: Sequence[Mapping[str, object]],
    fields: Mapping[str, object],
) -> tuple[str, bool]:
    """The greedy answer, and whether :data:`MAX_TOKENS` cut it; raises as :func:`score_answer`."""
    content = await chat_with_retries(
        servers,
        {
            "model": model,
            "messages": messages,
            "max_tokens": MAX_TOKENS,
            **_GREEDY,
            **fields,
        },
    )
    try:
        choice = content["choices"][0]
        text, _ = read_message(choice["message"])
        return text.strip(), choice["finish_reason"] == "length"
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        received = json.dumps(content)[:120]
        raise EvaluationFailed(f"answers without a message: {received}") from None


def read_reference_answer(
    prompt: Sequence[Mapping[str, Any] | None], answer: str
) -> list[tuple[float, int]]:
    """Log-probability and rank of each token of the answer at the end of a prompt.

    The tokens of the answer are found by decoding the prompt backwards from its end; a token that
    is decoded alone may lose white space, which is left out. Raises :class:`AnswerChanged` for
    another end, :class:`ServerLost` for impossible values.
    """
    scores = list[tuple[float, int]]()
    text = ""
    wanted = "".join(answer.split())
    for position in reversed(prompt):
        if not position or len(text) > len(wanted):
            break
        # With ``prompt_logprobs: 0`` the only entry is the token of the prompt itself.
        (token,) = position.values()
        part = str(token["decoded_token"])
        # vLLM gives the text of a character of several tokens to the last of them.
        if text == wanted and part:
            break
        text = "".join(part.split()) + text
        logprob = float(token["logprob"])
        rank = int(token["rank"])
        # No token has more than 1 / rank of the probability.
        if not logprob <= _ROUNDING - math.log(max(rank, 1)):
            what = f"log-probability {logprob:g} and rank {rank} contradict each other"
            raise ServerLost(f"the server's caches are broken: {what}")
        scores.append((logprob, rank))
    if text == wanted:
        return scores[::-1]
    raise AnswerChanged(
        f"the prompt ends in {text!r}, not in the reference answer {answer!r}"
    )
