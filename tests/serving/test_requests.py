"""States in requests to a server of another state, compared with servers of those states."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.serving.engine import (
    BLOCK,
    STATE,
    alone,
    examples,
    forget,
    generate,
    generate_each,
    prompt,
    release,
    start,
)
from tests.serving.interleave import TILED, interleaved, interleaved_tiles
from tests.serving.scenarios import Report, Runner, scenario
from vllm_autoprune.tpdsl.loading import load_state

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]


BUDGETS = (8, 24)
STATES = ("autoprune", "visionzip", "fastv")


@scenario
def request_states() -> Report:
    """Answers of three states at two budgets, of engines and of requests.

    ``native``: as the state of an engine. ``together``: as the states of requests, all at once, to
    an engine that has none of them as its own. ``again``: one by one, nothing cached.
    ``cached``: tokens from the prefix cache, for a state, the same again, and another one.
    """
    questions = examples(1)[:2]
    keys = list(product(STATES, BUDGETS, range(len(questions))))
    report: dict[str, Any] = {"native": []}
    for name in STATES:
        llm = start({**STATE, "state": name, "requests": "budget"})
        prompts = [prompt(questions[i], budget=k) for state, k, i in keys if state == name]
        report["native"] += generate_each(llm, prompts)
        release(llm)
    llm = start({**STATE, "state": alone("divprune"), "requests": "states"})
    # By its name, or whole.
    brought = [
        prompt(
            questions[i], budget=k, state=load_state(name).model_dump(mode="json") if i else name
        )
        for name, k, i in keys
    ]
    report["together"] = generate(llm, brought)
    forget(llm)
    report["again"] = generate_each(llm, brought)
    forget(llm)
    at, other = keys.index(("visionzip", 24, 0)), keys.index(("autoprune", 24, 0))
    answers = generate_each(llm, [brought[at], brought[at], brought[other]])
    report["cached"] = [answer["cached"] for answer in answers]
    return report


@scenario
def every_kind() -> Report:
    """Mixed concurrent requests, compared with single ones."""
    return interleaved(64)


@scenario
def mixed_tiles() -> Report:
    """By backbone: concurrent requests with images of mixed tiles, compared with single ones."""
    return {name: interleaved_tiles(name, 24) for name in TILED}


@pytest.mark.parametrize("how", ["together", "again"])
def test_a_state_of_a_request_is_served_as_the_state_of_a_server(runner: Runner, how: str) -> None:
    report = runner.run("request_states")
    for native, answer in zip(report["native"], report[how], strict=True):
        assert answer["text"] == native["text"]
        assert answer["prompt_tokens"] == native["prompt_tokens"]
        assert answer["logprob"] == pytest.approx(native["logprob"], abs=3e-2)


def test_prefix_cache_is_not_shared_between_states(runner: Runner) -> None:
    cached, again, other = runner.run("request_states")["cached"]
    assert (cached, other) == (0, 0)
    assert again >= BLOCK


def test_mixed_concurrent_requests_equal_single_ones(runner: Runner) -> None:
    report = runner.run("every_kind")
    assert (report["apart"], report["kept_apart"]) == ([], [])
    assert report["budgets_at_once"] > 2
    assert report["images_compared"] > 30


@pytest.mark.parametrize("backbone", TILED)
def test_images_of_mixed_tiles_keep_what_they_keep_alone(runner: Runner, backbone: str) -> None:
    report = runner.run("mixed_tiles")[backbone]
    assert (report["apart"], report["kept_apart"]) == ([], [])
    assert report["at_once"] > 1
    assert report["images_compared"] > 10
