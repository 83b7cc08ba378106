"""The processor of tiny models, without an engine: identities, keys and plans of what is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy
import pytest

from tests.serving.unit.api.tiny_processor import LARGE, OTHER, SMALL, Sender, picture
from vllm_autoprune import RequestError
from vllm_autoprune.selftest.backbones import BUILDERS, build
from vllm_autoprune.serving.api.request_fields import REQUEST_FIELD, SALT
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.serving.shared.detail_budgets import DetailBudgets
from vllm_autoprune.serving.shared.identities import hash_picture, make_feature_key
from vllm_autoprune.serving.shared.plan import NO_KEY
from vllm_autoprune.serving.shared.request_rules import RequestRules

pytestmark = pytest.mark.compat


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
    assert sent.identities[0] == stock_identity(without_cache, SMALL) != sent.identities[1]
    assert sent.keys[0] == NO_KEY != sent.keys[1]
    assert sent.lengths == [4, 8]


def stock_identity(sender: Sender, image: Any) -> str:
    from vllm.multimodal.processing import ProcessorInputs

    inputs = ProcessorInputs([], sender.info.parse_mm_data({"image": [image]}))
    (identity,) = inputs.get_mm_hashes(sender.info.model_id, "blake3")["image"]
    return identity


@pytest.mark.parametrize("modality", ["image", "video"])
def test_no_uuid_is_the_identity_of_an_image(folder: Any, modality: str) -> None:
    """Whoever knows a public image can compute both of its identities, and send other pixels."""
    from vllm.multimodal.processing import ProcessorInputs
    from vllm.multimodal.processing.context import TimingContext

    rules = RequestRules("budget", explicit=True)
    sender = Sender(folder, budget=8, rules=rules)
    public = sender.send([LARGE])
    for name in (*public.identities, stock_identity(sender, LARGE), stock_identity(sender, OTHER)):
        frames = numpy.zeros((4, 56, 56, 3), numpy.uint8)
        data: Any = (
            [OTHER] if modality == "image" else [(frames, {"fps": 2.0, "total_num_frames": 4})]
        )
        pad = "<|image_pad|>" if modality == "image" else "<|video_pad|>"
        inputs = ProcessorInputs(
            sender.info.get_tokenizer().encode(f"user {pad} what"),
            sender.info.parse_mm_data({modality: data}),
            {modality: [name]},
            {REQUEST_FIELD: {"enabled": False}},
        )
        made = sender._processor.apply(inputs, TimingContext(enabled=False))
        (identity,) = made["mm_hashes"][modality]
        assert identity == stock_identity(sender, OTHER) if modality == "image" else True
        assert identity not in (*public.identities, stock_identity(sender, LARGE))


def test_one_uuid_for_images_of_two_sizes_in_two_requests(sender: Sender) -> None:
    """Each has its own identity, its own plan and as many placeholders as without a name."""
    alone = [sender.send([image]) for image in (SMALL, LARGE, OTHER)]
    named = [sender.send([image], ["x"]) for image in (SMALL, LARGE, OTHER)]
    assert [sent.lengths for sent in named] == [sent.lengths for sent in alone] == [[4], [8], [8]]
    assert [sent.identities for sent in named[1:]] == [sent.identities for sent in alone[1:]]


def test_a_uuid_without_an_image_means_the_image_last_sent_with_it(sender: Sender) -> None:
    first = sender.send([LARGE], ["x"])
    assert sender.send([None], ["x"]) == replace(first, data=[None])
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
    assert [one.sent for one in sent] == [[True]] * 3, "in the cache of another tenant"
    assert sender.send([LARGE], salt="a").sent == [False]


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
    first, renamed, salted, other = [plan.key[0] for plan in draws]
    assert first == renamed == salted != other
    assert first == make_feature_key("", seed=hash_picture(LARGE))[0], "of pixels alone"
    with pytest.raises(RequestError, match="drawn from pixels"):
        without_cache.send([None], ["one"], keep="random")


OPTIONS: Mapping[str, Sequence[Mapping[str, object]]] = {
    "gemma3": ({}, {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 32}),
    "idefics3": ({}, {"do_image_splitting": False}),
    "smolvlm": ({}, {"do_image_splitting": False}),
}
"""Backbone -> processor options of servers, where those make other tiles of an image."""


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of GLM's image processor
@pytest.mark.parametrize("gigabytes", [0, 4])
@pytest.mark.parametrize(
    ("name", "options"),
    [(name, options) for name in BUILDERS for options in OPTIONS.get(name, ({},))],
)
def test_what_is_made_of_an_image_does_not_depend_on_those_beside_it(
    name: str,
    options: Mapping[str, object],
    gigabytes: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Processors pad a call to its largest image; with and without caches of processed images."""
    folder = tmp_path_factory.getbasetemp() / f"beside-{name}"
    if not folder.exists():
        build(name, folder)
    (architecture,) = (at for at, backbone in BACKBONES.items() if backbone.name == name)
    small, large = picture(100, 48), picture(330, 300, 1)

    def send(*calls: Sequence[Any]) -> dict[int, set[str]]:
        """By image, everything that one processor sends of it in these calls."""
        sender = Sender(folder, 5, architecture=architecture, placeholder="", options=options)
        sender._config.get_multimodal_config().mm_processor_cache_gb = gigabytes
        sender = sender.with_cache() if gigabytes else sender
        made: dict[int, set[str]] = {}
        for images in calls:
            for image, data in zip(images, sender.send(images).data, strict=True):
                if data is not None:  # else vLLM's cache has it
                    made.setdefault(id(image), set()).add(data)
        return made

    alone = send([small]) | send([large])
    orders = ([small, large], [large, small], [small, large, small])
    for calls in (*((order,) for order in orders), ([small, large], [small], [large])):
        assert send(*calls) == alone
