"""What a request asks for: its ``autoprune`` entry, its headers, fields in the wrong place."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from vllm_autoprune.errors import (
    BudgetError,
    Problem,
    Refusal,
    RequestError,
    StateError,
)
from vllm_autoprune.serving.api.refusal import refusing_requests
from vllm_autoprune.serving.compat import depends_on, patch
from vllm_autoprune.serving.plan import ENTRY, KWARGS, REQUEST_FIELD, Chooser, refuse
from vllm_autoprune.serving.request_rules import REQUESTS_FLAG, Detail
from vllm_autoprune.serving.served_state import served_state
from vllm_autoprune.tpdsl.atoms.source import MAX_BUDGET, BudgetCall
from vllm_autoprune.tpdsl.cells import Cells
from vllm_autoprune.tpdsl.loading import escape_unprintable, suggest_name
from vllm_autoprune.tpdsl.tokens import POSITIONS, Positions

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.renderers.online_renderer import OnlineRenderer

# Request fields: the ``autoprune`` entry of a request's ``mm_processor_kwargs``, parsed.

SALT = "_autoprune_salt"
"""Key beside the entry under which the renderer passes on the request's :class:`CacheSalt`."""

_MAX_PROBLEMS = 16
"""Problems listed in one error."""

_MAX_COUNTED = 256
"""Problems above which only their number is told: a message for each takes 50 microseconds, in
which the whole process waits."""


class CacheSalt(str):
    """A request's ``cache_salt``; a type of its own, so that no JSON body can send it here."""

    __slots__ = ()


class _SharedBudget(BaseModel):
    """Budget form ``{"shared": K}``: so many tokens for all images of the request together.

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
    """Split ``total`` tokens evenly over images of these sizes, the first taking the remainder.

    What an image is too small to use goes to the others, evenly again. The budgets add up to
    ``total``, or to all the tokens there are where that is less.
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
    "cells": 'give "flat", "predicted", "none", or "flat:2" with a tolerance up to 32',
    "enabled": "give true or false",
    "keep": 'give "state", "reference", "random" or "resized"',
    "positions": f"give {', '.join(POSITIONS)}",
    "video_budget": 'give the tokens of all frames, a share, or "tokens_per_frame:16"',
    "instructions": "give a list of texts, one an image",
    "video_instructions": "give a list of texts, one a video",
    "details": 'give a list of "low", "high" or null, one an image',
    "turns": "give a list of numbers from 0 on, one an image; null where no question follows it",
    "recall": "give a number of tokens, 0 for none",
    "recall_turns": 'give a list of {"images": images before the turn, "text": its text}',
}
_KNOWN = f"use: {', '.join(_FIX)}"
DETAIL_FIX = 'put it beside the picture: "image_url": {"url": ..., "detail": "low"}'


