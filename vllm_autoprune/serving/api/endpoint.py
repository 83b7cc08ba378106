"""Description of the served state: one line for the log, and `GET /v1/autoprune`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from vllm_autoprune import __version__
from vllm_autoprune.serving.served_state import ServedState, served_state
from vllm_autoprune.serving.settings import DETAIL_FLAG, REQUESTS_FLAG, RequestRules, TextTower

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient
    from vllm.tasks import SupportedTask


def format_summary(served: ServedState) -> str:
    """One line for the log: how many tokens images keep, by which state, and why."""
    policy, state = served.policy(), served.state
    kept = f"{policy.budget} tokens of an image"
    if served.budget_varies:
        kept, why = f"at most {kept}", "as the state follows its size"
    elif policy.budget == state.budget.range()[1]:
        why = "as the state has it"
    else:
        why = "by --autoprune-budget"
    parts = [
        f"Serving pruned: state {state.name!r} ({state.digest[:12]}) keeps {kept}, {why}: base "
        f"policy {policy.base.name}, at most {policy.quota} exchanged, at least {policy.r_min} of "
        "its own"
    ]
    if (core := policy.state.core) is not None:
        parts.append(
            f"{policy.core} of them are the same for every question, by {core.policy.name}"
        )
    if policy.reads_instruction:
        parts.append(f"relevance by {_describe_relevance(served.tower)}")
    parts.append(f"requests may set {_describe_permission(served.rules)}")
    if levels := served.rules.detail.as_dict():
        budgets = " and ".join(f"{level} keeps {budget}" for level, budget in levels.items())
        parts.append(f"image_url.detail {budgets} tokens of an image, by {DETAIL_FLAG}")
    if served.rules.recall:
        parts.append(
            f"later turns recall {served.rules.recall} tokens of a conversation's images, by "
            "--autoprune-recall"
        )
    return "; ".join(parts) + "."


def describe_as_json(served: ServedState) -> dict[str, JsonValue]:
    """JSON of `GET /v1/autoprune`: the served state, its digest, budget and evidence.

    The core is that before it is moved to the edge of a KV block. No local path is told.
    """
    policy, state, rules = served.policy(), served.state, served.rules
    core = policy.state.core
    relevance = _describe_relevance(served.tower, private=True)
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
        "relevance": relevance if policy.reads_instruction else None,
        "requests": _describe_permission(rules),
        "detail": {str(level): budget for level, budget in rules.detail.as_dict().items()} or None,
        "recall": rules.recall,
        "evidence": state.provenance.model_dump(mode="json"),
    }


def _describe_relevance(tower: TextTower | None, private: bool = False) -> str:
    """Embedding space of relevance and its reason; ``private`` omits local paths."""
    if tower is None:
        return (
            "the language model's input embeddings, sign +1, because no --autoprune-text-tower "
            "is given"
        )
    local = Path(tower.path).exists() or Path(tower.path).is_absolute()
    name = "from a local folder" if private and local else tower.path
    return f"CLIP text tower {name}, sign {tower.sign:+d}, because {tower.reason}"


def _describe_permission(rules: RequestRules) -> str:
    """Permissions of requests, and the flag that sets them."""
    if not rules.explicit:
        unflagged = "with --trust-request-mm-kwargs: their budget"
        return f"nothing, because no {REQUESTS_FLAG} is given ({unflagged})"
    if rules.level == "none":
        return f"nothing, by {REQUESTS_FLAG} none"
    what = {"budget": "their budget", "shipped-states": "a state that ships", "states": "any state"}
    tokens = f"{rules.minimum} to {rules.maximum} tokens of an image"
    text = f"{what[rules.level]}, {tokens}, by {REQUESTS_FLAG}"
    if not rules.allows("shipped-states"):
        return text
    return f"{text}, at a predicted {rules.cost:g} ms a selection or less"


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
