"""Facts about the images of a search, which prompts state: tokens, tiles, [CLS], sign, cosines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from offline_search.settings import Settings, Space
from vllm_autoprune.statistics import Floats
from vllm_autoprune.tpdsl.atoms.pools import MAX_POOL_RATIO
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
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
    has_wide_words: bool | None = None
    """Whether the language model's embeddings of words are as wide as the tokens' features."""
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
        words = probes[0].words
        has_wide_words = None
        if words is not None:
            has_wide_words = words.embeddings.shape[2] == probes[0].features.shape[2]
        spread = np.mean([_quantiles(t.cosine.numpy()) for t in probes], axis=0)
        return cls(
            counts=tuple(sorted({tokens.count for tokens in probes})),
            grids=tuple(sorted(grids)),
            has_cls=probes[0].cls_attention is not None,
            sign=sign,
            segments=segments,
            has_wide_words=has_wide_words,
            relevance=relevance,
            cosines=(float(spread[0]), float(spread[1])),
        )

    def describe(self, kept: int, space: Space = "all") -> str:
        """The facts in sentences; ``kept`` is K for the smallest image.

        A smaller ``space`` has no size of a pool, and no signal that reads the question or [CLS].
        """
        smallest = self.counts[0]
        largest = self.counts[-1]
        tokens = (
            f"N = {smallest}" if smallest == largest else f"{smallest} to {largest}"
        )
        sentences = [f"An image has {tokens} tokens."]
        if self.grids:
            shown = ", ".join(self.grids[:_SHOWN_GRIDS])
            sentences.append(f"Tiles x rows x columns are {shown}.")
        if space == "all":
            sentences.append(_describe_pools(largest, kept))
            sentences += self._list_inputs()
        ranges = {"tokens": self.cosines}
        if space == "all":
            ranges = {"tokens and question": self.relevance, **ranges}
        for between, interval in ranges.items():
            if interval is not None:
                low, high = interval
                sentences.append(
                    f"Cosines between {between} are {low:.2f} to {high:.2f} (5 to 95 %)."
                )
        return " ".join(sentences)

    def _list_inputs(self) -> Iterator[str]:
        """Sentences on what signals read besides features."""
        if self.has_cls is not None:
            yield f"There is {'a' if self.has_cls else 'no'} [CLS] token."
        if self.sign is not None:
            yield f'The sign "auto" is "{"+" if self.sign > 0 else "-"}".'
        if self.segments is not None:
            yield f"Text segments of a question: {self.segments} at most."
        if self.has_wide_words is not None:
            are = "are" if self.has_wide_words else "are not"
            yield f"Embeddings of words {are} as wide as the tokens' features."


def describe_facts(facts: Mapping[str, ImageFacts], settings: Settings) -> str:
    """A paragraph on the images as each model takes them; empty if nothing is known.

    ``facts`` are by model, of a search with one model by the empty name.
    """
    budget = BudgetCall.parse(settings.budgets[0])
    texts: list[str] = []
    for model, known in facts.items():
        kept = budget.tokens_kept(known.counts[0])
        text = known.describe(kept, settings.space)
        if model:
            text = f"{model}: {text} K of the smallest is {kept}."
        texts.append(text)
    return "\n".join([*texts, "", ""]) if texts else ""


def _describe_pools(tokens: int, kept: int) -> str:
    """Sizes of the largest pools of an image of so many tokens, of which K are ``kept``."""
    unpicked = max(tokens - kept, 0)
    largest = round(MAX_POOL_RATIO * kept)
    null = f"With pool_ratio null a pool has all {unpicked} other tokens"
    if largest < unpicked:
        return (
            f"{null}; with {MAX_POOL_RATIO:g}, the largest number, {largest} of them."
        )
    return f"{null}, and so it has with {unpicked / max(kept, 1):.1f} or more."


def _quantiles(values: Floats) -> Interval:
    low, high = np.quantile(values, (0.05, 0.95))
    return float(low), float(high)
