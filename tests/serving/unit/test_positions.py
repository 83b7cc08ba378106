"""Positions that a pruned prompt takes are those of the whole prompt, as the model gives them."""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.processing import ProcessorInputs
from vllm.multimodal.processing.context import TimingContext

from tests.serving.engine import built
from tests.serving.unit.samples import video_state
from tests.serving.unit.sender import LARGE, OTHER, Processed, Sender, picture
from vllm_autoprune import RequestError
from vllm_autoprune.selftest.backbones import TINY_MODELS
from vllm_autoprune.selftest.questions import video
from vllm_autoprune.serving.models import BACKBONES

pytestmark = [
    pytest.mark.compat,
    pytest.mark.filterwarnings("ignore:__array__ implementation"),  # Glm4vProcessor
]

MROPE = {row.name: row for row in BACKBONES.values() if row.mrope}
WITH_VIDEOS = [name for name, row in MROPE.items() if row.videos]
PRUNED_VIDEOS = video_state("vcast")
THIN = picture(28 * 40, 28)
TALL = picture(28, 28 * 30, 3)


Items = dict[str, list[Any]]
"""Images and videos of a request."""


def process(sender: Sender, items: Items, **entry: object) -> Any:
    """What a prompt with these items is made into, images first."""
    image = sender._processor._placeholders.text
    texts = [
        (kind == "image" and image) or sender._model.get_placeholder_str(kind, 1)
        for kind in items
        for _ in items[kind]
    ]
    if None in texts:
        texts = [sender._placeholder for _ in texts]
    inputs = ProcessorInputs(
        sender.info.get_tokenizer().encode(f"user {' '.join(texts)} what"),
        sender.info.parse_mm_data(items),
        None,
        hf_processor_mm_kwargs={"autoprune": entry},
        cache=sender.cache,
    )
    return sender._processor.apply(inputs, TimingContext(enabled=False))


def find_end(sender: Sender, backbone: str, items: Items) -> int:
    """The first position after a whole prompt, by vLLM's own model class."""
    uncached = copy.copy(sender)
    uncached.cache = None
    processed = process(uncached, items, enabled=False)
    features = [
        MultiModalFeatureSpec(item, modality, "", position)
        for modality, items in processed["mm_kwargs"].items()
        for item, position in zip(
            items, processed["mm_placeholders"][modality], strict=True
        )
    ]
    module, _, name = MROPE[backbone].model.partition(":")
    stock: Any = vars(import_module(module))[name].__mro__[4]
    model = stock.__new__(stock)
    vars(model)["config"] = sender.info.get_hf_config()
    ids = list(processed["prompt_token_ids"])
    _, delta = model.get_mrope_input_positions(ids, features)
    return len(ids) + int(delta)


def assert_same_end(
    sender: Sender, backbone: str, items: Items, **entry: object
) -> None:
    """The pruned prompt ends at the position at which the whole one does."""
    end = find_end(sender, backbone, items)
    for _ in range(2):  # the second time by what vLLM's cache knows of the items
        processed = process(sender, items, **entry)
        assert (
            len(processed["prompt_token_ids"]) + processed["mm_hashes"].surplus == end
        )


@pytest.mark.parametrize("backbone", MROPE)
@pytest.mark.parametrize("budget", [1, 8, "100%"])
def test_images_take_the_positions_of_whole_ones(
    backbone: str, budget: int | str
) -> None:
    sender = Sender(built(backbone), budget=8, placeholder="").with_cache()
    assert_same_end(
        sender, backbone, {"image": [THIN, LARGE, TALL, LARGE]}, budget=budget
    )


@pytest.mark.parametrize("backbone", WITH_VIDEOS)
@pytest.mark.parametrize(
    ("state", "budget"), [(PRUNED_VIDEOS, 9), (PRUNED_VIDEOS, "100%"), ({}, 0)]
)
def test_videos_take_the_positions_of_whole_ones(
    backbone: str, state: dict[str, Any], budget: int | str
) -> None:
    """Pruned, kept whole, and left whole by a state that prunes none; beside an image."""
    sender = Sender(built(backbone), budget=8, placeholder="", **state).with_cache()
    entry = {"video_budget": budget} if state else {}
    assert_same_end(sender, backbone, {"image": [THIN], "video": [video(12)]}, **entry)


