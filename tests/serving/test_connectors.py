"""What engines share through vLLM's connectors: KV blocks, and outputs of the vision encoder.

The connectors are vLLM's own, which keep everything in a folder. Engines run one after the other:
what the second one finds there is of the first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from benchmarks.yardsticks.examples import format_prompt
from tests.serving.engine import (
    BLOCK,
    Answer,
    alone,
    chat,
    examples,
    generate,
    generate_each,
    picture,
    raw_prompt,
    release,
    start,
    turn,
    vision_runs,
)
from tests.serving.scenarios import Report, Runner, scenario
from tests.serving.test_conversations import state_with_core
from tests.serving.test_equivalence import make_identity_without_question
from tests.serving.test_modes import counter, mixed_prompts, start_mode
from vllm_autoprune.serving.api import planner

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2400)]


TEXT = "Which shape is it? red green blue white"
"""A prompt of more than two KV blocks together with its image."""

VARIANTS: Mapping[str, Mapping[str, object]] = {
    "question": {"instructions": ["What is the number?"]},
    "state": {"state": "visionzip"},
    "reference": {"keep": "reference"},
    "random": {"keep": "random"},
    # With its question before the image it stays one item, of the same token ids.
    "core": {"state": {**state_with_core(), "name": "core"}},
}
"""What requests change whose prompts have the very same token ids."""


def _start(folder: str | None) -> LLM:
    from vllm.config import KVTransferConfig

    config = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": folder},
    )
    return start_mode(
        max_num_batched_tokens=2048, kv_transfer_config=None if folder is None else config
    )


def _prompt(**entry: object) -> dict[str, Any]:
    image = picture(examples(1)[0].image)
    fields = {"budget": 64, "instructions": [TEXT], **entry}
    return raw_prompt(format_prompt(TEXT), image, **fields)


def _answer_variant(llm: LLM, name: str) -> Answer:
    llm.reset_prefix_cache()
    return generate(llm, [_prompt(**VARIANTS[name])], tokens=6)[0]


@scenario
def shared_kv() -> Report:
    """Two engines on one store of KV, and one without.

    ``first`` and ``second``: their answers to the same prompts; ``alone``: those of an engine
    without a store. ``hits`` of the second one, in tokens. ``variants``: its answers to prompts of
    the same token ids with another question, state or control, by what differs; ``variants_alone``
    the same without a store. ``without_question``: by a third engine on the store, which leaves the
    question out of identities.
    """
    prompts = [_prompt(), *mixed_prompts()]
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, store in (("first", folder), ("second", folder), ("alone", None)):
            llm = _start(store)
            report[name] = generate_each(llm, prompts, tokens=6)
            if name == "second":
                report["hits"] = counter(llm, "vllm:external_prefix_cache_hits")
            if name != "first":
                variants = "variants" if store else "variants_alone"
                report[variants] = {name: _answer_variant(llm, name) for name in VARIANTS}
            release(llm)
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(planner, "make_cache_identity", make_identity_without_question),
    ):
        llm = _start(folder)
        generate_each(llm, prompts[:1], tokens=6)
        report["without_question"] = _answer_variant(llm, "question")
        release(llm)
    return report


def test_a_second_engine_takes_pruned_kv_of_the_first(runner: Runner) -> None:
    report = runner.run("shared_kv")
    loaded = 0
    for stored, taken, single in zip(
        report["first"], report["second"], report["alone"], strict=True
    ):
        assert taken["text"] == stored["text"] == single["text"]
        assert taken["logprob"] == pytest.approx(single["logprob"], abs=1e-3)
        assert taken["cached"] == (taken["prompt_tokens"] - 1) // BLOCK * BLOCK
        loaded += taken["cached"] - stored["cached"]
    assert report["hits"] == loaded > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_kv_of_another_request_is_never_taken(runner: Runner, name: str) -> None:
    """The token ids of the prompts are equal; question, state or control differ."""
    report = runner.run("shared_kv")
    answer, single = report["variants"][name], report["variants_alone"][name]
    assert answer["prompt_tokens"] == report["first"][0]["prompt_tokens"]
    assert answer["cached"] == 0
    assert answer["text"] == single["text"]
    assert answer["logprob"] == pytest.approx(single["logprob"], abs=1e-3)


def test_negative_control_without_the_question_in_the_identity(runner: Runner) -> None:
    wrong = runner.run("shared_kv")["without_question"]
    right = runner.run("shared_kv")["variants"]["question"]
    assert wrong["cached"] > 0
    assert wrong["text"] != right["text"] or wrong["logprob"] != pytest.approx(right["logprob"])


@scenario
def shared_encoder() -> Report:
    """An engine that encodes for another one, whose requests come without any text.

    ``answers`` of the second to questions about the image, ``runs`` of the vision tower of both,
    and the answers ``alone``, of an engine that encodes for itself.
    """
    from vllm.config import ECTransferConfig

    state = {"state": alone("divprune"), "budget": 32}
    questions = examples(2)
    image = questions[0].image
    talks = [[turn(q.question, image)] for q in questions if q.image_id == questions[0].image_id]
    report: dict[str, Any] = {"runs": []}
    with tempfile.TemporaryDirectory() as folder:
        for role in ("ec_producer", "ec_consumer", None):
            config = role and ECTransferConfig(
                ec_connector="ECExampleConnector",
                ec_role=role,
                ec_connector_extra_config={"shared_storage_path": folder},
            )
            llm = start(state, dtype="float32", ec_transfer_config=config)
            runs = vision_runs(llm)
            asked, tokens = ([[turn("", image)]], 1) if role == "ec_producer" else (talks, 4)
            report["answers" if role else "alone"] = [chat(llm, [t], tokens)[0] for t in asked]
            report["runs"].append(vision_runs(llm) - runs)
            release(llm)
    return report


@pytest.mark.parametrize("runner", ["v1"], indirect=True)
def test_images_encoded_by_another_engine(runner: Runner) -> None:
    """By V1 alone: in vLLM 0.32, V2 runs the language model of an encoding engine on meta."""
    report = runner.run("shared_encoder")
    assert report["runs"][:2] == [1, 0]
    assert len(report["answers"]) > 2
    for answer, single in zip(report["answers"], report["alone"], strict=True):
        assert answer["text"] == single["text"]
        assert answer["logprob"] == pytest.approx(single["logprob"], abs=1e-3)
