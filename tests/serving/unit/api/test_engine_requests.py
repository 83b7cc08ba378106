"""Plans are checked, and requests counted, when they are passed to the engine, and only then."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.exceptions import VLLMValidationError

from tests.serving.unit.samples import served
from vllm_autoprune.serving.api import engine_requests
from vllm_autoprune.serving.api.engine_requests import (
    ImageCounts,
    RenderedHashes,
    wrap_add_request,
    wrap_process_inputs,
)
from vllm_autoprune.serving.api.pruning_choice import ImageChoice
from vllm_autoprune.serving.shared.plan import FIELD, ItemPlan
from vllm_autoprune.serving.shared.request_rules import DEFAULT_RULES, RequestRules

pytestmark = pytest.mark.compat

PLAN = ItemPlan(8, (1, 2), (3,))
PIXELS = torch.arange(12.0).reshape(3, 2, 2)
CHOICES = (ImageChoice(8, 144, "state"), ImageChoice(16, 144, "state"))


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was counted, in place of the process's own counters."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(engine_requests, "count_request", lambda *said: calls.append(said))
    monkeypatch.setattr(
        engine_requests, "count_refused_request", lambda: calls.append(("refused",))
    )
    monkeypatch.setattr(engine_requests, "_waiting", engine_requests._waiting.copy())
    return calls


def feature(
    row: object, placeholders: int = 8, pixels: torch.Tensor | None = PIXELS, **how: Any
) -> Any:
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalKwargsItem,
    )

    data = MultiModalKwargsItem(
        {
            FIELD: MultiModalFieldElem(
                cast("Any", row), MultiModalBatchedField(**{"keep_on_cpu": True, **how})
            ),
            "pixel_values": MultiModalFieldElem(pixels, MultiModalBatchedField()),
        }
    )
    position = SimpleNamespace(get_num_embeds=lambda: placeholders)
    return SimpleNamespace(
        data=data, mm_position=position, mm_hash="a", identifier="a", modality="image"
    )


def processed(
    prompt: object,
    features: list[Any],
    *,
    fails: bool = False,
    stock: bool = False,
    salt: str | None = None,
    rules: RequestRules = DEFAULT_RULES,
) -> Any:
    """A request that vLLM's own step has made of a prompt, or refused."""

    def process_inputs(self: object, request_id: str, given: object) -> object:
        if fails:
            raise ValueError("longer than the maximum model length")
        return SimpleNamespace(
            request_id=f"{request_id}-random",
            external_req_id=request_id,
            mm_features=features,
            cache_salt=salt,
        )

    config = SimpleNamespace(
        autoprune=None if stock else replace(served(), rules=rules),
        get_vocab_size=lambda: 100,
        get_multimodal_config=lambda: SimpleNamespace(mm_hasher_algorithm="blake3"),
    )
    owner = SimpleNamespace(model_config=config)
    step: Any = wrap_process_inputs(process_inputs)
    return step(owner, "mine", prompt)


def hand_over(request: object, *, fails: bool = False) -> None:
    def add_request(self: object, given: object) -> None:
        if fails:
            raise RuntimeError("too many requests wait")

    step: Any = wrap_add_request(add_request)
    step(SimpleNamespace(), request)


def prompt() -> dict[str, object]:
    counts = ImageCounts("autoprune", CHOICES, 7)
    hashes = RenderedHashes({"image": ["a", "b"]}, counts)
    return {"type": "multimodal", "mm_hashes": hashes}


def test_a_request_is_counted_when_it_is_passed_to_the_engine(counted: list[Any]) -> None:
    one = prompt()
    request = processed(one, [feature(PLAN.encode())])
    assert counted == []
    hand_over(request)
    assert counted == [("autoprune", CHOICES, 7)]


def test_a_request_that_is_refused_after_rendering_does_not_count(counted: list[Any]) -> None:
    with pytest.raises(ValueError, match="model length"):
        processed(prompt(), [feature(PLAN.encode())], fails=True)
    one = prompt()
    request = processed(one, [feature(PLAN.encode())])
    with pytest.raises(RuntimeError):
        hand_over(request, fails=True)
    assert counted == []


def test_another_request_is_not_taken_for_a_refused_one(counted: list[Any]) -> None:
    refused = prompt()  # kept by a traceback, for example
    item = feature(PLAN.encode())
    place = id(processed(refused, [item]).mm_features)
    others = tuple([item] for _ in range(100))  # the first one would get its place in memory
    assert place not in map(id, others)
    for features in others:
        hand_over(SimpleNamespace(mm_features=features))
    assert counted == []


def test_samples_and_beams_of_a_request_count_once(counted: list[Any]) -> None:
    one = prompt()
    for _ in range(3):  # a beam search hands over every beam, token by token
        request = processed(one, [feature(PLAN.encode())])
        hand_over(request)
        hand_over(request)  # and n > 1 hands over each sample
    assert len(counted) == 1


