"""Every base policy alone on a real engine keeps the same K tokens as transformers."""

from __future__ import annotations

import pytest

from tests.serving.paths import TOKENS
from tests.serving.runners import Runner
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, INSTRUCTION_NEEDS

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(500),
    pytest.mark.scenarios("base_policies"),
]

READ_THE_INSTRUCTION = {
    name
    for name, base in BASE_POLICIES.items()
    if base.needs_of(base.default_params) & INSTRUCTION_NEEDS
}


def test_report_has_every_base_policy(runner: Runner) -> None:
    assert set(runner.run("base_policies")["policies"]) == set(BASE_POLICIES)
    assert len(BASE_POLICIES) >= 17


@pytest.mark.parametrize("budget", [16, 8])
@pytest.mark.parametrize("name", BASE_POLICIES)
def test_a_prompt_is_shorter_by_exactly_what_was_removed(
    runner: Runner, name: str, budget: int
) -> None:
    report = runner.run("base_policies")
    for full, case in zip(report["full"], report["policies"][name][str(budget)], strict=True):
        assert case["prompt_tokens"] == full - (TOKENS - budget)


@pytest.mark.parametrize("budget", [16, 8])
@pytest.mark.parametrize("name", BASE_POLICIES)
def test_kept_tokens_equal_those_of_transformers(runner: Runner, name: str, budget: int) -> None:
    """Equal tokens, and rows equal up to float32 rounding.

    A policy that does not read the instruction selects once an image: later questions find the
    rows in vLLM's caches.
    """
    cases = runner.run("base_policies")["policies"][name][str(budget)]
    selected = [case for case in cases if "kept" in case]
    images = 2
    assert len(selected) == (len(cases) if name in READ_THE_INSTRUCTION else images)
    for case in selected:
        assert case["kept"] == case["offline"]
        assert case["rows_apart"] < 1e-3


@pytest.mark.parametrize("name", BASE_POLICIES)
def test_no_fallbacks(runner: Runner, name: str) -> None:
    report = runner.run("base_policies")["policies"][name]
    assert report["errors"] == {}
    assert report["fallbacks"]["reference"] == report["fallbacks"]["uniform"] == 0
    assert report["fallbacks"]["none"] > 0


@pytest.mark.parametrize("name", BASE_POLICIES)
def test_batched_and_single_questions_keep_the_same_tokens(runner: Runner, name: str) -> None:
    report = runner.run("base_policies")["policies"][name]
    together, alone = report["together"]["kept"], report["alone"]
    assert report["together"]["at_once"] > 1
    assert together
    assert together == {plan: alone[plan] for plan in together}


@pytest.mark.parametrize("name", BASE_POLICIES)
def test_extreme_instructions_and_features_do_not_stop_the_engine(
    runner: Runner, name: str
) -> None:
    """10,000 words; no words; non-finite features, which give evenly spaced tokens."""
    report = runner.run("base_policies")["policies"][name]
    full = runner.run("base_policies")["full"]
    for index, answer in zip((0, -1, 0), report["survived"], strict=True):
        assert answer["prompt_tokens"] == full[index] - (TOKENS - 16)
        assert answer["text"] is not None
    assert report["broken"]["uniform"] == 1
    assert report["errors_at_last"] == {}
