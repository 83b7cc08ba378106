"""Rendered requests before the engine: counting, refusals and plans."""

from __future__ import annotations

import pytest

from tests.serving.scenarios import Report, run

pytestmark = pytest.mark.engine

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@pytest.fixture(scope="module")
def report() -> Report:
    """Report of the scenario, which starts no engine."""
    return run("rendering", ENVIRONMENT)


def test_request_is_counted_when_the_engine_receives_it(report: Report) -> None:
    start, rendered, checked, handed_over, refused = report["counts"]
    assert (rendered, checked) == (start, start)
    assert handed_over == start + 1
    assert "maximum model length" in report["too_many"]
    assert refused == handed_over


def test_plans_from_elsewhere_are_checked(report: Report) -> None:
    assert report["elsewhere"] == ""
    for name, error in report["forged"].items():
        assert error.startswith("VLLMValidationError"), name  # answered with 400
        assert "autoprune_plan" in error, name


def test_a_long_instruction_of_many_images_costs_little(report: Report) -> None:
    """100 images and 96,000 words: 47 s and 80 MB where each image has its own copy."""
    spent = report["long"]
    assert spent["long_bytes"] < 1_500_000
    assert spent["long_seconds"] < spent["short_seconds"] + 2.0


def test_unusual_requests_fail_only_if_stock_fails(report: Report) -> None:
    """Prompts that are cut short, and an image's token typed by a user."""
    refused = ("VLLMValidationError", "ValueError", "RequestError")
    assert len(report["odd"]) == 19
    for name, outcome in report["odd"].items():
        unpruned = report["odd_stock"][name]
        assert outcome in ("served", unpruned, *refused), (name, outcome, unpruned)
    assert "served" in report["odd"].values()


def test_concurrent_renderers_do_not_mix_instructions(report: Report) -> None:
    assert report["side_by_side"] == [True] * 8
