"""Figures of the documentation, drawn with matplotlib as SVG."""

from __future__ import annotations

import io

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's palette, which colour-blind readers can distinguish."""
SIZE = (6.4, 4.2)


def build_axes(across: str, up: str) -> tuple[Figure, Axes]:
    """An empty figure with labelled axes."""
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(color="#ddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def render_svg(figure: Figure, axes: Axes) -> str:
    """The figure with its legend as an SVG element."""
    if axes.has_data():
        figure.legend(fontsize=7, frameon=False, loc="outside lower center", ncols=3)
    out = io.StringIO()
    # A fixed salt and no date: the same figures give the same file.
    with mpl.rc_context({"svg.hashsalt": "load", "svg.fonttype": "none", "font.family": "sans"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
