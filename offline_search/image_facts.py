"""Facts about the images of a search, which prompts state: tokens, tiles, [CLS], sign, cosines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_autoprune.statistics import Floats
from vllm_autoprune.tpdsl.tokens import VisualTokens

Interval = tuple[float, float]

_SHOWN_GRIDS = 4


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """Facts about the images; a fact that is not known is None or empty."""

    counts: tuple[int, ...]
    """Distinct values of N among the examined images, ascending."""
    grids: tuple[str, ...] = ()
    """Grids of the images: tiles x rows x columns."""
    has_cls: bool | None = None
    """Whether the vision tower gives the attention of a [CLS] token."""
    sign: int | None = None
    """Sign of the cosine that means relevance."""
    segments: int | None = None
    """Largest number of text segments of a question."""
    relevance: Interval | None = None
    """5 and 95 % quantiles of the cosines between tokens and questions."""
    cosines: Interval | None = None
    """5 and 95 % quantiles of the cosines between tokens of an image."""

    @classmethod
    def of_probes(cls, probes: Sequence[VisualTokens]) -> ImageFacts:
        """Facts of the visual tokens of at least one image."""
        instructions = [t.instruction for t in probes if t.instruction is not None]
        sign = segments = relevance = None
        if instructions:
            sign = instructions[0].sign
            segments = max(int(text.segments.sum(1).max()) for text in instructions)
            cosines = torch.cat([text.cosines.flatten() for text in instructions])
            relevance = _quantiles(cosines.numpy())
        grids = {f"{t.grid.tiles} x {t.grid.height} x {t.grid.width}" for t in probes}
        spread = np.mean([_quantiles(t.cosine.numpy()) for t in probes], axis=0)
        return cls(
            counts=tuple(sorted({tokens.count for tokens in probes})),
            grids=tuple(sorted(grids)),
            has_cls=probes[0].cls_attention is not None,
            sign=sign,
            segments=segments,
            relevance=relevance,
            cosines=(float(spread[0]), float(spread[1])),
        )

    def describe(self, kept: int) -> str:
        """The facts in sentences; ``kept`` is K for the smallest image."""
        smallest = self.counts[0]
        largest = self.counts[-1]
        tokens = (
            f"N = {smallest}" if smallest == largest else f"{smallest} to {largest}"
        )
        ratio = max(largest / max(kept, 1) - 1, 0.0)
        sentences = [
            f"An image has {tokens} tokens.",
            f"From a pool_ratio of {ratio:.1f} on a pool has all tokens that are not picked.",
        ]
        if self.grids:
            shown = ", ".join(self.grids[:_SHOWN_GRIDS])
            sentences.insert(1, f"Tiles x rows x columns are {shown}.")
        if self.has_cls is not None:
            sentences.append(f"There is {'a' if self.has_cls else 'no'} [CLS] token.")
        if self.sign is not None:
            sentences.append(f'The sign "auto" is "{"+" if self.sign > 0 else "-"}".')
        if self.segments is not None:
            sentences.append(f"Text segments of a question: {self.segments} at most.")
        ranges = {"tokens and question": self.relevance, "tokens": self.cosines}
        for between, interval in ranges.items():
            if interval is not None:
                low, high = interval
                sentences.append(
                    f"Cosines between {between} are {low:.2f} to {high:.2f} (5 to 95 %)."
                )
        return " ".join(sentences)


def _quantiles(values: Floats) -> Interval:
    low, high = np.quantile(values, (0.05, 0.95))
    return float(low), float(high)
