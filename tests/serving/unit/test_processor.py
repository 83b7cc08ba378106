"""The processor of tiny models, without an engine: identities, keys and plans of what is sent."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.glm4v.image_processing_glm4v import smart_resize
from vllm.multimodal.parse import ImageSize
from vllm.multimodal.processing import ProcessorInputs
from vllm.multimodal.processing.context import TimingContext

from tests.serving.engine import built
from tests.serving.unit.samples import served
from tests.serving.unit.sender import LARGE, OTHER, SMALL, Sender, picture
from tests.tables import parametrize_from_file
from vllm_autoprune import RequestError
from vllm_autoprune.selftest.backbones import TINY_MODELS
from vllm_autoprune.serving.api import media
from vllm_autoprune.serving.identities import identify_item
from vllm_autoprune.serving.models.qwen import _GlmVision, _Qwen2Vision
from vllm_autoprune.serving.plan import NO_KEY, ItemPlan
from vllm_autoprune.serving.request_rules import RequestRules
from vllm_autoprune.text_tower import TextTower

pytestmark = pytest.mark.compat


# ---- identities of images, and names that clients give them ----


@parametrize_from_file("server", "requested")
def test_a_budget_is_k_of_each_image_however_it_is_said(
    folder: Any, server: int | str, requested: object
) -> None:
    """Equal K are one identity and plan, other K are others, of N = 64 and 4 in one cache."""
    by_number = (
        Sender(folder, budget=8).with_cache().send([LARGE, SMALL], budget=[16, 1])
    )
    sender = Sender(folder, budget=server).with_cache()
    other = sender.send([LARGE, SMALL], budget="1/2")
    said = sender.send([LARGE, SMALL], budget=requested)
    assert (said.identities, said.plans) == (by_number.identities, by_number.plans)
    assert (said.lengths, other.lengths) == ([16, 1], [32, 2])
    assert len({*said.identities, *other.identities}) == 4


@pytest.mark.parametrize("modality", ["image", "video"])
def test_no_uuid_is_the_identity_of_an_image(folder: Any, modality: str) -> None:
    """Whoever knows a public image can compute both of its identities, and send other pixels.

    That features are kept by content, and salts share nothing: ``tests/hostile``, and the pins.
    """

    def identify(
        sender: Sender, modality: str, data: Any, name: str | None, **kwargs: object
    ) -> str:
        """Identity of one input that is sent under a name."""
        inputs = ProcessorInputs(
            sender.info.get_tokenizer().encode(f"user <|{modality}_pad|> what"),
            sender.info.parse_mm_data({modality: [data]}),
            {modality: [name]},
            kwargs,
        )
        processed = sender._processor.apply(inputs, TimingContext(enabled=False))
        (identity,) = processed["mm_hashes"][modality]
        return str(identity)

    def stock_identity(sender: Sender, image: Any) -> str:
        inputs = ProcessorInputs([], sender.info.parse_mm_data({"image": [image]}))
        (identity,) = inputs.get_mm_hashes(sender.info.model_id, "blake3")["image"]
        return str(identity)

    sender = Sender(folder, budget=8, rules=RequestRules("budget", explicit=True))
    public = [*sender.send([LARGE]).identities, stock_identity(sender, LARGE)]
    video = (
        numpy.zeros((4, 56, 56, 3), numpy.uint8),
        {"fps": 2.0, "total_num_frames": 4},
    )
    for name in (*public, stock_identity(sender, OTHER)):
        data = OTHER if modality == "image" else video
        identity = identify(sender, modality, data, name, autoprune={"enabled": False})
        assert identity not in public
        assert modality == "video" or identity == stock_identity(sender, OTHER)


def test_a_uuid_without_an_image_means_the_image_last_sent_with_it(
    sender: Sender, folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = sender.send([LARGE], ["x"])
    assert sender.send([None], ["x"]) == replace(original, data=[None])
    for uuid, salt in (("y", ""), ("x", "a tenant")):
        with pytest.raises(ValueError, match="data is not provided"):
            sender.send([None], [uuid], salt)
    second = sender.send([OTHER], ["x"])
    assert (
        sender.send([None], ["x"]).identities
        == second.identities
        != original.identities
    )
    # The least recently used are forgotten first.
    monkeypatch.setattr(media, "MAX_NAMES", 2)
    forgetful = Sender(folder, budget=8).with_cache()
    for image, name in (
        (LARGE, "x"),
        (OTHER, "y"),
        (None, "x"),
        (SMALL, "z"),
        (None, "x"),
    ):
        forgetful.send([image], [name])
    with pytest.raises(ValueError, match="data is not provided"):
        forgetful.send([None], ["y"])


def test_embeddings_are_stock_where_pruning_is_off_and_refused_elsewhere(
    folder: Any,
) -> None:
    """Within what requests may keep of an image, which has no least number here."""
    rows = torch.ones(12, 64)
    grid = torch.tensor([[1, 4, 12]])

    def send(rules: RequestRules, **entry: object) -> Any:
        sender = Sender(folder, budget=8, rules=rules)
        sender._config.get_multimodal_config().enable_mm_embeds = True
        data = sender.info.parse_mm_data(
            {"image": {"image_embeds": rows, "image_grid_thw": grid}}
        )
        ids = sender.info.get_tokenizer().encode("user <|image_pad|> what")
        inputs = ProcessorInputs(ids, data, hf_processor_mm_kwargs={"autoprune": entry})
        return sender._processor.apply(inputs, TimingContext(enabled=False))

    (item,) = (processed := send(RequestRules("budget", 16), enabled=False))[
        "mm_kwargs"
    ]["image"]
    assert set(item) == {"image_embeds", "image_grid_thw"} and torch.equal(
        item["image_embeds"].data, rows
    )
    assert [
        placeholder.length for placeholder in processed["mm_placeholders"]["image"]
    ] == [12]
    with pytest.raises(RequestError, match="send the picture"):
        send(RequestRules("budget"))
    for rules, problem in (
        (RequestRules("budget", 1, 11), "keep 11"),
        (RequestRules(total=11), "has 11"),
    ):
        with pytest.raises(RequestError, match=problem):
            send(rules, enabled=False)


# ---- tensors ----

OPTIONS: list[tuple[str, dict[str, object]]] = [
    *((name, {}) for name in TINY_MODELS),
    ("gemma3", {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 32}),
    ("qianfan_ocr", {"max_dynamic_patch": 2}),
    ("nvlm_d", {"max_dynamic_patch": 2}),
    ("idefics3", {"do_image_splitting": False}),
    ("smolvlm", {"do_image_splitting": False}),
    ("cohere2_vision", {"max_patches": 2}),
    ("llama4", {"max_patches": 2}),
    ("ovis2_5", {"min_pixels": 28224, "max_pixels": 112896}),
    ("lfm2_vl", {"max_tiles": 2, "max_image_tokens": 16}),
]
"""Backbones and processor options of servers, where those make other tiles of an image."""


@pytest.mark.filterwarnings(
    "ignore:__array__ implementation"
)  # of GLM's image processor
@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_what_is_made_of_an_image_does_not_depend_on_those_beside_it(
    name: str, options: dict[str, object]
) -> None:
    """Processors pad a call to its largest image; with and without caches of processed images."""
    small = picture(100, 48)
    large = picture(330, 300, 1)
    folder = built(name)

    def send(sender: Sender, *calls: Sequence[Any]) -> dict[int, set[str]]:
        """By image, everything that is sent of it in these calls to one cache, or to none."""
        if sender._config.get_multimodal_config().mm_processor_cache_gb:
            sender = sender.with_cache()
        processed: dict[int, set[str]] = {}
        for images in calls:
            for image, data in zip(images, sender.send(images).data, strict=True):
                if data is not None:  # else vLLM's cache has it
                    processed.setdefault(id(image), set()).add(data)
        return processed

    orders = ([small, large], [large, small], [small, large, small])
    for gigabytes in (0, 4):
        sender = Sender(folder, 5, placeholder="", options=options)
        sender._config.get_multimodal_config().mm_processor_cache_gb = gigabytes
        alone = send(sender, [small]) | send(sender, [large])
        for calls in (
            *((order,) for order in orders),
            ([small, large], [small], [large]),
        ):
            assert send(sender, *calls) == alone


def test_another_question_or_k_sends_a_plan_alone(sender: Sender) -> None:
    original = sender.send([LARGE], instructions=["what is it"])
    again = sender.send([LARGE], instructions=["where is it"])
    fewer = sender.send([LARGE], budget=4)
    assert (original.sent, again.sent, fewer.sent) == ([True], [False], [False])
    assert len({*original.identities, *again.identities, *fewer.identities}) == 3
    assert (again.lengths, fewer.lengths) == ([8], [4])


def test_a_request_that_is_only_rendered_keeps_nothing_of_its_images(
    sender: Sender,
) -> None:
    gc.disable()  # at once, not at some later collection
    try:
        sender.send([LARGE, SMALL], hands_over=False)
        assert not sender._processor._waiting
    finally:
        gc.enable()


# ---- resized images ----

UNIT = 28


def test_what_cannot_be_resized_or_drawn_is_refused(folder: Any) -> None:
    sender: Any = Sender(folder, budget=8, options={"min_pixels": 4 * UNIT**2})
    with pytest.raises(
        RequestError, match="makes at least 4 tokens -> ask for 4 or more"
    ):
        sender.send([LARGE], keep="resized", budget=3)
    with pytest.raises(RequestError, match="send it as a picture"):
        sender.send([numpy.zeros((3, 224, 224), numpy.uint8)], keep="resized", budget=8)
    with pytest.raises(RequestError, match="drawn from pixels"):
        sender.send([None], ["one"], keep="random")


def test_another_size_of_an_image_is_another_item() -> None:
    """Of as many tokens as well."""
    plan = ItemPlan(4, NO_KEY, keep="resized", tokens=4)
    sizes = (None, (56, 56), (28, 112))
    identities = [identify_item(served(), plan, "image", False, size) for size in sizes]
    assert len({*identities}) == len(sizes)


def test_recall_is_refused_where_an_image_is_one_item_unless_pruning_is_off() -> None:
    sender = Sender(built("internvl"), budget=8, placeholder="")
    with pytest.raises(RequestError, match="later turns cannot recall tokens"):
        sender.send([SMALL], recall=8)
    (plan,) = sender.send([SMALL], recall=8, enabled=False).plans
    assert plan.keeps_all


@given(st.integers(28, 4000), st.integers(28, 4000), st.integers(1, 200))
def test_a_resized_image_has_at_most_k_tokens_and_stays_as_it_is(
    width: int, height: int, budget: int
) -> None:
    """GLM's processor counts the pixels of two frames, of which an image is one."""
    if max(width, height) > 200 * min(width, height):
        return
    vision = SimpleNamespace(patch_size=14, spatial_merge_size=2, temporal_patch_size=2)
    info: Any = SimpleNamespace(
        get_hf_config=lambda: SimpleNamespace(vision_config=vision)
    )
    for kind in (_Qwen2Vision, _GlmVision):
        smaller = kind.shrink_to_budget(info, ImageSize(width, height), budget)
        sides = smaller.height, smaller.width
        assert (sides[0] % UNIT, sides[1] % UNIT) == (0, 0)
        assert 1 <= sides[0] * sides[1] // UNIT**2 <= budget
        if max(sides) <= 200 * min(sides):
            pixels = 2 * 10**9
            assert (
                smart_resize(2, *sides, factor=UNIT, min_pixels=1, max_pixels=pixels)
                == sides
            )


def test_what_a_text_tower_chooses_is_another_item_by_its_sign_and_its_weights() -> (
    None
):
    towers = [
        None,
        *(TextTower(path, sign, "", 77, 8, 8) for path in "ab" for sign in (1, -1)),
    ]
    plan = ItemPlan(8, (1, 2), instruction=(7,), tokens=36)
    identities = {
        identify_item(served(tower=tower), plan, "image", True, None)
        for tower in towers
    }
    assert len(identities) == 5
