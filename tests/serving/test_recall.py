"""Later turns of a conversation recall tokens, and nothing before them is computed again."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.serving.runners import Runner

pytestmark = [
    pytest.mark.engine,
    pytest.mark.both,
    pytest.mark.scenarios("recalled_turns"),
]

BLOCK, BUDGET, RECALL, N = 32, 64, 8, 144


def _reports(runner: Runner) -> list[dict[str, Any]]:
    report = runner.run("recalled_turns")
    return [report, report["split"]]


def test_each_later_turn_recalls_tokens_that_were_not_kept(runner: Runner) -> None:
    for report in _reports(runner):
        kept = [rows for _, _, rows in report["parts"]]
        first = sum(len(rows) for part, _, rows in report["parts"] if part != "recall")
        assert first == BUDGET
        recalls = [rows for part, _, rows in report["parts"] if part == "recall"]
        assert [len(rows) for rows in recalls] == [RECALL, RECALL]
        assert len({token for rows in kept for token in rows}) == BUDGET + 2 * RECALL


def test_earlier_turns_stay_in_the_prefix_cache(runner: Runner) -> None:
    for report in _reports(runner):
        turns = report["turns"]
        assert turns[0]["cached"] == 0
        for before, after in itertools.pairwise(turns):
            # All full blocks of the turn before, whose answer is part of the conversation.
            assert after["cached"] >= before["prompt_tokens"] // BLOCK * BLOCK > 0


def test_answers_do_not_depend_on_what_is_cached(runner: Runner) -> None:
    report = runner.run("recalled_turns")
    pairs = [(report["two"], report["two_alone"])]
    for one in _reports(runner):
        pairs += zip(one["turns"], one["alone"], strict=True)
    for shared, single in pairs:
        assert shared["text"] == single["text"]
        assert shared["logprob"] == pytest.approx(single["logprob"], abs=2e-2)
        assert shared["prompt_tokens"] == single["prompt_tokens"]


def test_vision_tower_runs_once_for_all_turns(runner: Runner) -> None:
    assert [report["runs"] for report in _reports(runner)] == [1, 1]


def test_a_request_says_how_much_is_recalled(runner: Runner) -> None:
    asked = runner.run("recalled_turns")["asked"]
    lengths = {int(recall): answer["prompt_tokens"] for recall, answer in asked.items()}
    # Each turn's tokens end in a line break, as the chat template writes images, and a space.
    breaks = lengths[3] - lengths[0] - 2 * 3
    assert 0 <= breaks <= 2 * 2
    assert lengths[8] - lengths[3] == 2 * 5


def test_what_is_left_of_an_image_bounds_its_recall(runner: Runner) -> None:
    report = runner.run("recalled_turns")
    asked = report["asked"]["0"]["prompt_tokens"]
    assert N - BUDGET < report["all"]["prompt_tokens"] < asked + N - BUDGET + 3


def test_an_image_that_keeps_everything_recalls_nothing(runner: Runner) -> None:
    full = runner.run("recalled_turns")["full"]
    assert full["0"]["text"] == full["3"]["text"]
    assert full["0"]["prompt_tokens"] == full["3"]["prompt_tokens"]


def test_a_turn_after_two_images_recalls_tokens_of_both(runner: Runner) -> None:
    parts = runner.run("recalled_turns")["two_parts"]
    recalls = [[key, len(rows)] for part, key, rows in parts if part == "recall"]
    first, second = (key for part, key, _ in parts if part == "whole")
    assert sorted(recalls) == sorted([[first, RECALL], [first, RECALL // 2], [second, RECALL // 2]])
