"""From the renderer to the engine: fields of messages, checked plans, counted requests."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.exceptions import VLLMValidationError

from tests.serving.unit.samples import served
from vllm_autoprune.serving.api import engine_requests
from vllm_autoprune.serving.api.choices import ImageChoice
from vllm_autoprune.serving.api.engine_requests import (
    ImageCounts,
    RenderedHashes,
    watch_requests,
)
from vllm_autoprune.serving.api.renderer import (
    _MESSAGE_FIELDS,
    _add_salt,
    _pass_fields,
)
from vllm_autoprune.serving.api.request import SALT, CacheSalt
from vllm_autoprune.serving.plan import FIELD, ItemPlan
from vllm_autoprune.serving.settings import DEFAULT_RULES, RequestRules

pytestmark = pytest.mark.compat


TURN = {"images": 1, "text": "and now?"}
FIELDS = {"instructions": ["what?"], "details": ["low"], "turns": [0], "recall_turns": [TURN]}


FORGED = {"instructions": ["forged"], "details": ["high"], "recall_turns": []}


@pytest.mark.parametrize(
    ("asked", "passed"),
    [
        ({}, {"autoprune": FIELDS}),
        ({"autoprune": None}, {"autoprune": FIELDS}),
        (
            {"autoprune": {"budget": 16, **FORGED}, "num_crops": 4},
            {"autoprune": {"budget": 16, **FIELDS}, "num_crops": 4},
        ),
        # Left for the processor to refuse.
        *(({"autoprune": value},) * 2 for value in ([16], 16, "16", False)),
    ],
    ids=str,
)
def test_fields_of_the_messages_reach_the_processor_and_leave_the_prompt(
    asked: dict[str, Any], passed: dict[str, Any]
) -> None:
    before = copy.deepcopy(asked)
    prompt: Any = {"prompt_token_ids": [1], _MESSAGE_FIELDS: FIELDS, "mm_processor_kwargs": asked}
    assert _pass_fields(prompt) == {"prompt_token_ids": [1], "mm_processor_kwargs": passed}
    assert asked == before, "the caller's own"


def test_the_cache_salt_reaches_the_processor_in_a_type_of_its_own() -> None:
    asked = {"autoprune": {"budget": 8}, SALT: "what a client wrote"}
    prompt: Any = {"prompt_token_ids": [1], "cache_salt": "tenant", "mm_processor_kwargs": asked}
    kwargs = _add_salt(prompt)["mm_processor_kwargs"]
    assert kwargs == {"autoprune": {"budget": 8}, SALT: "tenant"}
    assert isinstance(kwargs[SALT], CacheSalt)
    assert asked[SALT] == "what a client wrote"
    assert _add_salt({"prompt_token_ids": [1]}) == {"prompt_token_ids": [1]}


# ---- requests on their way to the engine ----

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


def watched(**steps: Any) -> Any:
    """One of vLLM's steps, patched where this stands in for it."""
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor

    owners: dict[str, Any] = {"process_inputs": InputProcessor, "add_request": OutputProcessor}
    with pytest.MonkeyPatch.context() as patch:
        for name, owner in owners.items():
            patch.setattr(owner, name, steps.get(name, vars(owner)[name]))
        watch_requests()
        return next(vars(owners[name])[name] for name in steps)


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

    def process_inputs(self: object, request_id: str, handed: object) -> object:
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
    return watched(process_inputs=process_inputs)(owner, "mine", prompt)


def hand_over(request: object, *, fails: bool = False) -> None:
    def add_request(self: object, handed: object) -> None:
        if fails:
            raise RuntimeError("too many requests wait")

    watched(add_request=add_request)(SimpleNamespace(), request)


def prompt() -> dict[str, object]:
    counts = ImageCounts("autoprune", CHOICES, 7)
    hashes = RenderedHashes({"image": ["a", "b"]}, counts)
    return {"type": "multimodal", "mm_hashes": hashes}


def test_a_request_is_counted_once_and_when_it_is_passed_to_the_engine(counted: list[Any]) -> None:
    for number in range(2):
        made = prompt()
        for _ in range(3):  # a beam search hands over every beam, token by token
            request = processed(made, [feature(PLAN.encode())])
            assert len(counted) <= number + 1
            hand_over(request)
            hand_over(request)  # and n > 1 hands over each sample
    assert counted == [("autoprune", CHOICES, 7)] * 2
    with pytest.raises(RuntimeError):
        hand_over(processed(prompt(), [feature(PLAN.encode())]), fails=True)
    hand_over(processed({"type": "token"}, []))
    hand_over(processed("a raw prompt", []))
    hand_over(processed(prompt(), [feature(PLAN.encode())], stock=True))
    assert len(counted) == 2


ELSEWHERE = {"type": "multimodal", "mm_hashes": {"image": ["a"]}}
"""A prompt that was rendered by another process."""


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
    with pytest.raises(VLLMValidationError, match=said):  # answered by 400
        processed(ELSEWHERE, [plan])
    assert counted == [("refused",)]
    processed(ELSEWHERE, [plan], stock=True)


@pytest.mark.parametrize(
    "plan", [ItemPlan(65, (1, 2), (3,)), ItemPlan(8, (1, 2), (3,), keep="random")]
)
def test_without_the_flag_a_plan_from_another_process_sets_nothing(plan: ItemPlan) -> None:
    with pytest.raises(VLLMValidationError, match="requests may"):
        processed(ELSEWHERE, [feature(plan.encode(), plan.budget)])
    allowed = RequestRules("budget", explicit=True)
    processed(ELSEWHERE, [feature(plan.encode(), plan.budget)], rules=allowed)


def test_a_plan_from_another_process_brings_its_image() -> None:
    """The engine would look for the tensors in another item of the request."""
    alone = feature(PLAN.encode())
    del alone.data["pixel_values"]
    with pytest.raises(VLLMValidationError, match="without the tensors"):
        processed(ELSEWHERE, [alone])


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


def test_an_image_that_was_processed_without_the_plugin_is_refused(counted: list[Any]) -> None:
    unplanned = feature(PLAN.encode())
    del unplanned.data[FIELD]
    with pytest.raises(VLLMValidationError, match="processed without the plugin"):
        processed(ELSEWHERE, [feature(PLAN.encode()), unplanned])
    video = SimpleNamespace(data=unplanned.data, modality="video")
    processed(ELSEWHERE, [video])


def test_features_of_a_plan_ELSEWHERE_are_kept_under_the_key_of_its_pixels() -> None:
    """Under a key of the client's choice they would answer for another image."""
    keys = {}
    for name, forged, salt in (
        ("one", (1, 2), None),
        ("same", (3, 4), None),
        ("salted", (1, 2), "s"),
    ):
        image = feature(ItemPlan(8, forged, (3,)).encode())
        processed(ELSEWHERE, [image], salt=salt)
        keys[name] = ItemPlan.decode(image.data[FIELD].data).key
    assert keys["one"] == keys["same"] not in ((1, 2), (3, 4))
    assert keys["salted"] != keys["one"]
