"""Tables and documents: self-contained, escaped, without a script."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from vllm_autoprune.report import Cell, Document, Section, Table

HOSTILE = "<script>alert(1)</script>\"'"
TABLE = Table("Rows", ["a|b", "b"], [["x|y", Cell("1.0", "0.9–1.1", "runs/a", "good")]], "lr")
DOCUMENT = Document(
    f"Report {HOSTILE}", f"The answer {HOSTILE}", "good", [f"A warning {HOSTILE}"],
    [f"A fact {HOSTILE}"],
    [
        Section("Texts", [f"Text {HOSTILE}"]),
        Section("Tables", tables=[TABLE], code=HOSTILE, folded=True),
    ],
)  # fmt: skip


def page_of(*tables: Table) -> str:
    section = Section("s", tables=tables)
    return Document("t", "a", "good", sections=[section]).render_html()


def parse(page: str) -> ElementTree.Element:
    """The page as XML, which it is but for its doctype and void elements; ends of tags match."""
    page = re.sub(r"<((?:meta|br|wbr)\b[^>]*)>", r"<\1/>", page.partition(">")[2])
    return ElementTree.fromstring(page)


def test_the_page_is_well_formed_loads_nothing_and_runs_nothing() -> None:
    page = DOCUMENT.render_html()
    elements = list(parse(page).iter())
    tags = {element.tag.rpartition("}")[2] for element in elements}
    assert not {"script", "link", "img", "iframe", "object"} & tags
    links = {element.get("href") for element in elements if element.tag == "a"}
    assert links == {"runs/a"}
    names = {name for element in elements for name in element.attrib}
    assert not any(name.startswith("on") or name == "src" for name in names)
    assert "url(http" not in page and "@import" not in page
    assert "default-src 'none'" in page and "script-src" not in page
    assert page == DOCUMENT.render_html()


def test_markdown_has_the_answer_the_warnings_and_the_tables() -> None:
    page = DOCUMENT.render_markdown()
    for part in (f"# Report {HOSTILE}", f"- A warning {HOSTILE}", f"- A fact {HOSTILE}"):
        assert part in page
    assert "### Rows\n\n| a|b | b |\n| :-- | --: |\n| x\\|y | 1.0 (0.9–1.1) |" in page


def test_tables_put_intervals_under_figures_scroll_and_break_long_names() -> None:
    row = ["12 (a name)", "12.3 (11.0–14.0)", "+5.1 (+2.0 to +8.1)", "CDPruner (base)", "-"]
    names = [["signal_of_merging.max_step", "kept_whole"], ["1.5 requests/s", "x"]]
    page = page_of(Table("", [*"abcde"], [row]), Table("c", ["a", "b"], names, folded=True))
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page)
    assert cells == [
        "12 (a name)", "12.3<small>11.0–14.0</small>", "+5.1<small>+2.0 to +8.1</small>",
        "CDPruner (base)", "-",
        "signal_<wbr>of_<wbr>merging.<wbr>max_<wbr>step", "kept_whole", "1.5 requests/s", "x",
    ]  # fmt: skip
    around = [e.get("class") for e in parse(page).iter() if e.find("table") is not None]
    assert around == ["wide", "wide"] and re.search(r"\.wide\{overflow-x:auto", page)
