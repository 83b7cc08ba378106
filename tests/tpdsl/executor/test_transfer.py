"""Transfer: changed fields, unchanged fields, and completeness of the record."""

from __future__ import annotations

import json

import pytest

from tests.tpdsl.samples import edited, sample, state
from vllm_autoprune import (
    BudgetError,
    PruningState,
    load_state,
    materialize,
)
from vllm_autoprune.backbones import (
    BACKBONE_SHAPES,
    LLAVA_7B,
    LLAVA_NEXT_7B,
    QWEN_7B,
    BackboneShape,
)
from vllm_autoprune.tpdsl.atoms.source import FIXED_BUDGETS
from vllm_autoprune.tpdsl.transfer import (
    Transfer,
    check_transfer,
    set_at_pointer,
    state_document,
    transfer,
)

STRUCTURE = ("base_policy", "scoring", "reassembly", "safety")


def pointers(made: Transfer) -> set[str]:
    return {change.where for change in made.changes}


@pytest.mark.parametrize("backbone", [None, *BACKBONE_SHAPES.values()])
@pytest.mark.parametrize("budget", [None, 1, 16, 33, 160, 640, 1000])
def test_the_record_applied_to_the_old_state_gives_the_new_one(
    budget: int | None, backbone: BackboneShape | None
) -> None:
    old = state({"/constraints/selector/r_min": 30, "/scoring/signals/0/sign": "-"})
    result = transfer(old, budget, backbone)
    data = state_document(old)
    for change in result.changes:
        assert change.why
        assert change.before != change.after
        set_at_pointer(data, change.where, change.after)
    assert data == state_document(result.state)
    assert result.policy.budget == (budget or 32)


@pytest.mark.parametrize("budget", FIXED_BUDGETS)
@pytest.mark.parametrize("backbone", BACKBONE_SHAPES.values())
def test_the_searched_structure_stays(budget: int, backbone: BackboneShape) -> None:
    old = state()
    new = state_document(transfer(old, budget, backbone).state)
    assert {key: new[key] for key in STRUCTURE} == {
        key: state_document(old)[key] for key in STRUCTURE
    }
    assert new["constraints"] == state_document(old)["constraints"]
    assert new["budget"] == {**sample()["budget"], "atom": f"fixed_budget@{budget}", "limit": None}


def test_transfer_without_targets_changes_nothing() -> None:
    old = state()
    assert transfer(old).changes == ()
    assert transfer(old, 32).state == old


def test_r_min_follows_the_budget() -> None:
    old = state({"/constraints/selector/r_min": 30})
    result = transfer(old, 64)
    assert result.state.constraints.selector.insists_on == result.policy.r_min == 62
    assert "/constraints/selector/r_min" in pointers(result)
    smaller = transfer(old, 16)
    assert (smaller.policy.r_min, smaller.policy.quota) == (14, 2)


def test_r_min_is_never_negative() -> None:
    old = state({"/constraints/selector/r_min": 0, "/constraints/selector/q_e": 32})
    assert transfer(old, 16).state.constraints.selector.insists_on == 0


def test_every_transferred_policy_passes_its_safety_check() -> None:
    for budget in (16, 48, 160):
        for backbone in (None, LLAVA_NEXT_7B, QWEN_7B):
            assert check_transfer(transfer(state(), budget, backbone), backbone).valid


@pytest.mark.parametrize(("backbone", "sign"), [(LLAVA_7B, "-"), (QWEN_7B, "+")])
def test_a_stated_direction_of_relevance_follows_the_backbone(
    backbone: BackboneShape, sign: str
) -> None:
    for stated in "+-":
        old = state({"/scoring/signals/0/sign": stated})
        result = transfer(old, None, backbone)
        assert state_document(result.state)["scoring"]["signals"][0]["sign"] == sign  # type: ignore[index,call-overload]
        assert ("/scoring/signals/0/sign" in pointers(result)) == (stated != sign)


def test_a_direction_left_to_the_text_tower_stays_so() -> None:
    result = transfer(state(), None, QWEN_7B)
    assert "/scoring/signals/0/sign" not in pointers(result)
    meanings = {field.where: field.meaning for field in result.resolved}
    assert meanings["/scoring/signals/0/sign"].startswith("sign of relevance: +")


def test_tile_split_is_recorded() -> None:
    resolved = transfer(state(), 32, LLAVA_NEXT_7B).resolved
    assert resolved[0].meaning == "K = 32, over 5 tiles: 7 + 7 + 6 + 6 + 6"


def test_signals_without_their_input_are_recorded() -> None:
    report = [f for f in transfer(state(), None, QWEN_7B).resolved if "without [CLS]" in f.meaning]
    assert [f.value for f in report] == ["attention_proxy_saliency"]


def test_evidence_is_not_transferred() -> None:
    old = load_state(
        json.dumps(
            edited(
                sample(),
                {
                    "/provenance": {
                        "found_by": "a search",
                        "evaluated_on": "mini-LLaVA",
                        "scores": {"accuracy": 0.9},
                        "notes": "first of many",
                    }
                },
            )
        )
    )
    new = transfer(old, 64, LLAVA_NEXT_7B).state.provenance
    assert (new.found_by, new.evaluated_on, new.scores) == ("a search", "", {})
    assert new.notes.startswith("first of many Re-materialized from sample")
    assert old.digest[:12] in new.notes


