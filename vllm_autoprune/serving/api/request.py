"""The ``autoprune`` entry of a request's ``mm_processor_kwargs``, parsed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from vllm_autoprune.errors import AutopruneError, Problem, RequestError
from vllm_autoprune.serving.history import HISTORY_FIX, History
from vllm_autoprune.serving.plan import ENTRY, KWARGS, REQUEST_FIELD, Chooser
from vllm_autoprune.serving.request_rules import Detail
from vllm_autoprune.tpdsl.atoms.source import MAX_BUDGET, BudgetCall
from vllm_autoprune.tpdsl.cells import CELLS_FIX, Cells
from vllm_autoprune.tpdsl.loading import escape_unprintable, suggest_name
from vllm_autoprune.tpdsl.tokens import POSITIONS, Positions
from vllm_autoprune.tpdsl.tower import TOWER_FIX, Tower

SALT = "_autoprune_salt"
"""Key beside the entry under which the renderer passes on the request's :class:`CacheSalt`."""

_MAX_PROBLEMS = 16
"""Maximum number of problems listed in one error."""

_MAX_COUNTED = 256
"""Number of problems above which only their number is reported: formatting one message takes 50
microseconds, in which the whole process waits."""


class CacheSalt(str):
    """A request's ``cache_salt``. Its own type makes sure that no JSON body can send it here."""

    __slots__ = ()


class _SharedBudget(BaseModel):
    """Budget form ``{"shared": K}``: K tokens for all images of the request together.

    An image that a conversation adds changes the K, and so the cache identity, of all others.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    shared: BudgetCall


class RecallTurn(BaseModel):
    """A user turn that recalls: the number of images before it, and its text."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    images: int = Field(ge=1)
    text: str


def split_shared_budget(total: int, sizes: Sequence[int]) -> list[int]:
    """Split ``total`` tokens evenly over images of these sizes; the first ones take the remainder.

    Tokens that a small image cannot use are split evenly over the others. The budgets add up to
    ``total``, or to the number of all tokens if that is less.
    """
    total = min(total, sum(sizes))
    remaining = total
    level = 0
    for i, size in enumerate(sorted(sizes)):
        level = remaining // (len(sizes) - i)
        if size > level:
            break
        remaining -= size
    budgets = [min(size, level) for size in sizes]
    undivided = total - sum(budgets)
    for i in [i for i, size in enumerate(sizes) if size > level][:undivided]:
        budgets[i] += 1
    return budgets


_FIX = {
    "budget": 'give 64, a share such as "1/8", "12.5%" or "1/8:64-640", [64, "1/8"] with one an '
    'image, or {"shared": 96} for all images',
    "state": 'give a shipped name such as "visionzip", or a whole state as an object',
    "cells": CELLS_FIX,
    "tower": TOWER_FIX,
    "enabled": "give true or false",
    "keep": 'give "state", "reference", "random" or "resized"',
    "positions": f"give {', '.join(POSITIONS)}",
    "video_budget": 'give the tokens of all frames, a share, or "tokens_per_frame:16"',
    "instructions": "give a list of texts, one an image",
    "video_instructions": "give a list of texts, one a video",
    "details": 'give a list of "low", "high" or null, one an image',
    "turns": "give a list of numbers from 0 on, one an image; null where no question follows it",
    "recall": "give a number of tokens, 0 for none",
    "history": f'{HISTORY_FIX}, or "none"',
    "recall_turns": 'give a list of {"images": images before the turn, "text": its text}',
}
_KNOWN = f"use: {', '.join(_FIX)}"
DETAIL_FIX = 'put it beside the picture: "image_url": {"url": ..., "detail": "low"}'


_RULES: Mapping[str, type[Cells | Tower | History]] = {
    "cells": Cells,
    "tower": Tower,
    "history": History,
}
"""Fields that hold a rule, or ``"none"``."""