def test_parts_of_an_image_share_its_positions() -> None:
    """A core, its delta and what a later turn recalls, of an image of 8 x 8 tokens."""
    sender = Sender(built("qwen2_5_vl"), budget=32, core={"share": 0.5})
    turns = [{"images": 1, "text": "what"}]
    sent = sender.with_blocks(4).send([LARGE], recall=4, recall_turns=turns)
    assert [plan.part for plan in sent.plans] == ["core", "delta", "recall"]
    assert sent.surplus == 8 - sum(sent.lengths)


LINE_ROWS = {
    row.name: row
    for row in BACKBONES.values()
    if not row.mrope and row.name in TINY_MODELS
}


@pytest.mark.parametrize("backbone", LINE_ROWS)
def test_a_pruned_prompt_ends_where_the_whole_one_does(backbone: str) -> None:
    """On one axis, whatever text stands in and around an image; packed it is as long as it is."""
    sender = Sender(built(backbone), budget=8, placeholder="").with_cache()
    sender._config.max_model_len = 1 << 14
    request: Items = {"image": [THIN, LARGE, TALL, LARGE]}
    length = len(process(sender, request, enabled=False)["prompt_token_ids"])
    for positions in ("true", "spread", "packed"):
        if LINE_ROWS[backbone].packed and positions != "packed":
            with pytest.raises(RequestError, match=LINE_ROWS[backbone].packed):
                process(sender, request, positions=positions)
            continue
        for _ in range(2):  # the second time by what vLLM's cache knows of the items
            processed = process(sender, request, positions=positions)
            removed = length - len(processed["prompt_token_ids"])
            assert removed > 0
            assert processed["mm_hashes"].surplus == (
                0 if positions == "packed" else removed
            )


@pytest.mark.parametrize(
    "backbone", [name for name, row in LINE_ROWS.items() if row.videos]
)
def test_a_pruned_video_ends_where_the_whole_one_does(backbone: str) -> None:
    state: dict[str, Any] = {**PRUNED_VIDEOS, "positions": "true"}
    sender = Sender(built(backbone), budget=8, placeholder="", **state).with_cache()
    request: Items = {"image": [LARGE], "video": [video(12)]}
    length = len(process(sender, request, enabled=False)["prompt_token_ids"])
    for _ in range(2):
        processed = process(sender, request, video_budget=12)
        assert (
            processed["mm_hashes"].surplus
            == length - len(processed["prompt_token_ids"])
            > 0
        )


PICTURES = [LARGE, OTHER, LARGE, OTHER]


@pytest.fixture
def cramped() -> tuple[Sender, Processed]:
    """A server with room for some of the pictures at their places; what it sent without a bound."""
    state: dict[str, Any] = {"core": {"share": 0.5}, "positions": "true"}
    sender = Sender(built("llava_next"), budget=32, placeholder="", **state)
    (size,) = sender.send([LARGE], enabled=False).lengths
    with_room = sender.with_blocks(8).send(PICTURES)
    assert {plan.positions for plan in with_room.plans} == {"true"}
    assert with_room.surplus == 4 * (size - 32)
    sender._config.max_model_len = (2 * size + 40) * 4 // 3
    return sender, with_room


def test_images_without_room_are_packed_and_take_no_positions(
    cramped: tuple[Sender, Processed],
) -> None:
    sender, with_room = cramped
    sent = sender.send(PICTURES)
    in_place = [plan.positions == "true" for plan in sent.plans]
    assert in_place[0] and not all(in_place)
    cores = [plan for plan in sent.plans if plan.part == "core"]
    per_image = with_room.surplus // len(PICTURES)
    assert sent.surplus == per_image * sum(p.positions == "true" for p in cores)


def test_packed_images_are_other_items(cramped: tuple[Sender, Processed]) -> None:
    sender, with_room = cramped
    sent = sender.send(PICTURES)
    assert len({*sent.identities}) == len(sent.identities)
    identities = zip(sent.identities, with_room.identities, strict=True)
    assert [identity == with_space for identity, with_space in identities] == [
        plan.positions == "true" for plan in sent.plans
    ]


def test_what_is_packed_depends_on_what_comes_before_alone(
    cramped: tuple[Sender, Processed],
) -> None:
    """For KV of common prefixes is shared."""
    sender, _ = cramped

    def positions(pictures: list[Any]) -> list[str]:
        plans = sender.send(pictures).plans
        return [plan.positions for plan in plans if plan.part != "delta"]

    of_all = positions(PICTURES)
    for count in range(1, len(PICTURES)):
        assert positions(PICTURES[:count]) == of_all[:count]
