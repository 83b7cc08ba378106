"""Several models in one search: which answers are whose, and the scale on which they are added.

A question that is asked of several models is an example for each of them. Losses differ between
models: the same state may cost one five times as many nats as another. Values are therefore divided
by what the base policy alone loses on their model, so that each model counts alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from offline_search.differences import compare
from offline_search.settings import Settings
from vllm_autoprune.errors import ConfigError, SearchError
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.statistics import Floats, round_portably


def check_objective(settings: Settings) -> None:
    """Raise :class:`ConfigError` for an objective that several models cannot share."""
    if settings.models and settings.objective == "mme":
        what = f"mme is the total of one model, not of {len(settings.models)}"
        fix = "leave it out, or give servers of one model"
        raise ConfigError.of("--objective", what, fix, subject="search")


def mask_models(examples: Sequence[Example]) -> dict[str, NDArray[np.bool_]]:
    """Masks ``(M,)`` of the examples of each model; empty if a search has one model."""
    names = [example.model for example in examples]
    return {name: np.array(names) == name for name in dict.fromkeys(names) if name}


@dataclass(frozen=True)
class ModelScales:
    """Mean loss of the base policy on each model, in nats; empty if a search has one model."""

    losses: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def measure(cls, examples: Sequence[Example], values: Floats) -> Self:
        """Scales by the base policy's ``values`` ``(M,)``, which are negative for a loss.

        Raises :class:`SearchError` for a model on which the loss is within two standard errors of
        0: divided by it, the noise of that model would outweigh all others.
        """
        losses = dict[str, float]()
        for name, mask in mask_models(examples).items():
            asked = [example for example in examples if example.model == name]
            loss = compare(asked, np.zeros(len(asked)), values[mask])
            if loss.verdict() != "better":
                what = f"loses {loss.value:.3f} ± {loss.error:.3f} nats on {name}, too little to"
                raise SearchError.of(
                    "the base policy alone",
                    f"{what} measure gains by",
                    "give a smaller --budget, or more questions with a larger --block",
                )
            losses[name] = round_portably(loss.value, 6)
        return cls(losses)

    def apply(self, examples: Sequence[Example], values: Floats) -> Floats:
        """``values`` ``(M,)`` of the first M examples in losses of the base policy.

        With one model they stay as they are.
        """
        if not self.losses:
            return values
        asked = examples[: len(values)]
        losses = np.array([self.losses[example.model] for example in asked])
        scaled: Floats = values / losses
        return scaled
