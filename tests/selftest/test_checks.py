"""Checks pass on a correct report and fail on reports with one change."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from vllm_autoprune.selftest.checks import CHECKS, runners_agree
from vllm_autoprune.selftest.run import SMALL_BUDGET, SPLIT_QUESTION, Completion, Report

IMAGE, N = 9, 12
KEPT, OTHERS = [1, 2, 5, 7, 11], [0, 2, 5, 7, 11]
PARTS, RECALLED = [[0, 1, 2, 4, 6, 8, 9, 10, 11], [3, 5]], [[7]]
"""Kept rows of a core, of the delta behind it, and of a later turn: the last one of the image."""

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
    start = completion([row for part in PARTS for row in part])
    second = start.model_copy(update={"ids": [7, 8], "cached": 32})
    decoded = [
        [*axis[:-1], full[2 + RECALLED[0][0]], 90]
        for axis, full in zip(start.positions, FULL, strict=True)
    ]
    third = start.model_copy(update={"prompt": [*start.prompt, IMAGE, 61], "positions": decoded})
    settings = {
        "stock": stock,
        "whole": stock,
        "again": pruned.model_copy(update={"cached": 32}),
        **dict.fromkeys(("pruned", "alone", "unnamed", "renamed", "chunked", "preempted"), pruned),
    }
    others = {"video": stock, "embeddings": stock}
    split = {
        "first": start,
        "second": second,
        "further": second,
        "alone second": second,
        "third": third.model_copy(update={"cached": 32}),
        "alone third": third,
    }
    return Report(
        runner="v1",
        completions={
            **{setting: {SPLIT_QUESTION: completion} for setting, completion in settings.items()},
            "split": split,
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


Change = Callable[[Report], Report]


def fields(**changes: object) -> Change:
    return lambda report: report.model_copy(update=changes)


def answer(setting: str, name: str = SPLIT_QUESTION, **changes: object) -> Change:
    """Change one completion, or leave it out."""

    def change(report: Report) -> Report:
        completions = dict(report[setting])
        changed = completions.pop(name).model_copy(update=changes)
        if changes:
            completions[name] = changed
        return report.model_copy(
            update={"completions": {**report.completions, setting: completions}}
        )

    return change


def in_tiles(pruned: list[int]) -> Change:
    """The image in two tiles of 6 tokens, with text before each; 2 rows of the first are kept."""
    steps = (
        answer("stock", prompt=[1, *[IMAGE] * 6, 2, *[IMAGE] * 6]),
        fields(kept={SPLIT_QUESTION: [[1, 2, 6, 7, 11]]}),
        answer("pruned", prompt=pruned),
    )
    return lambda report: steps[2](steps[1](steps[0](report)))


BROKEN: dict[str, list[Change]] = {
    "answers_are_numbers": [answer(way, logprob=math.nan) for way in ("stock", "chunked")],
    "whole_is_stock": [answer("whole", logprob=-3.0000001), answer("whole", cached=32)],
    "prompts_shrink_as_predicted": [
        fields(predicted={SPLIT_QUESTION: [N + 1]}),
        answer("pruned", prompt=[1, *[IMAGE] * SMALL_BUDGET, *range(20, 60)]),
    ],
    "kept_rows_are_the_model_s_own": [
        fields(kept={SPLIT_QUESTION: images})
        for images in (*([[*rows, 5, 7, 11]] for rows in ([1, -1], [2, 1])), [[1, 2, 5, 7, 12]])
    ]
    + [fields(kept={SPLIT_QUESTION: images}) for images in ([[1, 2, 5, 7]], [])],
    "kept_rows_stand_in_their_tiles": [
        in_tiles([1, IMAGE, IMAGE, IMAGE, 2, IMAGE, IMAGE]),
        in_tiles([1, IMAGE, 2, IMAGE, IMAGE, IMAGE, IMAGE]),
    ],
    "small_steps_keep_the_same": [answer("chunked", ids=[3, 5]), answer("chunked", positions=FULL)],
    "preempted_requests_go_on": [
        answer("preempted", ids=[3, 5]),
        answer("preempted", positions=FULL),
    ],
    "the_same_question_shares": [
        *(answer("again", cached=0), answer("again", logprob=-4.0), answer("pruned", cached=32)),
    ],
    "questions_share_the_core": [
        fields(split_kept=[[0, 1, 2, 4, 6, 8, 9, 10, 11, 3, 5]]),
        fields(split_kept=[*PARTS[:1], [0, 5]]),
        *(fields(splittable=False), fields(hybrid=True), answer("split", "first", cached=32)),
        *(answer("split", name, cached=0) for name in ("second", "further")),
    ],
    "later_turns_recall_other_tokens": [
        *(fields(recalled=recalled) for recalled in ([], [[8]], [[7], [7]])),
        fields(splittable=False, recalled=[]),
        answer("split", "third", cached=0),
    ],
    "recalled_tokens_stand_in_their_image": [
        fields(recalled=[[6]]),
        answer("split", "alone third", positions=[list(range(60))] * 3),
    ],
    "parts_give_the_same_completions": [
        answer("split", "alone third", ids=[3, 5]),
        answer("split", "alone second", logprob=-4.0),
        answer("split", "alone second", ids=[3, 4]),
    ],
    "parts_stand_on_one_grid": [
        fields(split_kept=[PARTS[0][::-1], PARTS[1]]),
        answer("split", "first", positions=FULL),
    ],
    "questions_stand_alone": [answer("alone", logprob=-3.1), answer("alone", prompt=[1])],
    "names_do_not_matter": [answer("renamed", ids=[3, 5]), answer("renamed", prompt=[1])],
    "images_are_seen_once": [fields(vision_runs=1)],
    "nothing_fell_back": [fields(fallbacks=1), fields(errors={"RuntimeError": 1})],
    "positions_are_a_gather": [
        answer("pruned", positions=[list(range(48))] * 3),
        fields(kept={SPLIT_QUESTION: [OTHERS]}),
    ],
    "merger_input_is_that_of_transformers": [
        *(fields(merger_error=error) for error in (1.0, math.nan))
    ],
    "videos_are_untouched": [answer("others", "video"), answer("others", "video", logprob=-3.01)],
    "embeddings_are_untouched": [
        answer(setting, "embeddings") for setting in ("others", "stock others")
    ],
}


def test_a_correct_report_passes_every_check() -> None:
    assert {name: check(good()) for name, check in CHECKS.items()} == dict.fromkeys(CHECKS, "")
    in_order = in_tiles([1, IMAGE, IMAGE, 2, IMAGE, IMAGE, IMAGE])
    assert CHECKS["kept_rows_stand_in_their_tiles"](in_order(good())) == ""
    # NaN survives JSON, so that a check can report it.
    broken = answer("stock", logprob=math.nan)(good())
    read = Report.model_validate_json(broken.model_dump_json())
    assert "stock vLLM's own log-probability is nan" in CHECKS["answers_are_numbers"](read)


@pytest.mark.parametrize("name", CHECKS)
def test_a_failed_check_is_reported(name: str) -> None:
    for change in BROKEN[name]:
        assert CHECKS[name](change(good())) != ""


def test_linear_attention_rounds_and_shares_from_the_third_question_on() -> None:
    hybrid = fields(hybrid=True)(good())
    third = answer("split", "second", cached=0)(hybrid)
    assert CHECKS["questions_share_the_core"](third) == ""
    for name, setting, question in (
        ("small_steps_keep_the_same", "chunked", SPLIT_QUESTION),
        ("names_do_not_matter", "renamed", SPLIT_QUESTION),
        ("videos_are_untouched", "others", "video"),
    ):
        for off in (0.05, 0.2):
            rounded = answer(setting, question, logprob=-3.0 - off)(hybrid)
            assert (CHECKS[name](rounded) == "") is (off < 0.1)


def test_runners_agree_up_to_rounding() -> None:
    for change in (fields(runner="v2"), answer("pruned", logprob=-3.15)):
        assert runners_agree(good(), change(good())) == ""
    for change in (
        fields(kept={SPLIT_QUESTION: [OTHERS]}),
        *(answer(way, ids=[3, 5]) for way in ("stock", "pruned", "again", "alone")),
        *(answer(way, positions=[[0]]) for way in ("chunked", "preempted")),
        *(answer("pruned", logprob=logprob) for logprob in (-3.25, math.nan)),
    ):
        assert runners_agree(good(), change(good())) != ""
