"""Conversations of screenshots in history mode: the answer of every turn, and what stays cached."""

from __future__ import annotations

from itertools import pairwise, takewhile
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.yardsticks.examples import CHECKPOINTS
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
ENTRIES: tuple[dict[str, Any], ...] = tuple(
    {"budget": budget, "history": f"{newest}:{CORE},every={every}"}
    for newest, every, budget in (
        (1, 1, "100%"),
        (2, 1, 64),
        (4, 1, "100%"),
        (1, 4, 64),
        (2, 4, "100%"),
        (4, 4, 64),
    )
)
QUESTION = "what colour is the cat on the left of the blue dog"
TALK = [
    message
    for seed in range(9)
    for message in (turn(QUESTION, picture(224, 224, seed)), said("two dog are red"))
]
"""Nine turns of a user with a screenshot each, and the answers to them."""


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

    They end with the core of the first image that is retired since. From there to the newest image
    there are as many as the documentation says.
    """
    expected = [0]
    for count, (before, prompt) in enumerate(pairwise(prompts), 1):
        pairs = zip(before, prompt, strict=False)
        common = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
        retired = history.count_retired(count)
        if history.count_retired(count + 1) > retired:
            edges = [i for i in range(1, len(prompt)) if image in prompt[i - 1 : i + 1]]
            edges = [i for i in edges if prompt[i] != prompt[i - 1]]
            starts = edges[::2]
            assert common == starts[retired] + CORE
            text = starts[1] - edges[1]
            kept = edges[-1] - starts[-1]
            recomputed = history.every * text + (history.every - 1) * CORE
            recomputed += (history.newest - 1) * (kept + text)
            assert starts[-1] - common == recomputed
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


# ---- conversations at once ----

RULES = [f"{newest}:{CORE},every={every}" for newest in (1, 2, 4) for every in (1, 4)]


def draw_talk(random: Random, size: int) -> list[Any]:
    """A conversation of two to seven turns about screens of which some cells change."""
    screen = picture(size, size, random.randrange(1000))
    talk = []
    for _ in range(random.randint(2, 7)):
        corner = random.randrange(size), random.randrange(size)
        screen = screen.copy()
        screen.paste(picture(56, 28, random.randrange(1000)), corner)
        words = random.sample(QUESTION.split(), random.randint(3, 9))
        talk += [turn(" ".join(words), screen), said(random.choice(("red", "two dog")))]
    return talk


def interleave(
    model: Path, state: object, context: int, rules: tuple[str, ...], count: int
) -> float:
    """Number of preemptions of conversations whose turns fill a small KV cache.

    Each turn is answered as the conversation up to it, sent alone with empty caches.
    """
    random = Random(0)
    engine = start(
        {"state": state, "budget": 32, "requests": "budget", "positions": "true"},
        model,
        dtype="float32",
        max_num_batched_tokens=512,
        num_gpu_blocks_override=context // BLOCK + 1,  # for one long conversation
        max_model_len=context,
        disable_log_stats=False,
    )
    talks = [draw_talk(random, 224) for _ in range(count)]
    entries = [
        {
            "budget": random.choice((24, "1/2", "100%")),
            "history": random.choice(RULES),
            "cells": random.choice(rules),
        }
        for _ in talks
    ]

    def enqueue(number: int, end: int) -> None:
        engine.llm.enqueue_chat(
            [talks[number][:end]],
            greedy(40, logprobs=0, ignore_eos=True),
            use_tqdm=False,
            mm_processor_kwargs={"autoprune": entries[number]},
        )

    ends = [1] * count
    answers = {}
    while active := [i for i in range(count) if ends[i] < len(talks[i])]:
        asked = random.sample(active, min(8, len(active)))
        for number in asked:
            enqueue(number, ends[number])
        outputs = engine.llm.wait_for_completion(use_tqdm=False)
        for number, output in zip(asked, outputs, strict=True):
            answers[number, ends[number]] = output
            ends[number] += 2
    preemptions = engine.counter("vllm:num_preemptions")
    for turn_of_talk, answer in answers.items():
        engine.empty_caches()
        enqueue(*turn_of_talk)
        (alone,) = engine.llm.wait_for_completion(use_tqdm=False)
        assert answer.prompt_token_ids == alone.prompt_token_ids
        assert answer.outputs[0].token_ids == alone.outputs[0].token_ids, turn_of_talk
        assert answer.outputs[0].cumulative_logprob == pytest.approx(
            alone.outputs[0].cumulative_logprob, abs=1e-2
        )
    assert sum(answer.num_cached_tokens for answer in answers.values()) > 0
    return preemptions


@in_engine
def test_interleaved_conversations_are_answered_as_alone() -> None:
    """Positions with three axes; also of screens whose unchanged cells are left out."""
    rules = ("none", "changed", "changed+flat")
    model = CHECKPOINTS["miniqwen"]
    assert interleave(model, "cen_divprune", 864, rules, count=8) > 0


@in_engine
def test_the_same_with_one_axis() -> None:
    assert interleave(LLAVA, state_with_core(), 1344, ("none",), count=8) > 0
