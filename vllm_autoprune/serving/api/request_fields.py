"""What one request may say about pruning: the ``autoprune`` entry of its processor arguments.

Knows nothing about who is allowed to say it (``rules``), nor about what comes of it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

from vllm_autoprune.errors import Problem, RequestError
from vllm_autoprune.serving.shared.plan import Chooser
from vllm_autoprune.tpdsl.states.json_values import escape_unprintable

REQUEST_FIELD = "autoprune"
"""Our place within a request's ``mm_processor_kwargs``."""

ENTRY = f"mm_processor_kwargs/{REQUEST_FIELD}"
"""Where problems of it are."""

SALT = "_autoprune_salt"
"""Beside the entry, from the renderer: the request's ``cache_salt`` as a :class:`CacheSalt`."""

MAX_PROBLEMS = 16
"""Problems that one answer tells."""


class CacheSalt(str):
    """A request's ``cache_salt``; of a type of its own, so that no request can say it here."""

    __slots__ = ()


class SharedBudget(BaseModel):
    """``{"shared": K}``: K tokens for all images of the request together."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    shared: int


def _budget(value: object) -> object:
    if value is None or _whole(value):
        return value
    if isinstance(value, list) and value and all(_whole(item) for item in value):
        return tuple(value)
    if isinstance(value, dict) and list(value) == ["shared"] and _whole(value["shared"]):
        return SharedBudget(**value)
    raise PydanticCustomError("budget", "not a number of tokens in any of its three forms")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _policy(value: object) -> object:
    if value is None or isinstance(value, str | dict):
        return value
    raise PydanticCustomError("policy", "neither a name nor a state")


# Each with one error in our words, where a union has one for every form that a value is not.
Budget = Annotated[int | tuple[int, ...] | SharedBudget | None, PlainValidator(_budget)]
Policy = Annotated[str | dict[str, object] | None, PlainValidator(_policy)]


class PruningRequest(BaseModel):
    """All that a request can say; a field that is left out is the server's own choice.

    ``budget``: K of each image, a list with one K an image, or :class:`SharedBudget`. ``policy``: the
    name of a state that ships, or a whole state. ``enabled`` false: every token is kept.
    ``keep``: the state, or for measuring ``"reference"`` (its base policy alone) or ``"random"``.
    ``instructions`` has one text an image; the renderer fills it from the chat messages, a
    request without messages may fill it itself.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    budget: Budget = None
    policy: Policy = None
    enabled: bool = True
    keep: Chooser = "state"
    instructions: list[str] | None = None


_MEND = {
    "budget": 'give 64, [64, 32] with one number an image, or {"shared": 96} for all images',
    "policy": 'give a shipped name such as "visionzip", or a whole state as an object',
    "enabled": "give true or false",
    "keep": 'give "state", "reference" or "random"',
    "instructions": "give a list of texts, one an image",
}


def parse_request(asked: object) -> PruningRequest:
    """The parsed entry; raises RequestError with every problem, which vLLM answers by 400."""
    if asked is None:
        return PruningRequest()
    if isinstance(asked, dict) and not all(isinstance(key, str) for key in asked):
        raise request_error("", "has keys that are no text", f"use: {', '.join(_MEND)}")
    try:
        return PruningRequest.model_validate(asked)
    except ValidationError as error:
        problems: dict[str, Problem] = {}
        for detail in error.errors(include_url=False, include_input=False)[:MAX_PROBLEMS]:
            place = [str(step) for step in detail["loc"]]
            where = "/".join([ENTRY, *(escape_unprintable(step, 40) for step in place)])
            fix = _MEND.get(place[0] if place else "", f"use: {', '.join(_MEND)}")
            problems.setdefault(where, Problem(where, escape_unprintable(detail["msg"], 200), fix))
        raise RequestError("request", list(problems.values())) from None


def request_error(field: str, what: str, fix: str) -> RequestError:
    """The error for one field of the entry."""
    return RequestError("request", [Problem("/".join(filter(None, [ENTRY, field])), what, fix)])
