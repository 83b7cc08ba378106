"""Self-test checks of every supported backbone, on tiny random models (``selftest.checks``)."""

from __future__ import annotations

import os
from collections.abc import Collection

import pytest
from _pytest.mark import ParameterSet

from tests.serving.runners import Runner
from vllm_autoprune.selftest.backbones import BUILDERS
from vllm_autoprune.selftest.checks import CHECKS, runners_agree
from vllm_autoprune.selftest.run import Report
from vllm_autoprune.serving.models import BACKBONES

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.scenarios("selftest:{name}"),
]

LIKE_ANOTHER = ("qwen3_vl_moe", "qwen3_5_moe", "glm4v", "glm4v_moe", "smolvlm")
"""Share the code that prunes with another backbone: left to `make test-all`."""
ON_BOTH_RUNNERS = ("llava_onevision", "qwen2_5_vl", "qwen3_vl")
"""Tiles, M-RoPE and deepstack, which the model runners handle each in its own way; `make test`
serves the other backbones by V1."""

WITHOUT_VIDEO = ("llava_next", "idefics3", "smolvlm", "gemma3")
"""Their models, or vLLM's classes for them, take no videos."""

NAMES = list(BUILDERS)


def names(quick: Collection[str]) -> list[ParameterSet]:
    """All backbones as parameters, exhaustive but for the quick ones."""
    marks = {name: () if name in quick else (pytest.mark.exhaustive,) for name in NAMES}
    return [pytest.param(name, marks=marks[name]) for name in NAMES]


@pytest.mark.parametrize("runner", ["v1"], indirect=True)
@pytest.mark.parametrize("name", names({*NAMES} - {*LIKE_ANOTHER}))
def test_selftest_checks_pass(runner: Runner, name: str) -> None:
    if name.startswith("qwen3_5") and os.getenv("ONEDNN_MAX_CPU_ISA"):
        pytest.skip("vLLM's linear attention asks the CPU itself, and oneDNN then refuses")
    assert_checks_pass(runner.examine(name), name)


@pytest.mark.parametrize("runner", ["v2"], indirect=True)
@pytest.mark.parametrize("name", names(ON_BOTH_RUNNERS))
def test_selftest_checks_pass_on_both_model_runners(runner: Runner, name: str) -> None:
    """Both keep the same rows and positions, and give the same answers."""
    report = runner.examine(name)
    assert_checks_pass(report, name)
    assert report.runner == runner.name
    assert runners_agree(Runner("v1").examine(name), report) == ""


def assert_checks_pass(report: Report, name: str) -> None:
    assert {check: CHECKS[check](report) for check in CHECKS} == dict.fromkeys(CHECKS, "")
    (backbone,) = (backbone for backbone in BACKBONES.values() if backbone.name == name)
    axes = {len(completion.positions) for completion in report.stock.values()}
    assert axes == {3 if backbone.mrope else 1}
    assert (report.video_stock is not None) == (name not in WITHOUT_VIDEO)
