"""What engines share through vLLM's connectors: KV blocks, and outputs of the vision encoder.

The connectors are vLLM's own, which keep everything in a folder. Engines run one after the other:
what the second one finds there is of the first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from tests.serving.engine import (
    STATE,
    Answer,
    alone,
    chat,
    examples,
    generate,
    prompt,
    release,
    start,
    turn,
    vision_runs,
)
from tests.serving.scenarios import Report, scenario
from tests.serving.scenarios.modes import mixed_prompts
from vllm_autoprune.serving.api import planner
from vllm_autoprune.serving.plan import make_cache_identity

if TYPE_CHECKING:
    from vllm import LLM

TEXT = "Which shape is it? red green blue white"
"""A prompt of more than two KV blocks together with its image."""

VARIANTS: Mapping[str, Mapping[str, object]] = {
    "question": {"instructions": ["What is the number?"]},
    "state": {"state": "visionzip"},
    "reference": {"keep": "reference"},
    "random": {"keep": "random"},
    "core": {"state": "core"},
}
"""What requests change whose prompts have the very same token ids."""


@scenario
def shared_kv() -> Report:
    """Two engines on one store of KV, and one without.

    ``first`` and ``second``: their answers to the same prompts; ``alone``: those of an engine
    without a store. ``hits`` of the second one, in tokens. ``variants``: its answers to prompts of
    the same token ids with another question, state or control, by what differs; ``variants_alone``
    the same without a store.
    """
    with tempfile.TemporaryDirectory() as folder:
        llm = _start(folder)
        report: dict[str, Any] = {"first": _answers(llm, _shared())}
        release(llm)
        llm = _start(folder)
        report["second"] = _answers(llm, _shared())
        report["hits"] = _hits(llm)
        report["variants"] = {name: _variant(llm, name) for name in VARIANTS}
        release(llm)
        llm = _start(None)
        report["alone"] = _answers(llm, _shared())
        report["variants_alone"] = {name: _variant(llm, name) for name in VARIANTS}
        release(llm)
        return report


@scenario
def shared_kv_without_the_question() -> Report:
    """Negative control: the question is left out of identities, and a store is shared."""

    def without(image: str, served: str, budget: int, keep: Any, ids: Any, core: int) -> str:
        return make_cache_identity(image, served, budget, keep, None, core)

    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(planner, "make_cache_identity", without),
    ):
        llm = _start(folder)
        _answers(llm, _shared())
        release(llm)
        llm = _start(folder)
        return {"question": _variant(llm, "question")}


def _start(folder: str | None) -> LLM:
    from vllm.config import KVTransferConfig

    options: dict[str, object] = {}
    if folder is not None:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="ExampleConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"shared_storage_path": folder},
        )
    return start(
        {**STATE, "requests": "states"},
        dtype="float32",
        max_model_len=512,
        max_num_batched_tokens=2048,
        disable_log_stats=False,
        **options,
    )


def _shared() -> list[dict[str, object]]:
    return [_raw(), *mixed_prompts()]


def _raw(**entry: object) -> dict[str, object]:
    from benchmarks.yardsticks.examples import format_prompt

    example = examples(1)[0]
    fields = {"budget": 64, "instructions": [TEXT], **entry}
    if fields.get("state") == "core":
        from tests.serving.scenarios.split import state_with_core

        # With its question before the image it stays one item, of the same token ids.
        fields["state"] = {**state_with_core(), "name": "core"}
    return {
        **prompt(example),
        "prompt": format_prompt(TEXT),
        "mm_processor_kwargs": {"autoprune": fields},
    }


def _answers(llm: LLM, prompts: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    return [generate(llm, [one], tokens=6)[0].plain() for one in prompts]


def _variant(llm: LLM, name: str) -> dict[str, object]:
    llm.reset_prefix_cache()
    return generate(llm, [_raw(**VARIANTS[name])], tokens=6)[0].plain()


def _hits(llm: LLM) -> float:
    from tests.serving.scenarios.modes import counter

    return counter(llm, "vllm:external_prefix_cache_hits")


@scenario
def shared_encoder() -> Report:
    """An engine that encodes for another one, whose requests come without any text.

    ``answers`` of the second to questions about the image, its ``runs`` of the vision tower, and
    the answers ``alone``, of an engine that encodes for itself.
    """
    from vllm.config import ECTransferConfig

    state = {"state": alone("divprune"), "budget": 32}
    first, *others = examples(2)
    asked = [one for one in (first, *others) if one.image_id == first.image_id]

    def connected(role: str, folder: str) -> LLM:
        config = ECTransferConfig(
            ec_connector="ECExampleConnector",
            ec_role=role,
            ec_connector_extra_config={"shared_storage_path": folder},
        )
        return start(state, dtype="float32", ec_transfer_config=config)

    def answers(llm: LLM) -> list[Answer]:
        return [chat(llm, [[turn(one.question, one.image)]])[0] for one in asked]

    with tempfile.TemporaryDirectory() as folder:
        llm = connected("ec_producer", folder)
        profiled = vision_runs(llm)
        chat(llm, [[turn("", first.image)]], tokens=1)
        encoded = vision_runs(llm) - profiled
        release(llm)
        llm = connected("ec_consumer", folder)
        before = vision_runs(llm)
        found = [one.plain() for one in answers(llm)]
        runs = vision_runs(llm) - before
        release(llm)
    llm = start(state, dtype="float32")
    return {
        "answers": found,
        "runs": runs,
        "encoded": encoded,
        "alone": [one.plain() for one in answers(llm)],
    }
