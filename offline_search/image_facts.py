"""Facts about the images of a search, which prompts state: tokens, tiles, [CLS], sign, cosines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

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

    def describe(self, budget: BudgetCall, space: Space = "all") -> str:
        """The facts in sentences, with K of images if it is a share of N.

        A smaller ``space`` has no size of a pool, and no signal that reads the question or [CLS].
        """
        kept = [min(budget.tokens_kept(tokens), tokens) for tokens in self.counts]
        several = len(self.counts) > 1
        text = f"An image has {'' if several else 'N = '}{_describe_range(self.counts)} tokens"
        minimum, maximum = budget.range()
        if minimum < maximum:
            text += f", of which K = {_describe_range(kept)} are kept"
        sentences = [f"{text}."]
        if self.grids:
            shown = ", ".join(self.grids[:_SHOWN_GRIDS])
            if others := len(self.grids[_SHOWN_GRIDS:]):
                shown += f" and {others} more"
            sentences.append(f"Tiles x rows x columns are {shown}.")
        if space == "all":
            sentences.append(_describe_pools(self.counts, kept))
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

    def without_question(self) -> ImageFacts:
        """The facts that matter to policies that do not read the question."""
        return replace(
            self, sign=None, segments=None, has_wide_words=None, relevance=None
        )

    def _list_inputs(self) -> Iterator[str]:
        """Sentences on what signals read besides features."""
        if self.has_cls is not None:
            yield (
                "The attention of [CLS], or the mean of all tokens' in its place, is known."
                if self.has_cls
                else "No attention of [CLS] is known."
            )
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
        if settings.question_free:
            known = known.without_question()
        text = known.describe(budget, settings.space)
        texts.append(f"{model}: {text}" if model else text)
    return "\n".join([*texts, "", ""]) if texts else ""


def _describe_pools(counts: Sequence[int], kept: Sequence[int]) -> str:
    """Sizes of the largest pools of images of N = ``counts`` tokens, of which ``kept`` are kept."""
    others = np.subtract(counts, kept)
    ratio = (others / np.maximum(kept, 1)).max()
    null = f"With pool_ratio null a pool has all {_describe_range(others)} other tokens"
    if ratio > MAX_POOL_RATIO:
        largest = np.minimum(others, np.multiply(kept, MAX_POOL_RATIO).astype(int))
        text = f"with {MAX_POOL_RATIO:g}, the largest number, {_describe_range(largest)} of them"
        return f"{null}; {text}."
    # Rounded up, because with less it has fewer; first without the error of the division.
    smallest = math.ceil(round(10 * float(ratio), 6)) / 10
    return f"{null}, and so it has with {smallest:.1f} or more."


def _describe_range(numbers: Sequence[int] | NDArray[np.int64]) -> str:
    """The smallest and largest number, or the only one."""
    minimum = min(numbers)
    maximum = max(numbers)
    return f"{minimum}" if minimum == maximum else f"{minimum} to {maximum}"


def _quantiles(values: Floats) -> Interval:
    low, high = np.quantile(values, (0.05, 0.95))
    return float(low), float(high)
