"""Tokens are selected after encoder CUDA graphs; a stand-in runs what a graph would replay.

What is not seen here is capture and replay on a GPU.
"""

from __future__ import annotations

import pytest

from tests.serving.runners import Runner
from tests.serving.scenarios.encoder_graphs import BACKBONES

pytestmark = [pytest.mark.engine, pytest.mark.scenarios("encoder_graphs")]


@pytest.mark.parametrize("name", BACKBONES)
def test_tokens_are_selected_after_encoder_graphs(runner: Runner, name: str) -> None:
    report = runner.run("encoder_graphs")[name]
    assert report["used"] > 0
    assert report["kept_graphs"] == report["kept_eager"]
    for graphs, eager in zip(report["graphs"], report["eager"], strict=True):
        assert graphs["prompt_tokens"] == eager["prompt_tokens"]
        assert graphs["text"] == eager["text"]
        assert graphs["logprob"] == pytest.approx(eager["logprob"], abs=1e-3)


@pytest.mark.parametrize("name", BACKBONES)
def test_further_questions_replay_no_graph(runner: Runner, name: str) -> None:
    report = runner.run("encoder_graphs")[name]
    assert report["used_again"] == report["used"]