class PruningRequest(BaseModel):
    """Fields of the entry; for a field that is left out, the server's own choice holds.

    ``budget``: K of each image, a list with one K per image, or :class:`_SharedBudget`.
    ``video_budget``: K of each video, for a state that prunes videos.
    ``state``: the name of a shipped state, or a whole state.
    ``enabled``: false keeps every token.
    ``cells``: the rule by which cells are dropped before the vision tower, or ``"none"``.
    ``tower``: the rule by which cells are dropped inside the vision tower, or ``"none"``.
    ``positions``: where kept tokens stand.
    ``keep``: the state, or a control: ``"reference"`` (its base policy alone), ``"random"`` or
    ``"resized"`` (the resize control).
    ``recall``: number of tokens of the earlier images that each later turn without an image gets.
    ``history``: which images keep their core alone, or ``"none"``.
    ``instructions``: one text per image, and ``video_instructions``: one per video. ``details``:
    one level per image. ``turns``: one number per image, which is the same for neighbouring images
    that one question follows, and None for an image without a question after it.
    ``recall_turns``: the turns that recall.

    The renderer fills these last fields, from ``instructions`` on, from the chat messages. A
    request without messages may fill them itself, with an image token in its prompt for each image
    and each turn that recalls.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    budget: BudgetCall | tuple[BudgetCall, ...] | _SharedBudget | None = None
    video_budget: BudgetCall | None = None
    state: str | dict[str, object] | None = None
    cells: Cells | Literal["none"] | None = None
    tower: Tower | Literal["none"] | None = None
    positions: Positions | None = None
    enabled: bool = True
    keep: Chooser = "state"
    instructions: list[str] | None = None
    video_instructions: list[str] | None = None
    details: list[Detail | None] | None = None
    turns: list[Annotated[int, Field(ge=0)] | None] | None = None
    recall: int | None = Field(default=None, ge=0, le=MAX_BUDGET)
    recall_turns: list[RecallTurn] | None = None
    history: History | Literal["none"] | None = None

    # Plain validators, because a union would report one error for each form that a value lacks.

    @field_validator("budget", mode="plain")
    @classmethod
    def parse_budget(cls, value: object) -> object:
        """The budget in any of its three forms."""
        with _explaining("budget"):
            if isinstance(value, list) and value:
                return tuple(map(BudgetCall.parse, value))
            if isinstance(value, dict) and list(value) == ["shared"]:
                return _SharedBudget(shared=BudgetCall.parse(value["shared"]))
            return None if value is None else BudgetCall.parse(value)

    @field_validator("video_budget", mode="plain")
    @classmethod
    def parse_video_budget(cls, value: object) -> BudgetCall | None:
        """The budget of a video."""
        with _explaining("budget"):
            return None if value is None else BudgetCall.parse(value, video=True)

    @field_validator("state", mode="plain")
    @classmethod
    def parse_state(cls, value: object) -> object:
        """The name of a state, or a state."""
        if value is None or isinstance(value, str | dict):
            return value
        raise PydanticCustomError("state", "neither a name nor a state")

    @field_validator(*_RULES, mode="plain")
    @classmethod
    def parse_rule(cls, value: object, info: ValidationInfo) -> object:
        """A rule for cells, before the tower or inside it, or for older images."""
        if value is None or value == "none":
            return value
        name = str(info.field_name)
        with _explaining(name):
            return _RULES[name].parse(value, f"{ENTRY}/{name}")

    @classmethod
    def parse(cls, entry: object) -> PruningRequest:
        """The parsed entry; raises RequestError with every problem, which vLLM answers by 400."""
        if entry is None:
            return cls()
        if not isinstance(entry, dict):
            raise RequestError.of(
                ENTRY, "is not an object", f"write {_format_entry(entry)}"
            )
        if not all(isinstance(key, str) for key in entry):
            raise RequestError.of(ENTRY, "has keys that are no text", _KNOWN)
        try:
            return cls.model_validate(entry)
        except ValidationError as error:
            if (count := error.error_count()) > _MAX_COUNTED:
                raise RequestError.of(ENTRY, f"has {count} problems", _KNOWN) from None
            problems: dict[str, Problem] = {}
            details = error.errors(include_url=False, include_input=False)
            for problem in map(_explain, details[:_MAX_PROBLEMS]):
                problems.setdefault(problem.where, problem)
            raise RequestError("request", list(problems.values())) from None

    def split_budget(self, sizes: Sequence[int]) -> Sequence[int | None]:
        """K requested for each image of the request, of ``sizes`` tokens; None for the state's own.

        From here on a budget is a number, so equal K give equal plans, however K was written.
        Raises :class:`RequestError` if the number of budgets does not fit the number of images.
        """
        budget = self.budget
        if isinstance(budget, _SharedBudget):
            total = budget.shared.tokens_kept(sum(sizes))
            if total < len(sizes):
                what = f"{total} in all, and the number of images is {len(sizes)}"
                raise RequestError.of(
                    f"{ENTRY}/budget/shared", what, "give at least one token an image"
                )
            return split_shared_budget(total, sizes)
        if isinstance(budget, tuple):
            if len(budget) != len(sizes):
                what = (
                    f"a list of {len(budget)}, and the number of images is {len(sizes)}"
                )
                raise RequestError.of(
                    f"{ENTRY}/budget", what, "give one an image, in their order"
                )
            return [
                call.tokens_kept(size) for call, size in zip(budget, sizes, strict=True)
            ]
        return [None if budget is None else budget.tokens_kept(size) for size in sizes]

    def state_label(self, served: str) -> str:
        """Metric label of the state: its name, or ``request`` for one that the request contains."""
        if not self.enabled:
            return "off"
        if self.state is None:
            return served
        return self.state if isinstance(self.state, str) else "request"


@contextmanager
def _explaining(kind: str) -> Iterator[None]:
    """Have pydantic report an AutopruneError as an error of this kind, with our message."""
    try:
        yield
    except AutopruneError as error:
        what = error.problems[0].what
        raise PydanticCustomError(kind, "{what}", {"what": what}) from None


def _explain(error: ErrorDetails) -> Problem:
    """Pydantic's error as a problem, with its place in the request and how to correct it."""
    steps = [str(step) for step in error["loc"]]
    name = steps[0] if steps else ""
    what = error["msg"]
    fix = _FIX.get(name, _KNOWN)
    if error["type"] == "extra_forbidden" and len(steps) == 1:
        what = "is not a known field"
        fix = DETAIL_FIX if name == "detail" else suggest_name(name, list(_FIX))
    where = "/".join([ENTRY, *map(shorten, steps)])
    return Problem(where, escape_unprintable(what, 200), fix)


