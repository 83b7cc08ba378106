"""What must hold for every backbone in the table, on tiny random models (``selftest.checks``)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pytest

from tests.serving.scenarios import V2
from vllm_autoprune.selftest.backbones import BUILDERS
from vllm_autoprune.selftest.checks import CHECKS, unlike
from vllm_autoprune.selftest.report import Report
from vllm_autoprune.selftest.run import examine
from vllm_autoprune.serving.support import BACKBONE_SUPPORT

pytestmark = pytest.mark.engine

NAMES = [row.name for row in BACKBONE_SUPPORT if row.name in BUILDERS]


@cache
def _report(name: str, *environment: tuple[str, str]) -> Report:
    return examine(name, dict(environment))


def _served(name: str, environment: Mapping[str, str] | None = None) -> Report:
    return _report(name, *sorted((environment or {}).items()))


@pytest.mark.parametrize("name", NAMES)
def test_every_promise_holds(name: str) -> None:
    report = _served(name)
    assert {check: CHECKS[check](report) for check in CHECKS} == dict.fromkeys(CHECKS, "")
    (row,) = (row for row in BACKBONE_SUPPORT if row.name == name)
    axes = {len(said.positions) for said in report.stock.values()}
    assert axes == {3 if row.positions == "time, height, width" else 1}
    assert (report.video_stock is not None) == (row.video == "untouched")


def test_both_model_runners_keep_the_same() -> None:
    """Tokens, positions and answers under model runner V2, by Triton's interpreter.

    Of one model with M-RoPE, since time is short; stock Qwen3-VL answers NaN in the interpreter.
    """
    first, second = _served("qwen2_5_vl"), _served("qwen2_5_vl", V2)
    assert {check: CHECKS[check](second) for check in CHECKS} == dict.fromkeys(CHECKS, "")
    assert second.kept == first.kept
    for case, said in second.pruned.items():
        assert unlike(said, first.pruned[case]) == ""
        assert said.positions == first.pruned[case].positions
