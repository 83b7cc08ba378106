"""A worker's selection: fallbacks, the bounds of a state, and ranks that raise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.serving.unit.samples import blind, images, parts, plan, prune
from tests.tpdsl.samples import images as visual_tokens
from tests.tpdsl.samples import state
from vllm_autoprune import VisualTokens, materialize
from vllm_autoprune.serving.worker import batch, selection
from vllm_autoprune.serving.worker.batch import SelectionContext
from vllm_autoprune.serving.worker.selection import (
    FallbackReporter,
    select_with_fallback,
)
from vllm_autoprune.tpdsl.base_policy import (
    BASE_POLICIES,
    ReferenceSelection,
    TokenSelection,
)
from vllm_autoprune.tpdsl.refine import _evenly_spaced, keep_reference, select_tokens

POLICY = materialize(state({"/constraints/selector/q_e": 4}), 8)


def fail(*_: object) -> Any:
    raise RuntimeError("broken")


@pytest.mark.parametrize("kind", ["reference", "uniform"])
def test_an_exception_falls_back_to_the_reference_and_then_to_evenly_spaced_tokens(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter = FallbackReporter()
    tokens = visual_tokens()
    expected = keep_reference(POLICY, tokens).indices
    monkeypatch.setattr(selection, "select_tokens", fail)
    if kind == "uniform":
        monkeypatch.setattr(selection, "select_reference", fail)
        expected = _evenly_spaced(2, tokens.count, 8, tokens.features.device)
    result = select_with_fallback(POLICY, tokens, reporter)
    assert torch.equal(result.indices, expected)
    assert {key: n for key, n in reporter.counts().items() if n} == {(kind, "error"): 2}
    assert reporter.errors == {"RuntimeError": 1 + (kind == "uniform")}


def test_fallbacks_and_errors_add_up_and_each_kind_is_logged_once(
    logged: pytest.LogCaptureFixture,
) -> None:
    reporter = FallbackReporter()
    assert set(reporter.counts().values()) == {0}
    for codes in ([0, 0], [1, 0], [1, 1], [0], [2], [2], [1], [0]):
        reporter.report(torch.tensor(codes, dtype=torch.uint8))
    kinds = "none", "reference", "uniform"
    assert [reporter.counts()[kind, "scores"] for kind in kinds] == [5, 4, 2]
    lines = [record.getMessage() for record in logged.records]
    assert [[kind in line for kind in kinds[1:]] for line in lines] == [
        [True, False],
        [False, True],
    ]
    logged.clear()
    for error in (ValueError("a"), ValueError("b"), KeyError("c")):
        reporter.report_error(error)
    assert reporter.errors == {"ValueError": 2, "KeyError": 1}
    assert [r.exc_info[0] for r in logged.records if r.exc_info] == [
        ValueError,
        KeyError,
    ]


def break_bounds(
    monkeypatch: pytest.MonkeyPatch, number: int, broken: Sequence[int]
) -> None:
    """Have one image of each batch keep these tokens, whatever its policy selects."""

    def select(*inputs: Any) -> TokenSelection:
        chosen = select_tokens(*inputs)
        chosen.indices[number] = torch.tensor(broken)
        return chosen

    monkeypatch.setattr(selection, "select_tokens", select)


@pytest.mark.parametrize("broken", ["a token twice", "too few of the base policy's"])
def test_a_selection_that_breaks_its_bounds_is_replaced_for_its_image_alone(
    broken: str, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    tokens = visual_tokens(batch=3)
    reporter = FallbackReporter()
    sound = select_with_fallback(POLICY, tokens, reporter)
    reference = keep_reference(POLICY, tokens)
    picks = reference.indices[1].tolist()
    unpicked = [token for token in range(tokens.count) if token not in picks]
    unsafe = (
        [*picks[:7], picks[0]]
        if broken == "a token twice"
        else [*picks[:3], *unpicked[:5]]
    )
    break_bounds(monkeypatch, 1, unsafe)
    refined = select_with_fallback(POLICY, tokens, reporter)
    assert torch.equal(refined.indices[1], reference.indices[1])
    assert torch.equal(refined.indices[[0, 2]], sound.indices[[0, 2]])
    counts = reporter.counts()
    assert (counts["reference", "unsafe"], counts["none", "scores"]) == (1, 5)
    reporter.report(refined.fallback[:0])
    (record,) = logged.records
    assert "reference tokens (unsafe)" in record.getMessage()


def test_a_selection_may_exchange_as_many_tokens_as_its_state_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four of eight, at other tokens than those that the policy would choose."""
    tokens = visual_tokens()
    reporter = FallbackReporter()
    picks = keep_reference(POLICY, tokens).indices[1].tolist()
    unpicked = [token for token in range(tokens.count) if token not in picks]
    allowed = sorted([*picks[:4], *unpicked[:4]])
    break_bounds(monkeypatch, 1, allowed)
    refined = select_with_fallback(POLICY, tokens, reporter)
    assert refined.indices[1].tolist() == allowed
    assert refined.fallback.tolist() == [0, 0]


@pytest.mark.parametrize("extra", [0, 2])
@pytest.mark.parametrize(
    "broken",
    [
        (selection, ("select_tokens",)),
        (selection, ("select_tokens", "select_reference")),
        (selection, ("assemble_rows",)),
        (batch._RegionBatch, ("_make_tokens",)),
    ],
    ids=["policy", "base policy", "rows", "inputs"],
)
def test_a_rank_that_raises_takes_part_in_the_same_broadcasts(
    extra: int, broken: tuple[Any, Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broadcast less, or a shorter one, would hang all ranks; and all remember the same."""
    sent: list[Tensor] = []

    def broadcast(packed: Tensor) -> Tensor:
        sent.append(packed)
        return sent[0]  # rank 0's

    def first_tokens(
        _: object, tokens: VisualTokens, budget: int
    ) -> ReferenceSelection:
        picks = torch.arange(budget - extra).expand(tokens.batch, -1)
        return ReferenceSelection(picks, extra=torch.ones(tokens.batch, extra, 16))

    base = replace(BASE_POLICIES["cdpruner"], needs=frozenset(), function=first_tokens)
    monkeypatch.setitem(BASE_POLICIES, "cdpruner", base)
    for module in (selection, batch):
        monkeypatch.setattr(module, "world_size", lambda: 2)
    monkeypatch.setattr(selection, "broadcast_rank_zero", broadcast)
    plans = [plan(8, 1), plan(8, 2)]
    pictures = images(2)
    sound = prune(plans, pictures, blind())
    owner, names = broken
    for name in names:
        monkeypatch.setattr(owner, name, fail)
    context = SelectionContext(blind(), parts(), FallbackReporter())
    rows = batch.prune_images(context, plans, pictures)
    assert [packed.shape for packed in sent] == [(2, 9), (2, 9)]
    assert len(context.indices) == len(plans)
    if extra == 0:
        assert all(torch.equal(*pair) for pair in zip(rows, sound, strict=True))
