"""Invariant 5: no request stops the engine."""

from __future__ import annotations

import pytest

from tests.serving.runners import Runner

pytestmark = [pytest.mark.engine, pytest.mark.both, pytest.mark.scenarios("hostile")]

REQUESTS = ("one_pixel", "empty", "long", "nan", "inf", "raised")


@pytest.mark.parametrize("name", REQUESTS)
def test_engine_survives_and_answers(runner: Runner, name: str) -> None:
    report = runner.run("hostile")
    assert isinstance(report[name]["text"], str)
    assert report["after"][name] == report["sane"]


def test_fallbacks_are_counted_by_reason(runner: Runner) -> None:
    report = runner.run("hostile")
    # NaN and Inf in an image's features: evenly spaced tokens are kept.
    assert report["fallbacks"]["uniform"] == 2
    assert report["errors"] == {"RuntimeError": 1}


def test_fallbacks_are_in_the_metrics(runner: Runner) -> None:
    exported = runner.run("hostile")["exported"]
    assert exported['autoprune_fallbacks_total{fallback="uniform",reason="scores"}'] == 2
    assert exported['autoprune_fallbacks_total{fallback="reference",reason="error"}'] == 1
    assert exported['autoprune_selection_errors_total{error="RuntimeError"}'] == 1
    assert exported["autoprune_unsafe_states_total"] == 1


def test_a_state_that_fails_on_its_first_image_is_served_by_its_base_policy(runner: Runner) -> None:
    report = runner.run("hostile")["unsafe"]
    assert report["counted"] == 1
    assert report["broken"] == report["base"]
    # A state that failed once is not used again.
    assert report["fixed"] == report["other_base"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("zero", "K = 0"), ("text", "budget"), ("unknown", "buget"), ("list", "autoprune")],
)
def test_a_bad_request_is_refused_with_its_reason(runner: Runner, name: str, message: str) -> None:
    report = runner.run("hostile")
    assert message in report[name]
    assert report["after"]["refused"] == report["sane"]


def test_images_of_a_refused_request_reach_the_engine_with_the_next_one(runner: Runner) -> None:
    report = runner.run("hostile")
    assert report["repeated"] == report["unrefused"]
