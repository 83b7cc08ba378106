"""Description of the served state, for the log and `GET /v1/autoprune`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from vllm_autoprune import __version__
from vllm_autoprune.serving.served_state import ServedState, served_state
from vllm_autoprune.serving.settings import REQUESTS_FLAG

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient
    from vllm.tasks import SupportedTask

_PERMISSIONS = {
    "budget": "their budget",
    "shipped-states": "a state that ships",
    "states": "any state",
}


def describe_as_json(served: ServedState) -> dict[str, JsonValue]:
    """JSON of `GET /v1/autoprune`: the served state, its digest, budget and evidence.

    The core is that before it is moved to the edge of a KV block. No local path is told.
    """
    policy, state, rules, tower = served.policy(), served.state, served.rules, served.tower
    core = policy.state.core
    # Embedding space of relevance, with its reason.
    relevance = None
    if policy.reads_instruction and tower is None:
        reason = "because no --autoprune-text-tower is given"
        relevance = f"the language model's input embeddings, sign +1, {reason}"
    elif policy.reads_instruction and tower is not None:
        local = Path(tower.path).exists() or Path(tower.path).is_absolute()
        name = "from a local folder" if local else tower.path
        relevance = f"CLIP text tower {name}, sign {tower.sign:+d}, because {tower.reason}"
    # What requests may set, with the flag that lets them.
    if not rules.explicit:
        trusted = "with --trust-request-mm-kwargs: their budget"
        requests = f"nothing, because no {REQUESTS_FLAG} is given ({trusted})"
    elif rules.level == "none":
        requests = f"nothing, by {REQUESTS_FLAG} none"
    else:
        tokens = f"{rules.minimum} to {rules.maximum} tokens of an image"
        requests = f"{_PERMISSIONS[rules.level]}, {tokens}, by {REQUESTS_FLAG}"
        if rules.allows("shipped-states"):
            requests += f", at a predicted {rules.cost:g} ms a selection or less"
    return {
        "version": __version__,
        "architecture": served.architecture,
        "state": state.name,
        "digest": state.digest,
        "base_policy": policy.base.name,
        "budget": {
            "k": policy.budget,
            "follows_image_size": served.budget_varies,
            "q_e": policy.quota,
            "r_min": policy.r_min,
        },
        "core": None
        if core is None
        else {"k_c": policy.core, "share": core.share, "policy": core.policy.name},
        "reads": [*sorted(policy.needs)],
        "relevance": relevance,
        "requests": requests,
        "allows": {
            "level": rules.level if rules.explicit else "none",
            "tokens": [rules.minimum, rules.maximum],
        },
        "detail": {str(level): budget for level, budget in rules.detail.as_dict().items()} or None,
        "recall": rules.recall,
        "evidence": state.provenance.model_dump(mode="json"),
    }


NAME = "autoprune_endpoint"
PATH = "/v1/autoprune"


class AutopruneEndpoint:
    """``EndpointPlugin`` of vLLM that answers with a fixed description; never calls the engine.

    vLLM loads endpoint plugins only where ``VLLM_PLUGINS`` names them, and below ``/v1`` its API
    key guards the route.
    """

    name = NAME
    required_tasks: tuple[SupportedTask, ...] | None = (
        *("generate", "embed", "classify", "token_embed", "token_classify"),
    )

    def __init__(self) -> None:
        self._description: dict[str, JsonValue] = {"state": None}

    def attach_router(self, app: FastAPI) -> None:
        """Add the route."""
        app.add_api_route(PATH, self._answer, methods=["GET"])

    async def init_state(
        self, engine_client: EngineClient | None, state: State, args: Namespace
    ) -> None:
        """Describe the served state, once: it does not change while the server runs."""
        served = None if engine_client is None else served_state(engine_client.model_config)
        if served is not None:
            self._description = describe_as_json(served)

    async def _answer(self) -> dict[str, JsonValue]:
        return self._description
