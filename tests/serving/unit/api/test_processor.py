"""The processor of tiny models, without an engine: identities, keys and plans of what is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
from PIL import Image

from tests.serving.unit.samples import served
from vllm_autoprune.selftest.backbones import build
from vllm_autoprune.serving.api.request_fields import REQUEST_FIELD, SALT, CacheSalt
from vllm_autoprune.serving.compat import attach
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.serving.shared.detail_budgets import DetailBudgets
from vllm_autoprune.serving.shared.kv_blocks import ATTRIBUTE as KV_CACHE
from vllm_autoprune.serving.shared.plan import FIELD, NO_KEY, ItemPlan
from vllm_autoprune.serving.shared.request_rules import DEFAULT_RULES, RequestRules
from vllm_autoprune.serving.shared.served_state import ATTRIBUTE

pytestmark = pytest.mark.compat

QWEN = "Qwen2_5_VLForConditionalGeneration"


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    noise = numpy.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=numpy.uint8)
    return Image.fromarray(noise)


SMALL, LARGE, OTHER = picture(56, 56), picture(224, 224, 1), picture(224, 224, 2)


@dataclass(frozen=True)
class Processed:
    """What one request became: identities, plans where items were sent along, placeholders."""

    identities: list[str]
    plans: list[ItemPlan | None]
    lengths: list[int]

    @property
    def keys(self) -> list[tuple[int, int] | None]:
        return [None if plan is None else plan.key for plan in self.plans]


class Sender:
    """A tiny Qwen2.5-VL's processor, with vLLM's cache before an engine or without one."""

    def __init__(
        self,
        folder: Any,
        budget: int,
        rules: RequestRules = DEFAULT_RULES,
        **changes: object,
    ) -> None:
        from vllm.config import ModelConfig
        from vllm.multimodal.processing import InputProcessingContext
        from vllm.tokenizers import get_tokenizer

        config = ModelConfig(model=str(folder), max_model_len=1024, dtype="float32")
        edits = {f"/{field}": value for field, value in changes.items()}
        attach(config, ATTRIBUTE, replace(served(edits, budget=budget), rules=rules))
        module, _, name = BACKBONES[QWEN].model.partition(":")
        factories = vars(import_module(module))[name]._processor_factory
        context = InputProcessingContext(config, get_tokenizer(str(folder)))
        self._processor = factories.build_processor(context)
        self._config = config
        self.cache: Any = None

    def with_cache(self) -> Sender:
        from vllm.multimodal.cache.lru import LruKeyReplicatedSenderCache

        self.cache = LruKeyReplicatedSenderCache(self._config)
        return self

    def with_blocks(self, size: int) -> Sender:
        from vllm.config import CacheConfig

        attach(self._config, KV_CACHE, CacheConfig(block_size=size))
        return self

    def send(
        self,
        images: Sequence[Image.Image | None],
        uuids: Sequence[str | None] | None = None,
        salt: str = "",
        **entry: object,
    ) -> Processed:
        from vllm.multimodal.inputs import MultiModalFeatureSpec
        from vllm.multimodal.processing import ProcessorInputs
        from vllm.multimodal.processing.context import TimingContext

        info = self._processor.info
        prompt = info.get_tokenizer().encode("user " + "<|image_pad|> " * len(images) + "what")
        kwargs = {REQUEST_FIELD: {"instructions": ["what"] * len(images), **entry}}
        inputs = ProcessorInputs(
            prompt,
            info.parse_mm_data({"image": list(images)}),
            None if uuids is None else {"image": list(uuids)},
            hf_processor_mm_kwargs={**kwargs, **({SALT: CacheSalt(salt)} if salt else {})},
            cache=self.cache,
        )
        made = self._processor.apply(inputs, TimingContext(enabled=False))
        identities = made["mm_hashes"]["image"]
        made["mm_hashes"].hand_over(
            [
                MultiModalFeatureSpec(item, "image", identity, place, identity)
                for item, identity, place in zip(
                    made["mm_kwargs"]["image"],
                    identities,
                    made["mm_placeholders"]["image"],
                    strict=True,
                )
            ]
        )
        return Processed(
            list(identities),
            [
                None if item is None else ItemPlan.decode(item[FIELD].data)
                for item in made["mm_kwargs"]["image"]
            ],
            [place.get_num_embeds() for place in made["mm_placeholders"]["image"]],
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build("qwen2_5_vl", tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def without_cache(folder: Any) -> Sender:
    return Sender(folder, budget=8)


@pytest.fixture
def sender(folder: Any) -> Sender:
    return Sender(folder, budget=8).with_cache()


def test_features_are_cached_by_content_and_not_by_uuid(without_cache: Sender) -> None:
    unnamed = without_cache.send([LARGE, OTHER])
    one_name = without_cache.send([LARGE, OTHER], ["x", "x"])
    # What vLLM itself calls images where both of its caches are off; a client may send it too.
    counted = without_cache.send([LARGE], ["renderer0-mm-7-image-0"])
    assert unnamed.keys == one_name.keys
    assert len({*unnamed.keys, NO_KEY}) == 3
    assert counted.keys == unnamed.keys[:1]


def test_pruned_images_are_identified_by_content(without_cache: Sender) -> None:
    unnamed = without_cache.send([LARGE, OTHER])
    assert without_cache.send([LARGE, OTHER], ["x", "x"]).identities == unnamed.identities
    assert len(set(unnamed.identities)) == 2
    assert all(int(identity, 16) and len(identity) == 64 for identity in unnamed.identities)


def test_an_unpruned_image_has_the_stock_identity_and_is_not_cached(
    without_cache: Sender,
) -> None:
    sent = without_cache.send([SMALL, LARGE], ["x", "x"])
    assert sent.identities[0] == "x" != sent.identities[1]
    assert sent.keys[0] == NO_KEY != sent.keys[1]
    assert sent.lengths == [4, 8]


def test_one_uuid_for_images_of_two_sizes_in_two_requests(sender: Sender) -> None:
    """Each has its own identity, its own plan and as many placeholders as without a name."""
    alone = [sender.send([image]) for image in (SMALL, LARGE, OTHER)]
    named = [sender.send([image], ["x"]) for image in (SMALL, LARGE, OTHER)]
    assert [sent.lengths for sent in named] == [sent.lengths for sent in alone] == [[4], [8], [8]]
    assert [sent.identities for sent in named[1:]] == [sent.identities for sent in alone[1:]]


def test_a_uuid_without_an_image_means_the_image_last_sent_with_it(sender: Sender) -> None:
    first = sender.send([LARGE], ["x"])
    assert sender.send([None], ["x"]) == Processed(first.identities, [None], first.lengths)
    second = sender.send([OTHER], ["x"])
    assert sender.send([None], ["x"]).identities == second.identities != first.identities


def test_an_unknown_uuid_without_an_image_is_refused(sender: Sender) -> None:
    sender.send([LARGE], ["x"])
    for uuid, salt in (("y", ""), ("x", "a tenant")):
        with pytest.raises(ValueError, match="data is not provided"):
            sender.send([None], [uuid], salt)


def test_a_budget_by_detail_is_fixed_when_an_image_is_sent(folder: Any) -> None:
    """What a later turn appends changes neither length nor identity of the images before."""
    rules = RequestRules("none", detail=DetailBudgets(low=4, high=16))
    sender = Sender(folder, budget=8, rules=rules)
    first = sender.send([LARGE], details=["low"])
    for detail, length in (("low", 4), ("high", 16), (None, 8)):
        longer = sender.send([LARGE, OTHER], details=["low", detail])
        assert longer.lengths == [4, length]
        assert longer.identities[0] == first.identities[0]
    levels = [sender.send([LARGE], details=[detail]).identities for detail in ("low", "high", None)]
    assert len({identity for (identity,) in levels}) == 3


def test_tenants_of_two_salts_share_nothing(sender: Sender) -> None:
    sent = [sender.send([LARGE], salt=salt) for salt in ("", "a", "b")]
    assert len({one.identities[0] for one in sent}) == 3
    assert len({one.keys[0] for one in sent}) == 3
    assert None not in [one.keys[0] for one in sent], "sent by the cache of another tenant"
    assert sender.send([LARGE], salt="a").plans == [None]


def test_a_salt_that_a_request_writes_itself_is_none(without_cache: Sender) -> None:
    from vllm.multimodal.processing import ProcessorInputs
    from vllm.multimodal.processing.context import TimingContext

    processor = without_cache._processor
    prompt = processor.info.get_tokenizer().encode("user <|image_pad|> what")
    said = {SALT: "a", REQUEST_FIELD: {"instructions": ["what"]}}
    items = processor.info.parse_mm_data({"image": [LARGE]})
    made = processor.apply(
        ProcessorInputs(prompt, items, hf_processor_mm_kwargs=said), TimingContext(enabled=False)
    )
    assert made["mm_hashes"]["image"] == without_cache.send([LARGE]).identities


def test_a_random_keep_is_drawn_from_content(without_cache: Sender) -> None:
    draws = [
        without_cache.send([image], [uuid], salt, keep="random").plans[0]
        for image, uuid, salt in (
            (LARGE, "one", ""),
            (LARGE, "two", ""),
            (LARGE, "one", "tenant"),
            (OTHER, "one", ""),
        )
    ]
    first, renamed, salted, other = [plan.key[0] for plan in draws if plan is not None]
    assert first == renamed == salted != other


def resized(sender: Sender, image: Image.Image | None, budget: int, **entry: Any) -> Processed:
    return sender.send([image], budget=budget, keep="resized", **entry)


def test_a_resized_image_is_the_smaller_image_through_the_processor(folder: Any) -> None:
    """8 x 8 merged tokens, of which the processor's arithmetic makes 4 x 4 for K = 20."""
    sender = Sender(folder, budget=8)
    sent = resized(sender, LARGE, 20)
    assert sent.lengths == [16]
    (plan,) = sent.plans
    assert plan is not None
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
    assert asked.plans == [None], "vLLM's cache has it"
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


