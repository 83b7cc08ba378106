"""Invariants 1 and 4 under load: budgets mix in a batch, and vision batches stay bounded."""

from __future__ import annotations

import pytest

from tests.serving.paths import TOKENS
from tests.serving.runners import Runner

pytestmark = [pytest.mark.engine, pytest.mark.both, pytest.mark.scenarios("batches")]


def test_mixed_budgets_in_one_batch_answer_as_they_do_alone(runner: Runner) -> None:
    report = runner.run("batches")
    assert report["budgets_at_once"] > 4
    assert report["kept_together"] == report["kept_alone"]
    for together, alone in zip(report["together"], report["alone"], strict=True):
        assert together["text"] == alone["text"]
        assert together["logprob"] == pytest.approx(alone["logprob"], abs=2e-2)


def test_every_image_keeps_exactly_its_budget(runner: Runner) -> None:
    report = runner.run("batches")
    for plan, kept in report["kept_together"].items():
        assert f"budget={len(kept)}," in plan
        assert kept == sorted(set(kept))
        assert kept[0] >= 0 and kept[-1] < TOKENS


def test_vision_batches_stay_bounded_however_small_k_is(runner: Runner) -> None:
    """100 images of K = 2 fit one step's token budget, but not one vision batch."""
    report = runner.run("batches")
    # Features of a few of the 100 images are already cached.
    assert sum(report["vision_batches"]) > 90
    assert max(report["vision_batches"]) <= report["bound"] == 4096 // TOKENS


def test_twenty_images_in_one_prompt(runner: Runner) -> None:
    for answer in runner.run("batches")["twenty"]:
        assert answer["prompt_tokens"] < 20 * TOKENS
        assert answer["text"] is not None


def test_samples_of_one_request_share_a_plan(runner: Runner) -> None:
    """``n > 1`` creates several requests with the same plan."""
    report = runner.run("batches")
    assert report["samples"] == [report["turn_one"]["text"]] * 3
