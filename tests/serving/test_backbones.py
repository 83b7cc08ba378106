"""What must hold for every backbone in the table, on tiny random models."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.serving.scenarios import V2, Report, run
from vllm_autoprune.selftest.tiny import BUILDERS
from vllm_autoprune.serving.support import BACKBONE_SUPPORT

pytestmark = pytest.mark.engine

FEW = 5
NAMES = [row.name for row in BACKBONE_SUPPORT if row.name in BUILDERS]
MROPE = [row.name for row in BACKBONE_SUPPORT if row.positions == "time, height, width"]
VIDEO = [row.name for row in BACKBONE_SUPPORT if row.video == "untouched"]


def _report(name: str) -> Report:
    return run(f"backbone_{name}", patience=900)


@pytest.fixture(params=NAMES)
def report(request: pytest.FixtureRequest) -> Report:
    return _report(request.param)


def test_keeping_every_token_is_stock_to_the_last_bit(report: Report) -> None:
    """Token ids, log-probabilities, positions and prefix-cache hits."""
    assert report["whole"] == report["stock"]


def test_a_prompt_shrinks_by_the_predicted_number_of_placeholders(report: Report) -> None:
    for name, stock in report["stock"].items():
        pruned = report["pruned"][name]
        gone = Counter(stock["prompt"]) - Counter(pruned["prompt"])
        assert len(gone) == 1, "only placeholders may go"
        assert sum(gone.values()) == sum(n - FEW for n in report["predicted"][name])
        assert len(stock["prompt"]) - len(pruned["prompt"]) == sum(gone.values())


def test_kept_rows_are_the_model_s_own_in_their_order(report: Report) -> None:
    """Deepstack levels and position channels included: a row is compared whole."""
    for name, kept in report["kept"].items():
        assert len(kept) == len(report["predicted"][name])
        for rows, unpruned in zip(kept, report["predicted"][name], strict=True):
            assert len(rows) == FEW
            assert rows == sorted(set(rows))
            assert rows[0] >= 0 and rows[-1] < unpruned


def test_small_steps_keep_the_same_tokens(report: Report) -> None:
    for name, pruned in report["pruned"].items():
        _alike(report["chunked"][name], pruned)
        assert report["chunked"][name]["positions"] == pruned["positions"]


def test_the_same_question_shares_the_prefix_and_another_does_not(report: Report) -> None:
    for name, pruned in report["pruned"].items():
        assert pruned["cached"] == 0
        assert report["again"][name]["cached"] >= 32
        _alike(report["again"][name], pruned)


def test_questions_answer_as_they_do_alone(report: Report) -> None:
    for name, alone in report["alone"].items():
        _alike(alone, report["pruned"][name])


def test_the_vision_tower_runs_once_for_an_image(report: Report) -> None:
    assert report["vision_runs"] == 0, "these images were seen by the run that kept every token"


def test_nothing_fell_back(report: Report) -> None:
    assert report["fallbacks"] == 0
    assert report["errors"] == {}


@pytest.mark.parametrize("name", MROPE)
def test_positions_are_a_gather_of_the_full_ones(name: str) -> None:
    """Square, wide and high images, and two at once; what is decoded goes on as in stock."""
    report = _report(name)
    for case, pruned in report["pruned"].items():
        stock = report["stock"][case]
        survivors = _survivors(stock["prompt"], pruned["prompt"], report["kept"][case])
        survivors += range(len(stock["prompt"]), len(stock["positions"][0]))
        assert pruned["positions"] == [[row[i] for i in survivors] for row in stock["positions"]]
        assert len({tuple(axis) for axis in pruned["positions"]}) == 3, "axes should differ"


def _survivors(stock: list[int], pruned: list[int], kept: list[list[int]]) -> list[int]:
    """Places in the stock prompt of the tokens that are left."""
    (image,) = Counter(stock) - Counter(pruned)
    left, rows, at = [], iter(kept), 0
    while at < len(stock):
        if stock[at] != image:
            left.append(at)
            at += 1
            continue
        left += [at + row for row in next(rows)]
        while at < len(stock) and stock[at] == image:
            at += 1
    return left


@pytest.mark.parametrize("name", VIDEO)
def test_videos_are_untouched(name: str) -> None:
    report = _report(name)
    assert report["video"]["stock"] == report["video"]["pruned"]
    assert len(report["video"]["stock"]["prompt"]) > 16


def _alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["prompt"] == other["prompt"]
    assert one["ids"] == other["ids"]
    assert one["logprob"] == pytest.approx(other["logprob"], abs=2e-2)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_both_model_runners_keep_the_same(name: str) -> None:
    """Tokens, positions and answers under model runner V2, by Triton's interpreter."""
    first, second = _report(name), run(f"backbone_{name}", V2, patience=900)
    assert second["whole"] == second["stock"]
    assert second["kept"] == first["kept"]
    for run_of in ("stock", "pruned", "chunked", "again"):
        for case, said in second[run_of].items():
            _alike(said, first[run_of][case])
            assert said["positions"] == first[run_of][case]["positions"]
    assert second["video"]["stock"] == second["video"]["pruned"]
    assert second["errors"] == {}
