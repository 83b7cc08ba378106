"""Panels that explain one image: data for the pictures, without drawing."""

from __future__ import annotations

import colorsys
from dataclasses import dataclass

from PIL import Image

from vllm_autoprune.report.trace import Trace
from vllm_autoprune.tpdsl.materialize import PruningPolicy
from vllm_autoprune.tpdsl.tokens import Grid


@dataclass(frozen=True, slots=True)
class Panel:
    """One copy of the picture.

    ``heat`` has one value 0..1 for each token, or is None. ``lit`` are the tokens that are not
    dimmed, None means all. ``left`` and ``entered`` are marked as exchanged, ``core`` as kept for
    every question. ``owners`` has for every token the kept one that it is merged into, or -1.
    """

    title: str
    detail: str
    heat: tuple[float, ...] | None = None
    lit: tuple[int, ...] | None = None
    left: tuple[int, ...] = ()
    entered: tuple[int, ...] = ()
    core: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """Data of the picture about one question and one region of an image.

    ``region`` names the region, where the image has several.
    """

    picture: Image.Image
    question: str
    state: str
    digest: str
    trace: Trace
    panels: tuple[Panel, ...]
    region: str = ""

    @property
    def summary(self) -> str:
        """One line: state, number of tokens kept, and number exchanged."""
        kept, total = len(self.trace.kept) + self.trace.extra, self.trace.grid.tokens
        place = f"{self.region}: " if self.region else ""
        name = f"{place}{self.state}"
        summary = f"{name} ({self.digest[:12]}) keeps {kept} of {total} visual tokens"
        if self.trace.fallback != "none":
            return f"{summary}; its scores were not finite, {self.trace.fallback} selection instead"
        core = f"; {len(self.trace.core)} of them are the core" if self.trace.core else ""
        merged = sum(owner >= 0 for owner in self.trace.owners)
        into = f"; {merged} dropped ones are merged into them" if merged else ""
        return f"{summary}{core}; {len(self.trace.entered)} exchanged{into}"


def explain(
    policy: PruningPolicy, picture: Image.Image, question: str, trace: Trace, region: str = ""
) -> Explanation:
    """Build the panels of a region: picture, reference, exchange, groups, quality, signals."""
    base = policy.base.name
    count = len(trace.reference)
    extra = f" + {trace.extra} merged rows" if trace.extra else ""
    panels = [
        Panel("image", f"{trace.grid.tokens} tokens, as the model sees it"),
        Panel(
            "reference selection",
            f"{base}: {count} tokens{extra}",
            lit=trace.reference,
            core=trace.core,
        ),
    ]
    if trace.quality is not None:
        swaps = f"{len(trace.left)} out, {len(trace.entered)} in"
        exchange = (trace.kept, trace.left, trace.entered, trace.core)
        panels.append(Panel("after exchange", swaps, None, *exchange))
    if trace.owners:
        merged = sum(owner >= 0 for owner in trace.owners)
        folded = f"{merged} dropped into {len(set(trace.owners) - {-1})} kept"
        panels.append(Panel("merged", folded, lit=trace.kept, owners=trace.owners))
    if trace.quality is not None:
        panels.append(Panel("quality g", "all signals fused", tuple(trace.quality)))
        panels += [
            Panel(atom_title(s.atom), f"weight {s.weight:.3g}", s.values) for s in trace.signals
        ]
    state = policy.state
    return Explanation(picture, question, state.name, state.digest, trace, tuple(panels), region)


def atom_title(atom: str) -> str:
    """``local_contrast_saliency`` -> ``local contrast saliency``."""
    return atom.replace("_", " ")


def group_colour(number: int) -> tuple[int, int, int]:
    """Colour of a group of merged tokens; neighbouring numbers have hues far apart."""
    red, green, blue = colorsys.hsv_to_rgb((number * 0.618034) % 1.0, 0.75, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


def cell(token: int, grid: Grid) -> tuple[int, int]:
    """Row and column of a token, with tiles side by side."""
    tile, inside = divmod(token, grid.per_tile)
    row, column = divmod(inside, grid.width)
    return row, tile * grid.width + column
