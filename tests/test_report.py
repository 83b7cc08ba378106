"""Tables, charts and documents: self-contained, escaped, without a script."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from vllm_autoprune.report import (
    Cell,
    Chart,
    Details,
    Document,
    Mark,
    Rule,
    Section,
    Series,
    Table,
    draw_chart,
    render_document,
)

HOSTILE = "<script>alert(1)</script>\"'"
SVG = "{http://www.w3.org/2000/svg}"


def chart(**changes: object) -> Chart:
    marks = [
        Mark(1.0, 10.0, f"first {HOSTILE}", 9.0, 12.0, link="runs/a.jsonl"),
        Mark(2.0, 30.0, "second", hollow=True),
        Mark(3.0, 20.0, "third"),
    ]
    series = [Series(f"stock {HOSTILE}", marks), Series("other", path=[(0, 0), (3, 30)], colour=2)]
    return Chart("Title", "across", "up", series, [Rule(15.0, "objective")], **changes)  # type: ignore[arg-type]


def document() -> Document:
    table = Table("", ["a", "b"], [["x", Cell("1.0", "0.9–1.1", "runs/a", "good")]])
    sections = [
        Section("Charts", [f"Text {HOSTILE}"], [chart()]),
        Section("Tables", tables=[table], code=HOSTILE, folded=True),
        Section("Entries", entries=[Details(HOSTILE, ["text"], ["item"], HOSTILE, "one")]),
    ]
    texts = (f"Report {HOSTILE}", f"The answer {HOSTILE}")
    return Document(*texts, "good", [f"A warning {HOSTILE}"], [f"A fact {HOSTILE}"], sections)


def page_of(*tables: Table, **contents: list[Details]) -> str:
    section = Section("s", tables=[*tables], **contents)  # type: ignore[arg-type]
    return render_document(Document("t", "a", "good", sections=[section]))


def parse(page: str) -> ElementTree.Element:
    """The page as XML, which it is but for its doctype and void elements; ends of tags match."""
    page = re.sub(r"<((?:meta|br|wbr)\b[^>]*)>", r"<\1/>", page.partition(">")[2])
    return ElementTree.fromstring(page)


def test_the_page_is_well_formed_loads_nothing_and_runs_nothing() -> None:
    page = render_document(document())
    elements = list(parse(page).iter())
    tags = {element.tag.rpartition("}")[2] for element in elements}
    assert not {"script", "link", "img", "iframe", "object"} & tags
    links = {element.get("href") for element in elements if element.tag in ("a", f"{SVG}a")}
    assert links == {"runs/a", "runs/a.jsonl"}
    names = {name for element in elements for name in element.attrib}
    assert not any(name.startswith("on") or name == "src" for name in names)
    assert "url(http" not in page and "@import" not in page
    assert "default-src 'none'" in page and "script-src" not in page
    assert page == render_document(document())


def test_what_is_wider_than_a_phone_scrolls_or_breaks() -> None:
    names = [["signal_of_merging.max_step", "kept_whole"], ["1.5 requests/s", "x"]]
    page = page_of(*(Table("", ["a", "b"], names, folded=folded) for folded in (False, True)))
    around = [e.get("class") for e in parse(page).iter() if e.find("table") is not None]
    assert around == ["wide", "wide"]
    assert re.search(r"\.wide\{overflow-x:auto", page)
    assert "<td>signal_<wbr>of_<wbr>merging.<wbr>max_<wbr>step</td>" in page
    assert ">kept_whole<" in page and "<td>1.5 requests/s</td>" in page
    assert re.search(r"\bli,summary\{overflow-wrap:anywhere\}", page)


def test_an_entry_without_contents_cannot_be_opened() -> None:
    page = page_of(entries=[Details("leaf", name="a"), Details("full", ["text"], name="b")])
    assert '<p class="entry" id="a">leaf</p>' in page
    assert '<details id="b"><summary>full</summary>' in page


def svg_of(chart: Chart) -> ElementTree.Element:
    svg = re.search(r"<svg.*</svg>", draw_chart(chart), re.DOTALL)
    assert svg
    return ElementTree.fromstring(svg[0])


def texts(svg: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in svg.iter(f"{SVG}text")]


def places(svg: ElementTree.Element) -> list[tuple[float, float]]:
    """Where each point is drawn."""
    marks = (e for e in svg.iter() if e.get("id", "").startswith("mark-"))
    uses = (next(mark.iter(f"{SVG}use")) for mark in marks)
    return [(float(use.attrib["x"]), float(use.attrib["y"])) for use in uses]


def test_a_chart_has_its_labels_points_tips_links_and_rules() -> None:
    svg = svg_of(chart())
    assert {"across", "up", "objective", "other", f"stock {HOSTILE}"} <= set(texts(svg))
    assert {"1.0", "3.0", "10", "30"} <= set(texts(svg))
    assert len(places(svg)) == 3
    tips = [element.text for element in svg.iter(f"{SVG}title")]
    assert tips == [f"first {HOSTILE}", "second", "third"]
    assert [link.get("href") for link in svg.iter(f"{SVG}a")] == ["runs/a.jsonl"]
    # Drawn colours become those of the page's style, which differ in its dark mode.
    assert "var(--c0)" in draw_chart(chart()) and "#0072b2" not in draw_chart(chart())


def test_series_at_one_place_may_stand_side_by_side() -> None:
    series = [Series(str(n), [Mark(1.0, n, "", n - 1, n + 1), Mark(2.0, n, "")]) for n in range(3)]
    drawn = Chart("t", "x", "y", series)
    together, apart = places(svg_of(drawn)), places(svg_of(replace(drawn, side_by_side=True)))
    assert [round(a[0] - b[0]) for a, b in zip(apart, together, strict=True)] == [
        -5, -5, 0, 0, 5, 5,
    ]  # fmt: skip


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_higher_points_are_drawn_higher(scale: str) -> None:
    marks = [Mark(n, y, str(y)) for n, y in enumerate((0.001, 5.0, 1000.0), 1)]
    svg = svg_of(Chart("t", "x", "y", [Series("s", marks)], y_scale=scale))  # type: ignore[arg-type]
    heights = [y for _, y in places(svg)]
    assert heights == sorted(heights, reverse=True) and len(set(heights)) == 3


def test_an_axis_may_include_zero_and_end_at_its_most() -> None:
    series = [Series("s", [Mark(5, 99.0, ""), Mark(6, 40.0, "")])]
    bare = texts(svg_of(Chart("t", "x", "y", series)))
    svg = texts(svg_of(Chart("t", "x", "y", series, x_zero=True, y_zero=True, y_most=100.0)))
    assert "0" in svg and "100" in svg and "0" not in bare
    named = Chart("t", "x", "y", series, x_names={5.0: "test", 6.0: "search"})
    assert {"test", "search"} <= set(texts(svg_of(named)))


def test_a_chart_without_points_is_drawn() -> None:
    for scale in ("linear", "log"):
        svg_of(Chart("t", "x", "y", [Series("s")], x_scale=scale, x_zero=True))


def test_without_matplotlib_a_page_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib" in render_document(document())


def test_intervals_stand_under_their_figures() -> None:
    row = ["12 (a name)", "12.3 (11.0–14.0)", "+5.1 (+2.0 to +8.1)", "CDPruner (base)", "-"]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page_of(Table("", [*"abcde"], [row])))
    assert cells == [
        "12 (a name)", "12.3<small>11.0–14.0</small>", "+5.1<small>+2.0 to +8.1</small>",
        "CDPruner (base)", "-",
    ]  # fmt: skip


def test_a_table_as_markdown() -> None:
    table = Table("", ["m", "v", "w"], [["a|b", Cell("1", "0 to 2"), "3"]], "lr")
    assert table.markdown() == ("| m | v | w |\n| :-- | --: | --- |\n| a\\|b | 1 (0 to 2) | 3 |")
