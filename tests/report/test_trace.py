"""Traces agree with the selection of the policy."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from PIL import Image

from tests.tpdsl.samples import images, state
from vllm_autoprune import Grid, materialize, refine
from vllm_autoprune.report.panels import atom_title, cell, explain
from vllm_autoprune.report.trace import Trace, trace_images
from vllm_autoprune.tpdsl.tokens import MergerInput, VisualTokens


def trace_batch(
    tokens: VisualTokens, changes: dict[str, object] | None = None
) -> tuple[Trace, ...]:
    policy = materialize(state(changes), 12)
    return trace_images(policy, tokens, refine(policy, tokens))


def test_a_trace_agrees_with_the_selection() -> None:
    tokens = images(seed=3)
    policy = materialize(state(), 12)
    refined = refine(policy, tokens)
    for number, image in enumerate(trace_images(policy, tokens, refined)):
        assert list(image.kept) == refined.indices[number].tolist()
        assert list(image.reference) == refined.reference[number].tolist()
        assert len(image.left) == len(image.entered) == int(refined.exchanged[number])
        assert set(image.kept) == set(image.reference) - set(image.left) | set(image.entered)
        assert image.fallback == "none"
        assert image.quality is not None
        assert len(image.quality) == 36
        assert [len(signal.values) for signal in image.signals] == [36] * 5
        assert all(min(s.values) >= 0 and max(s.values) == 1 for s in image.signals)


def test_signals_are_those_of_the_tokens_that_were_ranked() -> None:
    after = images(seed=3)
    rows = torch.randn(after.batch, after.count, 9, generator=torch.Generator().manual_seed(1))
    norms = MergerInput(torch.ones(after.batch, after.count, 2))
    tokens = dataclasses.replace(after, encoder=rows, merger_input=norms)
    alone = dataclasses.replace(after, features=rows)
    before = trace_batch(tokens, {"/rank_at": "merger_in"})
    assert [image.signals for image in before] == [image.signals for image in trace_batch(alone)]
    assert before[0].signals != trace_batch(after)[0].signals


def test_entering_tokens_have_higher_quality_than_leaving_ones() -> None:
    exchanged = 0
    for image in trace_batch(images(seed=4, batch=4)):
        assert image.quality is not None
        exchanged += len(image.entered)
        for entered, left in zip(
            sorted(image.quality[t] for t in image.entered),
            sorted(image.quality[t] for t in image.left),
            strict=True,
        ):
            assert entered > left
    assert exchanged > 0


def test_signals_without_weight_are_left_out() -> None:
    (image, _) = trace_batch(images(), {"/scoring/signals/2/weight": 0.0})
    assert "spatial_centrality_prior" not in [signal.atom for signal in image.signals]


def test_a_weight_is_named_with_three_digits() -> None:
    tokens = images()
    policy = materialize(state({"/scoring/signals/2/weight": 3.99961}), 12)
    trace = trace_images(policy, tokens, refine(policy, tokens))[0]
    panels = explain(policy, Image.new("RGB", (60, 60)), "?", trace).panels
    (detail,) = [p.detail for p in panels if p.title == "spatial centrality prior"]
    assert detail == "weight 4"


def test_a_base_policy_alone_scores_nothing() -> None:
    (image, _) = trace_batch(images(), {"/constraints/selector/q_e": 0})
    assert image.signals == () and image.quality is None
    assert set(image.kept) == set(image.reference)


def test_a_fallback_is_reported() -> None:
    tokens = images()
    assert tokens.cls_attention is not None
    broken = dataclasses.replace(
        tokens, cls_attention=torch.full_like(tokens.cls_attention, torch.nan)
    )
    (image, _) = trace_batch(broken)
    assert image.fallback == "reference" and image.entered == ()
    policy = materialize(state(), 12)
    picture = explain(policy, _blank(), "?", image)
    assert "not finite, reference selection instead" in picture.summary


def test_panels_show_image_selection_and_every_signal() -> None:
    (image, _) = trace_batch(images())
    policy = materialize(state(), 12)
    explanation = explain(policy, _blank(), "What?", image)
    assert [panel.title for panel in explanation.panels] == [
        "image",
        "reference selection",
        "after exchange",
        "quality g",
        *(atom_title(signal.atom) for signal in image.signals),
    ]
    assert explanation.panels[1].lit == image.reference
    assert (
        explanation.panels[2].left == image.left and explanation.panels[2].entered == image.entered
    )
    assert explanation.summary.startswith("sample (") and "keeps 12 of 36" in explanation.summary


def test_a_base_policy_alone_has_two_panels() -> None:
    changes: dict[str, object] = {"/constraints/selector/q_e": 0}
    (image, _) = trace_batch(images(), changes)
    policy = materialize(state(changes), 12)
    assert len(explain(policy, _blank(), "What?", image).panels) == 2


@pytest.mark.parametrize(
    ("token", "place"), [(0, (0, 0)), (5, (1, 2)), (6, (0, 3)), (11, (1, 5)), (17, (1, 8))]
)
def test_tiles_stand_side_by_side(token: int, place: tuple[int, int]) -> None:
    assert cell(token, Grid(2, 3, tiles=3)) == place


def _blank() -> Image.Image:
    return Image.new("RGB", (60, 60), "grey")


def test_a_trace_names_the_core_and_its_panels_mark_it() -> None:
    tokens = images(seed=3)
    policy = materialize(state({"/core": {"share": 0.5}}), 12)
    refined = refine(policy, tokens)
    for number, image in enumerate(trace_images(policy, tokens, refined)):
        assert list(image.core) == refined.indices[number, :6].tolist()
        assert set(image.core) < set(image.kept)
        told = explain(policy, Image.new("RGB", (12, 12)), "?", image)
        assert [bool(panel.core) for panel in told.panels[:3]] == [False, True, True]
        assert "6 of them are the core" in told.summary
    assert {image.core for image in trace_batch(tokens)} == {()}


def test_an_image_of_k_tokens_has_no_core() -> None:
    tokens = images(seed=3, grid=Grid(3, 4))
    (image, _) = trace_batch(tokens, {"/core": {"share": 0.5}})
    assert image.core == () and len(image.kept) == 12


MERGING: dict[str, object] = {"/reassembly": {"atom": "mean_residual", "strength": 0.5}}


def test_owners_are_the_kept_tokens_that_dropped_ones_are_merged_into() -> None:
    tokens = images(seed=5)
    policy = materialize(state(MERGING), 12)
    for number, image in enumerate(trace_images(policy, tokens, refine(policy, tokens))):
        similarity = tokens.cosine[number]
        assert len(image.owners) == 36
        for token, owner in enumerate(image.owners):
            if token in image.kept:
                assert owner == -1
            else:
                assert owner == max(image.kept, key=lambda kept: float(similarity[token, kept]))
        explanation = explain(policy, Image.new("RGB", (60, 60)), "?", image)
        assert "24 dropped ones are merged into them" in explanation.summary
        (panel,) = [panel for panel in explanation.panels if panel.title == "merged"]
        assert panel.owners == image.owners and panel.lit == image.kept


def test_a_state_that_merges_nothing_has_no_owners() -> None:
    (image, _) = trace_batch(images(), {"/reassembly/strength": 0.0})
    assert image.owners == ()


def test_a_token_beyond_the_radius_of_every_kept_one_is_merged_into_none() -> None:
    local = {"atom": "spatial_local_residual_merge", "strength": 0.5, "radius": 1}
    tokens = images(seed=5)
    policy = materialize(state({"/reassembly": local}), 3)
    (image, _) = trace_images(policy, tokens, refine(policy, tokens))
    for token, owner in enumerate(image.owners):
        if owner >= 0:
            (row, column), (other, place) = cell(token, Grid(6, 6)), cell(owner, Grid(6, 6))
            assert max(abs(row - other), abs(column - place)) <= 1
    places = [cell(token, Grid(6, 6)) for token in range(36)]
    lonely = {
        token
        for token, (row, column) in enumerate(places)
        if all(
            max(abs(row - r), abs(column - c)) > 1 for r, c in map(places.__getitem__, image.kept)
        )
    }
    assert lonely
    assert {t for t, owner in enumerate(image.owners) if owner < 0} == lonely | set(image.kept)
