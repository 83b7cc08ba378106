"""Documents: self-contained, escaped, with one script that the policy of the page allows."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from vllm_autoprune.pages.charts import Chart, Mark, Rule, Series, draw_chart
from vllm_autoprune.pages.document import Details, Document, Section, render_document
from vllm_autoprune.pages.table import Cell, PageTable, Table, as_page_table, split_interval

HOSTILE = "<script>alert(1)</script>\"'"
VOID = {"meta", "br", "wbr", "path", "circle", "rect"}


def chart(**changes: object) -> Chart:
    marks = [
        Mark(1.0, 10.0, f"first {HOSTILE}", 9.0, 12.0, link="runs/a.jsonl"),
        Mark(2.0, 30.0, "second", hollow=True),
        Mark(3.0, 20.0, "third"),
    ]
    series = [Series(f"stock {HOSTILE}", marks), Series("other", path=[(0, 0), (3, 30)], colour=2)]
    return Chart("Title", "across", "up", series, [Rule(15.0, "objective")], **changes)  # type: ignore[arg-type]


def document() -> Document:
    table = PageTable(["a", "b"], [["x", Cell("1.0", "0.9–1.1", "runs/a", "good")]])
    return Document(
        f"Report {HOSTILE}",
        f"The answer {HOSTILE}",
        "good",
        [f"A warning {HOSTILE}"],
        [f"A fact {HOSTILE}"],
        [
            Section("Charts", [f"Text {HOSTILE}"], [chart()]),
            Section("Tables", tables=[table], code=HOSTILE, folded=True),
            Section("Entries", entries=[Details(HOSTILE, ["text"], ["item"], HOSTILE, "one")]),
        ],
    )


class Tags(HTMLParser):
    """Checks that tags are balanced, and collects those with attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.around_tables: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag == "table":
            self.around_tables.append(self.stack[-1])
        if tag not in VOID:
            self.stack.append(tag if tag != "div" else f"div.{dict(attrs).get('class')}")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop().split(".")[0] == tag


def test_the_page_is_well_formed_and_loads_nothing() -> None:
    tags = Tags()
    tags.feed(page := render_document(document()))
    assert tags.stack == []
    assert not {"link", "img", "iframe", "object"} & {tag for tag, _ in tags.seen}
    assert {attrs["href"] for _, attrs in tags.seen if "href" in attrs} == {
        "runs/a",
        "runs/a.jsonl",
    }
    assert not any(name.startswith("on") or name == "src" for _, a in tags.seen for name in a)
    assert "url(" not in page and "@import" not in page


def test_what_is_wider_than_a_phone_scrolls_or_breaks() -> None:
    names = [["signal_of_merging.max_step", "kept_whole"], ["1.5 requests/s", "x"]]
    plain, folded = PageTable(["a", "b"], names), PageTable(["a", "b"], names, folded=True)
    page = render_document(
        Document("t", "a", "good", sections=[Section("s", tables=[plain, folded])])
    )
    tags = Tags()
    tags.feed(page)
    assert tags.around_tables == ["div.wide", "div.wide"]
    assert re.search(r"\.wide\{overflow-x:auto", page)
    assert "<td>signal_<wbr>of_<wbr>merging.<wbr>max_<wbr>step</td>" in page
    assert ">kept_whole<" in page and "<td>1.5 requests/s</td>" in page
    assert re.search(r"\bli,summary\{overflow-wrap:anywhere\}", page)


def test_an_entry_without_contents_cannot_be_opened() -> None:
    leaf, full = Details("leaf", name="a"), Details("full", ["text"], name="b")
    page = render_document(
        Document("t", "a", "good", sections=[Section("s", entries=[leaf, full])])
    )
    assert '<p class="entry" id="a">leaf</p>' in page
    assert '<details id="b"><summary>full</summary>' in page


