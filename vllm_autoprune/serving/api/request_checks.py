"""Pruning fields in places of a request where nothing reads them: refused instead of ignored."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from vllm_autoprune.errors import Refusal, RequestError
from vllm_autoprune.serving.api.headers import current_headers, handling, join_headers
from vllm_autoprune.serving.api.refusal import refusing_requests
from vllm_autoprune.serving.api.request import (
    PruningRequest,
    quote_entry,
    resembles_entry,
    shorten,
)
from vllm_autoprune.serving.compat import patch, wraps
from vllm_autoprune.serving.plan import ENTRY, KWARGS, REQUEST_FIELD
from vllm_autoprune.serving.request_rules import REQUESTS_FLAG
from vllm_autoprune.serving.served_state import served_state

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.renderers.online_renderer import OnlineRenderer

_CLIENT_FIX = "send {entry} (extra_body={{{entry}}} in the OpenAI client)"
OFFLINE_FIX = "put {entry} into the prompt's dict, or mm_processor_kwargs into LLM.chat's arguments"
"""Suggested fix for inputs that are not requests of OpenAI's form."""

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
"""Fields whose content has names that the client chooses: tools, schemas."""

_NOTES = "metadata"
"""Field of OpenAI's API for a client's own notes, as texts."""


def check_request(model_config: ModelConfig, request: BaseModel, trusted: bool) -> None:
    """Raise :class:`RefusedRequest` if a request's pruning fields would have no effect.

    Settings in its headers are written into its ``mm_processor_kwargs``. ``trusted`` is the flag
    ``--trust-request-mm-kwargs``.
    """
    served = served_state(model_config)
    kwargs: Any = getattr(request, KWARGS, None) or {}
    if served is None or not isinstance(kwargs, Mapping):
        return  # completions do not declare it: refused by vLLM
    headers = current_headers()
    with refusing_requests():
        refuse_misplaced({**vars(request), **(request.model_extra or {})}, kwargs)
        if REQUEST_FIELD in kwargs:
            PruningRequest.parse(kwargs[REQUEST_FIELD])
        entry = join_headers(kwargs.get(REQUEST_FIELD), headers)
        if headers:
            # Set in vars(), because not all kinds of requests declare the field.
            vars(request)[KWARGS] = {**kwargs, REQUEST_FIELD: entry}
        may_ask = trusted or served.rules.explicit
        if (headers or REQUEST_FIELD in kwargs) and not may_ask:
            where = f"header {headers[0][0]}" if headers else ENTRY
            what = f"this server's requests may set nothing, because no {REQUESTS_FLAG} is given"
            fix = f"leave it out, or serve with {REQUESTS_FLAG} budget"
            raise RequestError.of(where, what, fix, kind=Refusal.NOT_ALLOWED)


_PROBE = "_render_probe_prompt"
"""Method that only vLLM 0.32 has."""


@wraps(
    "vllm.renderers.online_renderer:OnlineRenderer",
    "preprocess_chat",
    "preprocess_cmpl",
)
@wraps("vllm.entrypoints.pooling.base.serving:PoolingBaseServing", "_init_ctx")
@wraps(
    "vllm.entrypoints.anthropic.serving:AnthropicServingMessages",
    _PROBE,
    optional=True,
)
def check_requests() -> None:
    """Check the fields of every chat, completion and pooling request before it is rendered.

    vLLM renders a prompt once to learn about the template, during the first client's request; the
    headers of that request do not apply to it.

    Why: ``OpenAIBaseModel`` accepts unknown fields and drops them silently. vLLM's own refusal of
    fields in ``mm_processor_kwargs`` suggests a fix that does not apply here.
    Remove when: vLLM refuses unknown fields, or lets a plugin name its own.
    """
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
    from vllm.renderers.online_renderer import OnlineRenderer

    def check_first(position: int) -> Callable[..., object]:
        """A wrapper that first checks the request, which is the argument at ``position``."""

        def preprocess(
            stock: Callable[..., object],
            self: OnlineRenderer,
            *args: object,
            **named: object,
        ) -> object:
            request: Any = named["request"] if "request" in named else args[position]
            check_request(self.model_config, request, self.trust_request_mm_kwargs)
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
            with handling(()):
                return await stock(*args, **named)


def refuse_misplaced(
    fields: Mapping[str, object], kwargs: Mapping[str, object], fix: str = _CLIENT_FIX
) -> None:
    """Raise :class:`RequestError` for the first pruning field that nothing reads.

    ``fields`` are those of a request, or of an offline prompt; ``kwargs`` are its
    ``mm_processor_kwargs`` as they are read, which may contain an entry. Misplaced fields are
    searched for beside the entry, and at any depth outside the kwargs.
    """
    for key in kwargs:
        where = f"{KWARGS}/{shorten(key)}"
        if key in PruningRequest.model_fields:
            right_place = f"put it one level down: {quote_entry()}"
            raise RequestError.of(where, "is not read there", right_place)
        if key != REQUEST_FIELD and resembles_entry(key):
            suggestion = f"did you mean {REQUEST_FIELD!r}?"
            raise RequestError.of(where, "is not a known entry", suggestion)
    if kwargs:
        fields = {name: value for name, value in fields.items() if name != KWARGS}
    for path, name, value in _walk_fields(fields):
        if isinstance(name, str) and _is_setting(path, name, value):
            where = "/".join(shorten(str(step)) for step in (*path, name))
            what = "is ignored there" if path else "is ignored at the top of a request"
            fix = fix.format(entry=quote_entry(value))
            raise RequestError.of(where[-200:], what, fix)


def _walk_fields(
    fields: Mapping[str, object],
) -> Iterator[tuple[tuple[object, ...], object, object]]:
    """Path, name and value of each field at any depth, except in content that clients name."""
    containers: list[tuple[tuple[object, ...], Any]] = [((), fields)]
    while containers:
        path, container = containers.pop()
        is_object = isinstance(container, Mapping)
        for name, value in container.items() if is_object else enumerate(container):
            if value is not None:
                yield path, name, value
            if _holds_fields(name, value):
                containers.append(((*path, name), value))


def _holds_fields(name: object, value: object) -> bool:
    if name in _NAMED_BY_CLIENTS:
        return False
    if isinstance(value, dict):
        return name != "input"
    # Token ids have no names.
    return isinstance(value, list | tuple) and not isinstance(
        next(iter(value), 0), int | float
    )


def _is_setting(path: Sequence[object], name: str, value: object) -> bool:
    """Whether a field is an entry, or a budget outside the entry in kwargs or in an image."""
    parent = path[-1] if path else ""
    if parent == KWARGS and name in PruningRequest.model_fields:
        return True
    if parent == "image_url" and name == "budget":
        return True
    if not resembles_entry(name):
        return False
    # A note of the client may have the entry's name, but not its fields.
    has_fields = isinstance(value, dict) and not value.keys().isdisjoint(
        PruningRequest.model_fields
    )
    return has_fields or _NOTES not in path
