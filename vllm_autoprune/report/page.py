"""An explanation as one self-contained HTML file that fetches nothing.

All panels are shown without JavaScript; the script adds the values of the token under the pointer.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterator, Sequence

from PIL import Image

from vllm_autoprune.report.panels import Explanation, Panel, atom_title, cell, group_colour
from vllm_autoprune.report.picture import (
    CORE,
    ENTERED,
    INK,
    LEFT,
    RAMP,
    STAYED,
    css_colour,
    draw_heat_map,
    encode_png,
)
from vllm_autoprune.report.trace import Trace
from vllm_autoprune.tpdsl.tokens import Grid

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def render_page(explanations: Sequence[Explanation]) -> str:
    """Render the whole document: a section for each region of the image."""
    question = html.escape(explanations[0].question)
    panels = [panel for explanation in explanations for panel in explanation.panels]
    sections = "\n".join(_section(explanation) for explanation in explanations)
    regions = [_tokens(explanation.trace) for explanation in explanations]
    data = json.dumps(regions).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{question}</title>
<style>{_style()}</style>
<h1>{question}</h1>
<p class="legend">{_legend(panels)}</p>
<output id="details">Point at a token, or tap it, to read its values.</output>
{sections}
<script type="application/json" id="tokens">{data}</script>
<script>{_SCRIPT}</script>
</html>
"""


def _section(explanation: Explanation) -> str:
    grid = explanation.trace.grid
    figures = "\n".join(_figure(panel, grid) for panel in explanation.panels)
    style = (
        f"--ratio:{grid.width * grid.tiles}/{grid.height};--panel:{22 * grid.tiles}rem;"
        f"--picture:url({_inline(explanation.picture.convert('RGB'))})"
    )
    summary = html.escape(explanation.summary)
    panels = f'<div class="panels">\n{figures}\n</div>'
    return f'<section style="{style}"><p>{summary}</p>\n{panels}</section>'


def _legend(panels: Sequence[Panel]) -> str:
    """Legend of the marks and colours that the panels use."""
    entries = ['<span><i class="kept"></i>kept</span>']
    if any(panel.core for panel in panels):
        entries = [
            '<span><i class="core"></i>core, kept for every question</span>',
            '<span><i class="kept"></i>delta</span>',
        ]
    if any(panel.left or panel.entered for panel in panels):
        entries.append('<span><i class="left">&minus;</i>swapped out</span>')
        entries.append('<span><i class="entered">+</i>swapped in</span>')
    if any(panel.owners for panel in panels):
        entries.append('<span><i class="merged"></i><i></i>merged into the framed token</span>')
    if any(panel.heat is not None for panel in panels):
        entries.append('<span><i class="ramp"></i>low to high, each map on its own scale</span>')
    return "".join(entries)


def _figure(panel: Panel, grid: Grid) -> str:
    caption = f"{html.escape(panel.title)} <small>{html.escape(panel.detail)}</small>"
    layer = ""
    if panel.heat is not None:
        layer = f'<img class="heat" alt="" src="{_inline(draw_heat_map(panel.heat, grid))}">'
    marks = "".join(_marks(panel, grid))
    box = f"0 0 {grid.width * grid.tiles} {grid.height}"
    kind = "scene grey" if panel.heat is not None else "scene"
    return (
        f'<figure><figcaption>{caption}</figcaption><div class="{kind}">{layer}'
        f'<svg viewBox="{box}" role="img" aria-label="{html.escape(panel.title)}">{marks}'
        '<rect class="here" width="1" height="1" x="-2" y="-2"/></svg></div></figure>'
    )


def _marks(panel: Panel, grid: Grid) -> Iterator[str]:
    """SVG of dropped tokens as one dark path, then frames of the others."""
    if panel.lit is None:
        return
    if panel.owners:
        yield from _group_marks(panel, grid)
        return
    lit = set(panel.lit)
    dark = (cell(token, grid) for token in range(grid.tokens) if token not in lit)
    path = "".join(f"M{column} {row}h1v1h-1z" for row, column in dark)
    yield f'<path class="dim" d="{path}"/>'
    for token in (*panel.lit, *panel.left):
        row, column = cell(token, grid)
        kind = _kind(token, panel)
        yield f'<rect class="{kind}" x="{column + 0.05}" y="{row + 0.05}" width=".9" height=".9"/>'
        if kind in ("left", "entered"):
            x, y = column + 0.5, row + 0.5
            upright = f"M{x} {y - 0.22}v.44" if kind == "entered" else ""
            yield f'<path class="{kind}" d="M{x - 0.22:g} {y}h.44{upright}"/>'


def _group_marks(panel: Panel, grid: Grid) -> Iterator[str]:
    """SVG of groups of merged tokens: each in its own colour, its kept token framed."""
    kept = panel.lit or ()
    colours = {token: css_colour(group_colour(number)) for number, token in enumerate(kept)}
    for token in range(grid.tokens):
        row, column = cell(token, grid)
        owner = panel.owners[token]
        if token in colours:
            style = f"stroke:{colours[token]};stroke-width:.16"
            yield (
                f'<rect style="{style}" x="{column + 0.08}" y="{row + 0.08}" '
                'width=".84" height=".84"/>'
            )
        elif owner >= 0:
            style = f"fill:{colours[owner]};fill-opacity:.55"
            yield f'<rect style="{style}" x="{column}" y="{row}" width="1" height="1"/>'
        else:
            yield f'<path class="dim" d="M{column} {row}h1v1h-1z"/>'


