"""The document of a report: the answer in one sentence, then sections with tables and charts.

One self-contained HTML file that loads nothing. Its content security policy allows one script by
the digest of its text, so that nothing else can run that a model or a file brought into the page.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from markupsafe import Markup, escape

from vllm_autoprune.pages.charts import Chart, draw_chart
from vllm_autoprune.pages.environment import page_environment
from vllm_autoprune.pages.table import Cell, PageTable

Tone = Literal["good", "bad", "open"]
"""How the answer is marked; ``open``: not decided."""

_JOINT = re.compile(r"(?<=[a-z][_./])(?=[a-z]{2})")


@dataclass(frozen=True)
class Details:
    """An entry that is folded to its summary."""

    summary: str
    texts: Sequence[str] = ()
    items: Sequence[str] = ()
    code: str = ""
    name: str = ""
    """What links to it refer to, as ``#name``."""


@dataclass(frozen=True)
class Section:
    """A titled part of a document."""

    title: str
    texts: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[PageTable] = ()
    code: str = ""
    entries: Sequence[Details] = ()
    folded: bool = False


@dataclass(frozen=True)
class Document:
    """A whole report."""

    title: str
    answer: str
    """One sentence that says what came out."""
    tone: Tone
    warnings: Sequence[str] = ()
    """What limits the answer, each in a sentence."""
    facts: Sequence[str] = ()
    """What was measured, in short phrases."""
    sections: Sequence[Section] = ()


def render_document(document: Document) -> str:
    """The HTML file."""
    script = _read("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = (
        page_environment()
        .get_template("page.html.jinja")
        .render(
            document=document,
            draw_chart=draw_chart,
            as_cell=lambda cell: cell if isinstance(cell, Cell) else Cell(cell),
            breakable=_mark_breaks,
            style=_read("page.css"),
            script=script,
            digest=digest,
        )
    )
    return text + "\n"


def _mark_breaks(text: str) -> Markup:
    """The text with places where a long name may be broken on a narrow screen."""
    return Markup(_JOINT.sub("<wbr>", escape(text)))


@cache
def _read(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
