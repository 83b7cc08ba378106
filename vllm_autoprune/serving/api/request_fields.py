"""Request fields: the ``autoprune`` entry of a request's ``mm_processor_kwargs``, parsed."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

from vllm_autoprune.errors import Problem, RequestError
from vllm_autoprune.serving.shared.detail_budgets import Detail
from vllm_autoprune.serving.shared.plan import Chooser
from vllm_autoprune.tpdsl.json_text import escape_unprintable
from vllm_autoprune.tpdsl.loading import suggest_name
from vllm_autoprune.tpdsl.materialize import MAX_BUDGET

REQUEST_FIELD = "autoprune"
"""Key of the plugin's entry in a request's ``mm_processor_kwargs``."""

ENTRY = f"mm_processor_kwargs/{REQUEST_FIELD}"
"""Location of the entry in error messages."""

SALT = "_autoprune_salt"
"""Key beside the entry under which the renderer passes on the request's :class:`CacheSalt`."""

MAX_PROBLEMS = 16
"""Problems listed in one error."""

MAX_COUNTED = 256
"""Problems above which only their number is told: a message for each takes 50 microseconds, in
which the whole process waits."""


class CacheSalt(str):
    """A request's ``cache_salt``; a type of its own, so that no JSON body can send it here."""

    __slots__ = ()


class SharedBudget(BaseModel):
    """Budget form ``{"shared": K}``: K tokens for all images of the request together.

    An image that a conversation adds changes the K, and so the cache identity, of all others.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    shared: int


def _parse_budget(value: object) -> object:
    if value is None or _is_integer(value):
        return value
    if isinstance(value, list) and value and all(_is_integer(item) for item in value):
        return tuple(value)
    if isinstance(value, dict) and list(value) == ["shared"] and _is_integer(value["shared"]):
        return SharedBudget(**value)
    raise PydanticCustomError("budget", "not a number of tokens in any of its three forms")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _parse_state(value: object) -> object:
    if value is None or isinstance(value, str | dict):
        return value
    raise PydanticCustomError("state", "neither a name nor a state")


# Plain validators, because a union reports one error for every form that a value does not have.
Budget = Annotated[int | tuple[int, ...] | SharedBudget | None, PlainValidator(_parse_budget)]
State = Annotated[str | dict[str, object] | None, PlainValidator(_parse_state)]


class RecallTurn(BaseModel):
    """A user turn that recalls: the number of images before it, and its text."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    images: int = Field(ge=1)
    text: str


class PruningRequest(BaseModel):
    """Fields of the entry; the server's own choice holds for each one that is left out.

    ``budget``: K of each image, a list with one K an image, or :class:`SharedBudget`. ``state``:
    the name of a shipped state, or a whole state. ``enabled`` false: every token is kept.
    ``keep``: the state, or a control: ``"reference"`` (its base policy alone), ``"random"``
    or ``"resized"`` (the resize control).
    ``recall``: tokens that each later turn without an image gets of the images before it.
    ``instructions`` has one text an image, ``details`` one level an image, ``turns`` a number an
    image, equal for neighbours that one question follows, None where none does; ``recall_turns``
    the turns that recall. The renderer fills them from the chat messages, a request without
    messages may fill them itself, with an image token in its prompt for each image and each turn.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    budget: Budget = None
    state: State = None
    enabled: bool = True
    keep: Chooser = "state"
    instructions: list[str] | None = None
    details: list[Detail | None] | None = None
    turns: list[Annotated[int, Field(ge=0)] | None] | None = None
    recall: int | None = Field(default=None, ge=0, le=MAX_BUDGET)
    recall_turns: list[RecallTurn] | None = None


_FIX = {
    "budget": 'give 64, [64, 32] with one number an image, or {"shared": 96} for all images',
    "state": 'give a shipped name such as "visionzip", or a whole state as an object',
    "enabled": "give true or false",
    "keep": 'give "state", "reference", "random" or "resized"',
    "instructions": "give a list of texts, one an image",
    "details": 'give a list of "low", "high" or null, one an image',
    "turns": "give a list of numbers from 0 on, one an image; null where no question follows it",
    "recall": "give a number of tokens, 0 for none",
    "recall_turns": 'give a list of {"images": images before the turn, "text": its text}',
}


def parse_request(entry: object) -> PruningRequest:
    """The parsed entry; raises RequestError with every problem, which vLLM answers by 400."""
    if entry is None:
        return PruningRequest()
    if not isinstance(entry, dict):
        raise request_error("", "is not an object", f"write {format_entry(entry)}")
    if not all(isinstance(key, str) for key in entry):
        raise request_error("", "has keys that are no text", f"use: {', '.join(_FIX)}")
    try:
        return PruningRequest.model_validate(entry)
    except ValidationError as error:
        if (count := error.error_count()) > MAX_COUNTED:
            raise request_error("", f"has {count} problems", f"use: {', '.join(_FIX)}") from None
        problems: dict[str, Problem] = {}
        for detail in error.errors(include_url=False, include_input=False)[:MAX_PROBLEMS]:
            place = [str(step) for step in detail["loc"]]
            where = "/".join([ENTRY, *(escape_unprintable(step, 40) for step in place)])
            fix = _FIX.get(place[0] if place else "", f"use: {', '.join(_FIX)}")
            what = detail["msg"]
            if detail["type"] == "extra_forbidden" and len(place) == 1:
                what, fix = "is not a known field", suggest_name(place[0], list(_FIX))
            problems.setdefault(where, Problem(where, escape_unprintable(what, 200), fix))
        raise RequestError("request", list(problems.values())) from None


def format_entry(value: object) -> str:
    """JSON of the entry that says what a value in its place, or elsewhere, was probably to say."""
    if isinstance(value, bool):
        return json.dumps({"enabled": value})
    return json.dumps({"budget": value if isinstance(value, int) and 0 < value < 10**6 else 64})


def request_error(field: str, what: str, fix: str) -> RequestError:
    """The error for one field of the entry, of which ``fix`` says how to correct it."""
    return RequestError("request", [Problem("/".join(filter(None, [ENTRY, field])), what, fix)])
