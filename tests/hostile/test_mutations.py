"""Forged plans and tensors in this process: refused, or served with as many rows as placeholders.

``--exhaustive`` draws 60,000 mutations on every backbone's tiny model.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from tests.hostile.mutations import Mutation, draw_mutation
from tests.hostile.worker import Worker, distributed, plan_row, reaches_worker
from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.serving.plan import FIELD, ItemPlan

pytestmark = pytest.mark.compat

QUICK = ("qwen2_5_vl", "qwen3_vl", "internvl", "idefics3", "llava_next")
MORE = (
    "qwen2_vl",
    "glm4v",
    "llava_onevision",
    "gemma3",
    "mistral3",
    "paddleocr_vl",
    "lightonocr",
)


@pytest.fixture(scope="module", autouse=True)
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with distributed(tmp_path_factory.mktemp("ranks")):
        yield


@torch.inference_mode()
def judge(worker: Worker, mutation: Mutation) -> str:
    """How a forged request ends: ``refused``, or ``served`` beside a sound one.

    A worker survives what is refused as well, with as many rows as it reads in the plan.
    """
    features = mutation.request.features
    outcome = "served"
    try:
        worker.check(mutation.request)
    except AutopruneError:  # answered by 400
        outcome = "refused"
    if not reaches_worker(mutation.feature):
        assert (
            outcome == "refused" or mutation.feature.modality == "video"
        )  # stock's, left whole
        return outcome
    plans = worker.model.autoprune_plan_reader.read(
        [plan_row(item) for item in features]
    )
    if any(plan.profile for plan in plans):
        assert outcome == "refused"
        return outcome
    lengths = [plan.budget + len(plan.text) for plan in plans]
    positions = worker.positions(mutation.request)
    ahead, *rows, behind = worker.encode(
        [worker.neighbour, *features, worker.neighbour]
    )
    for neighbour in (ahead, behind):
        torch.testing.assert_close(neighbour, worker.rows, rtol=1e-3, atol=1e-3)
    assert [len(part) for part in rows] == lengths
    if outcome == "served":
        assert all(bool(part.isfinite().all()) for part in rows)
        assert lengths == [item.mm_position.get_num_embeds() for item in features]
    if outcome == "served" and positions is not None:
        worker.place(mutation.request, rows, positions)
    return outcome


Change = Callable[[MultiModalFeatureSpec], None]


def with_plan(change: Callable[[ItemPlan], ItemPlan]) -> Change:
    """Another plan, and as many placeholders as it asks for."""

    def apply(item: MultiModalFeatureSpec) -> None:
        plan = change(ItemPlan.decode(plan_row(item)))
        assert item.data is not None
        item.data[FIELD].data = plan.encode()
        length = plan.budget + len(plan.text)
        item.mm_position = PlaceholderRange(item.mm_position.offset, length)

    return apply


def with_tensor(name: str, *numbers: int) -> Change:
    """Other numbers of a field, or no such field."""

    def apply(item: MultiModalFeatureSpec) -> None:
        assert item.data is not None
        item.data[name].data = torch.tensor(numbers)
        if not numbers:
            del item.data[name]

    return apply


def cut_text(plan: ItemPlan, count: int) -> ItemPlan:
    """As many rows as before, fewer of them of text."""
    return replace(
        plan, text=plan.text[:count], budget=plan.budget + len(plan.text) - count
    )


def has_text(plan: ItemPlan) -> bool:
    return bool(plan.text)


EXAMPLES: Mapping[str, tuple[str, Callable[[ItemPlan], bool], Change]] = {
    "text at 1,000,000": (
        "qwen3_vl",
        has_text,
        with_plan(lambda plan: replace(plan, text=(*plan.text[:-1], (10**6, 31)))),
    ),
    "no text": ("qwen3_vl", has_text, with_plan(lambda plan: cut_text(plan, 0))),
    "half of the text": (
        "qwen3_vl",
        has_text,
        with_plan(lambda plan: cut_text(plan, 12)),
    ),
    "no pixels": ("qwen3_vl", has_text, with_tensor("pixel_values_videos")),
    "no plan but its field": ("qwen3_vl", has_text, with_tensor(FIELD, 1)),
    "cells and resized": (
        "qwen2_5_vl",
        lambda plan: 3 < plan.tokens < 12,
        with_plan(lambda plan: replace(plan, keep="resized", budget=3)),
    ),
    **{
        f"grid {sides}": (
            "qwen2_5_vl",
            lambda plan: plan.tokens == 64,
            with_tensor("image_grid_thw", *sides),
        )
        for sides in ((1, 1, 256), (1, 256, 1), (1, 16, 12), (4, 8, 8), (1, 0, 16))
    },
}
"""What ended engines: a backbone, one of its items, and what is changed of it."""


@pytest.mark.parametrize(
    "backbone", sorted({backbone for backbone, *_ in EXAMPLES.values()})
)
def test_what_ended_engines_is_refused_or_survived(
    backbone: str, tmp_path: Path
) -> None:
    """A video without any text is served, of a model that the check does not know to have some."""
    worker = Worker(backbone, tmp_path)
    outcomes = dict[str, str]()
    for name, (of_backbone, concerns, change) in EXAMPLES.items():
        if of_backbone != backbone:
            continue
        sound = next(
            request
            for request in worker.requests
            if concerns(ItemPlan.decode(plan_row(request.features[0])))
        )
        request = copy.deepcopy(sound)
        (item,) = request.features
        start = item.mm_position.offset
        end = item.mm_position.offset + item.mm_position.length
        change(item)
        placeholders = [request.ids[start]] * item.mm_position.length
        request.ids[start:end] = placeholders
        outcomes[name] = judge(worker, Mutation(request, 0, name))
    assert {name for name, outcome in outcomes.items() if outcome == "served"} <= {
        "no text"
    }


def run(backbone: str, folder: Path, count: int) -> Counter[str]:
    worker = Worker(backbone, folder)
    outcomes = Counter[str]()
    faults = list[str]()
    for number in range(count):
        mutation = draw_mutation(worker.requests, Random(f"{backbone}/{number}"))
        if mutation is None:
            outcomes["unsendable"] += 1
            continue
        try:
            outcomes[judge(worker, mutation)] += 1
        except Exception as error:  # noqa: BLE001
            outcomes["raised"] += 1
            faults.append(f"{backbone}/{number} ({mutation.name}): {error!r}"[:300])
    assert faults == [], f"{outcomes}"
    return outcomes


@pytest.mark.parametrize(
    ("backbone", "count"),
    [
        *((name, 200) for name in QUICK),
        *(
            pytest.param(
                name, 5000, marks=[pytest.mark.exhaustive, pytest.mark.timeout(3600)]
            )
            for name in (*QUICK, *MORE)
        ),
    ],
)
def test_a_mutated_request_is_refused_or_served(
    backbone: str, count: int, tmp_path: Path
) -> None:
    outcomes = run(backbone, tmp_path, count)
    assert min(outcomes["refused"], outcomes["served"]) > count / 10, outcomes
