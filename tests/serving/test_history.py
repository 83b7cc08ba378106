"""Conversations of screenshots in history mode: the answer of every turn, and what stays cached."""

from __future__ import annotations

from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest

from tests.serving.engine import (
    LLAVA,
    Engine,
    built,
    greedy,
    said,
    start,
    state_with_core,
    turn,
)
from tests.serving.runners import in_engine
from vllm_autoprune.selftest.questions import picture
from vllm_autoprune.selftest.run import BLOCK
from vllm_autoprune.serving.history import History

pytestmark = pytest.mark.engine

CORE = 40
ENTRIES: tuple[dict[str, Any], ...] = (
    {"budget": "100%", "history": f"1:{CORE}"},
    {"budget": 64, "history": f"2:{CORE}"},
    {"budget": 64, "history": f"1:{CORE},every=4"},
    {"budget": "100%", "history": f"2:{CORE},every=4"},
)
QUESTION = "what colour is the cat on the left of the blue dog"
TALK = [
    message
    for seed in range(6)
    for message in (turn(QUESTION, picture(320, 320, seed)), said("two dog are red"))
]
"""Six turns of a user with a screenshot each, and the answers to them."""


def ask_turns(engine: Engine, entry: dict[str, Any], alone: bool = False) -> list[Any]:
    """What vLLM answers at each turn, after the turns before or with empty caches."""
    outputs = []
    engine.empty_caches()
    for end in range(1, len(TALK), 2):
        outputs += engine.llm.chat(
            [TALK[:end]],
            greedy(4, logprobs=0),
            use_tqdm=False,
            mm_processor_kwargs={"autoprune": entry},
        )
        if alone:
            engine.empty_caches()
    return outputs


def count_cached(history: History, prompts: list[list[int]], image: int) -> list[int]:
    """Tokens of each prompt in full blocks that the prompt before it has too.

    These end with the core of the first image that is retired since; nothing before it changes.
    """
    expected = [0]
    for count, (before, prompt) in enumerate(pairwise(prompts), 1):
        pairs = zip(before, prompt, strict=False)
        common = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
        retired = history.count_retired(count)
        if history.count_retired(count + 1) > retired:
            starts = [
                i for i in range(1, len(prompt)) if prompt[i] == image != prompt[i - 1]
            ]
            assert common == starts[retired] + CORE
        expected.append(common // BLOCK * BLOCK)
    return expected


def check_turns(model: Path, state: object) -> None:
    """Of conversations whose newest images keep K or all of their tokens."""
    engine = start(
        {"state": state, "budget": 64, "requests": "budget", "positions": "true"},
        model,
        dtype="float32",
    )
    unpruned, *_ = ask_turns(engine, {})
    ids = unpruned.prompt_token_ids
    image = max(ids, key=ids.count)  # the most frequent token
    for entry in ENTRIES:
        outputs = ask_turns(engine, entry)
        prompts = [output.prompt_token_ids for output in outputs]
        cached = [output.num_cached_tokens for output in outputs]
        history = History.parse(entry["history"], "")
        assert cached == count_cached(history, prompts, image)
        singles = ask_turns(engine, entry, alone=True)
        for output, single in zip(outputs, singles, strict=True):
            assert output.prompt_token_ids == single.prompt_token_ids
            answer = output.outputs[0]
            expected = single.outputs[0]
            assert answer.token_ids == expected.token_ids
            assert answer.cumulative_logprob == pytest.approx(
                expected.cumulative_logprob, abs=1e-3
            )


@in_engine
def test_every_turn_is_answered_as_alone_and_reads_what_the_formula_says() -> None:
    """Positions with three axes, by a state without a core that reads no question."""
    check_turns(built("qwen3_vl"), "cen_divprune")


@in_engine
def test_the_same_with_one_axis_by_a_state_that_reads_the_question() -> None:
    check_turns(LLAVA, state_with_core())
