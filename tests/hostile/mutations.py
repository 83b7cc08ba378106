"""Mutations of sound requests: one field of one item, of its plan or of its tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

import torch
from torch import Tensor
from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import (
    decode_mm_kwargs_item,
    encode_mm_kwargs_item,
)
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalSharedField,
    PlaceholderRange,
)

from tests.hostile.worker import Request, plan_row
from tests.serving.unit.samples import fields_of, with_fields
from vllm_autoprune import RequestError, load_state
from vllm_autoprune.serving.plan import CHOOSERS, FIELD, Choice, ItemPlan, TowerCut
from vllm_autoprune.serving.state_codec import encode_state
from vllm_autoprune.tpdsl.tokens import POSITIONS

_NUMBERS = (
    -1, 0, 1, 2, 3, 7, 8, 17, 64, 255, 256, 1000, 10**6, 2**31 - 1, 2**31, 2**62,
    -(2**62),
)  # fmt: skip

_STATES = [
    encode_state(load_state(name)) for name in ("divprune", "shared-core", "visionzip")
]


@dataclass(frozen=True)
class Mutation:
    """A request of which item ``number`` has another value of the field ``name``."""

    request: Request
    number: int
    name: str

    @property
    def feature(self) -> MultiModalFeatureSpec:
        """The item that differs."""
        return self.request.features[self.number]


def draw_mutation(requests: Sequence[Request], source: Random) -> Mutation | None:
    """One mutation; None where vLLM's encoding of processed inputs cannot send it."""
    request = copy.deepcopy(source.choice(requests))
    number = source.randrange(len(request.features))
    feature = request.features[number]
    assert feature.data is not None
    if source.random() < 0.5:
        name = source.choice([field.name for field in fields(ItemPlan)])
        feature.data[FIELD].data = _mutate_plan(plan_row(feature), name, source)
        length = _count_rows(plan_row(feature))
        if 0 < length < 4096 and source.random() < 0.8:
            request = _resize(request, number, length)
    else:
        name = source.choice([*sorted(feature.data) * 2, "pixel_values", "more"])
        items = [
            item.data for r in requests for item in r.features if item.data is not None
        ]
        _mutate_tensor(
            feature.data, name, [item[name] for item in items if name in item], source
        )
    feature = request.features[number]
    try:
        assert feature.data is not None
        feature.data = decode_mm_kwargs_item(encode_mm_kwargs_item(feature.data))
    except Exception:  # of vLLM's own encoding  # noqa: BLE001
        return None
    return Mutation(request, number, name)


# ---- plans ----


def _mutate_plan(row: Tensor, name: str, source: Random) -> Tensor:
    """The row with another value of a field: of its type, or of any."""
    plan = ItemPlan.decode(row)
    value = getattr(plan, name)
    if source.random() < 0.2:
        anything: Sequence[object] = (
            None,
            "core",
            [],
            [[1, 2]],
            {},
            0.5,
            b"x",
            True,
            -1,
            2**63,
        )
        return with_fields(row, **{name: source.choice(anything)})
    draws: Mapping[str, Callable[[], object]] = {
        "key": lambda: (source.choice(_NUMBERS), source.choice(_NUMBERS)),
        "instruction": lambda: _draw_ids(source),
        "language": lambda: _draw_ids(source),
        "keep": lambda: source.choice(CHOOSERS),
        "positions": lambda: source.choice([*POSITIONS]),
        "profile": lambda: not value,
        "state": lambda: source.choice([*_STATES, b"", b"{}", _STATES[0] + b" "]),
        "part": lambda: source.choice(("whole", "core", "delta", "recall")),
        "earlier": lambda: _draw_choices(plan, source),
        "text": lambda: _draw_text(plan, source),
        "tower": lambda: _draw_cut(plan, source),
    }
    drawn = draws[name]() if name in draws else _draw_number(value, plan, source)
    return with_fields(row, **{name: drawn})


