"""From the renderer to the engine: message fields, checked plans, counts, processed images."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import MultiModalConfig
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.cache import (
    LruKeyReplicatedReceiverCache,
    LruKeyReplicatedSenderCache,
    MultiModalCacheMissError,
)
from vllm.multimodal.inputs import (
    MultiModalKwargsItem,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor

from tests.serving.unit.samples import PLAN, element, feature, served
from tests.serving.unit.sender import read_refused
from vllm_autoprune.errors import RequestError
from vllm_autoprune.serving.api.engine_requests import RenderedHashes, watch_requests
from vllm_autoprune.serving.api.foreign_items import count_surplus
from vllm_autoprune.serving.api.image_cache import (
    RenderedItem,
    Rendering,
    Waiting,
    cache_without_plans,
)
from vllm_autoprune.serving.api.positions import ItemSize
from vllm_autoprune.serving.api.renderer import _MESSAGE_FIELDS, _pass_fields
from vllm_autoprune.serving.api.request import SALT, CacheSalt
from vllm_autoprune.serving.plan import FIELD, KWARGS, ItemPlan
from vllm_autoprune.serving.request_rules import DEFAULT_RULES, RequestRules

pytestmark = pytest.mark.compat

TURN = {"images": 1, "text": "and now?"}
FIELDS = {
    "instructions": ["what?"],
    "details": ["low"],
    "turns": [0],
    "recall_turns": [TURN],
}


@pytest.mark.parametrize(
    ("kwargs", "passed"),
    [
        ({}, {"autoprune": FIELDS}),
        ({"autoprune": None, SALT: "what a client wrote"}, {"autoprune": FIELDS}),
        (
            {"autoprune": {"budget": 16, "details": None}, "num_crops": 4},
            {"autoprune": {"budget": 16, **FIELDS}, "num_crops": 4},
        ),
        # Left for the processor to refuse.
        *(({"autoprune": value},) * 2 for value in ([16], 16, "16", False)),
    ],
    ids=str,
)
def test_fields_of_messages_and_the_salt_reach_the_processor(
    kwargs: dict[str, Any], passed: dict[str, Any]
) -> None:
    original = copy.deepcopy(kwargs)
    prompt: Any = {_MESSAGE_FIELDS: FIELDS, KWARGS: kwargs, "cache_salt": "tenant"}
    result = _pass_fields(prompt)
    assert result == {KWARGS: {**passed, SALT: "tenant"}, "cache_salt": "tenant"}
    assert isinstance(result[KWARGS][SALT], CacheSalt), "no JSON body can send one"
    assert kwargs == original, "the caller's own"
    assert _pass_fields({"prompt_token_ids": [1]}) == {"prompt_token_ids": [1]}


@pytest.mark.parametrize("name", FIELDS)
def test_a_chat_may_not_write_what_is_read_of_its_messages(name: str) -> None:
    prompt = {_MESSAGE_FIELDS: FIELDS, KWARGS: {"autoprune": {name: FIELDS[name]}}}
    with pytest.raises(
        RequestError, match=f"autoprune/{name}: is read of the messages"
    ) as caught:
        _pass_fields(prompt)
    assert ("beside the picture" in str(caught.value)) == (name == "details")


# ---- requests on their way to the engine ----

ELSEWHERE = {"type": "multimodal", "mm_hashes": {"image": ["a"]}}
"""A prompt that was rendered by another process."""


@pytest.fixture
def refused() -> Callable[[], float]:
    """How many requests were refused since."""
    start = sum(read_refused().values())
    return lambda: sum(read_refused().values()) - start


def processed(
    prompt: object,
    features: list[Any],
    *,
    salt: str | None = None,
    rules: RequestRules | None = DEFAULT_RULES,
    span: int | None = None,
    params: SamplingParams | None = None,
    embeds: bool = False,
) -> Any:
    """A request that vLLM's own step has made of a prompt, or refused; stock without rules.

    Its prompt has 20 tokens of at most 100, and each item takes ``span`` positions.
    """
    config = SimpleNamespace(
        autoprune=None if rules is None else replace(served(), rules=rules),
        get_vocab_size=lambda: 100,
        max_model_len=100,
        get_multimodal_config=lambda: MultiModalConfig(enable_mm_embeds=embeds),
    )
    request = SimpleNamespace(
        mm_features=features,
        cache_salt=salt,
        prompt_token_ids=[0] * 20,
        sampling_params=params,
    )
    processor = SimpleNamespace(measure=lambda data, rows: ItemSize(span))
    renderer = SimpleNamespace(get_mm_processor=lambda: processor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            InputProcessor, "process_inputs", lambda self, request_id, prompt: request
        )
        patch.setattr(OutputProcessor, "add_request", OutputProcessor.add_request)
        watch_requests()
        process: Any = InputProcessor.process_inputs
        return process(
            SimpleNamespace(model_config=config, renderer=renderer), "mine", prompt
        )


def hand_over(request: Any, *, fails: bool = False) -> None:
    def add_request(self: object, request: object) -> None:
        if fails:
            raise RuntimeError("too many requests wait")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InputProcessor, "process_inputs", InputProcessor.process_inputs)
        patch.setattr(OutputProcessor, "add_request", add_request)
        watch_requests()
        add: Any = OutputProcessor.add_request
        add(SimpleNamespace(), request)


def rendered(**fields: Any) -> dict[str, object]:
    hashes = RenderedHashes({"image": ["a", "b"]}, **fields)
    return {"type": "multimodal", "mm_hashes": hashes}


def test_a_request_that_vllm_refuses_last_is_not_counted() -> None:
    """Beams, samples, and what is only rendered: ``test_server.py`` and ``tests/hostile``."""
    counted: list[int] = []
    prompt = rendered(count=lambda: counted.append(1))
    for fails in (True, False, False):
        with pytest.raises(RuntimeError) if fails else nullcontext():
            hand_over(processed(prompt, [feature(PLAN.encode())]), fails=fails)
        assert counted == ([] if fails else [1])
    hand_over(processed("a raw prompt", []))


@pytest.mark.parametrize("elsewhere", [False, True], ids=["rendered here", "elsewhere"])
def test_no_position_of_a_request_passes_the_served_context(elsewhere: bool) -> None:
    """Of 8 tokens of an image at ``span`` positions: 12 tokens of text are 12 positions."""

    def max_tokens(span: int, **sampling: int) -> int | None:
        hashes = ELSEWHERE if elsewhere else rendered(surplus=span - 8)
        params = SamplingParams(**{"max_tokens": 80, **sampling})
        sent = processed(hashes, [feature(PLAN.encode())], span=span, params=params)
        limited: int | None = sent.sampling_params.max_tokens
        return limited

    assert max_tokens(4) == max_tokens(8) == 80
    assert max_tokens(9) == 79
    assert max_tokens(9, max_tokens=5) == 5
    assert max_tokens(87) == 1
    for span, sampling, problem in (
        (88, {}, "20 tokens at 100 positions"),
        (10**6, {}, "at 1000012 positions"),
        (87, {"min_tokens": 2}, "less than or equal to 1"),
    ):
        with pytest.raises(VLLMValidationError, match=problem):
            max_tokens(span, **sampling)


def test_parts_of_an_image_from_elsewhere_share_its_positions() -> None:
    """A core, its delta and what a later turn recalls; then a whole image of the same size."""
    core, delta = ItemPlan(8, (1, 2), tokens=64).split(5)
    plans = [core, delta, delta.recall(4), ItemPlan(8, (3, 4), tokens=64)]
    items = [feature(plan.encode(), plan.budget) for plan in plans]
    assert count_surplus(lambda data, rows: ItemSize(span=30), items) == 2 * 30 - (
        5 + 3 + 4 + 8
    )
    packed = [replace(plan, positions="packed") for plan in plans]
    items = [feature(plan.encode(), plan.budget) for plan in packed]
    assert count_surplus(lambda data, rows: ItemSize(span=30), items) == 0


def test_parts_without_their_image_have_no_positions_to_share() -> None:
    """No server makes them: they would lower the positions that are counted of other images."""
    core, delta = ItemPlan(8, (1, 2), tokens=64).split(5)
    for plans in (
        [delta, core],
        [delta.recall(4)],
        [replace(core, positions="packed"), delta],
    ):
        items = [feature(plan.encode(), plan.budget) for plan in plans]
        for index, item in enumerate(items):
            item.mm_position.offset = 10 * index
        with pytest.raises(RequestError, match="not before it"):
            count_surplus(lambda data, rows: ItemSize(span=rows), items)


def test_an_image_that_keeps_all_tokens_takes_as_many_positions() -> None:
    """Whatever N its plan says."""
    item = feature(ItemPlan(8, (1, 2), tokens=0).encode(), 8)
    assert count_surplus(lambda data, rows: ItemSize(span=rows), [item]) == 0


def test_items_are_cached_under_the_key_of_their_image_when_they_are_handed_over() -> (
    None
):
    """Their identity, of which prefixes are made, stays theirs."""
    core = feature(PLAN.encode())
    delta = feature(PLAN.encode(), name="b")
    prompt = rendered(
        keys={"a": "x", "b": "x"}
    )  # held by vLLM until the request is handed over
    request = processed(prompt, [core, delta])
    assert (core.mm_hash, delta.mm_hash) == ("a", "b")
    for _ in range(2):
        hand_over(request)
        assert (core.mm_hash, delta.mm_hash) == ("x", "x")
        assert (core.identifier, delta.identifier) == ("a", "b")


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        (feature(PLAN.encode(), 9), "9 placeholders"),
        (feature(PLAN.encode()[:1]), "1 bytes"),
        (feature([PLAN.encode()]), "row of bytes"),
        (feature(PLAN.encode(), keep_on_cpu=False), "not batched as a processor does"),
        (feature(replace(PLAN, instruction=(100,)).encode()), "vocabulary"),
        # Without the flag a plan sets nothing.
        (feature(replace(PLAN, budget=65).encode(), 65), "requests may"),
        (feature(replace(PLAN, keep="random").encode()), "requests may"),
        # The engine would look for the tensors in another item of the request.
        (feature(PLAN.encode(), pixels=""), "the pixels of nothing"),
        (feature(None), "processed without the plugin"),
        (feature(None, pixels=""), "processed without the plugin"),
    ],
)
def test_a_plan_from_another_process_is_checked(
    refused: Callable[[], float], item: Any, problem: str
) -> None:
    with pytest.raises(VLLMValidationError, match=problem):  # answered by 400
        processed(ELSEWHERE, [feature(PLAN.encode()), item])
    assert refused() == 1
    processed(ELSEWHERE, [item], rules=None)
    processed(ELSEWHERE, [feature(None, modality="video")])
    if problem == "requests may":
        processed(ELSEWHERE, [item], rules=RequestRules("budget", explicit=True))


def test_embeddings_from_another_process_are_kept_whole_within_what_requests_may_keep() -> (
    None
):
    """On a server that takes embeddings, and lets requests say ``"enabled": false``."""
    rules = RequestRules("budget", 16, 64, explicit=True, total=100)
    of_image = partial(feature, None, pixels="image_embeds")

    def send(*tokens: int, rules: RequestRules = rules, embeds: bool = True) -> None:
        processed(
            ELSEWHERE, [of_image(count) for count in tokens], rules=rules, embeds=embeds
        )

    send(4, 64, 32)
    for refused, problem in (
        (partial(send, 65), "may keep 64"),
        (partial(send, 64, 37), "may keep 100"),
        (partial(send, 4, embeds=False), "without the plugin"),
        (partial(send, 4, rules=replace(rules, level="none")), "without the plugin"),
        (partial(send, 4, rules=replace(rules, explicit=False)), "without the plugin"),
    ):
        with pytest.raises(VLLMValidationError, match=problem):
            refused()


def test_features_of_a_plan_from_elsewhere_are_kept_under_the_key_of_its_pixels() -> (
    None
):
    """Under a key of the client's choice they would answer for another image."""
    keys = []
    for key, salt in (((1, 2), None), ((3, 4), None), ((1, 2), "s")):
        image = feature(ItemPlan(8, key, (3,)).encode())
        processed(ELSEWHERE, [image], salt=salt)
        keys.append(ItemPlan.decode(image.data[FIELD].data).key)
    assert keys[0] == keys[1] not in ((1, 2), (3, 4))
    assert keys[2] != keys[0]


