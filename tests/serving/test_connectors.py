"""What engines share through vLLM's connectors: KV blocks, and outputs of the vision encoder.

The connectors are vLLM's own, which keep everything in a folder. Engines run one after the other:
what the second one finds there is of the first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from benchmarks.yardsticks.examples import format_prompt
from tests.serving.engine import (
    Answer,
    alone,
    assert_same,
    chat,
    counter,
    examples,
    generate,
    generate_each,
    picture,
    raw_prompt,
    release,
    start,
    state_with_core,
    turn,
    vision_runs,
)
from tests.serving.runners import in_engine
from tests.serving.test_equivalence import make_identity_without_question
from tests.serving.test_modes import mixed_prompts, start_mode
from vllm_autoprune.selftest.run import BLOCK
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


def _answer_variants(llm: LLM) -> list[Answer]:
    answers = []
    for entry in VARIANTS.values():
        llm.reset_prefix_cache()
        answers += generate(llm, [_prompt(**entry)], tokens=6)
    return answers


@in_engine
def test_a_second_engine_takes_pruned_kv_of_the_first_and_of_no_other_request() -> None:
    prompts = [_prompt(), *mixed_prompts()]
    answers, variants = {}, {}
    with tempfile.TemporaryDirectory() as store:
        for name, folder in (("first", store), ("second", store), ("alone", None)):
            llm = _start(folder)
            answers[name] = generate_each(llm, prompts, tokens=6)
            if name == "second":
                hits = counter(llm, "vllm:external_prefix_cache_hits")
            if name != "first":
                variants[name] = _answer_variants(llm)
            release(llm)
    for name in ("first", "second"):
        assert_same(answers[name], answers["alone"])
    for taken in answers["second"]:
        assert taken["cached"] == (taken["prompt_tokens"] - 1) // BLOCK * BLOCK
    cached = {name: sum(answer["cached"] for answer in each) for name, each in answers.items()}
    assert hits == cached["second"] - cached["first"] > 0

    # The token ids of these prompts are equal; question, state or control differ.
    assert_same(variants["second"], variants["alone"])
    length = answers["first"][0]["prompt_tokens"]
    assert {(a["cached"], a["prompt_tokens"]) for a in variants["second"]} == {(0, length)}

    # Negative control: without the question in the identity.
    with (
        tempfile.TemporaryDirectory() as store,
        patch.object(planner, "make_cache_identity", make_identity_without_question),
    ):
        llm = _start(store)
        generate_each(llm, prompts[:1], tokens=6)
        llm.reset_prefix_cache()
        (wrong,) = generate(llm, [_prompt(**VARIANTS["question"])], tokens=6)
    right, *_ = variants["second"]
    assert wrong["cached"] > 0
    assert wrong["text"] != right["text"] or wrong["logprob"] != pytest.approx(right["logprob"])


@pytest.mark.only("v1")
@in_engine
def test_images_encoded_by_another_engine() -> None:
    """Which is sent them without any text. By V1 alone: in vLLM 0.32, V2 runs the language model of
    an encoding engine on meta."""
    from vllm.config import ECTransferConfig

    questions = [e for e in examples(2) if e.image_id == examples(2)[0].image_id]
    image = questions[0].image
    talks = [[turn(question.question, image)] for question in questions]
    answers: dict[str | None, list[Answer]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for role, runs in (("ec_producer", 1), ("ec_consumer", 0), (None, 1)):
            config = role and ECTransferConfig(
                ec_connector="ECExampleConnector",
                ec_role=role,
                ec_connector_extra_config={"shared_storage_path": str(Path(folder))},
            )
            state = {"state": alone("divprune"), "budget": 32}
            llm = start(state, dtype="float32", ec_transfer_config=config)
            before = vision_runs(llm)
            asked, tokens = ([[turn("", image)]], 1) if role == "ec_producer" else (talks, 4)
            answers[role] = [chat(llm, [talk], tokens)[0] for talk in asked]
            assert vision_runs(llm) - before == runs
            release(llm)
    assert len(questions) > 2
    assert_same(answers["ec_consumer"], answers[None])
