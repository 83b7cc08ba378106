"""Grouping of the images of one step into encoder calls."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_autoprune.serving.compat import worker
from vllm_autoprune.serving.models.vision import group_by_tokens

BOUND = 100


@given(st.lists(st.integers(0, 150)), st.integers(1, 200))
def test_groups_are_all_images_in_order_within_the_bound(sizes: list[int], bound: int) -> None:
    groups = list(group_by_tokens(sizes, bound))
    assert [size for some in groups for size in sizes[some]] == sizes
    for some in groups:
        group = sizes[some]
        assert group and (len(group) == 1 or sum(group) <= bound)
    for some, following in pairwise(groups):
        assert sum(sizes[some]) + sizes[following][0] > bound, "these would have gone together"


class Model:
    """Fake model whose items are numbers of tokens; None is an item without data."""

    def autoprune_split(self, items: Sequence[int | None]) -> list[slice]:
        return list(group_by_tokens([item or 0 for item in items], BOUND))


def first_runner(model: object, features: dict[str, list[int | None]]) -> Any:
    """The part of ``GPUModelRunner`` that the wrapper reads."""
    requests = {
        name: SimpleNamespace(mm_features=[SimpleNamespace(data=item) for item in items])
        for name, items in features.items()
    }
    return SimpleNamespace(get_model=lambda: model, requests=requests)


def first_calls(model: object, features: dict[str, list[int | None]]) -> list[dict[str, list[int]]]:
    """Inputs of each call of runner V1's stock method, where all inputs are scheduled together."""
    calls: list[dict[str, list[int]]] = []

    def stock(self: object, scheduler_output: Any) -> Any:
        assert scheduler_output.free_encoder_mm_hashes == ["freed"]
        scheduled = scheduler_output.scheduled_encoder_inputs
        calls.append(scheduled)
        return [f"{name}{i}" for name, inputs in scheduled.items() for i in inputs]

    scheduled = {name: list(range(len(items))) for name, items in features.items()}
    output: Any = SimpleNamespace(
        scheduled_encoder_inputs=scheduled, free_encoder_mm_hashes=["freed"]
    )
    outputs = worker._wrap_encoder_v1(stock)(first_runner(model, features), output)
    assert outputs == [f"{name}{i}" for name, inputs in scheduled.items() for i in inputs]
    assert output.scheduled_encoder_inputs is scheduled
    return calls


def test_runner_v1_is_given_one_group_after_another() -> None:
    assert first_calls(Model(), {"a": [60, 30, 30], "b": [10], "c": [101]}) == [
        {"a": [0, 1]},
        {"a": [2], "b": [0]},
        {"c": [0]},
    ]


@pytest.mark.parametrize(
    ("model", "features"),
    [
        (Model(), {"a": [60, 30], "b": [10, None]}),
        (Model(), {"a": [500]}),
        (object(), {"a": [60, 60], "b": [60]}),  # a model without the plugin
    ],
)
def test_runner_v1_is_unchanged_if_one_call_suffices(model: object, features: Any) -> None:
    assert len(first_calls(model, features)) == 1


@pytest.mark.parametrize(("model", "groups"), [(Model(), [[60, 30], [30], [150]]), (object(), 1)])
def test_runner_v2_is_given_one_group_after_another(model: object, groups: Any) -> None:
    items: Any = [("image", size) for size in (60, 30, 30, 150)]
    calls: list[list[int]] = []

    def stock(self: object, mm_kwargs: list[tuple[str, Any]]) -> Any:
        calls.append([size for _, size in mm_kwargs])
        return list(calls[-1])

    runner: Any = SimpleNamespace(model=model)
    assert worker._wrap_encoder_v2(stock)(runner, items) == [60, 30, 30, 150]
    assert calls == (groups if isinstance(groups, list) else [[60, 30, 30, 150]])
