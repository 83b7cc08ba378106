"""Pins of serving: what requests become, what they are refused with, flags, fields."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.pins.table import Table, key_paths, read, table
from tests.serving.unit.samples import served
from tests.serving.unit.sender import Sender, answer_by
from vllm_autoprune.selftest.backbones import build
from vllm_autoprune.serving import plugin
from vllm_autoprune.serving.api.endpoint import AutopruneEndpoint
from vllm_autoprune.serving.api.request import PruningRequest
from vllm_autoprune.serving.request_rules import DetailBudgets, RequestRules

Request = dict[str, Any]
"""``entry`` has the pruning fields of a request, ``brings`` names the state that it holds in full;
``kwargs`` and ``body`` are what stands around the entry; ``headers``, ``images`` and ``salt``;
``level`` is what its server lets requests set."""


@cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """The folder of a tiny Qwen2.5-VL; entered, because a model's name is part of identities."""
    temporary = tempfile.TemporaryDirectory()
    os.chdir(temporary.name)
    build("qwen2_5_vl", Path("tiny"))
    return temporary


@cache
def sender(level: Any) -> Sender:
    """The model's processor, on a server that lets requests set so much."""
    folder()
    rules = RequestRules(
        level,
        2,
        256,
        explicit=True,
        detail=DetailBudgets.model_validate({"low": 4, "high": 16}),
    )
    return Sender("tiny", budget=8, rules=rules).with_blocks(16)


def answer(request: Request) -> list[str] | str:
    """What the tiny model's processor makes of a request."""
    return answer_by(sender(request.get("level", "states")), request)


def served_requests() -> Iterator[Request]:
    """Requests that are served: budgets, states, questions, controls, recalls, headers."""
    budgets = (None, 8, [8, 16], {"shared": 20})
    questions = (["what", "what"], ["colour is the cat", "what"])
    for state, budget, question in product(
        (None, "divprune", "shared-core"), budgets, questions
    ):
        yield {"entry": {"state": state, "budget": budget, "instructions": question}}
    for keep, budget in product(("reference", "random", "resized"), (8, 16)):
        yield {"entry": {"keep": keep, "budget": budget}}
    for state, recall, text in product(
        (None, "shared-core"), (4, 200), ("is the cat", "")
    ):
        turns = [{"images": 1, "text": text}, {"images": 2, "text": "what"}]
        yield {"entry": {"state": state, "recall": recall, "recall_turns": turns}}
    for details, budget in product(
        (["low", "high"], ["high", None], ["low"]), (None, 8)
    ):
        yield {"entry": {"details": details, "budget": budget}, "level": "budget"}
    for salt, images in product(
        ("", "tenant"), (["small"], ["large", "large"], ["small", "other"])
    ):
        yield {"salt": salt, "images": images}
    for name in ("divprune", "trim", "shared-core"):
        yield {"brings": name, "entry": {"budget": 8}}
    for places in ([0, 0], [0, 1], [None, None]):
        yield {"entry": {"state": "shared-core", "turns": places}}
    both = {"x-autoprune-budget": "[8, 16]", "x-autoprune-state": "divprune"}
    for headers in ({"x-autoprune-budget": "16"}, {"x-autoprune-state": "trim"}, both):
        yield {"headers": headers}
        yield {"headers": headers, "entry": {"keep": "reference"}}
    yield {"entry": {"enabled": False}}
    yield {"entry": {"policy": "trim", "budget": 64}}


@table
def requests() -> Table:
    """What is made of requests that are served."""
    return {json.dumps(request): answer(request) for request in served_requests()}


@table
def refusals() -> Table:
    """Messages of status 400. The requests are the keys of the table; add one with a null."""
    return {request: answer(json.loads(request)) for request in read("refusals")}


@table
def server() -> Table:
    """Flags of ``vllm serve``, fields of a request, keys of ``GET /v1/autoprune``."""
    schema = PruningRequest.model_json_schema()
    models = {
        "": schema,
        **{f"{name}.": part for name, part in schema["$defs"].items()},
    }
    fields = {
        f"field {model}{name}": field
        for model, part in models.items()
        for name, field in part["properties"].items()
    }
    return {**fields, **flags(), **endpoint()}


def flags() -> Table:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    plugin.register()
    return {
        f"flag {action.option_strings[0]}": [
            action.default,
            action.metavar,
            action.help,
        ]
        for action in EngineArgs.add_cli_args(FlexibleArgumentParser())._actions
        if action.dest.startswith("autoprune")
    }


def endpoint() -> Table:
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    app = FastAPI()
    route = AutopruneEndpoint()
    config = SimpleNamespace(autoprune=served({"/core": {"share": 0.5}}))
    state: Any = SimpleNamespace(online_renderer=SimpleNamespace(model_config=config))
    asyncio.run(route.init_state(None, state, Namespace()))
    route.attach_router(app)
    return {
        "GET /v1/autoprune": sorted(
            key_paths(TestClient(app).get("/v1/autoprune").json())
        )
    }
