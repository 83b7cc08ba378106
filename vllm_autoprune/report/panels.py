"""The panels that explain one image: what each shows, before any of it is drawn.

Knows nothing about pixels or pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image

from vllm_autoprune.report.trace import Trace
from vllm_autoprune.tpdsl.executor.materialize import PruningPolicy
from vllm_autoprune.tpdsl.tokens import Grid


@dataclass(frozen=True, slots=True)
class Panel:
    """One copy of the picture.

    heat is one value 0..1 for each token, or None; lit are the tokens shown as they are while
    the rest is dimmed, or None for all; left and entered are marked as exchanged.
    """

    title: str
    detail: str
    heat: tuple[float, ...] | None = None
    lit: tuple[int, ...] | None = None
    left: tuple[int, ...] = ()
    entered: tuple[int, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """Everything that a picture or a page of one image and one question is made from."""

    picture: Image.Image
    question: str
    state: str
    digest: str
    base_policy: str
    trace: Trace
    panels: tuple[Panel, ...]

    @property
    def summary(self) -> str:
        """One line: who chose, how many of how many, what was exchanged."""
        kept, total = len(self.trace.kept) + self.trace.extra, self.trace.grid.tokens
        said = f"{self.state} ({self.digest[:12]}) keeps {kept} of {total} visual tokens"
        if self.trace.fallback != "none":
            return f"{said}; its scores were not finite, {self.trace.fallback} selection instead"
        return f"{said}; {len(self.trace.entered)} exchanged"


def explain(
    policy: PruningPolicy, picture: Image.Image, question: str, trace: Trace
) -> Explanation:
    """Panels of one image: as it is, reference, after the exchange, quality, every signal."""
    base = policy.base.name
    count = len(trace.reference)
    extra = f" + {trace.extra} without a place" if trace.extra else ""
    found = [
        Panel("image", f"{trace.grid.tokens} tokens, as the model sees it"),
        Panel("reference selection", f"{base}: {count} tokens{extra}", lit=trace.reference),
    ]
    if trace.quality is not None:
        swaps = f"{len(trace.left)} out, {len(trace.entered)} in"
        found.append(Panel("after exchange", swaps, None, trace.kept, trace.left, trace.entered))
        found.append(Panel("quality g", "all signals fused", tuple(trace.quality)))
        found += [Panel(spoken(s.atom), f"weight {s.weight:g}", s.values) for s in trace.signals]
    return Explanation(
        picture, question, policy.state.name, policy.state.digest, base, trace, tuple(found)
    )


def spoken(atom: str) -> str:
    """``local_contrast_saliency`` -> ``local contrast saliency``."""
    return atom.replace("_", " ")


def cell(token: int, grid: Grid) -> tuple[int, int]:
    """Row and column of a token where tiles stand side by side."""
    tile, inside = divmod(token, grid.per_tile)
    row, column = divmod(inside, grid.width)
    return row, tile * grid.width + column
