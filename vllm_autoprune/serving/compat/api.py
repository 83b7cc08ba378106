"""Patches of vLLM's API server: the renderer, and what a request may set."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from vllm_autoprune.errors import RequestError
from vllm_autoprune.serving.compat import MARK, wrap

if TYPE_CHECKING:
    from pydantic import BaseModel
    from vllm.config import ModelConfig
    from vllm.renderers.online_renderer import OnlineRenderer


def register_renderer(mode: str, module: str, name: str) -> None:
    """Serve a renderer mode by our subclass.

    Not through ``RENDERER_REGISTRY.register``: it warns about the very replacement meant here.
    Remove when: renderers can be extended without replacing them.
    """
    from vllm.renderers.registry import RENDERER_REGISTRY

    RENDERER_REGISTRY.renderers[mode] = (module, name)


def allow_mm_kwarg(key: str) -> None:
    """Let one entry of a request's ``mm_processor_kwargs`` pass vLLM's check of them.

    Why: ``--trust-request-mm-kwargs`` is all or nothing, and an operator who lets clients choose
    a budget has no reason to let them choose the size of images as well. Every other entry is
    judged as before; who reads this one judges it for itself.
    Remove when: vLLM can trust entries one by one.
    """
    from vllm.renderers import online_renderer

    stock = online_renderer.validate_request_mm_kwargs
    if getattr(stock, MARK, False):
        return

    @functools.wraps(stock)
    def validate(*, mm_processor_kwargs: Mapping[str, object] | None, **rest: object) -> None:
        others = {k: v for k, v in (mm_processor_kwargs or {}).items() if k != key}
        stock(mm_processor_kwargs=others or None, **rest)

    setattr(validate, MARK, True)
    online_renderer.validate_request_mm_kwargs = validate


RequestCheck = Callable[["ModelConfig", Mapping[str, object], Mapping[str, object], bool], None]
"""Takes a request's fields that vLLM does not know, its kwargs, and whether those are trusted."""


def check_requests(check: RequestCheck) -> None:
    """Call ``check`` with every chat and completion request before it is rendered.

    Why: ``OpenAIBaseModel`` accepts unknown fields and drops them without a word to the client, and
    what a request may set in ``mm_processor_kwargs`` is refused with a fix that is not ours.
    Remove when: vLLM refuses unknown fields, or lets a plugin name its own.
    """
    from vllm.renderers.online_renderer import OnlineRenderer

    for name in ("preprocess_chat", "preprocess_cmpl"):
        wrap(OnlineRenderer, name, functools.partial(_wrap_preprocess, check))


def _wrap_preprocess(check: RequestCheck, stock: Callable[..., object]) -> Callable[..., object]:
    def preprocess(
        self: OnlineRenderer, request: BaseModel, *args: object, **named: object
    ) -> object:
        from vllm.exceptions import VLLMValidationError

        kwargs = getattr(request, "mm_processor_kwargs", None) or {}
        try:
            check(
                self.model_config, request.model_extra or {}, kwargs, self.trust_request_mm_kwargs
            )
        except RequestError as error:
            # Of all errors of this step every endpoint answers only vLLM's own by 400.
            raise VLLMValidationError(str(error), parameter="mm_processor_kwargs") from None
        return stock(self, request, *args, **named)

    return preprocess
