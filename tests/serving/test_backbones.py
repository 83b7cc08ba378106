"""Self-test checks of every supported backbone, on tiny random models (``selftest.checks``)."""

from __future__ import annotations

import pytest

from tests.serving.runners import Runner
from vllm_autoprune.selftest.backbones import BUILDERS
from vllm_autoprune.selftest.checks import CHECKS, runners_agree
from vllm_autoprune.serving.startup.support import BACKBONE_SUPPORT

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.both,
    pytest.mark.scenarios("selftest:{name}"),
]

LIKE_ANOTHER = ("qwen3_vl_moe",)
"""Differ from another backbone in their language model alone: `make test` serves them by V1."""

NAMES = [row.name for row in BACKBONE_SUPPORT if row.name in BUILDERS]
DISTINCT = [name for name in NAMES if name not in LIKE_ANOTHER]


@pytest.mark.parametrize("name", DISTINCT)
def test_selftest_checks_pass(runner: Runner, name: str) -> None:
    assert_checks_pass(runner, name)


@pytest.mark.parametrize("name", LIKE_ANOTHER)
@pytest.mark.parametrize(
    "runner", ["v1", pytest.param("v2", marks=pytest.mark.exhaustive)], indirect=True
)
def test_selftest_checks_pass_with_experts(runner: Runner, name: str) -> None:
    assert_checks_pass(runner, name)


def assert_checks_pass(runner: Runner, name: str) -> None:
    report = runner.examine(name)
    assert report.runner == runner.name
    assert {check: CHECKS[check](report) for check in CHECKS} == dict.fromkeys(CHECKS, "")
    (row,) = (row for row in BACKBONE_SUPPORT if row.name == name)
    axes = {len(completion.positions) for completion in report.stock.values()}
    assert axes == {3 if row.positions == "time, height, width" else 1}
    assert (report.video_stock is not None) == (row.video == "untouched")


@pytest.mark.parametrize(
    "name",
    [*DISTINCT, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in LIKE_ANOTHER)],
)
@pytest.mark.parametrize("runner", ["v2"], indirect=True)
def test_both_model_runners_keep_the_same(runner: Runner, name: str) -> None:
    """The same rows, positions and answers."""
    assert runners_agree(Runner("v1").examine(name), runner.examine(name)) == ""
