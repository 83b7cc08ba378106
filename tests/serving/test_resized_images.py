"""The resize control on models of dynamic resolution, positions and deepstack rows included."""

from __future__ import annotations

import pytest

from tests.serving.runners import Runner
from tests.serving.scenarios.resized_images import BACKBONES

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500), pytest.mark.scenarios("resized_images")]


@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_resized_image_is_answered_as_one_that_the_client_has_shrunk(
    runner: Runner, backbone: str
) -> None:
    report = runner.run("resized_images")[backbone]
    assert len({answer["text"] for answer in report["resized"]}) > 1, "sizes should matter"
    for resized, shrunk in zip(report["resized"], report["shrunk"], strict=True):
        assert resized["prompt_tokens"] == shrunk["prompt_tokens"]
        assert resized["text"] == shrunk["text"]
        assert resized["logprob"] == pytest.approx(shrunk["logprob"], abs=1e-3)