def split_sender(folder: Any, blocks: int | None = 16) -> Sender:
    """A server of a state with a core: half of K = 24, of which blocks of 16 make 15."""
    sender = Sender(folder, 24, core={"share": 0.5}).with_cache()
    return sender if blocks is None else sender.with_blocks(blocks)


def test_a_split_image_is_two_items_of_which_one_knows_no_question(folder: Any) -> None:
    sender = split_sender(folder)
    first = sender.send([LARGE], instructions=["what is it"])
    assert first.lengths == [15, 9]
    core, delta = first.plans
    assert core is not None and delta is not None
    assert (core.part, core.core, core.instruction) == ("core", 15, ())
    assert (delta.part, delta.core) == ("delta", 15)
    assert delta.instruction
    assert core.key == delta.key != NO_KEY
    second = sender.send([LARGE], instructions=["how many"])
    assert second.identities[0] == first.identities[0]
    assert second.identities[1] != first.identities[1]
    assert second.plans[0] is None, "the engine has the core"
    assert sender.send([LARGE], salt="a").identities[0] != first.identities[0]


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
    processed = []
    kind: Any = type(sender._processor).__mro__[2]  # vLLM's own class, below the mixin
    stock = kind._apply_hf_processor_main

    def noted(self: Any, items: Any, kwargs: Any) -> Any:
        processed.append(len(items["image"]))
        return stock(self, items, kwargs)

    with patch.object(kind, "_apply_hf_processor_main", noted):
        keys = sender.send([LARGE, OTHER]).keys
    assert processed == [2]
    assert keys[0] == keys[2] != keys[1] == keys[3]


def test_images_stay_whole_without_a_prefix_cache(folder: Any) -> None:
    sent = split_sender(folder, blocks=None).send([LARGE])
    assert sent.lengths == [24]
    assert [plan is not None and plan.part for plan in sent.plans] == ["whole"]