class PruningRequest(BaseModel):
    """Fields of the entry; the server's own choice holds for each one that is left out.

    ``budget``: K of each image, a list with one K an image, or :class:`_SharedBudget`;
    ``video_budget``: K of each clip, by a state that prunes them. ``state``:
    the name of a shipped state, or a whole state. ``enabled`` false: every token is kept.
    ``cells``: the rule by which cells are dropped before the vision tower, or ``"none"``.
    ``positions``: where kept tokens stand.
    ``keep``: the state, or a control: ``"reference"`` (its base policy alone), ``"random"``
    or ``"resized"`` (the resize control).
    ``recall``: tokens that each later turn without an image gets of the images before it.
    ``instructions`` has one text an image, ``details`` one level an image, ``turns`` a number an
    image, equal for neighbours that one question follows, None where none does; ``recall_turns``
    the turns that recall. The renderer fills them from the chat messages, a request without
    messages may fill them itself, with an image token in its prompt for each image and each turn.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    budget: BudgetCall | tuple[BudgetCall, ...] | _SharedBudget | None = None
    video_budget: BudgetCall | None = None
    state: str | dict[str, object] | None = None
    cells: Cells | Literal["none"] | None = None
    positions: Positions | None = None
    enabled: bool = True
    keep: Chooser = "state"
    instructions: list[str] | None = None
    video_instructions: list[str] | None = None
    details: list[Detail | None] | None = None
    turns: list[Annotated[int, Field(ge=0)] | None] | None = None
    recall: int | None = Field(default=None, ge=0, le=MAX_BUDGET)
    recall_turns: list[RecallTurn] | None = None

    # Plain validators: a union reports one error for every form that a value does not have.

    @field_validator("budget", mode="plain")
    @classmethod
    def parse_budget(cls, value: object) -> object:
        """The budget in any of its three forms."""
        try:
            if isinstance(value, list) and value:
                return tuple(map(BudgetCall.parse, value))
            if isinstance(value, dict) and list(value) == ["shared"]:
                return _SharedBudget(shared=BudgetCall.parse(value["shared"]))
            return None if value is None else BudgetCall.parse(value)
        except BudgetError as error:
            what = error.problems[0].what
            raise PydanticCustomError("budget", "{what}", {"what": what}) from None

    @field_validator("video_budget", mode="plain")
    @classmethod
    def parse_video_budget(cls, value: object) -> BudgetCall | None:
        """The budget of a clip."""
        try:
            return None if value is None else BudgetCall.parse(value, clip=True)
        except BudgetError as error:
            what = error.problems[0].what
            raise PydanticCustomError("budget", "{what}", {"what": what}) from None

    @field_validator("state", mode="plain")
    @classmethod
    def parse_state(cls, value: object) -> object:
        """The name of a state, or a state."""
        if value is None or isinstance(value, str | dict):
            return value
        raise PydanticCustomError("state", "neither a name nor a state")

    @field_validator("cells", mode="plain")
    @classmethod
    def parse_cells(cls, value: object) -> object:
        """A rule for cells."""
        if value is None or value == "none":
            return value
        try:
            return Cells.parse(value, f"{ENTRY}/cells")
        except StateError as error:
            raise PydanticCustomError(
                "cells", "{what}", {"what": error.problems[0].what}
            ) from None

    @classmethod
    def parse(cls, entry: object) -> PruningRequest:
        """The parsed entry; raises RequestError with every problem, which vLLM answers by 400."""
        if entry is None:
            return cls()
        if not isinstance(entry, dict):
            raise refuse(ENTRY, "is not an object", f"write {_format_entry(entry)}")
        if not all(isinstance(key, str) for key in entry):
            raise refuse(ENTRY, "has keys that are no text", _KNOWN)
        try:
            return cls.model_validate(entry)
        except ValidationError as error:
            if (count := error.error_count()) > _MAX_COUNTED:
                raise refuse(ENTRY, f"has {count} problems", _KNOWN) from None
            problems: dict[str, Problem] = {}
            for detail in error.errors(include_url=False, include_input=False)[
                :_MAX_PROBLEMS
            ]:
                place = [str(step) for step in detail["loc"]]
                where = "/".join([ENTRY, *map(_shorten, place)])
                what = detail["msg"]
                fix = _FIX.get(place[0] if place else "", _KNOWN)
                if detail["type"] == "extra_forbidden" and len(place) == 1:
                    what = "is not a known field"
                    name = place[0]
                    fix = (
                        DETAIL_FIX
                        if name == "detail"
                        else suggest_name(name, list(_FIX))
                    )
                problems.setdefault(
                    where, Problem(where, escape_unprintable(what, 200), fix)
                )
            raise RequestError("request", list(problems.values())) from None

    def split_budget(self, sizes: Sequence[int]) -> Sequence[int | None]:
        """K asked for each of the request's images of N tokens; None for the state's own.

        From here on a budget is a number: however it was said, equal K are equal plans.

        Raises :class:`RequestError` where their number does not fit.
        """
        budget = self.budget
        if isinstance(budget, _SharedBudget):
            total = budget.shared.tokens_kept(sum(sizes))
            if total < len(sizes):
                what = f"{total} in all, and the number of images is {len(sizes)}"
                raise refuse(
                    f"{ENTRY}/budget/shared", what, "give at least one token an image"
                )
            return split_shared_budget(total, sizes)
        if isinstance(budget, tuple):
            if len(budget) != len(sizes):
                what = (
                    f"a list of {len(budget)}, and the number of images is {len(sizes)}"
                )
                raise refuse(
                    f"{ENTRY}/budget", what, "give one an image, in their order"
                )
            return [
                each.tokens_kept(size) for each, size in zip(budget, sizes, strict=True)
            ]
        return [None if budget is None else budget.tokens_kept(size) for size in sizes]

    def state_label(self, served: str) -> str:
        """Metric label of the state: by name, or ``request`` for one that the request brings."""
        if not self.enabled:
            return "off"
        if self.state is None:
            return served
        return self.state if isinstance(self.state, str) else "request"


def _format_entry(value: object) -> str:
    """JSON of the entry that says what a value in its place, or elsewhere, was probably to say."""
    if isinstance(value, bool):
        return json.dumps({"enabled": value})
    return json.dumps(
        {"budget": value if isinstance(value, int) and 0 < value < 10**6 else 64}
    )


def _shorten(name: str) -> str:
    return escape_unprintable(name, 40)


# Settings in HTTP headers, for endpoints whose bodies have no place for them.
#
# ``x-autoprune-budget: 64`` is the entry's ``"budget": 64``, ``x-autoprune-state: visionzip`` its
# ``"state": "visionzip"``. The middleware keeps the headers of a request in a context variable:
# each request has a task of its own, and what a task sets no other one sees.

_PREFIX = f"x-{REQUEST_FIELD}"
HEADERS = {
    f"{_PREFIX}-budget": 'a budget, such as "64" or "1/8"',
    f"{_PREFIX}-cells": '"flat", "predicted" or "none"',
    f"{_PREFIX}-enabled": '"true" or "false"',
    f"{_PREFIX}-positions": f"one of {', '.join(POSITIONS)}",
    f"{_PREFIX}-state": "the name of a shipped state",
    f"{_PREFIX}-video-budget": 'a budget, such as "tokens_per_frame:16" or "1/8"',
}
"""The headers, each named like its field of the entry, and what they hold."""

_NAMES = frozenset({"cells", "positions", "state"})
"""Fields whose header holds a name; those of others hold JSON, or a budget as text."""

_Headers = Sequence[tuple[str, str]]
"""Headers that are ours, or nearly named so, as sent."""

_current: ContextVar[_Headers] = ContextVar("autoprune_headers", default=())
"""Headers of this task's request; none where it did not come over HTTP."""


