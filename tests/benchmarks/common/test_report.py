"""Figures of reports as text, and progress where there is no terminal."""

from __future__ import annotations

import io
import re

from rich.console import Console

from benchmarks.common.report import format_estimate, format_spread, show_stage
from vllm_autoprune.statistics import Estimate, Spread


def test_an_estimate_has_its_interval() -> None:
    assert format_estimate(Estimate(1.05, 0.99, 1.1), 1000, 0) == "1050 (990–1100)"


def test_milliseconds_have_decimals_only_below_a_second() -> None:
    assert format_spread(Spread(22.1191, 21.0, 46.6858, 3)) == "22,119 (21,000–46,686)"
    assert format_spread(Spread(0.0391, 0.0389, 0.0393, 3)) == "39.1 (38.9–39.3)"


def test_without_a_terminal_a_stage_is_a_line_at_each_quarter() -> None:
    console = Console(file=io.StringIO(), record=True)
    with show_stage("questions", 8, console) as advance:
        for _ in range(8):
            advance()
    lines = [line.partition("] ")[2] for line in console.export_text().splitlines()]
    quarters = [f"questions: {steps} of 8" for steps in (2, 4, 6)]
    assert lines[:-1] == ["questions ...", *quarters]
    assert re.fullmatch(r"questions: done, \d+ s", lines[-1])
