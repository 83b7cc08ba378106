"""Inputs that are not finite. Codes: 0 no fallback, 1 the reference selection, 2 an even spread."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tpdsl.samples import images, state
from tests.tpdsl.selection_assertions import EVENLY, VARIANTS, assert_sound, policy_of, same
from vllm_autoprune import materialize, refine
from vllm_autoprune.ops.rowwise import gather_rows

BAD = [torch.nan, torch.inf, -torch.inf]


@given(
    variant=st.sampled_from(list(VARIANTS)),
    budget=st.integers(1, 35),
    value=st.sampled_from(BAD),
    places=st.sets(
        st.tuples(
            st.sampled_from(["features", "cls_attention", "patches", "text"]),
            st.integers(0, 1),
            st.integers(0, 35),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_non_finite_inputs_keep_guarantees_and_affect_no_other_image(
    variant: str, budget: int, value: float, places: set[tuple[str, int, int]]
) -> None:
    policy, clean, tokens = policy_of(variant, budget), images(6, batch=3), images(6, batch=3)
    assert tokens.cls_attention is not None and tokens.instruction is not None
    for name, image, token in places:
        if name == "features":
            tokens.features[image, token, token % 16] = value
        elif name == "cls_attention":
            tokens.cls_attention[image, token] = value
        elif name == "patches":
            tokens.instruction.patches[image, token, token % 8] = value
        else:
            tokens.instruction.text[image, token % 2, token % 8] = value
    actual, expected = refine(policy, tokens), refine(policy, clean)
    assert_sound(policy, tokens, actual)
    untouched = [i for i in range(3) if i not in {image for _, image, _ in places}]
    assert same(actual, expected, (untouched, untouched))


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("variant", ["shipped", "divprune", "base alone"])
def test_non_finite_features_give_evenly_spaced_tokens(variant: str, value: float) -> None:
    tokens = images(1)
    tokens.features[1, 20, 3] = value
    actual = refine(policy_of(variant), tokens)
    assert actual.fallback.tolist() == [0, 2]
    assert actual.indices[1].tolist() == EVENLY
    assert actual.exchanged[1] == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("variant", ["shipped", "divprune", "dpp"])
def test_non_finite_attention_keeps_the_reference(variant: str, value: float) -> None:
    tokens, clean = images(1), images(1)
    assert tokens.cls_attention is not None
    tokens.cls_attention[0, 7] = value
    policy = policy_of(variant)
    actual = refine(policy, tokens)
    assert actual.fallback.tolist() == [1, 0]
    assert torch.equal(actual.reference, refine(policy, clean).reference)
    assert actual.indices[0].tolist() == sorted(actual.reference[0].tolist())


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("field", ["patches", "text"])
@pytest.mark.parametrize(("variant", "code"), [("shipped", 2), ("base alone", 2), ("divprune", 1)])
def test_non_finite_instruction_affects_base_and_scores(
    variant: str, code: int, field: str, value: float
) -> None:
    tokens = images(1)
    assert tokens.instruction is not None
    broken = tokens.instruction.patches if field == "patches" else tokens.instruction.text
    broken[1, 1, 2] = value
    assert refine(policy_of(variant), tokens).fallback.tolist() == [0, code]


def test_unread_inputs_may_be_non_finite() -> None:
    tokens, clean = images(1), images(1)
    assert tokens.cls_attention is not None and tokens.instruction is not None
    tokens.cls_attention.fill_(torch.nan)
    policy = policy_of("base alone")
    assert same(refine(policy, tokens), refine(policy, clean), (slice(None), slice(None)))
    tokens.instruction.text.fill_(torch.nan)
    blind = materialize(state({**VARIANTS["divprune"], "/constraints/selector/q_e": 0}), budget=8)
    assert refine(blind, tokens).fallback.tolist() == [0, 0]


def test_a_signal_of_weight_zero_is_not_read() -> None:
    tokens = images(1)
    assert tokens.cls_attention is not None
    tokens.cls_attention.fill_(torch.nan)
    policy = materialize(state({"/scoring/signals/1/weight": 0.0}), 8)
    assert refine(policy, tokens).fallback.tolist() == [0, 0]


def test_instruction_padding_may_be_non_finite() -> None:
    tokens = images(1)
    given = tokens.instruction
    assert given is not None
    text = torch.cat([given.text, torch.full((2, 3, 8), torch.nan)], dim=1)
    used = torch.tensor([True, True, False, False, False]).expand(2, -1)
    padded = dataclasses.replace(
        tokens, instruction=dataclasses.replace(given, text=text, segments=used)
    )
    actual = refine(policy_of(), padded)
    assert same(actual, refine(policy_of(), tokens), (slice(None), slice(None)))


def test_a_zero_patch_embedding_is_a_token_like_any_other() -> None:
    tokens = images(1)
    assert tokens.instruction is not None
    tokens.instruction.patches[0, 5] = 0
    assert refine(policy_of(), tokens).fallback.tolist() == [0, 0]


@pytest.mark.parametrize("variant", ["shipped", "residual"])
def test_kept_rows_are_unchanged_except_non_finite_values(variant: str) -> None:
    tokens = images(1)
    hidden = next(i for i in range(36) if i not in EVENLY)
    tokens.features[0, EVENLY[2], 4] = torch.nan
    tokens.features[0, EVENLY[3], 5] = -torch.inf
    tokens.features[0, hidden] = torch.nan
    actual = refine(policy_of(variant), tokens)
    rows = tokens.features[0, EVENLY]
    assert torch.equal(actual.features[0], torch.where(rows.isfinite(), rows, 0.0))
    assert actual.features[0, 2, 4] == 0 and actual.features[0, 3, 5] == 0


def test_reference_rows_are_untouched_too() -> None:
    tokens = images(1)
    assert tokens.cls_attention is not None
    tokens.cls_attention[0, 0] = torch.nan
    actual = refine(policy_of("residual"), tokens)
    assert actual.fallback.tolist() == [1, 0]
    rows = gather_rows(tokens.features, actual.indices)
    assert torch.equal(actual.features[0], rows[0])
    assert not torch.equal(actual.features[1], rows[1])