def quote_entry(value: object = None) -> str:
    """JSON of the entry that the client probably meant by ``value``, to quote in a message."""
    return f'"{KWARGS}": {{"{REQUEST_FIELD}": {_format_entry(value)}}}'


def _format_entry(value: object) -> str:
    """JSON of the entry that the client probably meant by ``value``."""
    if isinstance(value, bool):
        return json.dumps({"enabled": value})
    is_budget = isinstance(value, int) and 0 < value < 10**6
    return json.dumps({"budget": value if is_budget else 64})


def shorten(name: str) -> str:
    """A client's text, shortened and escaped for an answer."""
    return escape_unprintable(name, 40)


_MAX_NAME = 100
"""Maximum length of names that are compared, because compared names are cached."""


def resembles_entry(name: str) -> bool:
    """Whether a key is the entry's name, begins with it, or is similar to it."""
    return _resembles_entry(name[:_MAX_NAME])


@lru_cache(maxsize=1024)
def _resembles_entry(name: str) -> bool:
    if name.startswith("_"):
        return False
    word = name.lower().replace("-", "").replace("_", "").removeprefix("x")
    # Similar means one letter missing, changed, added, or exchanged with the next one.
    return word.startswith(REQUEST_FIELD) or bool(
        get_close_matches(word, [REQUEST_FIELD], 1, 0.88)
    )