def _draw_number(value: int, plan: ItemPlan, source: Random) -> int:
    near = (
        value - 1,
        value + 1,
        value * 2,
        plan.tokens - 1,
        plan.tokens,
        plan.tokens + 1,
    )
    return source.choice((*near, *near, *_NUMBERS))


def _draw_ids(source: Random) -> tuple[int, ...]:
    return tuple(
        source.choice((3, 40, 159, *_NUMBERS)) for _ in range(source.randrange(4))
    )


def _draw_choices(plan: ItemPlan, source: Random) -> list[object]:
    choices = [*plan.earlier, Choice(source.choice((1, 8, plan.tokens, 60_000)))]
    source.shuffle(choices)
    return [
        _as_fields(choice)
        for choice in choices[: source.randrange(3)] * source.choice((1, 9))
    ]


def _as_fields(choice: Choice | TowerCut) -> dict[str, object]:
    return {field.name: getattr(choice, field.name) for field in fields(choice)}


def _draw_cut(plan: ItemPlan, source: Random) -> dict[str, object] | None:
    """Of as many cells as there are, or of others, after some or all layers."""
    cells = source.choice((0, plan.tokens - 1, plan.tokens, plan.tokens + 1, 60_000))
    cut = TowerCut(cells, source.choice((0.0, 0.3, 0.5, 0.99, 1.0)))
    return source.choice((None, _as_fields(cut), {**_as_fields(cut), "criterion": ""}))


def _draw_text(plan: ItemPlan, source: Random) -> list[tuple[int, int]]:
    """Text without its first, its last or any place, moved, or where there was none."""
    text = [*plan.text]
    if not text or source.random() < 0.2:
        count = source.randrange(1, 40)
        places = sorted(source.choice((0, 1, plan.tokens, 10**6)) for _ in range(count))
        return [(position, 3) for position in places]
    index = source.randrange(len(text))
    position, token = text[index]
    changes: Sequence[Callable[[], list[tuple[int, int]]]] = (
        list,
        lambda: text[:index],
        lambda: text[index:],
        lambda: [*text[:index], *text[index + 1 :]],
        lambda: [
            *text[:index],
            (position + source.choice((-1, 1)), token),
            *text[index + 1 :],
        ],
        lambda: [
            *text[:index],
            *[(source.choice((plan.tokens, 10**6)), token)] * (len(text) - index),
        ],
        lambda: [
            *text[:index],
            (position, source.choice(_NUMBERS)),
            *text[index + 1 :],
        ],
        lambda: [*text, *text],
    )
    return source.choice(changes)()


def _count_rows(row: Tensor) -> int:
    """Rows that a plan asks for; 0 where it does not say."""
    with suppress(RequestError):
        plan = ItemPlan.decode(row)
        return plan.budget + len(plan.text)
    budget, text = (fields_of(row).get(name) for name in ("budget", "text"))
    return (
        budget + len(text) if isinstance(budget, int) and isinstance(text, list) else 0
    )


def _resize(request: Request, number: int, length: int) -> Request:
    """The request with so many placeholders of an item, all of which have rows."""
    item = request.features[number]
    start = item.mm_position.offset
    end = item.mm_position.offset + item.mm_position.length
    ids = [*request.ids[:start], *[request.ids[start]] * length, *request.ids[end:]]
    moved = [
        replace(
            feature,
            mm_position=replace(span, offset=span.offset + start + length - end),
        )
        if (span := feature.mm_position).offset > start
        else feature
        for feature in request.features
    ]
    moved[number] = replace(item, mm_position=PlaceholderRange(start, length))
    return Request(ids, moved)


# ---- tensors ----