@contextmanager
def _handling(headers: _Headers) -> Iterator[None]:
    """Handle a request with these headers in this context."""
    token = _current.set(headers)
    try:
        yield
    finally:
        _current.reset(token)


class KeepHeaders:
    """ASGI middleware that keeps our headers of a request; vLLM adds it by ``--middleware``."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Mapping[str, Any], *channels: object) -> None:
        """Handle one connection (ASGI)."""
        headers: Iterable[tuple[bytes, bytes]] = scope.get("headers", ())
        pairs = [
            (name.decode("latin-1"), text.decode("latin-1")) for name, text in headers
        ]
        with _handling(
            [pair for pair in pairs if _resembles_entry(pair[0][:_MAX_NAME])]
        ):
            await self._app(scope, *channels)


def _join_headers(entry: object, headers: _Headers) -> object:
    """The entry of a request with the fields that its headers set.

    Raises RequestError where a header is unknown, malformed or sent twice, or where the entry has
    its field with another value.
    """
    fields: dict[str, object] = {}
    for header, text in headers:
        where = f"header {_shorten(header)}"
        if header not in HEADERS:
            # Also with underscores: a proxy that removes the headers of its clients has to know
            # their names.
            raise refuse(where, "is not a known header", f"send {' or '.join(HEADERS)}")
        name = header.removeprefix(f"{_PREFIX}-").replace("-", "_")
        if name in fields:
            raise refuse(where, "is sent more than once", "send it once")
        value: object = text
        if name not in _NAMES:
            with suppress(ValueError, RecursionError):  # a share is no JSON
                value = json.loads(text)
        try:
            parsed = PruningRequest.parse({name: value})
        except RequestError:
            value = None
        if value in (None, ""):
            raise refuse(where, f"is {_shorten(text)!r}", f"give {HEADERS[header]}")
        in_body = entry.get(name) if isinstance(entry, dict) else None
        if in_body is not None and PruningRequest.parse({name: in_body}) != parsed:
            raise refuse(where, "contradicts the body", "send one of the two")
        fields[name] = value
    if entry is None:
        return fields or None
    return {**entry, **fields} if isinstance(entry, dict) else entry


# Pruning fields of a request that stand where nothing reads them, answered instead of ignored.

_CLIENT_FIX = "send {entry} (extra_body={{{entry}}} in the OpenAI client)"
OFFLINE_FIX = "put {entry} into the prompt's dict, or mm_processor_kwargs into LLM.chat's arguments"
"""What to write, where it is not a request of OpenAI's form."""

