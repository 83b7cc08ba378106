"""What one tiny model did while it was served, as data.

Knows nothing about what should hold: ``checks`` does.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Said(BaseModel):
    """One answer: ids of its prompt and of what was decoded, and what the model was given.

    ``logprob`` is the sum over decoded tokens; ``cached`` counts prompt tokens that came from the
    prefix cache; ``positions`` has one row an axis, of every token that was computed.
    """

    # Log-probabilities may be no numbers: a report that says so is to be read, not refused.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    prompt: list[int]
    ids: list[int]
    logprob: float
    cached: int
    positions: list[list[int]]


class Report(BaseModel):
    """Answers by question, under each way of serving it.

    ``runner`` is the model runner that vLLM did use, "v1" or "v2".
    ``stock`` without a state, ``whole`` with a K that keeps every token, ``pruned`` with a small
    K, ``again`` the same once more, ``alone`` after all caches were emptied, ``unnamed`` and
    ``renamed`` about images of several sizes without a ``uuid`` and all under one, ``chunked`` in
    steps of a few tokens, ``preempted`` pushed back to the waiting queue in the middle.
    ``predicted`` has N of every image by its size alone, ``kept`` the place among an image's rows
    of each row that was kept, -1 where it is none of them. ``vision_runs`` counts runs of the
    vision tower beyond one an image.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    runner: Literal["v1", "v2"]
    stock: dict[str, Said]
    whole: dict[str, Said]
    pruned: dict[str, Said]
    again: dict[str, Said]
    alone: dict[str, Said]
    unnamed: dict[str, Said]
    renamed: dict[str, Said]
    chunked: dict[str, Said]
    preempted: dict[str, Said]
    predicted: dict[str, list[int]]
    kept: dict[str, list[list[int]]]
    vision_runs: int
    fallbacks: int
    errors: dict[str, int]
    video_stock: Said | None = None
    video_pruned: Said | None = None
