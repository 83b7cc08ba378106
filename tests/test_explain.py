"""Traces agree with the selection of the policy; regions show what the model sees of an image."""

from __future__ import annotations

import dataclasses

import pytest
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


@pytest.mark.parametrize("changes", [{}, {"/core": {"share": 0.5}}])
def test_a_trace_agrees_with_the_selection(changes: dict[str, object]) -> None:
    tokens, exchanged = images(seed=4, batch=4), 0
    policy = materialize(state(changes), 12)
    refined = refine(policy, tokens)
    for number, image in enumerate(trace_images(policy, tokens, refined)):
        indices = refined.indices[number].tolist()
        assert list(image.kept) == sorted(indices)
        assert list(image.reference) == refined.reference[number].tolist()
        assert len(image.left) == len(image.entered) == int(refined.exchanged[number])
        assert set(image.kept) == set(image.reference) - set(image.left) | set(image.entered)
        assert image.fallback == "none"
        assert list(image.core) == (indices[:6] if changes else [])
        assert image.quality is not None and len(image.quality) == 36
        assert [len(signal.values) for signal in image.signals] == [36] * 5
        assert all(min(s.values) >= 0 and max(s.values) == 1 for s in image.signals)
        quality, exchanged = image.quality, exchanged + len(image.entered)
        pairs = zip(*(sorted(quality[t] for t in group) for group in (image.entered, image.left)),
                    strict=True)  # fmt: skip
        assert all(entered > removed for entered, removed in pairs)
    assert exchanged > 0


def test_signals_are_those_of_the_tokens_that_were_ranked() -> None:
    after = images(seed=3)
    rows = torch.randn(after.batch, after.count, 9, generator=torch.Generator().manual_seed(1))
    norms = MergerInput(torch.ones(after.batch, after.count, 2))
    tokens = dataclasses.replace(after, encoder=rows, merger_input=norms)
    alone = dataclasses.replace(after, features=rows)
    before = trace_batch(tokens, {"/rank_at": "merger_in"})
    assert [image.signals for image in before] == [image.signals for image in trace_batch(alone)]
    assert before[0].signals != trace_batch(after)[0].signals


def test_what_a_policy_does_not_do_is_not_traced() -> None:
    tokens = images()
    assert tokens.cls_attention is not None
    (weightless, _) = trace_batch(tokens, {"/scoring/signals/2/weight": 0.0})
    assert "spatial_centrality_prior" not in [signal.atom for signal in weightless.signals]
    (alone, _) = trace_batch(tokens, {"/constraints/selector/q_e": 0})
    assert alone.signals == () and alone.quality is None and set(alone.kept) == {*alone.reference}
    lost = torch.full_like(tokens.cls_attention, torch.nan)
    merging: dict[str, object] = {"/reassembly": {"atom": "mean_residual", "strength": 0.5}}
    (fallback, _) = trace_batch(dataclasses.replace(tokens, cls_attention=lost), merging)
    assert fallback.fallback == "reference" and fallback.entered == fallback.owners == ()
    (unpruned, _) = trace_batch(images(grid=Grid(3, 4)), {"/core": {"share": 0.5}})
    assert unpruned.core == () and len(unpruned.kept) == 12
    (unmerged, _) = trace_batch(tokens, {"/reassembly/strength": 0.0})
    assert unmerged.owners == ()


@pytest.mark.parametrize(
    ("reassembly", "radius", "budget"),
    [({"atom": "mean_residual"}, 6, 12), ({"atom": "spatial_local_residual_merge"}, 1, 3)],
)
def test_owners_are_the_kept_tokens_that_dropped_ones_are_merged_into(
    reassembly: dict[str, object], radius: int, budget: int
) -> None:
    """The most similar one within the radius, or none."""
    if radius == 1:
        reassembly = {**reassembly, "radius": radius}
    tokens = images(seed=5)
    policy = materialize(state({"/reassembly": {**reassembly, "strength": 0.5}}), budget)
    places = [divmod(token, 6) for token in range(36)]
    for number, image in enumerate(trace_images(policy, tokens, refine(policy, tokens))):
        similarity, expected = tokens.cosine[number], []
        for token, (row, column) in enumerate(places):
            near = [
                kept
                for kept in image.kept
                if max(abs(places[kept][0] - row), abs(places[kept][1] - column)) <= radius
            ]
            dropped = token not in image.kept and bool(near)
            expected.append(max(near, key=lambda k: float(similarity[token, k])) if dropped else -1)
        assert list(image.owners) == expected
        assert expected.count(-1) == budget or radius == 1


TILES = tuple(region_image(seed).regions[0] for seed in range(3))


def test_regions_are_the_tiles_that_keep_tokens() -> None:
    tiles = [dataclasses.replace(tile, order=torch.arange(36)) for tile in TILES]
    for features, count, budget, shown in (
        (ImageFeatures(TILES, rest_at=-1), 3, 5, [0, 1, 2]),
        (ImageFeatures(TILES, rest_at=-1), 3, 2, [0, 2]),
        (ImageFeatures(TILES, rest_at=-1), 3, 1, [2]),
        # A base view and stitched crops, one grid, several tiles in one region.
        (ImageFeatures((tiles[0], tiles[1])), 2, 5, []),
        (ImageFeatures(TILES[:1]), 1, 5, []),
        (ImageFeatures(TILES[:1]), 4, 5, []),
    ):
        assert find_tiles_of_regions(features, count, budget) == shown


def test_pixels_come_back_as_they_were() -> None:
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
    levels = torch.randint(256, (3, 5, 4), generator=torch.Generator().manual_seed(0))
    shift, scale = (torch.tensor(x)[:, None, None] for x in (mean, std))
    picture = restore_picture((levels / 255 - shift) / scale, mean, std)
    assert picture.size == (4, 5)
    assert picture.getpixel((3, 1)) == tuple(levels[:, 1, 3].tolist())