def _mutate_tensor(
    item: Any, name: str, elements: Sequence[MultiModalFieldElem], source: Random
) -> None:
    """Another value or another kind of a field, in place."""
    element = item.get(name)
    if element is None:
        kind = MultiModalBatchedField(keep_on_cpu=source.random() < 0.5)
        item[name] = MultiModalFieldElem(torch.zeros(3), kind)
        return
    if source.random() < 0.15:
        del item[name]
        return
    if source.random() < 0.2:
        element.field = _draw_kind(source)
        return
    values: list[Callable[[], object]] = [
        lambda: None,
        lambda: source.choice((3, 0.5, [], [1, 2], [[1.0]])),
        lambda: source.choice(elements).data if elements else None,
    ]
    if isinstance(element.data, Tensor):
        values = [*values[: source.randrange(2)], *(_changes(element.data, source))]
        values += [lambda: source.choice(elements).data if elements else None] * 3
    element.data = source.choice(values)()


def _draw_kind(source: Random) -> Any:
    on_cpu = source.random() < 0.5
    rows = [slice(0, 1)]
    return source.choice(
        (
            MultiModalBatchedField(keep_on_cpu=on_cpu),
            MultiModalSharedField(batch_size=1, keep_on_cpu=on_cpu),
            MultiModalFlatField(slices=rows, keep_on_cpu=on_cpu),
            MultiModalFlatField(slices=rows, dim=1, keep_on_cpu=on_cpu),
        )
    )


def _changes(tensor: Tensor, source: Random) -> list[Callable[[], object]]:
    """Other tensors: of another type, shape, or with other numbers."""
    types = (
        torch.float32,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
    number = source.choice((*_NUMBERS, *_NUMBERS, 0.5, float("nan"), float("inf")))
    changes: list[Callable[[], object]] = [
        lambda: tensor.to(source.choice(types)),
        lambda: tensor[None],
        lambda: tensor.flatten(),
        lambda: tensor.reshape(-1, 1),
        lambda: torch.full_like(tensor, _fitting(number, tensor)),
    ]
    if tensor.dim():
        last = tensor.shape[-1]
        changes += [
            lambda: tensor[:-1],
            lambda: tensor[:0],
            lambda: tensor[..., : last - 1],
            lambda: torch.cat([tensor, tensor]),
            lambda: tensor.flip(0),
            lambda: torch.cat([tensor, tensor], dim=-1),
        ]
    if not tensor.is_floating_point() and tensor.dim() == 1 and len(tensor):
        changes += [lambda: _exchange_number(tensor, number, source)] * 6
        changes += [lambda: _reshape_grid(tensor, source)] * 6
    return changes


def _fitting(number: float, tensor: Tensor) -> float:
    """A number that the tensor's type has."""
    if tensor.is_floating_point():
        return number
    if number != number or abs(number) == float("inf"):
        return 1
    limits = torch.iinfo(tensor.dtype) if tensor.dtype != torch.bool else None
    return int(number) if limits and limits.min <= number <= limits.max else 1


def _exchange_number(tensor: Tensor, number: float, source: Random) -> Tensor:
    changed = tensor.clone()
    index = source.randrange(len(tensor))
    near = int(tensor[index])
    value = source.choice((near + 1, near - 1, near * 2, number))
    changed[index] = int(_fitting(value, tensor))
    return changed


def _reshape_grid(tensor: Tensor, source: Random) -> Tensor:
    """Other sides with the same product."""
    sides: list[int] = tensor.tolist()
    product = torch.tensor(sides).prod()
    shapes = [sides[::-1], [1] * (len(sides) - 1) + [int(product)]]
    if len(sides) == 3:
        times, height, width = sides
        shapes += [
            [times, 1, height * width],
            [times, height * width, 1],
            [1, times * height, width],
        ]
        shapes += [[times, height * 2, width // 2], [times, height // 2, width * 2]]
        shapes += [
            [times * 2, height // 2, width],
            [times, height * 4, max(1, width // 4)],
        ]
    return torch.tensor(source.choice(shapes), dtype=tensor.dtype)
