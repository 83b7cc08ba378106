"""Questions about one image share its core, and are answered as they are alone."""

from __future__ import annotations

import pytest

from tests.serving.conftest import V2_EXHAUSTIVE
from tests.serving.runners import Runner

pytestmark = [
    pytest.mark.engine,
    pytest.mark.both,
    pytest.mark.scenarios("split_images"),
]

BLOCK, BUDGET = 32, 64


def test_further_questions_reuse_the_blocks_of_the_core(runner: Runner) -> None:
    first, *others = runner.run("split_images")["turns"]
    assert first["cached"] == 0
    assert [answer["cached"] for answer in others] == [2 * BLOCK] * len(others)


def test_answers_do_not_depend_on_what_is_cached(runner: Runner) -> None:
    report = runner.run("split_images")
    for key, alone in (("turns", "alone"), ("two", "two_alone")):
        for shared, single in zip(report[key], report[alone], strict=True):
            assert shared["text"] == single["text"]
            assert shared["logprob"] == pytest.approx(single["logprob"], abs=2e-2)
            assert shared["prompt_tokens"] == single["prompt_tokens"]


def test_core_is_chosen_once_and_the_delta_for_each_question(runner: Runner) -> None:
    parts = runner.run("split_images")["parts"]
    cores = [rows for part, _, rows in parts if part == "core"]
    deltas = [rows for part, _, rows in parts if part == "delta"]
    assert len(cores) == 1 and len(deltas) == 3
    for rows in deltas:
        assert not set(rows) & set(cores[0])
        assert len(rows) + len(cores[0]) == BUDGET
    assert len({tuple(rows) for rows in deltas}) > 1


def test_vision_tower_runs_once_for_both_parts(runner: Runner) -> None:
    assert runner.run("split_images")["runs"] == 1


def test_cores_of_two_images_come_before_their_deltas(runner: Runner) -> None:
    first, second = runner.run("split_images")["two"]
    # 48 tokens of the first core and most of the second one.
    assert first["cached"] < second["cached"] == 3 * BLOCK


def test_one_question_in_two_turns_leaves_the_first_turn_in_the_prefix_cache(
    runner: Runner,
) -> None:
    first, second = runner.run("split_images")["equal"]
    assert first["cached"] == 0
    assert second["cached"] >= first["prompt_tokens"] // BLOCK * BLOCK


def test_task_chooses_the_tokens_of_a_screenshot_that_follows_it(runner: Runner) -> None:
    (part, _, rows), (_, _, others) = runner.run("split_images")["tasks"]
    assert part == "whole", "the task is part of the prefix"
    assert rows != others


def test_image_behind_its_question_stays_whole(runner: Runner) -> None:
    assert runner.run("split_images")["reversed_parts"] == ["whole"]


def test_image_stays_whole_without_a_prefix_cache_and_keeps_the_same_tokens(
    runner: Runner,
) -> None:
    report = runner.run("split_images")
    parts = report["parts"]
    ((_, core, shared),) = (part for part in parts if part[0] == "core")
    assert core == 61, "the state below has a core of the size that was aligned to blocks"
    kept = [sorted([*shared, *rows]) for part, _, rows in parts if part == "delta"]
    assert report["whole"] == kept
    prompts = [[a["prompt_tokens"] for a in report[key]] for key in ("turns", "uncached")]
    assert prompts[0] == prompts[1]


@pytest.mark.scenarios("core_size_left_out")
@pytest.mark.parametrize("runner", V2_EXHAUSTIVE, indirect=True)
def test_negative_control_without_the_size_of_the_core_in_the_identity(runner: Runner) -> None:
    report = runner.run("core_size_left_out")
    assert report["wrong"] != report["right"]
