"""States in requests to a server of another state, compared with servers of those states."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.server import Server
from benchmarks.yardsticks.examples import Example
from tests.serving.engine import (
    STATE,
    TOKENS,
    Answer,
    alone,
    examples,
    forget,
    generate,
    prompt,
    release,
    start,
    watch,
)
from tests.serving.http import ask, entry, prompt_tokens, text_of
from tests.serving.interleave import TILED, interleaved, interleaved_tiles
from tests.serving.scenarios import Report, Runner, scenario
from tests.tpdsl.samples import edited, sample
from vllm_autoprune.tpdsl.loading import load_state

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]


OWN_BUDGETS = (8, 24)
STATES = ("autoprune", "visionzip", "fastv")


@scenario
def request_states() -> Report:
    """Answers and kept tokens of three states at two budgets, of engines and of requests.

    ``native``: as the state of an engine. ``together``: as the states of requests, all at once, to
    an engine that has none of them as its own. ``again``: one by one, nothing cached.
    ``batches``: budgets in each step. ``cached``: tokens from the prefix cache, for a state asked
    first, again, and another state.
    """
    questions = examples(1)[:2]
    report: dict[str, Any] = {"native": {}, "together": {}, "again": {}}
    for name in STATES:
        llm = start({**STATE, "state": name, "requests": "budget"})
        for budget in OWN_BUDGETS:
            for i, example in enumerate(questions):
                (answer,) = generate(llm, [prompt(example, budget)])
                report["native"][f"{name}/{budget}/{i}"] = answer.plain()
        release(llm)
    llm = start({**STATE, "state": alone("divprune"), "requests": "states"})
    seen = watch()
    keys = [
        f"{name}/{k}/{i}" for name in STATES for k in OWN_BUDGETS for i in range(len(questions))
    ]
    answers = generate(llm, [_bringing(key, questions) for key in keys])
    report["together"] = {k: a.plain() for k, a in zip(keys, answers, strict=True)}
    report["batches"] = list(seen.budgets)
    forget(llm)
    report["again"] = {key: _answer(llm, key, questions).plain() for key in keys}
    first, again, other = "visionzip/24/0", "visionzip/24/0", "autoprune/24/0"
    forget(llm)
    report["cached"] = [_answer(llm, key, questions).cached for key in (first, again, other)]
    return report


def _answer(llm: LLM, key: str, questions: list[Example]) -> Answer:
    (answer,) = generate(llm, [_bringing(key, questions)])
    return answer


def _bringing(key: str, questions: list[Example]) -> dict[str, object]:
    """A raw prompt that brings a state by its name, or whole."""
    name, budget, i = key.split("/")
    whole = json.loads(load_state(name).dumps())
    policy = name if i == "0" else whole
    entry = {"state": policy, "budget": int(budget)}
    return {**prompt(questions[int(i)]), "mm_processor_kwargs": {"autoprune": entry}}


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
    assert report["native"].keys() == report[how].keys()
    for key, native in report["native"].items():
        answer = report[how][key]
        assert (answer["text"], answer["prompt_tokens"]) == (
            native["text"],
            native["prompt_tokens"],
        ), key
        assert answer["logprob"] == pytest.approx(native["logprob"], abs=3e-2), key


def test_states_and_budgets_share_a_step(runner: Runner) -> None:
    report = runner.run("request_states")
    assert max(len(set(step)) for step in report["batches"]) == 2
    assert max(map(len, report["batches"])) >= 6


def test_prefix_cache_is_not_shared_between_states(runner: Runner) -> None:
    first, again, other = runner.run("request_states")["cached"]
    assert (first, other) == (0, 0)
    assert again >= 32


def test_mixed_concurrent_requests_equal_single_ones(runner: Runner) -> None:
    report = runner.run("every_kind")
    assert (report["apart"], report["kept_apart"]) == ([], [])
    assert report["at_once"] > 1
    assert report["images_compared"] > 30


@pytest.mark.parametrize("backbone", TILED)
def test_images_of_mixed_tiles_keep_what_they_keep_alone(runner: Runner, backbone: str) -> None:
    report = runner.run("mixed_tiles")[backbone]
    assert (report["apart"], report["kept_apart"]) == ([], [])
    assert report["at_once"] > 1
    assert report["images_compared"] > 10


def test_states_over_http(pruned: Server) -> None:
    example = examples(1)[0]
    full = prompt_tokens(ask(pruned, example, **entry(enabled=False)))
    for policy in ("visionzip", "dart", edited(sample(), {"/constraints/selector/q_e": 3})):
        answer = ask(pruned, example, **entry(state=policy, budget=20))
        assert prompt_tokens(answer) == full - TOKENS + 20
        assert text_of(answer)
