"""One request that scores a reference answer: its body, its response, and its retries.

The answer is part of the prompt, so that its log-probability costs a prefill and no decoding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import JsonValue

from vllm_autoprune.errors import EvaluationFailed
from vllm_autoprune.http_client import (
    AsyncServerClient,
    ServerLost,
    chat_with_retries,
)
from vllm_autoprune.stream import read_message
from vllm_autoprune.tpdsl.state import PruningState

_ROUNDING = 1e-3
"""By which a log-probability may be too high."""


def pruning_options(state: PruningState | None, budget: int | str) -> dict[str, JsonValue]:
    """A request's options for the plugin: a state with K, or no pruning."""
    if state is None:
        return {"enabled": False}
    policy = state.model_dump(mode="json", exclude={"provenance"})
    return {"state": policy, "budget": budget}


def scoring_request(
    model: str,
    messages: Sequence[Mapping[str, object]],
    answer: str,
    pruning: Mapping[str, object],
) -> dict[str, object]:
    """Chat request whose prompt ends with the reference answer, with prompt log-probabilities.

    ``messages`` end with the question; ``pruning`` are the request's options for the plugin.
    """
    return {
        "model": model,
        "messages": [*messages, {"role": "assistant", "content": answer}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
        "mm_processor_kwargs": {"autoprune": pruning},
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


async def score_answer(
    servers: Sequence[AsyncServerClient],
    model: str,
    messages: Sequence[Mapping[str, object]],
    answer: str,
    pruning: Mapping[str, object],
    *,
    attempts: int = 4,
    first_wait: float = 1.0,
) -> _ScoredAnswer:
    """Score a reference answer, as :func:`chat_with_retries` asks and raises.

    Raises :class:`EvaluationFailed` too for an answer without the log-probabilities of the prompt
    or their number, or without a message.
    """
    body = scoring_request(model, messages, answer, pruning)
    content = await chat_with_retries(servers, body, attempts, first_wait)
    what = "the log-probabilities of the prompt"
    try:
        prompt = content["prompt_logprobs"]
        logprob, right = score_reference_answer(prompt, answer)
        what = "a message"
        following, _ = read_message(content["choices"][0]["message"])
        what = "the number of prompt tokens"
        tokens = int(content["usage"]["prompt_tokens"])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        received = json.dumps(content)[:120]
        raise EvaluationFailed(f"answers without {what}: {received}") from None
    return _ScoredAnswer(logprob, right, following, tokens)


def score_reference_answer(
    prompt: Sequence[Mapping[str, Any] | None], answer: str
) -> tuple[float, bool]:
    """Log-probability of the answer at the end of a prompt, and whether greedy decoding gives it.

    The tokens of the answer are found by decoding the prompt backwards from its end. Raises
    :class:`EvaluationFailed` for another end, :class:`ServerLost` for impossible values.
    """
    total, right, text = 0.0, True, ""
    for position in reversed(prompt):
        if not position or len(text.strip()) > len(answer.strip()):
            break
        # With ``prompt_logprobs: 0`` the only entry is the token of the prompt itself.
        (token,) = position.values()
        text = str(token["decoded_token"]) + text
        logprob, rank = float(token["logprob"]), int(token["rank"])
        # No token has more than 1 / rank of the probability.
        if not logprob <= _ROUNDING - math.log(max(rank, 1)):
            what = f"log-probability {logprob:g} and rank {rank} contradict each other"
            raise ServerLost(f"the server's caches are broken: {what}")
        total += logprob
        right = right and rank == 1
        if text.strip() == answer.strip():
            return total, right
    raise EvaluationFailed(f"the prompt ends in {text!r}, not in the reference answer {answer!r}")
