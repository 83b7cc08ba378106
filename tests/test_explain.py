"""Traces agree with the selection of the policy; regions show what the model sees of an image."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import torch

from tests.serving.unit.samples import image as region_image
from tests.tpdsl.samples import images, state
from vllm_autoprune import Grid, materialize, refine
from vllm_autoprune.explain import Trace, find_tiles_of_regions, restore_picture, trace_images
from vllm_autoprune.serving.worker.features import ImageFeatures
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


def test_a_trace_names_the_core() -> None:
    tokens = images(seed=3)
    policy = materialize(state({"/core": {"share": 0.5}}), 12)
    refined = refine(policy, tokens)
    for number, image in enumerate(trace_images(policy, tokens, refined)):
        assert list(image.core) == refined.indices[number, :6].tolist()
        assert set(image.core) < set(image.kept)
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


def test_a_state_that_merges_nothing_has_no_owners() -> None:
    (image, _) = trace_batch(images(), {"/reassembly/strength": 0.0})
    assert image.owners == ()


def test_a_token_beyond_the_radius_of_every_kept_one_is_merged_into_none() -> None:
    local = {"atom": "spatial_local_residual_merge", "strength": 0.5, "radius": 1}
    tokens = images(seed=5)
    policy = materialize(state({"/reassembly": local}), 3)
    (image, _) = trace_images(policy, tokens, refine(policy, tokens))
    places = [divmod(token, 6) for token in range(36)]

    def apart(token: int, other: int) -> int:
        return max(abs(x - y) for x, y in zip(places[token], places[other], strict=True))

    lonely = {t for t in range(36) if all(apart(t, kept) > 1 for kept in image.kept)}
    assert lonely
    assert {t for t, owner in enumerate(image.owners) if owner < 0} == lonely | set(image.kept)
    assert all(apart(t, owner) <= 1 for t, owner in enumerate(image.owners) if owner >= 0)


TILES = tuple(region_image(seed).regions[0] for seed in range(3))


def test_regions_are_the_tiles_that_keep_tokens() -> None:
    whole_image_last = ImageFeatures(TILES, first=-1)
    assert find_tiles_of_regions(whole_image_last, 3, 5) == [0, 1, 2]
    assert find_tiles_of_regions(whole_image_last, 3, 2) == [0, 2]
    assert find_tiles_of_regions(whole_image_last, 3, 1) == [2]


def test_other_regions_are_not_tiles() -> None:
    """A base view and stitched crops, one grid, several tiles in one region."""
    stitched = dataclasses.replace(TILES[1], order=torch.arange(36))
    base = dataclasses.replace(TILES[0], order=torch.arange(36))
    assert find_tiles_of_regions(ImageFeatures((base, stitched)), 2, 5) == []
    assert find_tiles_of_regions(ImageFeatures(TILES[:1]), 1, 5) == []
    assert find_tiles_of_regions(ImageFeatures(TILES[:1]), 4, 5) == []


def test_pixels_come_back_as_they_were() -> None:
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
    levels = torch.randint(256, (3, 5, 4), generator=torch.Generator().manual_seed(0))
    shift, scale = (torch.tensor(x)[:, None, None] for x in (mean, std))
    normalised = SimpleNamespace(image_mean=mean, image_std=std)
    picture = restore_picture((levels / 255 - shift) / scale, normalised)
    assert picture.size == (4, 5)
    assert picture.getpixel((3, 1)) == tuple(levels[:, 1, 3].tolist())
