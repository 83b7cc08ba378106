"""Record of what one tiny model returned while it was served; ``checks`` evaluates it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Completion(BaseModel):
    """One completion: token ids of prompt and output, and the positions the model received.

    ``logprob`` is the sum over output tokens; ``cached`` counts prompt tokens from the prefix
    cache; ``positions`` has one row for each axis, with every token that was computed.
    """

    # NaN and infinity must survive JSON, so that a check can report them.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    prompt: list[int]
    ids: list[int]
    logprob: float
    cached: int
    positions: list[list[int]]


class Report(BaseModel):
    """Completions by question, under each setting.

    ``runner`` is the model runner that vLLM used, "v1" or "v2".
    Settings: ``stock`` without a state; ``whole`` with a K that keeps every token; ``pruned`` with
    a small K; ``again`` the same a second time; ``alone`` after all caches were emptied;
    ``unnamed`` and ``renamed``: images of several sizes without a ``uuid``, and all with the same
    one; ``chunked`` with prefill chunks of a few tokens; ``preempted`` by the scheduler.
    ``predicted`` has N of every image, computed from its size. ``kept`` has the index of each kept
    row among an image's unpruned rows, or -1 if it equals none of them. ``vision_runs`` counts runs
    of the vision tower beyond one for each image. ``split`` has two questions about one image under
    a state with a core, and the third turn of a conversation, together, alone, and with chunked and
    preempted prefill; ``split_kept`` has the kept rows of each part in the first, ``recalled``
    those of each later turn, ``splittable`` whether images of this backbone can be two items of a
    prompt, and ``recall_refused`` whether a request for recall is refused where they cannot. The
    state with a core ranks before the patch merger where there is one; ``merger_error`` is how far
    what it ranks is from what enters the merger in transformers, relative to how much tokens
    differ, None without a merger. ``hybrid`` says whether some layers have linear attention.
    ``video_*`` and ``embeddings_*`` are about inputs that are served unpruned, None where the model
    takes none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    runner: Literal["v1", "v2"]
    stock: dict[str, Completion]
    whole: dict[str, Completion]
    pruned: dict[str, Completion]
    again: dict[str, Completion]
    alone: dict[str, Completion]
    unnamed: dict[str, Completion]
    renamed: dict[str, Completion]
    chunked: dict[str, Completion]
    preempted: dict[str, Completion]
    predicted: dict[str, list[int]]
    kept: dict[str, list[list[int]]]
    vision_runs: int
    split: dict[str, Completion]
    split_kept: list[list[int]]
    recalled: list[list[int]]
    recall_refused: bool
    splittable: bool
    merger_error: float | None
    fallbacks: int
    errors: dict[str, int]
    hybrid: bool = False
    video_stock: Completion | None = None
    video_pruned: Completion | None = None
    embeddings_stock: Completion | None = None
    embeddings_pruned: Completion | None = None
