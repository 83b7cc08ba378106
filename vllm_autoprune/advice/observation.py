"""Values of the cost model as far as they are known, from flags, a probe or ``/metrics``."""

from __future__ import annotations

from dataclasses import fields

from pydantic import BaseModel, ConfigDict

from vllm_autoprune.advice.model import Timings, Traffic
from vllm_autoprune.errors import ConfigError, Problem

CORE_SHARE = 0.75
"""Part of K that is core, where neither --core nor a state says it."""
TOKENS_PER_KEPT = 9
"""N / K where K is not given: 576 to 64, 2880 to 320."""

_MEASURE = "give it, or let --server URL --probe SIZE measure it"


class Observation(BaseModel):
    """Fields of :class:`Traffic` and :class:`Timings`; None: not known.

    ``notes`` say how values were found and what they leave out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    questions: float | None = None
    tokens: int | None = None
    budget: int | None = None
    core: int | None = None
    template: int | None = None
    prompt: int | None = None
    answer: int | None = None
    block: int | None = None
    tower: float | None = None
    prefill: float | None = None
    decode_image: float | None = None
    processor: float | None = None
    selection: float | None = None
    request: float | None = None
    decode: float | None = None
    notes: tuple[str, ...] = ()

    def filled_from(self, other: Observation) -> Observation:
        """This observation, with values of ``other`` where this one has none."""
        known = self.model_dump(exclude_none=True)
        return other.model_copy(update={**known, "notes": (*self.notes, *other.notes)})


def complete(known: Observation) -> tuple[Traffic, Timings, tuple[str, ...]]:
    """Inputs of the model, and notes on how they were found and what was assumed.

    Raises :class:`ConfigError` listing all values that are missing and cannot be assumed.
    """
    values = known.model_dump(exclude_none=True, exclude={"notes"})
    layers = "give it, or --layers and --layer-ms, or let --server URL --probe SIZE measure it"
    needed = {
        "questions": ("--questions", "give the mean number of questions on one image"),
        "tokens": ("--tokens", _MEASURE),
        "tower": ("--tower-ms", _MEASURE),
        "prefill": ("--prefill-ms-per-token", layers),
    }
    problems = [
        Problem(flag, "is not known", fix)
        for name, (flag, fix) in needed.items()
        if name not in values
    ]
    if problems:
        raise ConfigError("inputs", problems)
    notes = list(known.notes)
    if "budget" not in values:
        values["budget"] = max(values["tokens"] // TOKENS_PER_KEPT, 1)
        notes.append(f"K = {values['budget']}, a ninth of N, because no --budget is given.")
    if "core" not in values:
        values["core"] = int(CORE_SHARE * values["budget"])
        notes.append(f"K_c = {values['core']}, {CORE_SHARE:.0%} of K: no --core is given.")
    times = [field.name for field in fields(Timings)]
    if unknown := [name.replace("_", " ") for name in times if name not in values]:
        notes.append(f"Counted as 0, because not known: {', '.join(unknown)}.")
    sizes = [field.name for field in fields(Traffic)]
    traffic = Traffic(**{name: values[name] for name in sizes if name in values})
    return traffic, Timings(**{name: values[name] for name in times if name in values}), (*notes,)