def test_only_the_script_of_the_page_may_run() -> None:
    page = render_document(document())
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 1 and "alert" not in scripts[0]
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page and "default-src 'none'" in page


def test_equal_documents_are_equal_bytes() -> None:
    assert render_document(document()) == render_document(document())


def test_a_chart_has_its_ticks_points_intervals_and_rules() -> None:
    svg = draw_chart(chart())
    assert svg.count('class="mark') == 3 and svg.count('class="mark hollow"') == 1
    assert svg.count('class="bar"') == 1 and "objective" in svg
    ticks = re.findall(r'class="tick"[^>]*>([^<]+)<', svg)
    assert "1" in ticks and "3" in ticks and "10" in ticks
    # Through all points pale, through the others solid; and the line without points.
    assert svg.count('class="line pale"') == 1 and svg.count('class="line"') == 2 + 2


def test_the_name_of_a_rule_is_in_the_legend_where_it_covers_no_data() -> None:
    legend, plot = draw_chart(chart()).split('<svg class="plot"')
    assert "objective" in legend and 'class="rule"' in plot and "objective" not in plot


def test_a_dashed_series_is_told_apart_where_it_has_a_single_point() -> None:
    series = [Series("p50", [Mark(1, 1, "")]), Series("p99", [Mark(1, 2, "")], dashed=True)]
    legend, plot = draw_chart(Chart("t", "x", "y", series)).split('<svg class="plot"')
    assert legend.count('class="minor"') == 1 and plot.count('class="series c0 minor"') == 1


def test_series_at_one_place_may_stand_side_by_side() -> None:
    series = [Series(str(n), [Mark(1.0, n, "", n - 1, n + 1), Mark(2.0, n, "")]) for n in range(3)]
    drawn = Chart("t", "x", "y", series)
    together, apart = (
        [float(x) for x in re.findall(r'data-x="([^"]+)"', draw_chart(one))]
        for one in (drawn, replace(drawn, side_by_side=True))
    )
    assert [round(x - y, 1) for x, y in zip(apart, together, strict=True)] == [
        -5.0, -5.0, 0.0, 0.0, 5.0, 5.0,
    ]  # fmt: skip


def test_labels_of_the_x_axis_do_not_run_into_each_other() -> None:
    names = {float(n): f"place {n}" for n in range(20)}
    svg = draw_chart(
        Chart("t", "x", "y", [Series("s", [Mark(0, 0, ""), Mark(19, 1, "")])], x_names=names)
    )
    ticks = re.findall(r'class="tick" x="([^"]+)"[^>]*>place (\d+)<', svg)
    places = [float(x) for x, _ in ticks]
    assert len(places) > 4
    assert all(after - x > 8 * len("place 1") for x, after in pairwise(places))


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_no_point_is_moved_to_the_edge_of_a_chart(scale: str) -> None:
    marks = [Mark(n, y, str(y)) for n, y in enumerate((0.001, 5.0, 1000.0), 1)]
    svg = draw_chart(Chart("t", "x", "y", [Series("s", marks)], y_scale=scale))  # type: ignore[arg-type]
    heights = [float(y) for y in re.findall(r'data-y="([^"]+)"', svg)]
    assert heights == sorted(heights, reverse=True) and len(set(heights)) == 3
    assert all(30.0 <= height <= 276.0 for height in heights)


def test_intervals_stand_under_their_figures() -> None:
    assert split_interval("12.3 (11.0–14.0)") == Cell("12.3", "11.0–14.0")
    assert split_interval("+5.1 (+2.0 to +8.1)") == Cell("+5.1", "+2.0 to +8.1")
    assert split_interval("CDPruner (base)") == Cell("CDPruner (base)")
    assert split_interval("-") == Cell("-")
    page_table = as_page_table(Table("c", ["m", "v"], [["x", "1 (0 to 2)"]], "lr"))
    assert page_table.left == 1 and page_table.rows == [[Cell("x"), Cell("1", "0 to 2")]]
