"""Tables, sections and summaries: content and escaping."""

from __future__ import annotations

from benchmarks.common.report import (
    Claim,
    Section,
    Table,
    format_estimate,
    format_excess,
    format_spread,
    markdown,
)
from vllm_autoprune.statistics import Estimate, Spread

SECTION = Section(
    name="ttft",
    title="Time to first token",
    setup=["one server"],
    claims=[Claim("at most 5 %", "+4.0 %", "inconclusive")],
    tables=[Table("Times.", ("request", "ms"), [("a|b <i>", "1.0")], "lr")],
    data={"values": [1.0]},
    environment={"vllm": "0"},
)


def test_a_section_reads_as_markdown() -> None:
    text = markdown([SECTION], "What pruning costs")
    assert text.startswith("# What pruning costs\n\n## Time to first token\n\n* one server\n")
    assert "| at most 5 % | +4.0 % | **inconclusive** |" in text
    assert "| request | ms |\n| :-- | --: |\n| a\\|b <i> | 1.0 |" in text
    assert text.endswith("Environment: vllm 0.\n")


def test_a_ratio_is_written_as_the_excess_over_one() -> None:
    assert format_excess(Estimate(1.05, 0.99, 1.1)) == "+5.0 % (95 %: -1.0 to +10.0)"
    assert format_estimate(Estimate(1.05, 0.99, 1.1), 1000, 0) == "1050 (990–1100)"


def test_milliseconds_have_decimals_only_below_a_second() -> None:
    assert format_spread(Spread(22.1191, 21.0, 46.6858, 3)) == "22,119 (21,000–46,686)"
    assert format_spread(Spread(0.0391, 0.0389, 0.0393, 3)) == "39.1 (38.9–39.3)"
