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


GRID = [(2, 2 + y, 2 + x) for y in range(3) for x in range(4)]
TEXT = [(6 + i,) * 3 for i in range(41)]
FULL = [list(axis) for axis in zip((0, 0, 0), (1, 1, 1), *GRID, *TEXT, strict=True)]
"""Positions of a grid of 3 x 4 after two words; one token is decoded and computed."""


def completion(rows: list[int]) -> Completion:
    """Of an image of which these rows remain."""
    remaining = [0, 1, *(2 + row for row in rows), *range(2 + N, len(FULL[0]))]
    return Completion(
        prompt=[1, 2, *[IMAGE] * len(rows), *range(20, 60)],
        ids=[3, 4],
        logprob=-3.0,
        cached=0,
        positions=[[axis[i] for i in remaining] for axis in FULL],
    )


def good() -> Report:
    """A report that passes every check."""
    stock, pruned = completion([*range(N)]), completion(KEPT)
    again = pruned.model_copy(update={"cached": 32})
    start = completion([row for part in PARTS for row in part])
    second = start.model_copy(update={"ids": [7, 8], "cached": 32})
    decoded = [
        [*axis[:-1], full[2 + RECALLED[0][0]], 90]
        for axis, full in zip(start.positions, FULL, strict=True)
    ]
    third = start.model_copy(update={"prompt": [*start.prompt, IMAGE, 61], "positions": decoded})
    settings = ("alone", "unnamed", "renamed", "chunked", "preempted")
    others = {"video": stock, "embeddings": stock}
    return Report(
        runner="v1",
        completions={
            "stock": {SPLIT_QUESTION: stock},
            "whole": {SPLIT_QUESTION: stock},
            "pruned": {SPLIT_QUESTION: pruned},
            "again": {SPLIT_QUESTION: again},
            **{setting: {SPLIT_QUESTION: pruned} for setting in settings},
            "split": {
                "first": start,
                "second": second,
                "further": second,
                "alone second": second,
                "third": third.model_copy(update={"cached": 32}),
                "alone third": third,
            },
            "stock others": others,
            "others": others,
        },
        predicted={SPLIT_QUESTION: [N]},
        kept={SPLIT_QUESTION: [KEPT]},
        vision_runs=0,
        split_kept=PARTS,
        recalled=RECALLED,
        recall_refused=False,
        splittable=True,
        merger_error=0.02,
        fallbacks=0,
        errors={},
    )


def test_a_correct_report_passes_every_check() -> None:
    assert {name: check(good()) for name, check in CHECKS.items()} == dict.fromkeys(CHECKS, "")


Change = Callable[[Report], Report]


def _set(**changes: object) -> Change:
    return lambda report: report.model_copy(update=changes)


def _with(setting: str, name: str = SPLIT_QUESTION, **changes: object) -> Change:
    """Change one completion."""

    def change(report: Report) -> Report:
        changed = report[setting][name].model_copy(update=changes)
        settings = {**report.completions, setting: {**report[setting], name: changed}}
        return report.model_copy(update={"completions": settings})

    return change


def _without(setting: str, name: str) -> Change:
    def change(report: Report) -> Report:
        kept = {key: value for key, value in report[setting].items() if key != name}
        return report.model_copy(update={"completions": {**report.completions, setting: kept}})

    return change


def _in_tiles(pruned: list[int]) -> Change:
    """The image in two tiles of 6 tokens, with text before each; 2 rows of the first are kept."""

    def change(report: Report) -> Report:
        stock = [1, *[IMAGE] * 6, 2, *[IMAGE] * 6]
        report = _with("stock", prompt=stock)(report)
        report = _set(kept={SPLIT_QUESTION: [[1, 2, 6, 7, 11]]})(report)
        return _with("pruned", prompt=pruned)(report)

    return change


def test_rows_of_every_tile_have_their_placeholders() -> None:
    sound = _in_tiles([1, IMAGE, IMAGE, 2, IMAGE, IMAGE, IMAGE])(good())
    assert CHECKS["kept_rows_stand_in_their_tiles"](sound) == ""


