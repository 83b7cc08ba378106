"""Tables, charts and documents: self-contained, escaped, without a script."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from vllm_autoprune.report import (
    Cell,
    Chart,
    Document,
    Mark,
    Section,
    Series,
    Table,
)

HOSTILE = "<script>alert(1)</script>\"'"
SVG = "{http://www.w3.org/2000/svg}"
MARKS = (
    Mark(1.0, 10.0, f"first {HOSTILE}", 9.0, 12.0),
    Mark(2.0, 30.0, "second", 30.0, 30.0, hollow=True),
    Mark(3.0, 20.0, "third", 20.0, 20.0),
)
LINES = (
    Series(f"stock {HOSTILE}", MARKS),
    Series("other", MARKS[2:], dashed=True, colour=2),
)
CHART = Chart("Title", "across", "up", LINES, {"objective": 15.0})
TABLE = Table(
    "Rows", ["a|b", "b"], [["x|y", Cell("1.0", "0.9–1.1", "runs/a", "good")]], "lr"
)
DOCUMENT = Document(
    f"Report {HOSTILE}",
    f"The answer {HOSTILE}",
    "good",
    [f"A warning {HOSTILE}"],
    [f"A fact {HOSTILE}"],
    [
        Section("Charts", [f"Text {HOSTILE}"], [CHART]),
        Section("Tables", tables=[TABLE], code=HOSTILE, folded=True),
    ],
)


def parse(page: str) -> ElementTree.Element:
    """The page as XML, which it is but for its doctype and void elements; ends of tags match."""
    page = re.sub(r"<((?:meta|br|wbr)\b[^>]*)>", r"<\1/>", page.partition(">")[2])
    return ElementTree.fromstring(page)


def test_the_page_is_well_formed_loads_nothing_and_runs_nothing() -> None:
    page = DOCUMENT.render_html()
    elements = list(parse(page).iter())
    tags = {element.tag.rpartition("}")[2] for element in elements}
    assert not {"script", "link", "img", "iframe", "object"} & tags
    assert {element.get("href") for element in elements if element.tag == "a"} == {
        "runs/a"
    }
    names = {name for element in elements for name in element.attrib}
    assert not any(name.startswith("on") or name == "src" for name in names)
    assert "url(http" not in page and "@import" not in page
    assert "default-src 'none'" in page and "script-src" not in page
    assert page == DOCUMENT.render_html()


def test_markdown_has_the_answer_the_warnings_and_the_tables() -> None:
    page = DOCUMENT.render_markdown()
    for part in (
        f"# Report {HOSTILE}",
        f"- A warning {HOSTILE}",
        f"- A fact {HOSTILE}",
    ):
        assert part in page
    assert "### Rows\n\n| a|b | b |\n| :-- | --: |\n| x\\|y | 1.0 (0.9–1.1) |" in page
    assert f"## Charts\n\n- Text {HOSTILE}" in page


def test_tables_put_intervals_under_figures_scroll_and_break_long_names() -> None:

    def page_of(*tables: Table) -> str:
        section = Section("s", tables=tables)
        return Document("t", "a", "good", sections=[section]).render_html()

    row = [
        "12 (a name)",
        "12.3 (11.0–14.0)",
        "+5.1 (+2.0 to +8.1)",
        "CDPruner (base)",
        "-",
    ]
    names = [["signal_of_merging.max_step", "kept_whole"], ["1.5 requests/s", "x"]]
    page = page_of(Table("", [*"abcde"], [row]), Table("c", ["a", "b"], names))
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page)
    assert cells == [
        "12 (a name)",
        "12.3<small>11.0–14.0</small>",
        "+5.1<small>+2.0 to +8.1</small>",
        "CDPruner (base)",
        "-",
        "signal_<wbr>of_<wbr>merging.<wbr>max_<wbr>step",
        "kept_whole",
        "1.5 requests/s",
        "x",
    ]
    around = [e.get("class") for e in parse(page).iter() if e.find("table") is not None]
    assert around == ["wide", "wide"] and re.search(r"\.wide\{overflow-x:auto", page)


def svg_of(*series: Series, **axes: Any) -> ElementTree.Element:
    svg = re.search(
        r"<svg.*</svg>", Chart("t", "x", "y", series, **axes).draw(), re.DOTALL
    )
    assert svg
    return ElementTree.fromstring(svg[0])


def test_a_chart_has_its_labels_points_tips_and_rules_and_begins_at_0() -> None:
    svg = svg_of(*LINES, rules={"objective": 15.0})
    labels = {element.text for element in svg.iter(f"{SVG}text")}
    assert {"x", "y", "objective", "other", f"stock {HOSTILE}", "0.0", "3.0"} <= labels
    tips = [element.text for element in svg.iter(f"{SVG}title")]
    assert tips == [f"first {HOSTILE}", "second", "third", "third"]
    # Drawn colours become those of the page's style, which differ in its dark mode.
    assert "var(--c0)" in CHART.draw() and "#0072b2" not in CHART.draw()


def test_higher_points_are_drawn_higher_and_no_points_are_drawn_too() -> None:
    marks = [Mark(n, y, str(y), y, y) for n, y in enumerate((0.001, 5.0, 1000.0), 1)]
    svg = svg_of(Series("s", marks))
    drawn = (
        element for element in svg.iter() if element.get("id", "").startswith("mark-")
    )
    heights = [float(next(mark.iter(f"{SVG}use")).attrib["y"]) for mark in drawn]
    assert heights == sorted(set(heights), reverse=True) and len(heights) == 3
    assert "mark-" not in Chart("t", "x", "y", []).draw()


@pytest.mark.parametrize(
    ("ys", "shown"),
    [((0.02, 900.0), {"0.1", "1", "100"}), ((610.0, 880.0), {"700", "800"})],
)
def test_a_logarithmic_axis_has_plain_numbers(
    ys: tuple[float, ...], shown: set[str]
) -> None:
    marks = [Mark(n, y, str(y), y, y) for n, y in enumerate(ys, 1)]
    labels = {text.text for text in svg_of(Series("s", marks)).iter(f"{SVG}text")}
    assert shown <= labels and len(labels) < 30
    assert not any("$" in str(label) for label in labels)


def test_without_matplotlib_a_page_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib" in DOCUMENT.render_html()
