"""States adapted to a budget, a backbone or many questions: what changes, and the record of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tables import parametrize_from_file
from tests.tpdsl.samples import DELETE, IN, Changes, edited, images, sample, state
from vllm_autoprune import BudgetError, StateError, load_state, materialize, refine
from vllm_autoprune.backbones import BACKBONE_SHAPES, BackboneShape
from vllm_autoprune.tpdsl.atoms.source import FIXED_BUDGETS
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.transfer import (
    NEAREST,
    Change,
    Kind,
    check_transfer,
    instruction_free,
    list_changes,
    transfer,
)

LLAVA_7B = BACKBONE_SHAPES["llava-1.5-7b"]
LLAVA_NEXT_7B = BACKBONE_SHAPES["llava-next-7b"]
QWEN_7B = BACKBONE_SHAPES["qwen2.5-vl-7b"]


@pytest.mark.parametrize("backbone", [None, LLAVA_NEXT_7B, QWEN_7B])
@pytest.mark.parametrize("budget", [None, 1, *FIXED_BUDGETS, 33, 65536])
def test_the_record_applied_to_the_old_state_gives_the_new_one_which_holds_k(
    budget: int | None, backbone: BackboneShape | None
) -> None:
    old = state({"/constraints/selector/r_min": 30, "/scoring/signals/0/sign": "-"})
    new, changes = transfer(old, budget, backbone)
    data = old.document()
    for change in changes:
        assert change.why and change.before != change.after
        after = DELETE if change.kind == "removed" else change.after
        data = edited(data, {change.where: after})
    assert data == new.document()
    for part in ("base_policy", "reassembly", "safety"):  # the searched structure stays
        assert data[part] == old.document()[part]
    policy = materialize(load_state(new.dumps()))
    assert (policy.budget, policy.quota) == (budget or 32, min(2, budget or 2))
    if budget in FIXED_BUDGETS:
        assert data["budget"] == {
            **sample()["budget"],
            "atom": f"fixed_budget@{budget}",
        }
    assert transfer(state(), 32) == (state(), ()) == transfer(state())


RATIO = {"atom": "ratio_budget", "ratio": 0.1, "floor": 8, "ceiling": 64, "limit": 100}
R_MIN = "/constraints/selector/r_min"
SIGN = "/scoring/signals/0/sign"
TOWER = {"tokens": {"atom": "vision_tokens@vision_tower"}}
SAME = ...


@pytest.mark.parametrize(
    ("changes", "budget", "backbone", "where", "value"),
    [
        *(({R_MIN: 30}, budget, None, R_MIN, r_min)
          for budget, r_min in ((64, 62), (16, 14), (1000, None))),
        *(({SIGN: sign}, None, backbone, SIGN, after) for backbone, sign, after in (
            (LLAVA_7B, "+", "-"), (QWEN_7B, "-", "+"), (LLAVA_7B, "-", SAME),
            (QWEN_7B, "auto", SAME))),
        ({"/budget": RATIO}, 64, None, "/budget/atom", "fixed_budget@64"),
        (IN, None, LLAVA_7B, "/rank_at", None),
        (IN, None, QWEN_7B, "/rank_at", SAME),
        ({"/source": TOWER}, None, LLAVA_NEXT_7B, "/source/tokens/atom", SAME),
        ({"/source": TOWER}, None, QWEN_7B, "/source/tokens/atom", "vision_tokens@post_projector"),
        ({"/name": "a-k32"}, None, LLAVA_NEXT_7B, "/name", "a-llava-next-7b-k32"),
        ({"/name": "x" * 128}, 64, None, "/name", "x" * 124 + "-k64"),
    ],
)  # fmt: skip
def test_what_depends_on_budget_or_backbone_follows_it(
    changes: Changes,
    budget: int | None,
    backbone: BackboneShape,
    where: str,
    value: object,
) -> None:
    _, record = transfer(state(changes), budget, backbone)
    assert {change.where: change.after for change in record}.get(where, SAME) == value


def test_the_limit_applies_scores_are_not_transferred_and_the_backbone_is_checked() -> (
    None
):
    with pytest.raises(BudgetError, match="/budget/limit"):
        transfer(state({"/budget": RATIO}), 128)
    provenance = {
        "found_by": "a search",
        "evaluated_on": "mini-LLaVA",
        "scores": {"accuracy": 0.9},
        "notes": "first of many",
    }
    old = state({"/provenance": provenance})
    new = transfer(old, 64, LLAVA_NEXT_7B)[0].provenance
    assert (new.found_by, new.evaluated_on, new.scores) == ("a search", "", {})
    assert new.notes.startswith("first of many Re-materialized from sample")
    assert old.digest[:12] in new.notes
    cls = state(
        {"/base_policy": {"name": "visionzip", "params": {"patch_only": False}}}
    )
    policy = materialize(transfer(cls, 64)[0])
    assert check_transfer(policy, LLAVA_NEXT_7B).valid
    failed = check_transfer(policy, QWEN_7B)  # whose tower has no [CLS]
    assert "use VisionZip with patch_only" in failed.failures()[0].detail


X = {"atom": "x", "weight": 1}
Y = {"atom": "y", "weight": 2}
Z = {"atom": "z"}


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ([1], [1.0], [("/0", "changed", 1, 1.0)]),
        ({"a": 1, "b": {"c": 2}}, {"b": {"c": 3, "d/e": 4}},
         [("/a", "removed", 1, None), ("/b/c", "changed", 2, 3), ("/b/d~1e", "added", None, 4)]),
        # Atoms are compared with themselves wherever they stand.
        ([X, Y], [Z, {**Y, "weight": 5}],
         [("/0", "removed", X, None), ("/1/weight", "changed", 2, 5), ("/0", "added", None, Z)]),
        ([X, Y], [Y, X], [("", "reordered", ["x", "y"], ["y", "x"])]),
    ],
)  # fmt: skip
def test_differences_by_hand(
    before: Any, after: Any, changes: list[tuple[str, Kind, Any, Any]]
) -> None:
    assert list_changes(before, after) == tuple(Change(*change) for change in changes)


# Variants that read no question.


@pytest.mark.parametrize("policy", list(BASE_POLICIES))
def test_no_variant_reads_the_instruction(policy: str) -> None:
    variant, _ = instruction_free(state({"/base_policy": {"name": policy}}))
    assert not materialize(variant, 8).reads_instruction
    readers = {name for name, policy in BASE_POLICIES.items() if policy.core is None}
    assert (
        set(NEAREST) == readers
        and not {other for other, _ in NEAREST.values()} & readers
    )


@parametrize_from_file("policy", "params", "form")
def test_a_policy_with_a_form_that_reads_no_question_keeps_its_other_parameters(
    policy: str, params: Changes, form: Changes
) -> None:
    before = state({"/base_policy": {"name": policy, "params": params}})
    after = instruction_free(before)[0].base_policy
    every = before.base_policy.params.model_dump()
    assert (after.name, after.params.model_dump()) == (policy, {**every, **form})


def test_only_instruction_dependent_parts_change_and_are_recorded() -> None:
    before = state()
    tokens = images(3)
    variant, changes = instruction_free(before)
    assert [
        change.where for change in changes if not change.where.startswith("/provenance")
    ] == [
        "/name",
        "/base_policy/name",
        "/base_policy/params/theta",
        "/base_policy/params/tile_scope",
        "/scoring/signals/0",
    ]
    assert all(change.why for change in changes) and variant.provenance.scores == {}
    alone = state(
        {"/scoring/signals": [{"atom": "instruction_guided_visual_relevance"}]}
    )
    (signal,) = instruction_free(alone)[0].scoring.signals
    assert signal.atom == "attention_proxy_saliency"
    gated = state(
        {"/reassembly": {"atom": "semantic_gated_residual_merge", "strength": 0.2}}
    )
    with pytest.raises(StateError) as caught:
        instruction_free(gated)
    assert [problem.where for problem in caught.value.problems] == ["/reassembly"]
    # A core is dropped with the reason, unless the state is all core.
    variant, changes = instruction_free(state({"/core": {"share": 0.5}}))
    assert (
        variant.core is None and variant.digest == instruction_free(state())[0].digest
    )
    (why,) = (change.why for change in changes if change.where == "/core")
    assert why == "without the instruction, questions share all KV blocks anyway"
    split = state({"/core": {"share": 1.0, "cover": 0.5, "strength": 0.25}})
    variant, _ = instruction_free(split)
    actual, expected = (
        refine(materialize(chosen, 8), tokens) for chosen in (variant, split)
    )
    assert variant.core == split.core and torch.equal(
        actual.features, expected.features
    )