_NAMED_BY_CLIENTS = frozenset(
    {
        "arguments",
        "function",
        "function_call",
        "functions",
        "guided_json",
        "input_schema",
        "json_schema",
        "parameters",
        "response_format",
        "schema",
        "structured_outputs",
        "tool_calls",
        "tool_choice",
        "tools",
    }
)
"""Fields whose content has names of the client's own: tools, schemas."""

_NOTES = "metadata"
"""Field of OpenAI's API with notes of the client's own, as texts."""


def _check_request(
    model_config: ModelConfig, request: BaseModel, trusted: bool
) -> None:
    """Raise :class:`RefusedRequest` where a request's pruning fields would have no effect.

    What its headers set is written into its ``mm_processor_kwargs``. ``trusted`` is
    ``--trust-request-mm-kwargs``.
    """
    served = served_state(model_config)
    kwargs: Any = getattr(request, KWARGS, None) or {}
    if served is None or not isinstance(kwargs, Mapping):
        return  # completions do not declare it: refused by vLLM
    headers = _current.get()
    with refusing_requests():
        refuse_misplaced({**vars(request), **(request.model_extra or {})}, kwargs)
        if REQUEST_FIELD in kwargs:
            PruningRequest.parse(kwargs[REQUEST_FIELD])
        entry = _join_headers(kwargs.get(REQUEST_FIELD), headers)
        if headers:
            vars(request)[KWARGS] = {
                **kwargs,
                REQUEST_FIELD: entry,
            }  # not all declare it
        if (headers or REQUEST_FIELD in kwargs) and not (
            trusted or served.rules.explicit
        ):
            where = f"header {headers[0][0]}" if headers else ENTRY
            what = f"this server's requests may set nothing, because no {REQUESTS_FLAG} is given"
            fix = f"leave it out, or serve with {REQUESTS_FLAG} budget"
            raise refuse(where, what, fix, Refusal.NOT_ALLOWED)


_PROBE = "_render_probe_prompt"
"""Method of vLLM 0.32 alone."""


@depends_on(
    "vllm.renderers.online_renderer:OnlineRenderer",
    "preprocess_chat",
    "preprocess_cmpl",
)
@depends_on("vllm.entrypoints.pooling.base.serving:PoolingBaseServing", "_init_ctx")
def check_requests() -> None:
    """Check the fields of every chat, completion and pooling request before it is rendered.

    A prompt that vLLM renders once to know the template, within the first client's request, has
    none of its headers.

    Why: ``OpenAIBaseModel`` accepts unknown fields and drops them without a word to the client, and
    what a request may set in ``mm_processor_kwargs`` is refused with a fix that is not ours.
    Remove when: vLLM refuses unknown fields, or lets a plugin name its own.
    """
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
    from vllm.renderers.online_renderer import OnlineRenderer

    def check_first(at: int) -> Callable[..., object]:
        """The step that begins with the check, of the argument at a place."""

        def preprocess(
            stock: Callable[..., object],
            self: OnlineRenderer,
            *args: object,
            **named: object,
        ) -> object:
            request: Any = named["request"] if "request" in named else args[at]
            _check_request(self.model_config, request, self.trust_request_mm_kwargs)
            return stock(self, *args, **named)

        return preprocess

    for name in ("preprocess_chat", "preprocess_cmpl"):
        patch(OnlineRenderer, name)(check_first(0))
    patch(PoolingBaseServing, "_init_ctx")(check_first(1))
    if _PROBE in vars(AnthropicServingMessages):

        @patch(AnthropicServingMessages, _PROBE)
        async def probe(
            stock: Callable[..., Awaitable[object]], *args: object, **named: object
        ) -> object:
            with _handling(()):
                return await stock(*args, **named)


