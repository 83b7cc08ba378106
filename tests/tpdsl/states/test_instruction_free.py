from __future__ import annotations

import pytest
import torch

from tests.tpdsl.samples import images, state
from vllm_autoprune import PruningState, StateError, VisualTokens, materialize, refine
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.transfer import NEAREST, instruction_free


@pytest.mark.parametrize("policy", list(BASE_POLICIES))
def test_no_variant_reads_the_instruction(policy: str) -> None:
    variant = instruction_free(state({"/base_policy": {"name": policy}})).state
    assert not materialize(variant, 8).reads_instruction


def test_substitutes_of_base_policies_read_no_instruction() -> None:
    readers = {name for name, policy in BASE_POLICIES.items() if policy.core is None}
    assert set(NEAREST) == readers
    assert not {other for other, _ in NEAREST.values()} & readers


@pytest.mark.parametrize(
    ("policy", "params", "kept"),
    [
        ("cen_cdpruner", {"relevance": False}, {"scale_variance": True}),
        ("mmtok", {"words": False}, {"alpha": 0.25}),
        ("fsr", {"alpha": 0.0}, {"rho": 0.5}),
        ("idpruner", {"importance": "attention"}, {"balance": 0.25}),
    ],
)
def test_a_policy_with_a_form_that_reads_no_question_keeps_its_other_parameters(
    policy: str, params: dict[str, object], kept: dict[str, object]
) -> None:
    asking = {"importance": "relevance"} if policy == "idpruner" else {}
    before = state({"/base_policy": {"name": policy, "params": {**kept, **asking}}})
    after = instruction_free(before).state.base_policy
    assert after.name == policy
    assert after.params.model_dump() == {
        **before.base_policy.params.model_dump(), **params, **kept
    }  # fmt: skip


def test_the_same_tokens_for_two_questions() -> None:
    policy = materialize(instruction_free(state()).state, 8)
    tokens = images(3)
    bare = VisualTokens(tokens.features, tokens.grid, tokens.cls_attention)
    assert torch.equal(refine(policy, tokens).indices, refine(policy, bare).indices)


def test_only_instruction_dependent_parts_change_and_are_recorded() -> None:
    before = state()
    result = instruction_free(before)
    assert [c.where for c in result.changes if not c.where.startswith("/provenance")] == [
        "/name",
        "/base_policy/name",
        "/base_policy/params/theta",
        "/base_policy/params/tile_scope",
        "/scoring/signals/0",
    ]
    assert all(change.why for change in result.changes)
    for part in ("budget", "constraints", "reassembly", "safety", "source"):
        assert getattr(result.state, part) == getattr(before, part)
    assert result.state.provenance.scores == {}


def test_a_state_that_scores_by_relevance_alone_is_left_with_attention() -> None:
    alone = state({"/scoring/signals": [{"atom": "instruction_guided_visual_relevance"}]})
    (signal,) = instruction_free(alone).state.scoring.signals
    assert signal.atom == "attention_proxy_saliency"


def test_a_part_without_a_substitute_is_refused_by_name() -> None:
    gated: PruningState = state(
        {"/reassembly": {"atom": "semantic_gated_residual_merge", "strength": 0.2}}
    )
    with pytest.raises(StateError) as caught:
        instruction_free(gated)
    assert [p.where for p in caught.value.problems] == ["/reassembly"]


def test_a_core_is_dropped_with_the_reason() -> None:
    split = state({"/core": {"share": 0.5}})
    variant = instruction_free(split)
    assert variant.state.core is None
    assert variant.state.digest == instruction_free(state()).state.digest
    (change,) = (change for change in variant.changes if change.where == "/core")
    assert "share all KV blocks" in change.why


def test_a_state_that_is_all_core_keeps_it() -> None:
    split = state({"/core": {"share": 1.0, "cover": 0.5, "strength": 0.25}})
    variant = instruction_free(split).state
    assert variant.core == split.core
    tokens = images(3)
    actual, expected = (refine(materialize(one, 8), tokens) for one in (variant, split))
    assert torch.equal(actual.features, expected.features)