@pytest.mark.parametrize(
    ("name", "budget", "backbone", "expected"),
    [
        ("autoprune", 64, None, "autoprune-k64"),
        ("autoprune-k32", 64, None, "autoprune-k64"),
        ("autoprune-k32", None, LLAVA_NEXT_7B, "autoprune-llava-next-7b-k32"),
        ("autoprune-llava-next-7b-k160", 320, None, "autoprune-llava-next-7b-k320"),
        ("autoprune-llava-next-7b-k160", 64, QWEN_7B, "autoprune-qwen2.5-vl-7b-k64"),
        ("k16", 64, None, "k16-k64"),
        ("x" * 128, 64, None, "x" * 124 + "-k64"),
    ],
)
def test_transferred_names_are_distinct(
    name: str, budget: int | None, backbone: BackboneShape | None, expected: str
) -> None:
    old = state({"/name": name, "/budget/atom": "fixed_budget@32"})
    assert transfer(old, budget, backbone).state.name == expected


def test_a_name_may_be_chosen() -> None:
    assert transfer(state(), name="mine").state.name == "mine"


def test_limit_of_the_operator_applies() -> None:
    limited = state({"/budget/limit": 64})
    assert transfer(limited, 64).policy.budget == 64
    with pytest.raises(BudgetError, match="/budget/limit"):
        transfer(limited, 128)


@pytest.mark.parametrize("budget", [0, -1, 65537])
def test_budget_out_of_range_is_refused(budget: int) -> None:
    with pytest.raises(BudgetError):
        transfer(state(), budget)


def test_a_transferred_state_loads_again() -> None:
    result = transfer(state(), 160, LLAVA_NEXT_7B).state
    again: PruningState = load_state(result.dumps())
    assert again == result and again.digest == result.digest


def test_a_policy_that_reads_what_the_backbone_lacks_fails_its_check() -> None:
    zipped = {"name": "visionzip", "params": {"patch_only": False}}
    result = transfer(state({"/base_policy": zipped}), 64, LLAVA_NEXT_7B)
    assert check_transfer(result, LLAVA_NEXT_7B).valid
    failed = check_transfer(transfer(state({"/base_policy": zipped}), 64, QWEN_7B), QWEN_7B)
    assert "use VisionZip with patch_only" in failed.failures()[0].detail
    alone = transfer(state({"/base_policy": {"name": "visionzip"}}), 64, QWEN_7B)
    assert check_transfer(alone, QWEN_7B).valid
    assert "/base_policy/name" in {field.where for field in alone.resolved}


@pytest.mark.parametrize("budget", [1, 33, 48, 1000, 65536])
def test_any_number_of_tokens_is_held_by_the_state_itself(budget: int) -> None:
    result = transfer(state(), budget).state
    own = materialize(load_state(result.dumps()))
    assert (own.budget, own.varies) == (budget, False)
    assert [own.at(tokens, 5).budget for tokens in (1, 576, 2880)] == [budget] * 3


def test_a_budget_that_followed_the_image_becomes_fixed() -> None:
    ratio = {"atom": "ratio_budget", "ratio": 0.1, "floor": 8, "ceiling": 64, "limit": 100}
    result = transfer(state({"/budget": ratio}), 64)
    assert state_document(result.state)["budget"] == {"atom": "fixed_budget@64", "limit": 100}
    assert "/budget" in pointers(result)


def test_a_budget_that_follows_the_image_is_resolved_on_a_backbone() -> None:
    tiles = state({"/budget": {"atom": "per_tile_budget", "k": 32}})
    assert "K = 160, over 5 tiles" in transfer(tiles, None, LLAVA_NEXT_7B).resolved[0].meaning
    assert transfer(tiles, None, LLAVA_7B).resolved[0].meaning == "K = 32"
    assert transfer(tiles, name="x").resolved[0].meaning == "K = 32 to 640, by image"


def test_r_min_above_its_range_becomes_null() -> None:
    result = transfer(state({"/constraints/selector/r_min": 30}), 1000)
    assert state_document(result.state)["constraints"]["selector"]["r_min"] is None  # type: ignore[index,call-overload]
    assert result.policy.r_min == 998


def test_tower_view_is_removed_without_a_tower() -> None:
    tower = state({"/source": {"tokens": {"atom": "vision_tokens@vision_tower"}}})
    assert "/source/tokens" not in pointers(transfer(tower, None, LLAVA_NEXT_7B))
    result = transfer(tower, None, QWEN_7B)
    assert "/source/tokens" in pointers(result)
    assert result.state.source.tokens.atom == "vision_tokens@post_projector"


def test_similarity_scope_is_recorded_for_tiled_backbones() -> None:
    report = {field.where: field.meaning for field in transfer(state(), 64, LLAVA_NEXT_7B).resolved}
    assert report["/source/tokens/tile_scope"].endswith("within each tile")
    assert "/source/tokens/tile_scope" not in {f.where for f in transfer(state(), 64).resolved}


def test_the_share_of_a_core_is_resolved_to_tokens() -> None:
    split = state({"/core": {"share": 0.75}})
    (field,) = (f for f in transfer(split, 64).resolved if f.where == "/core/share")
    assert (field.value, field.meaning) == (0.75, "48 core tokens, 16 by the question")
    assert not [f for f in transfer(state(), 64).resolved if f.where.startswith("/core")]