def _kind(token: int, panel: Panel) -> str:
    if token in panel.left:
        return "left"
    if token in panel.entered:
        return "entered"
    return "core" if token in panel.core else "kept"


def _tokens(trace: Trace) -> dict[str, object]:
    """Data of each token for the script."""
    rank = {token: number for number, token in enumerate(trace.reference, start=1)}
    kept, left, core = set(trace.kept), set(trace.left), set(trace.core)
    status = []
    for token in range(trace.grid.tokens):
        word = "swapped out" if token in left else "not kept"
        if token in kept:
            word = "kept" if token in rank else "swapped in"
        if token in core:
            word = "kept for every question"
        if trace.owners and trace.owners[token] >= 0:
            word += f", merged into token {trace.owners[token]}"
        status.append(f"{word}, pick {rank[token]} of the reference" if token in rank else word)
    columns: dict[str, list[float]] = {}
    if trace.quality is not None:
        columns["quality g"] = [round(value, 4) for value in trace.quality]
    for signal in trace.signals:
        columns[atom_title(signal.atom)] = [round(value, 4) for value in signal.values]
    place = [cell(token, trace.grid) for token in range(trace.grid.tokens)]
    return {"place": place, "status": status, "values": columns}


def _inline(image: Image.Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(encode_png(image)).decode()}"


def _style() -> str:
    ramp = ",".join(css_colour(colour) for colour in RAMP)
    stayed, left, entered = css_colour(STAYED), css_colour(LEFT), css_colour(ENTERED)
    core, merged = css_colour(CORE), css_colour(group_colour(0))
    return f"""
:root{{color-scheme:light dark;
--ink:{css_colour(INK)};--page:#fff;--soft:#626976;--box:#f3f4f6}}
@media(prefers-color-scheme:dark){{
:root{{--ink:#e4e7ec;--page:#14171c;--soft:#a2abb8;--box:#1d222a}}}}
html{{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page)}}
body{{max-width:78rem;margin:2rem auto;padding:0 1.5rem}}
h1{{font-size:1.6rem;margin:0}} p{{margin:.3rem 0;color:var(--soft)}}
.legend{{display:flex;flex-wrap:wrap;gap:1.5rem;align-items:center;margin:1rem 0}}
.legend span{{display:flex;align-items:center}}
.legend i{{flex:none;width:1.3rem;height:1.3rem;margin-right:.5rem;
background:{css_colour(INK)};border:3px solid;box-sizing:border-box;
font:bold 1rem/.9rem monospace;text-align:center}}
.legend .kept{{border-color:{stayed};outline:2px solid var(--soft)}}
.legend .core{{border-color:{core}}}
.legend .left{{color:{left}}} .legend .entered{{color:{entered}}}
.legend .merged{{border-color:{merged};margin-right:0}}
.legend .merged+i{{border:0;background:{merged}8c}}
.legend .ramp{{width:9rem;border:0;background:linear-gradient(90deg,{ramp})}}
output{{display:block;min-height:3.2em;padding:.6rem .9rem;background:var(--box);
border-radius:.4rem;
position:sticky;top:0;z-index:1}}
.panels{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,var(--panel)),1fr));
gap:1.5rem;margin-top:1.5rem}}
figure{{margin:0;align-self:end}} figcaption{{font-weight:600;margin-bottom:.3rem;
display:flex;flex-wrap:wrap;column-gap:.8rem;align-items:baseline}}
figcaption small{{font-weight:400;color:var(--soft)}}
.scene{{position:relative;aspect-ratio:var(--ratio);background-size:100% 100%;
background-image:var(--picture)}}
.scene svg,.scene .heat{{position:absolute;inset:0;width:100%;height:100%}}
.heat{{opacity:.75;image-rendering:pixelated}}
.grey{{background-color:#fff;background-blend-mode:luminosity}}
svg *{{fill:none;stroke-width:.07}}
svg .dim{{fill:#14161c;fill-opacity:.74}} svg .kept{{stroke:{stayed}}}
svg .core{{stroke:{core}}}
svg .left{{stroke:{left};stroke-width:.12}} svg .entered{{stroke:{entered};stroke-width:.12}}
svg .here{{stroke:#ff2bd6;stroke-width:.14}}
section+section{{margin-top:2.5rem}}
@media(max-width:40rem){{output{{font-size:.8rem;padding:.4rem .6rem}} body{{padding:0 1rem}}}}
"""


_SCRIPT = """
const regions = JSON.parse(document.getElementById("tokens").textContent);
const details = document.getElementById("details");
document.querySelectorAll("section").forEach((section, number) => {
  const data = regions[number];
  const at = new Map(data.place.map(([row, column], token) => [row + "," + column, token]));
  const marks = section.querySelectorAll(".here");
  const read = event => {
    const svg = event.currentTarget;
    const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    const column = Math.floor((event.clientX - box.left) / box.width * view.width);
    const row = Math.floor((event.clientY - box.top) / box.height * view.height);
    const token = at.get(row + "," + column);
    if (token === undefined) return;
    marks.forEach(mark => { mark.setAttribute("x", column); mark.setAttribute("y", row); });
    const values = Object.entries(data.values).map(([name, all]) => name + " " + all[token]);
    details.textContent = ["token " + token + " (row " + row + ", column " + column + "): "
      + data.status[token], ...values].join("; ");
  };
  for (const svg of section.querySelectorAll("svg")) {
    svg.addEventListener("pointermove", read);
    svg.addEventListener("pointerdown", read);
  }
});
"""
