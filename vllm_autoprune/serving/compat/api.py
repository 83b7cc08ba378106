"""Patches of vLLM's API server: the renderer, and what a request may set."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from vllm_autoprune.errors import RequestError
from vllm_autoprune.serving.compat import MARK, depends_on, patch

if TYPE_CHECKING:
    from pydantic import BaseModel
    from vllm.config import ModelConfig
    from vllm.renderers.online_renderer import OnlineRenderer


@depends_on("vllm.renderers.registry:RENDERER_REGISTRY", "renderers")
def register_renderer(mode: str, module: str, name: str) -> None:
    """Serve a renderer mode by our subclass.

    Not through ``RENDERER_REGISTRY.register``: it warns about the very replacement meant here.
    Remove when: renderers can be extended without replacing them.
    """
    from vllm.renderers.registry import RENDERER_REGISTRY

    RENDERER_REGISTRY.renderers[mode] = (module, name)


@depends_on("vllm.renderers.online_renderer", "validate_request_mm_kwargs")
@depends_on("vllm.entrypoints.pooling.base.serving", "validate_request_mm_kwargs")
def allow_mm_kwarg(key: str) -> None:
    """Let one entry of a request's ``mm_processor_kwargs`` pass vLLM's check of them.

    Why: ``--trust-request-mm-kwargs`` is all or nothing, and an operator who lets clients choose
    a budget has no reason to let them choose the size of images as well. Every other entry is
    judged as before; who reads this one judges it for itself.
    Remove when: vLLM can trust entries one by one.
    """
    from vllm.entrypoints.pooling.base import serving as pooling
    from vllm.renderers import online_renderer

    for module in (online_renderer, pooling):
        stock = module.validate_request_mm_kwargs
        if not getattr(stock, MARK, False):
            module.validate_request_mm_kwargs = _without(key, stock)


def _without(key: str, stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def validate(*, mm_processor_kwargs: object, **rest: object) -> None:
        if isinstance(mm_processor_kwargs, Mapping):
            mm_processor_kwargs = {k: v for k, v in mm_processor_kwargs.items() if k != key}
        stock(mm_processor_kwargs=mm_processor_kwargs or None, **rest)

    setattr(validate, MARK, True)
    return validate


_RequestCheck = Callable[["ModelConfig", "BaseModel", bool], None]
"""Takes a request, and whether its ``mm_processor_kwargs`` are trusted."""


_PROBE = "_render_probe_prompt"
"""Method of vLLM 0.32 alone."""

_Handling = Callable[[None], AbstractContextManager[None]]
"""Makes the context of a request that no client sent."""


@depends_on("vllm.renderers.online_renderer:OnlineRenderer", "preprocess_chat", "preprocess_cmpl")
@depends_on("vllm.entrypoints.pooling.base.serving:PoolingBaseServing", "_init_ctx")
def check_requests(check: _RequestCheck, handling: _Handling) -> None:
    """Call ``check`` with every chat, completion and pooling request before it is rendered.

    A prompt that vLLM renders once to know the template, within the first client's request, is
    ``handling`` apart from it.

    Why: ``OpenAIBaseModel`` accepts unknown fields and drops them without a word to the client, and
    what a request may set in ``mm_processor_kwargs`` is refused with a fix that is not ours.
    Remove when: vLLM refuses unknown fields, or lets a plugin name its own.
    """
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers.online_renderer import OnlineRenderer

    def check_first(at: int) -> Callable[..., object]:
        """The step that begins with the check, of the argument at a place."""

        def preprocess(
            stock: Callable[..., object], self: OnlineRenderer, *args: object, **named: object
        ) -> object:
            request: Any = named["request"] if "request" in named else args[at]
            try:
                check(self.model_config, request, self.trust_request_mm_kwargs)
            except RequestError as error:
                # Of all errors of this step every endpoint answers only vLLM's own by 400.
                raise VLLMValidationError(str(error), parameter="mm_processor_kwargs") from None
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
            with handling(None):
                return await stock(*args, **named)