def refuse_misplaced(  # noqa: C901
    fields: object, kwargs: Mapping[str, object], fix: str = _CLIENT_FIX
) -> None:
    """Raise :class:`RequestError` with the first pruning field that nothing reads.

    ``fields`` are those of a request, or of an offline prompt; ``kwargs`` what is read of its
    ``mm_processor_kwargs``, where it may have an entry. A field is looked for beside the entry, and
    at any depth outside the kwargs.
    """
    for key in kwargs:
        where = f"{KWARGS}/{_shorten(key)}"
        if key in PruningRequest.model_fields:
            raise refuse(
                where, "is not read there", f"put it one level down: {_quote_entry()}"
            )
        if key != REQUEST_FIELD and _resembles_entry(key[:_MAX_NAME]):
            raise refuse(
                where, "is not a known entry", f"did you mean {REQUEST_FIELD!r}?"
            )
    waiting: list[tuple[tuple[object, ...], object]] = [((), fields)]
    while waiting:
        place, value = waiting.pop()
        children: Iterable[tuple[object, object]]
        if isinstance(value, Mapping):
            children = value.items()
        elif isinstance(value, list | tuple) and not isinstance(
            next(iter(value), 0), int | float
        ):
            children = enumerate(value)  # token ids have no names
        else:
            continue
        for name, child in children:
            if child is None or (name == KWARGS and kwargs and not place):
                continue
            if isinstance(name, str) and _is_setting(place, name, child):
                where = "/".join(_shorten(str(step)) for step in (*place, name))
                what = (
                    "is ignored there"
                    if place
                    else "is ignored at the top of a request"
                )
                raise refuse(where[-200:], what, fix.format(entry=_quote_entry(child)))
            of_tool = name in _NAMED_BY_CLIENTS or (
                name == "input" and isinstance(child, dict)
            )
            if isinstance(child, dict | list | tuple) and not of_tool:
                waiting.append(((*place, name), child))


def _is_setting(place: Sequence[object], name: str, value: object) -> bool:
    """Whether a field is an entry, or the budget of ignored kwargs or of an image."""
    inside = place[-1] if place else ""
    if inside == KWARGS and name in PruningRequest.model_fields:
        return True
    if inside == "image_url" and name == "budget":
        return True
    if not _resembles_entry(name[:_MAX_NAME]):
        return False
    # A note may have the name of an entry, but has none of its fields.
    has_fields = isinstance(value, dict) and not value.keys().isdisjoint(
        PruningRequest.model_fields
    )
    return has_fields or _NOTES not in place


_MAX_NAME = 100
"""Characters of a name that are compared: compared names are remembered."""


@lru_cache(maxsize=1024)
def _resembles_entry(name: str) -> bool:
    """Whether a key is the entry's name, one with more behind it, or nearly so."""
    if name.startswith("_"):
        return False
    word = name.lower().replace("-", "").replace("_", "").removeprefix("x")
    # So near is a word with one letter missing, changed, added or exchanged with the next one.
    return word.startswith(REQUEST_FIELD) or bool(
        get_close_matches(word, [REQUEST_FIELD], 1, 0.88)
    )


def _quote_entry(value: object = None) -> str:
    return f'"{KWARGS}": {{"{REQUEST_FIELD}": {_format_entry(value)}}}'