# ---- both caches of processed images hold the same, whatever becomes of the requests ----

IMAGE_BYTES = 400


def plan_element(budget: int) -> Any:
    return element(ItemPlan(budget, (1, 1)).encode())


class Server:
    """vLLM's two caches with room for ``images``, and the steps of a request between them."""

    def __init__(self, images: int = 100) -> None:
        room = SimpleNamespace(mm_processor_cache_gb=images * IMAGE_BYTES / (1 << 30))
        config: Any = SimpleNamespace(get_multimodal_config=lambda: room)
        self.sender = LruKeyReplicatedSenderCache(config)
        self.engine = LruKeyReplicatedReceiverCache(config)
        cache_without_plans()
        self.waiting = Waiting()

    def render(self, *keys: str, by_name: bool = False) -> Any:
        """A request with images of these keys, as vLLM's processor renders it."""

        def process(key: str) -> Any:
            name = torch.tensor([ord(letter) for letter in key.ljust(IMAGE_BYTES // 4)])
            return MultiModalKwargsItem({"pixel_values": element(name.to(torch.int32))})

        rendering = Rendering(self.sender, self.waiting)
        cached = rendering.is_cached(list(keys))
        items = [
            rendering.get_and_update_item(
                None if is_cached else (process(key), []), key
            )[0]
            for key, is_cached in zip(keys, cached, strict=True)
        ]
        if not by_name:
            rendering.process_again = lambda: {
                key: RenderedItem(process(key), []) for key in keys
            }
        features = [
            SimpleNamespace(
                mm_hash=key,
                identifier="i",
                data={**(item or {}), FIELD: plan_element(4)},
            )
            for key, item in zip(keys, items, strict=True)
        ]
        return SimpleNamespace(features=features, rendering=rendering)

    def send(self, request: Any) -> list[bool]:
        """Which items had tensors; raises MultiModalCacheMissError, which vLLM answers by 500."""
        request.rendering.hand_over(request.features)
        had = [set(item.data) != {FIELD} for item in request.features]
        for item in self.engine.get_and_update_features(list(request.features)):
            key = "".join(map(chr, item.data["pixel_values"].data)).rstrip()
            assert (key, FIELD in item.data) == (item.mm_hash, True)
        return had


def test_an_image_that_came_by_name_and_was_dropped_fails_its_request_alone() -> None:
    server = Server(images=1)
    server.send(server.render("a"))
    waits = server.render("a", by_name=True)
    server.send(server.render("b"))
    with pytest.raises(MultiModalCacheMissError):
        server.send(waits)
    assert server.send(server.render("b")) == [False]


@pytest.mark.parametrize("seed", range(20))
def test_caches_agree_whatever_is_refused_and_overtaken(seed: int) -> None:
    source = random.Random(seed)
    server = Server(images=4)
    waiting = list[Any]()
    for _ in range(300):
        waiting.append(
            server.render(*source.choices("abcdefgh", k=source.randint(1, 5)))
        )
        if source.random() < 0.3:
            waiting.pop(source.randrange(len(waiting)))
        while len(waiting) > source.randint(0, 4):
            server.send(waiting.pop(source.randrange(len(waiting))))
            assert list(server.sender._cache.order) == list(server.engine._cache.order)