def test_two_requests_count_twice_and_others_not_at_all(counted: list[Any]) -> None:
    for one in (prompt(), prompt()):
        hand_over(processed(one, [feature(PLAN.encode())]))
    assert len(counted) == 2
    hand_over(processed({"type": "token"}, []))
    hand_over(processed("a raw prompt", []))
    one = prompt()
    hand_over(processed(one, [feature(PLAN.encode())], stock=True))
    assert len(counted) == 2


def test_a_request_that_never_reaches_the_engine_leaves_nothing_behind() -> None:
    for _ in range(9):
        processed(prompt(), [feature(PLAN.encode())])
    assert not engine_requests._waiting


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (feature(PLAN.encode(), 9), "9 placeholders"),
        (feature(PLAN.encode()[:3]), "3 numbers"),
        (feature([PLAN.encode()]), "64-bit"),
        (feature(PLAN.encode(), keep_on_cpu=False), "on the CPU"),
        (feature(ItemPlan(8, (1, 2), (100,)).encode()), "vocabulary"),
        (feature(ItemPlan(8, (1, 2), profile=True).encode()), "profiling"),
    ],
)
def test_a_plan_from_another_process_is_checked(counted: list[Any], plan: Any, said: str) -> None:
    made_elsewhere = {"type": "multimodal", "mm_hashes": {"image": ["a"]}}
    with pytest.raises(VLLMValidationError, match=said):  # answered by 400
        processed(made_elsewhere, [plan])
    assert counted == [("refused",)]
    processed(made_elsewhere, [plan], stock=True)


@pytest.mark.parametrize(
    "plan", [ItemPlan(65, (1, 2), (3,)), ItemPlan(8, (1, 2), (3,), keep="random")]
)
def test_without_the_flag_a_plan_from_another_process_sets_nothing(plan: ItemPlan) -> None:
    made_elsewhere = {"type": "multimodal", "mm_hashes": {"image": ["a"]}}
    with pytest.raises(VLLMValidationError, match="requests may"):
        processed(made_elsewhere, [feature(plan.encode(), plan.budget)])
    allowed = RequestRules("budget", explicit=True)
    processed(made_elsewhere, [feature(plan.encode(), plan.budget)], rules=allowed)


def test_a_plan_from_another_process_brings_its_image() -> None:
    """The engine would look for the tensors in another item of the request."""
    alone = feature(PLAN.encode())
    del alone.data["pixel_values"]
    made_elsewhere = {"type": "multimodal", "mm_hashes": {"image": ["a"]}}
    with pytest.raises(VLLMValidationError, match="without the tensors"):
        processed(made_elsewhere, [alone])


def test_items_are_cached_under_the_key_of_their_image_when_they_are_handed_over() -> None:
    """Their identity, of which prefixes are made, stays theirs."""
    core, delta = feature(PLAN.encode()), feature(PLAN.encode())
    delta.mm_hash = delta.identifier = "b"
    hashes = RenderedHashes({"image": ["a", "b"]}, keys={"a": "x", "b": "x"})
    request = processed({"type": "multimodal", "mm_hashes": hashes}, [core, delta])
    assert (core.mm_hash, delta.mm_hash) == ("a", "b")
    for _ in range(2):
        hand_over(request)
        assert (core.mm_hash, delta.mm_hash) == ("x", "x")
        assert (core.identifier, delta.identifier) == ("a", "b")


def test_valid_plans_and_inputs_that_need_none_are_accepted() -> None:
    made_elsewhere = {"type": "multimodal", "mm_hashes": {"image": ["a"]}}
    known = SimpleNamespace(data=None, modality="image")
    other = SimpleNamespace(data={"image_embeds": torch.zeros(1)}, modality="image")
    cached = feature(None, pixels=None)
    request = processed(made_elsewhere, [known, other, cached, feature(PLAN.encode())])
    assert len(request.mm_features) == 4


def test_an_image_that_was_processed_without_the_plugin_is_refused(counted: list[Any]) -> None:
    made_elsewhere = {"type": "multimodal", "mm_hashes": {"image": ["a"]}}
    unplanned = feature(PLAN.encode())
    del unplanned.data[FIELD]
    with pytest.raises(VLLMValidationError, match="processed without the plugin"):
        processed(made_elsewhere, [feature(PLAN.encode()), unplanned])
    video = SimpleNamespace(data=unplanned.data, modality="video")
    processed(made_elsewhere, [video])


def test_features_of_a_plan_made_elsewhere_are_kept_under_the_key_of_its_pixels() -> None:
    """Under a key of the client's choice they would answer for another image."""
    made_elsewhere = {"type": "multimodal", "mm_hashes": {"image": ["a"]}}
    keys = {}
    for name, forged, salt in (
        ("one", (1, 2), None),
        ("same", (3, 4), None),
        ("salted", (1, 2), "s"),
    ):
        image = feature(ItemPlan(8, forged, (3,)).encode())
        processed(made_elsewhere, [image], salt=salt)
        keys[name] = ItemPlan.decode(image.data[FIELD].data).key
    assert keys["one"] == keys["same"] not in ((1, 2), (3, 4))
    assert keys["salted"] != keys["one"]
