"""The processor of a tiny model: resized images, and images in two items, core and delta."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from PIL import Image

from tests.serving.unit.api.tiny_processor import (
    LARGE,
    OTHER,
    SMALL,
    Processed,
    Sender,
    processing,
)
from vllm_autoprune.serving.api.request_fields import REQUEST_FIELD
from vllm_autoprune.serving.shared.plan import NO_KEY

pytestmark = pytest.mark.compat


def resized(sender: Sender, image: Image.Image | None, budget: int, **entry: Any) -> Processed:
    return sender.send([image], budget=budget, keep="resized", **entry)


def test_a_resized_image_is_the_smaller_image_through_the_processor(folder: Any) -> None:
    """8 x 8 merged tokens, of which the processor's arithmetic makes 4 x 4 for K = 20."""
    sender = Sender(folder, budget=8)
    sent = resized(sender, LARGE, 20)
    assert sent.lengths == [16]
    (plan,) = sent.plans
    assert plan.keep == "resized"
    assert plan.keeps_all, "the worker has nothing to choose"
    assert (plan.instruction, plan.key) == ((), NO_KEY)
    smaller = LARGE.resize((112, 112), Image.Resampling.BICUBIC)
    assert torch.equal(
        pixels(sender, [LARGE], budget=20, keep="resized"), pixels(sender, [smaller])
    )


def pixels(sender: Sender, images: Sequence[Image.Image], **entry: Any) -> Any:
    from vllm.multimodal.processing import ProcessorInputs
    from vllm.multimodal.processing.context import TimingContext

    processor = sender._processor
    prompt = processor.info.get_tokenizer().encode("user <|image_pad|> what")
    kwargs = {REQUEST_FIELD: {"instructions": ["what"], **entry}}
    items = processor.info.parse_mm_data({"image": list(images)})
    inputs = ProcessorInputs(prompt, items, hf_processor_mm_kwargs=kwargs)
    made = processor.apply(inputs, TimingContext(enabled=False))
    return made["mm_kwargs"]["image"][0]["pixel_values"].data


def test_a_resized_image_is_shared_by_questions_and_by_nothing_else(folder: Any) -> None:
    sender = Sender(folder, budget=8).with_cache()
    first = resized(sender, LARGE, 20)
    asked = resized(sender, LARGE, 20, instructions=["how many"])
    assert asked.identities == first.identities
    assert asked.sent == [False], "vLLM's cache has it"
    others = [
        resized(sender, LARGE, 8),
        resized(sender, OTHER, 20),
        resized(sender, LARGE, 20, salt="tenant"),
        sender.send([LARGE], budget=16),
        sender.send([LARGE], budget=16, keep="random"),
        sender.send([LARGE], budget=64),
    ]
    assert len({one.identities[0] for one in (first, *others)}) == 7


def test_an_image_that_has_k_tokens_is_not_resized(folder: Any) -> None:
    sender = Sender(folder, budget=8)
    assert resized(sender, LARGE, 64).identities == sender.send([LARGE], budget=64).identities
    assert resized(sender, SMALL, 4).lengths == [4]


def test_a_resized_image_may_be_sent_by_its_name(folder: Any) -> None:
    sender = Sender(folder, budget=8).with_cache()
    first = resized(sender, LARGE, 20, uuids=["one"])
    again = resized(sender, None, 20, uuids=["one"])
    assert again.identities == first.identities
    assert resized(sender, OTHER, 20, uuids=["one"]).identities != first.identities


def split_sender(
    folder: Any, blocks: int | None = 16, placeholder: str = "<|image_pad|>"
) -> Sender:
    """A server of a state with a core: half of K = 24, of which blocks of 16 make 15."""
    sender = Sender(folder, 24, placeholder=placeholder, core={"share": 0.5}).with_cache()
    return sender if blocks is None else sender.with_blocks(blocks)


def test_a_split_image_is_two_items_of_which_one_knows_no_question(folder: Any) -> None:
    sender = split_sender(folder)
    first = sender.send([LARGE], instructions=["what is it"])
    assert first.lengths == [15, 9]
    core, delta = first.plans
    assert (core.part, core.core, core.instruction) == ("core", 15, ())
    assert (delta.part, delta.core) == ("delta", 15)
    assert delta.instruction
    assert core.key == delta.key != NO_KEY
    second = sender.send([LARGE], instructions=["how many"])
    assert second.identities[0] == first.identities[0]
    assert second.identities[1] != first.identities[1]
    assert (first.sent, second.sent) == ([True, False], [False, False])
    assert sender.send([LARGE], salt="a").identities[0] != first.identities[0]


def test_a_question_that_occurs_by_chance_before_the_image_does_not_stop_the_split(
    folder: Any,
) -> None:
    assert split_sender(folder).send([LARGE], instructions=["use"]).lengths == [15, 9]
    for placeholder in ("<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"):
        asked_before = split_sender(folder, placeholder=placeholder)
        assert asked_before.send([LARGE], instructions=["user"]).lengths == [24]


def test_images_are_laid_out_by_their_turns(folder: Any) -> None:
    sender = split_sender(folder)
    together = sender.send([LARGE, OTHER], turns=[0, 0])
    assert sender.send([LARGE, OTHER]).prompt == together.prompt
    first, second = sender.send([LARGE], turns=[0]), sender.send([LARGE, OTHER], turns=[0, 2])
    assert second.identities[:2] == first.identities
    assert together.identities[:2] != first.identities
    assert sender.send([LARGE, OTHER], turns=[None, None]).lengths == [24, 24]


def test_cores_are_shared_by_budgets_and_states_with_the_same_core(folder: Any) -> None:
    one = split_sender(folder).send([LARGE])
    other = Sender(folder, 28, core={"share": 0.45}, base_policy={"name": "divprune"})
    shared = other.with_blocks(16).send([LARGE])
    assert shared.lengths == [15, 13]
    assert shared.identities[0] == one.identities[0]
    assert shared.identities[1] != one.identities[1]
    strength = Sender(folder, 24, core={"share": 0.5, "cover": 0.5, "strength": 0.3})
    assert strength.with_blocks(16).send([LARGE]).identities[0] != one.identities[0]


def test_parts_of_an_image_are_processed_once_and_carry_the_same_pixels(folder: Any) -> None:
    sender = split_sender(folder)
    with processing(sender) as runs:
        keys = sender.send([LARGE, OTHER]).keys
    assert runs == [1, 1], "each by itself"
    assert keys[0] == keys[2] != keys[1] == keys[3]


def test_images_stay_whole_without_a_prefix_cache(folder: Any) -> None:
    sent = split_sender(folder, blocks=None).send([LARGE])
    assert sent.lengths == [24]
    assert [plan.part for plan in sent.plans] == ["whole"]
