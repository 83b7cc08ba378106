"""Description of the served state, for the log and `GET /v1/autoprune`."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from pydantic import JsonValue

from vllm_autoprune.serving.description import describe
from vllm_autoprune.serving.served_state import served_state

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient
    from vllm.tasks import SupportedTask

NAME = "autoprune_endpoint"
PATH = "/v1/autoprune"


class AutopruneEndpoint:
    """``EndpointPlugin`` of vLLM that answers with a fixed description; never calls the engine.

    vLLM loads endpoint plugins only if ``VLLM_PLUGINS`` names them. The route is below ``/v1``, so
    vLLM's API key guards it.
    """

    name = NAME
    required_tasks: tuple[SupportedTask, ...] | None = (
        "generate",
        "embed",
        "classify",
        "token_embed",
        "token_classify",
    )

    def __init__(self) -> None:
        self._description: dict[str, JsonValue] = {"state": None}

    def attach_router(self, app: FastAPI) -> None:
        """Add the route ``GET /v1/autoprune``."""

        async def answer() -> dict[str, JsonValue]:
            return self._description

        app.add_api_route(PATH, answer, methods=["GET"])

    async def init_state(
        self, engine_client: EngineClient | None, state: State, args: Namespace
    ) -> None:
        """Describe the served state once, because it does not change while the server runs."""
        served = (
            None if engine_client is None else served_state(engine_client.model_config)
        )
        if served is not None:
            self._description = describe(served)