BROKEN: dict[str, list[Change]] = {
    "answers_are_numbers": [_with(way, logprob=math.nan) for way in ("stock", "chunked")],
    "whole_is_stock": [
        _with("whole", logprob=-3.0000001),
        _with("whole", cached=32),
    ],
    "prompts_shrink_as_predicted": [
        _set(predicted={SPLIT_QUESTION: [N + 1]}),
        _with("pruned", prompt=[1, *[IMAGE] * SMALL_BUDGET, *range(20, 60)]),
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
        _with("chunked", ids=[3, 5]),
        _with("chunked", positions=FULL),
    ],
    "preempted_requests_go_on": [
        _with("preempted", ids=[3, 5]),
        _with("preempted", positions=FULL),
    ],
    "the_same_question_shares": [
        _with("again", cached=0),
        _with("again", logprob=-4.0),
        _with("pruned", cached=32),
    ],
    "questions_share_the_core": [
        _set(split_kept=[[0, 1, 2, 4, 6, 8, 9, 10, 11, 3, 5]]),
        _set(split_kept=[*PARTS[:1], [0, 5]]),
        _set(splittable=False),
        _with("split", "second", cached=0),
        _with("split", "further", cached=0),
        _with("split", "first", cached=32),
        _set(hybrid=True),
    ],
    "later_turns_recall_other_tokens": [
        _set(recalled=[]),
        _set(recalled=[[8]]),
        _set(recalled=[[7], [7]]),
        _set(splittable=False, recalled=[]),
        _with("split", "third", cached=0),
    ],
    "recalled_tokens_stand_in_their_image": [
        _set(recalled=[[6]]),
        _with("split", "alone third", positions=[list(range(60))] * 3),
    ],
    "parts_give_the_same_completions": [
        _with("split", "alone third", ids=[3, 5]),
        _with("split", "alone second", logprob=-4.0),
        _with("split", "alone second", ids=[3, 4]),
    ],
    "parts_stand_on_one_grid": [
        _set(split_kept=[PARTS[0][::-1], PARTS[1]]),
        _with("split", "first", positions=FULL),
    ],
    "questions_stand_alone": [
        _with("alone", logprob=-3.1),
        _with("alone", prompt=[1]),
    ],
    "names_do_not_matter": [
        _with("renamed", ids=[3, 5]),
        _with("renamed", prompt=[1]),
    ],
    "images_are_seen_once": [_set(vision_runs=1)],
    "nothing_fell_back": [_set(fallbacks=1), _set(errors={"RuntimeError": 1})],
    "positions_are_a_gather": [
        _with("pruned", positions=[list(range(48))] * 3),
        _set(kept={SPLIT_QUESTION: [[0, 2, 5, 7, 11]]}),
    ],
    "merger_input_is_that_of_transformers": [_set(merger_error=1.0), _set(merger_error=math.nan)],
    "videos_are_untouched": [_without("others", "video")],
    "embeddings_are_untouched": [
        _without(setting, "embeddings") for setting in ("others", "stock others")
    ],
}


def test_nan_survives_json() -> None:
    broken = _with("stock", logprob=math.nan)(good())
    read = Report.model_validate_json(broken.model_dump_json())
    assert math.isnan(read["stock"][SPLIT_QUESTION].logprob)
    assert (
        CHECKS["answers_are_numbers"](read)
        == "stock, large: stock vLLM's own log-probability is nan"
    )


def test_linear_attention_rounds_and_shares_from_the_third_question_on() -> None:
    hybrid = _set(hybrid=True)(_with("split", "second", cached=0)(good()))
    assert CHECKS["questions_share_the_core"](hybrid) == ""
    for name, field in (
        ("small_steps_keep_the_same", "chunked"),
        ("names_do_not_matter", "renamed"),
    ):
        assert CHECKS[name](_with(field, logprob=-3.05)(hybrid)) == ""
        assert CHECKS[name](_with(field, logprob=-3.2)(hybrid)) != ""
    rounded = _with("others", "video", logprob=-3.05)
    assert CHECKS["videos_are_untouched"](rounded(hybrid)) == ""
    assert CHECKS["videos_are_untouched"](rounded(good())) != ""


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
        *(_with(way, ids=[3, 5]) for way in ("stock", "pruned", "again", "alone")),
        *(_with(way, positions=[[0]]) for way in ("chunked", "preempted")),
        *(_with("pruned", logprob=number) for number in (-3.4, math.nan)),
    ):
        assert runners_agree(good(), change(other)) != ""


@pytest.mark.parametrize(("off", "agree"), [(0.15, True), (0.25, False)])
def test_runners_may_differ_by_rounding(off: float, agree: bool) -> None:
    moved = _with("pruned", logprob=good()["pruned"][SPLIT_QUESTION].logprob - off)(good())
    assert (runners_agree(good(), moved) == "") is agree


def test_remaining_indices_of_two_images() -> None:
    stock = [1, IMAGE, IMAGE, IMAGE, 2, IMAGE, IMAGE, 3]
    pruned = [1, IMAGE, IMAGE, 2, IMAGE, 3]
    assert remaining_indices(stock, pruned, [[0, 2], [1]]) == [0, 1, 3, 4, 6, 7]
