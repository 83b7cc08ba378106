"""Checks pass on a correct report and fail on reports with one change."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from vllm_autoprune.selftest.checks import (
    CHECKS,
    SMALL_BUDGET,
    SPLIT_QUESTION,
    remaining_indices,
    runners_agree,
)
from vllm_autoprune.selftest.run import Completion, Report

IMAGE, N = 9, 12
PARTS = [[0, 1, 2, 4, 6, 8, 9, 10, 11], [3, 5]]
"""Kept rows of a core and of the delta behind it."""

RECALLED = [[7]]
"""Kept row of a later turn: the last one of the image."""

KEPT = [1, 2, 5, 7, 11]


def completion(
    count: int, positions: list[list[int]], cached: int = 0, logprob: float = -3.0
) -> Completion:
    prompt = [1, 2, *[IMAGE] * count, *range(20, 60)]
    return Completion(
        prompt=prompt, ids=[3, 4], logprob=logprob, cached=cached, positions=positions
    )


def full_positions() -> list[list[int]]:
    """A grid of 3 x 4 after two words; one token is decoded and computed."""
    grid = [(2, 2 + y, 2 + x) for y in range(3) for x in range(4)]
    text = [(6 + i,) * 3 for i in range(41)]
    return [list(axis) for axis in zip((0, 0, 0), (1, 1, 1), *grid, *text, strict=True)]


def good() -> Report:
    full = full_positions()
    left = [0, 1, *(2 + row for row in KEPT), *range(2 + N, len(full[0]))]
    stock = completion(N, full)
    pruned = completion(SMALL_BUDGET, [[axis[i] for i in left] for axis in full])
    core_and_delta = [row for part in PARTS for row in part]
    left = [0, 1, *(2 + row for row in core_and_delta), *range(2 + N, len(full[0]))]
    first = completion(len(core_and_delta), [[axis[i] for i in left] for axis in full])
    second = first.model_copy(update={"ids": [7, 8], "cached": 32})
    third = first.model_copy(
        update={
            "prompt": [*first.prompt, IMAGE, 61],
            "positions": [
                [*axis[:-1], whole[2 + 7], 90]
                for axis, whole in zip(first.positions, full, strict=True)
            ],
        }
    )
    return Report(
        runner="v1",
        stock={SPLIT_QUESTION: stock},
        whole={SPLIT_QUESTION: stock},
        pruned={SPLIT_QUESTION: pruned},
        again={SPLIT_QUESTION: pruned.model_copy(update={"cached": 32})},
        alone={SPLIT_QUESTION: pruned},
        unnamed={SPLIT_QUESTION: pruned},
        renamed={SPLIT_QUESTION: pruned},
        chunked={SPLIT_QUESTION: pruned},
        preempted={SPLIT_QUESTION: pruned},
        predicted={SPLIT_QUESTION: [N]},
        kept={SPLIT_QUESTION: [KEPT]},
        vision_runs=0,
        split={
            "first": first,
            "second": second,
            "further": second,
            "alone second": second,
            "third": third.model_copy(update={"cached": 32}),
            "alone third": third,
        },
        split_kept=PARTS,
        recalled=RECALLED,
        recall_refused=False,
        splittable=True,
        merger_error=0.02,
        fallbacks=0,
        errors={},
        video_stock=stock,
        video_pruned=stock,
        embeddings_stock=stock,
        embeddings_pruned=stock,
    )


def test_a_correct_report_passes_every_check() -> None:
    assert {name: check(good()) for name, check in CHECKS.items()} == dict.fromkeys(CHECKS, "")


def _with_completion(field: str, **changes: object) -> Callable[[Report], Report]:
    def change(report: Report) -> Report:
        (one,) = dict(report)[field].values()
        return report.model_copy(update={field: {SPLIT_QUESTION: one.model_copy(update=changes)}})

    return change


def _with_split(name: str, **changes: object) -> Callable[[Report], Report]:
    def change(report: Report) -> Report:
        changed = report.split[name].model_copy(update=changes)
        return report.model_copy(update={"split": {**report.split, name: changed}})

    return change


def _set(**changes: object) -> Callable[[Report], Report]:
    return lambda report: report.model_copy(update=changes)


def _in_tiles(pruned: list[int]) -> Callable[[Report], Report]:
    """The image in two tiles of 6 tokens, with text before each; 2 rows of the first are kept."""

    def change(report: Report) -> Report:
        stock = [1, *[IMAGE] * 6, 2, *[IMAGE] * 6]
        report = _with_completion("stock", prompt=stock)(report)
        report = _set(kept={SPLIT_QUESTION: [[1, 2, 6, 7, 11]]})(report)
        return _with_completion("pruned", prompt=pruned)(report)

    return change


def test_rows_of_every_tile_have_their_placeholders() -> None:
    sound = _in_tiles([1, IMAGE, IMAGE, 2, IMAGE, IMAGE, IMAGE])(good())
    assert CHECKS["kept_rows_stand_in_their_tiles"](sound) == ""


BROKEN: dict[str, list[Callable[[Report], Report]]] = {
    "answers_are_numbers": [
        _with_completion(way, logprob=math.nan) for way in ("stock", "chunked")
    ],
    "whole_is_stock": [
        _with_completion("whole", logprob=-3.0000001),
        _with_completion("whole", cached=32),
    ],
    "prompts_shrink_as_predicted": [
        _set(predicted={SPLIT_QUESTION: [N + 1]}),
        _with_completion("pruned", prompt=[1, *[IMAGE] * SMALL_BUDGET, *range(20, 60)]),
    ],
    "kept_rows_are_the_model_s_own": [
        _set(kept={SPLIT_QUESTION: [[1, 2, 5, 7, -1]]}),
        _set(kept={SPLIT_QUESTION: [[2, 1, 5, 7, 11]]}),
        _set(kept={SPLIT_QUESTION: [[1, 2, 5, 7, 12]]}),
        _set(kept={SPLIT_QUESTION: [[1, 2, 5, 7]]}),
        _set(kept={SPLIT_QUESTION: []}),
    ],
    "kept_rows_stand_in_their_tiles": [
        _in_tiles([1, IMAGE, IMAGE, IMAGE, 2, IMAGE, IMAGE]),
        _in_tiles([1, IMAGE, 2, IMAGE, IMAGE, IMAGE, IMAGE]),
    ],
    "small_steps_keep_the_same": [
        _with_completion("chunked", ids=[3, 5]),
        _with_completion("chunked", positions=full_positions()),
    ],
    "preempted_requests_go_on": [
        _with_completion("preempted", ids=[3, 5]),
        _with_completion("preempted", positions=full_positions()),
    ],
    "the_same_question_shares": [
        _with_completion("again", cached=0),
        _with_completion("again", logprob=-4.0),
        _with_completion("pruned", cached=32),
    ],
    "questions_share_the_core": [
        _set(split_kept=[[0, 1, 2, 4, 6, 8, 9, 10, 11, 3, 5]]),
        _set(split_kept=[*PARTS[:1], [0, 5]]),
        _set(splittable=False),
        _with_split("second", cached=0),
        _with_split("further", cached=0),
        _with_split("first", cached=32),
        _set(hybrid=True),
    ],
    "later_turns_recall_other_tokens": [
        _set(recalled=[]),
        _set(recalled=[[8]]),
        _set(recalled=[[7], [7]]),
        _set(splittable=False, recalled=[]),
        _with_split("third", cached=0),
    ],
    "recalled_tokens_stand_in_their_image": [
        _set(recalled=[[6]]),
        _with_split("alone third", positions=[list(range(60))] * 3),
    ],
    "parts_give_the_same_completions": [
        _with_split("alone third", ids=[3, 5]),
        _with_split("alone second", logprob=-4.0),
        _with_split("alone second", ids=[3, 4]),
    ],
    "parts_stand_on_one_grid": [
        _set(split_kept=[PARTS[0][::-1], PARTS[1]]),
        _with_split("first", positions=full_positions()),
    ],
    "questions_stand_alone": [
        _with_completion("alone", logprob=-3.1),
        _with_completion("alone", prompt=[1]),
    ],
    "names_do_not_matter": [
        _with_completion("renamed", ids=[3, 5]),
        _with_completion("renamed", prompt=[1]),
    ],
    "images_are_seen_once": [_set(vision_runs=1)],
    "nothing_fell_back": [_set(fallbacks=1), _set(errors={"RuntimeError": 1})],
    "positions_are_a_gather": [
        _with_completion("pruned", positions=[list(range(48))] * 3),
        _set(kept={SPLIT_QUESTION: [[0, 2, 5, 7, 11]]}),
    ],
    "merger_input_is_that_of_transformers": [_set(merger_error=1.0), _set(merger_error=math.nan)],
    "videos_are_untouched": [_set(video_pruned=None)],
    "embeddings_are_untouched": [_set(embeddings_pruned=None), _set(embeddings_stock=None)],
}


def test_nan_survives_json() -> None:
    broken = _with_completion("stock", logprob=math.nan)(good())
    read = Report.model_validate_json(broken.model_dump_json())
    assert math.isnan(read.stock[SPLIT_QUESTION].logprob)
    assert (
        CHECKS["answers_are_numbers"](read)
        == "stock, large: stock vLLM's own log-probability is nan"
    )


def test_linear_attention_rounds_and_shares_from_the_third_question_on() -> None:
    hybrid = _set(hybrid=True)(_with_split("second", cached=0)(good()))
    assert CHECKS["questions_share_the_core"](hybrid) == ""
    for name, field in (
        ("small_steps_keep_the_same", "chunked"),
        ("names_do_not_matter", "renamed"),
    ):
        assert CHECKS[name](_with_completion(field, logprob=-3.05)(hybrid)) == ""
        assert CHECKS[name](_with_completion(field, logprob=-3.2)(hybrid)) != ""
    video = good().stock[SPLIT_QUESTION].model_copy(update={"logprob": -3.05})
    assert CHECKS["videos_are_untouched"](hybrid.model_copy(update={"video_pruned": video})) == ""
    assert CHECKS["videos_are_untouched"](good().model_copy(update={"video_pruned": video})) != ""


def test_every_check_has_a_failing_report() -> None:
    assert set(BROKEN) == set(CHECKS)


@pytest.mark.parametrize("name", BROKEN)
def test_a_failed_check_is_reported(name: str) -> None:
    for change in BROKEN[name]:
        assert CHECKS[name](change(good())) != ""


def test_runners_that_differ_are_reported() -> None:
    other = good().model_copy(update={"runner": "v2"})
    assert runners_agree(good(), other) == ""
    for change in (
        _set(kept={SPLIT_QUESTION: [[0, 2, 5, 7, 11]]}),
        *(_with_completion(way, ids=[3, 5]) for way in ("stock", "pruned", "again", "alone")),
        *(_with_completion(way, positions=[[0]]) for way in ("chunked", "preempted")),
        *(_with_completion("pruned", logprob=number) for number in (-3.4, math.nan)),
    ):
        assert runners_agree(good(), change(other)) != ""


@pytest.mark.parametrize(("off", "agree"), [(0.15, True), (0.25, False)])
def test_runners_may_differ_by_rounding(off: float, agree: bool) -> None:
    moved = _with_completion("pruned", logprob=good().pruned[SPLIT_QUESTION].logprob - off)(good())
    assert (runners_agree(good(), moved) == "") is agree


def test_remaining_indices_of_two_images() -> None:
    stock = [1, IMAGE, IMAGE, IMAGE, 2, IMAGE, IMAGE, 3]
    pruned = [1, IMAGE, IMAGE, 2, IMAGE, 3]
    assert remaining_indices(stock, pruned, [[0, 2], [1]]) == [0, 1, 3, 4, 6, 7]
