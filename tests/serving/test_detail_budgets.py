"""Budgets by ``image_url.detail``, on an engine whose requests may set nothing themselves."""

from __future__ import annotations

import pytest

from tests.serving.runners import Runner
from tests.serving.scenarios.detail_budgets import DETAIL, OWN

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(500),
    pytest.mark.scenarios("detail_budgets"),
]
BLOCK = 32


def test_detail_sets_the_tokens_of_an_image(runner: Runner) -> None:
    tokens = runner.run("detail_budgets")["tokens"]
    assert tokens["none"] == tokens["auto"]
    assert tokens["low"] - tokens["auto"] == DETAIL["low"] - OWN
    assert tokens["high"] - tokens["auto"] == DETAIL["high"] - OWN


@pytest.mark.parametrize("appended", ["text", "image"])
def test_a_conversation_keeps_its_whole_prefix_one_turn_later(
    runner: Runner, appended: str
) -> None:
    turns = runner.run("detail_budgets")["later"][appended]
    whole_blocks = turns["first"]["prompt_tokens"] // BLOCK * BLOCK
    assert turns["first"]["cached"] == 0
    assert turns["later"]["cached"] >= whole_blocks >= DETAIL["low"]


def test_another_detail_is_another_image_for_the_prefix_cache(runner: Runner) -> None:
    assert runner.run("detail_budgets")["other_detail"]["cached"] == 0
