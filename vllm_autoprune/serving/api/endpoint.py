"""Endpoints: `GET /v1/autoprune` describes the served state, `POST /v1/autoprune/plan` plans."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from vllm_autoprune.errors import Refusal, RequestError
from vllm_autoprune.serving.api.engine_requests import RenderedHashes
from vllm_autoprune.serving.api.refusal import refusing_requests
from vllm_autoprune.serving.api.sized_pictures import name_pictures
from vllm_autoprune.serving.description import describe
from vllm_autoprune.serving.served_state import ServedState, served_state

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.inputs import EngineInput
    from vllm.renderers.online_renderer import OnlineRenderer
    from vllm.tasks import SupportedTask

NAME = "autoprune_endpoint"
PATH = "/v1/autoprune"
PLAN = f"{PATH}/plan"


class AutopruneEndpoint:
    """``EndpointPlugin`` of vLLM that describes the served state and plans prompts for routers.

    It never calls the engine. vLLM loads endpoint plugins only if ``VLLM_PLUGINS`` names them. The
    routes are below ``/v1``, so vLLM's API key guards them.
    """

    name = NAME
    required_tasks: tuple[SupportedTask, ...] | None = (
        "generate",
        "render",
        "embed",
        "classify",
        "token_embed",
        "token_classify",
    )

    def __init__(self) -> None:
        self._served: ServedState | None = None
        self._description: dict[str, JsonValue] = {"state": None}
        self._renderer: OnlineRenderer | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Add both routes."""
        from fastapi import Depends
        from fastapi.responses import JSONResponse
        from vllm.entrypoints.openai.chat_completion.protocol import (
            ChatCompletionRequest,
        )
        from vllm.entrypoints.serve.utils.api_utils import validate_json_request

        async def answer() -> dict[str, JsonValue]:
            return self._description

        async def plan(request: ChatCompletionRequest) -> JSONResponse:
            status, content = await self._plan(request)
            return JSONResponse(content, status)

        # FastAPI resolves annotations in the module, which imports no protocol of vLLM.
        plan.__annotations__ = {"request": ChatCompletionRequest}
        app.add_api_route(PATH, answer, methods=["GET"])
        is_json = [Depends(validate_json_request)]
        app.add_api_route(PLAN, plan, methods=["POST"], dependencies=is_json)

    async def init_state(
        self, engine_client: EngineClient | None, state: State, args: Namespace
    ) -> None:
        """Describe the served state once, because it does not change while the server runs.

        A render server has no engine, and the same renderer.
        """
        self._renderer = state.online_renderer
        self._served = served_state(state.online_renderer.model_config)
        if self._served is not None:
            self._description = describe(self._served)

    async def _plan(
        self, request: ChatCompletionRequest
    ) -> tuple[int, dict[str, JsonValue]]:
        """Status and answer of `POST /v1/autoprune/plan`."""
        with refusing_requests():
            if self._served is None or self._renderer is None:
                what = "this server prunes nothing"
                fix = "serve with --autoprune-state"
                raise RequestError.of(PLAN, what, fix, kind=Refusal.UNSUPPORTED)
            request.messages = name_pictures(request.messages)
        rendered = await self._renderer.render_chat(request, skip_mm_cache=True)
        if not isinstance(rendered, tuple):
            return rendered.error.code, rendered.model_dump(mode="json")
        _, (prompt,) = rendered
        return 200, _describe_prompt(prompt)


def _describe_prompt(prompt: EngineInput) -> dict[str, JsonValue]:
    """Token ids of a prompt, its pictures, and the span and identity of each of their items."""
    fields: dict[str, Any] = {**prompt}
    tokens: list[JsonValue] = [*fields["prompt_token_ids"]]
    hashes = fields.get("mm_hashes", {})
    spans = fields.get("mm_placeholders", {}).get("image", [])
    items: list[JsonValue] = [
        {"offset": span.offset, "length": span.length, "identity": identity}
        for span, identity in zip(spans, hashes.get("image", []), strict=True)
    ]
    pictures: list[JsonValue] = []
    if isinstance(hashes, RenderedHashes):
        pictures = [picture.url for picture in hashes.pictures]
    return {
        "count": len(tokens),
        "tokens": tokens,
        "pictures": pictures,
        "items": items,
    }
