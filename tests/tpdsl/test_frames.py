"""Videos: how K is spread over frames, and what a selection from them promises."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.stand_in_device import forbid_waiting
from tests.tpdsl.samples import (
    UNCHANGED,
    Changes,
    call,
    images,
    mapped,
    plain,
    state,
    take,
)
from tests.tpdsl.soundness import assert_sound, same
from vllm_autoprune import (
    BudgetError,
    Grid,
    PruningPolicy,
    StateError,
    VisualTokens,
    materialize,
    refine,
)
from vllm_autoprune.ops.rowwise import mask_from_indices
from vllm_autoprune.ops.videos import split_exactly
from vllm_autoprune.tpdsl.atoms.signals import run_signal
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.frames import Frames
from vllm_autoprune.tpdsl.refine import keep_reference

VIDEO = Grid(3, 3, tiles=4, video=True)
RULES = [
    {"budget": budget, "first": first, "low": low}
    for budget, first in product(
        *(get_args(Frames.model_fields[f].annotation) for f in ("budget", "first"))
    )
    for low in (0, 2)
]


def policy_of(
    base: str, count: int, changes: Changes | None = None, **frames: object
) -> PruningPolicy:
    """A base policy on videos, alone if no other changes are given."""
    chosen = {
        "/base_policy": {"name": base},
        **(UNCHANGED if changes is None else changes),
    }
    return materialize(state({**chosen, "/frames": frames}), count, video=True)


def per_frame(indices: Tensor, grid: Grid = VIDEO) -> list[list[int]]:
    kept = mask_from_indices(indices, grid.tokens)
    counts: list[list[int]] = kept.view(len(kept), grid.tiles, -1).sum(dim=2).tolist()
    return counts


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 40), st.data()
)
def test_shares_are_exact_largest_remainders(
    weights: list[int], most: int, data: st.DataObject
) -> None:

    def split_by_hand(weights: list[int], total: int, low: int, most: int) -> list[int]:
        shares = [low] * len(weights)
        while rest := total - sum(shares):
            free = [frame for frame, share in enumerate(shares) if share < most]
            every = sum(weights[frame] for frame in free)
            quotas = {frame: Fraction(weights[frame], every) * rest for frame in free}
            added = {
                frame: min(int(quota), most - shares[frame])
                for frame, quota in quotas.items()
            }
            if not any(added.values()):
                largest = sorted(free, key=lambda frame: (-(quotas[frame] % 1), frame))[
                    :rest
                ]
                added = dict.fromkeys(largest, 1)
            for frame, count in added.items():
                shares[frame] += count
        return shares

    low = data.draw(st.integers(0, most))
    total = data.draw(st.integers(low * len(weights), most * len(weights)))
    both = torch.tensor([weights, weights[::-1]], dtype=torch.float64)
    shares = split_exactly(both, total, low, most).tolist()
    assert shares == [
        split_by_hand(row, total, low, most) for row in (weights, weights[::-1])
    ]


def test_shares_without_a_weight_or_with_many_frames_still_sum_to_k() -> None:
    for weights in (
        torch.zeros(1, 9),
        torch.full((1, 9), torch.nan),
        0.5 ** torch.arange(300)[None],
    ):
        count = weights.shape[1]
        for total in (count, 3 * count + 1, 7 * count - 1):
            shares = split_exactly(weights, total, 1, 7)
            assert (
                int(shares.sum()) == total
                and 1 <= int(shares.min()) <= int(shares.max()) <= 7
            )


@pytest.mark.parametrize("base", BASE_POLICIES)
def test_k_tokens_of_a_video_whatever_the_rule_and_the_same_alone(base: str) -> None:
    videos = images(5, batch=2, grid=VIDEO, noise=1.0)
    budgets = (1, 8, 17, 35)
    for rule, budget in zip(RULES, budgets * 6, strict=True):
        policy = policy_of(base, budget, **rule)
        refined = refine(policy, videos)
        assert_sound(policy, videos, refined)
        assert refined.fallback.tolist() == [0, 0] and refined.extra == 0
        assert same(refined, refine(policy, take(videos, [1])), 1, 0)
        for counts in per_frame(refined.indices):
            if rule["first"] == "whole":
                assert counts[0] >= min(budget, 9)
            enough = 17 if rule["first"] == "whole" else 8
            if rule["low"] and rule["budget"] != "uniqueness" and budget >= enough:
                assert min(counts) >= 2
            if (rule["budget"], rule["first"]) == ("uniform", "as_others"):
                assert counts == [
                    budget // 4 + (frame < budget % 4) for frame in range(4)
                ]
    assert same(
        refine(policy_of(base, 36), videos), refine(policy_of(base, 900), videos)
    )
    alone = images(6, grid=Grid(4, 4, video=True))
    for rule in RULES[::5]:
        assert_sound(
            policy_of(base, 7, **rule), alone, refine(policy_of(base, 7, **rule), alone)
        )


@pytest.mark.parametrize(
    "base", ["vcast", "echoprune", "evs", "vidcom2", "cdpruner", "visionzip"]
)
def test_a_video_does_not_wait_for_the_device_and_falls_back_where_it_is_not_finite(
    base: str,
) -> None:
    videos = images(8, grid=Grid(2, 3, tiles=3, video=True))
    elsewhere = mapped(videos, lambda tensor: tensor.to("meta"))
    spoiled = replace(videos, features=videos.features.clone())
    spoiled.features[0, 3:9] = torch.nan
    core: Changes = {"/core": {"share": 0.5}}
    for rule, changes in zip((RULES[9], RULES[17]), (UNCHANGED, core), strict=True):
        policy = policy_of(base, 8, changes, **rule)
        with forbid_waiting():
            assert refine(policy, elsewhere).indices.shape == (2, 8)
        refined = refine(policy, spoiled)
        assert_sound(policy, spoiled, refined)
        assert refined.fallback.tolist() == [2, 0]
        assert same(refined, refine(policy, videos), 1, 1)


@pytest.mark.parametrize("base", BASE_POLICIES)
def test_core_and_delta_of_a_video(base: str) -> None:
    """Distinct tokens, a core that no question changes, and frames that count what it has."""
    videos = images(9, grid=VIDEO, noise=1.0)
    opposite = -videos.require_instruction().text
    asked = replace(
        videos, instruction=replace(videos.require_instruction(), text=opposite)
    )
    for rule in RULES[::3]:
        changes: Changes = {
            "/core": {"share": 0.5, "policy": {"name": "vcast"}},
            **UNCHANGED,
        }
        policy = policy_of(base, 17, changes, **rule)
        refined = refine(policy, videos)
        assert_sound(policy, videos, refined)
        core = materialize(policy.state, 8, part="core")
        for other in (refine(core, replace(videos, words=None)), refine(policy, asked)):
            assert torch.equal(other.indices[:, :8], refined.indices[:, :8])
        if (rule["budget"], rule["first"]) == ("uniform", "as_others"):
            assert per_frame(refined.indices) == [[5, 4, 4, 4]] * 2
    fewer = policy_of(
        base, 17, changes, **RULES[-3], tokens={"atom": "per_frame_budget", "k": 4}
    )
    bare = state(changes)
    assert fewer.state.core_digest == policy.state.core_digest != bare.core_digest
    covered = {"share": 0.6, "cover": 0.8, "strength": 0.2}
    policy = policy_of(base, 24, {"/core": covered}, budget="global")
    assert_sound(policy, videos, refine(policy, videos))


def test_a_state_without_frames_and_an_image_are_as_before() -> None:
    still = Grid(3, 3, tiles=4)
    policy = policy_of("divprune", 23, budget="global", first="whole")
    alone = replace(policy, state=policy.state.model_copy(update={"frames": None}))
    for tokens, other in (
        (images(3, grid=still), policy),
        (images(3, grid=VIDEO), alone),
    ):
        assert same(refine(other, tokens), refine(alone, replace(tokens, grid=still)))
    reference, refined = (
        keep(policy, images(3, grid=VIDEO)) for keep in (keep_reference, refine)
    )
    assert torch.equal(reference.indices, refined.indices)
    with pytest.raises(BudgetError, match='leaves videos whole -> add "frames"'):
        materialize(alone.state, video=True)


def test_k_of_a_video_follows_from_its_size() -> None:
    def kept(tokens: int, frames: int, budget: object = None, **rules: object) -> int:
        rule = None if budget is None else BudgetCall.parse(budget, video=True)
        changes: Changes = {"/frames": rules}
        return materialize(state(changes), rule, video=True).tokens_kept(tokens, frames)

    assert [kept(256 * t, t) for t in (1, 7, 64)] == [16, 112, 1024]
    assert kept(144, 12, "tokens_per_frame:20") == 144 and kept(300, 3, "1/8") == 37
    assert kept(300, 3, 64) == 64 and kept(900, 3, 64, first="whole") == 300
    assert kept(900, 3, "1/2", first="whole") == 450
    assert (
        BudgetCall.parse("tokens_per_frame:16", video=True).rule()
        == "tokens_per_frame:16"
    )
    assert (
        materialize(state({"/frames": {"first": "whole"}}), 9, video=True).tokens_kept(
            900, 3
        )
        == 9
    )
    for said in ("tokens_per_frame:0", "tokens_per_frame:16%", "per frame"):
        with pytest.raises(BudgetError, match="or tokens_per_frame:16"):
            BudgetCall.parse(said, video=True)
    with pytest.raises(BudgetError, match="is not a budget"):
        BudgetCall.parse("tokens_per_frame:16")
    with pytest.raises(StateError, match="/frames/tokens/limit"):
        state({"/frames": {"tokens": {"atom": "per_frame_budget", "limit": 640}}})


def signal(name: str, tokens: VisualTokens, **params: object) -> Tensor:
    values: Tensor = run_signal(
        call(name, **params), tokens, torch.zeros(1, 1, dtype=torch.int64)
    )
    return values.view(tokens.batch, tokens.grid.tiles, -1)


def test_signals_over_time() -> None:
    """A video of two by three places that stands still, but for the last one in the last frame."""
    grid = Grid(2, 3, tiles=4, video=True)
    rows = torch.eye(6).repeat(4, 1)
    rows[-1] *= -1
    for name in ("temporal_novelty", "temporal_echo_penalty", "prediction_surprise"):
        values = signal(name, plain(rows, grid))[0]
        assert values[0].tolist() == [values.max().item()] * 6, name
        assert values[2].tolist() == pytest.approx([values[2, 0].item()] * 6), name
        assert values[3, 5] > values[3, :5].max() + 0.1, name
        assert (
            len(signal(name, plain(rows, replace(grid, video=False))).unique()) == 1
        ), name
    novelty = signal("temporal_novelty", plain(rows, grid))[0]
    assert novelty[1:].flatten().tolist() == [0.0] * 17 + [2.0]
    rows[-1] = rows[0]  # it comes from the other end
    for scope, echo in (("local", 0.0), ("frame", -1.0)):
        values = signal(
            "temporal_echo_penalty", plain(rows, grid), scope=scope, tau=0.01
        )
        assert values[0, 3, 5].item() == pytest.approx(echo)
    outlier = signal("frame_outlier", plain(rows, grid))[0]
    assert outlier[3].argmin() in (0, 5) and torch.equal(outlier[1], outlier[2])


def test_surprise_is_the_error_of_a_prediction_over_its_running_mean() -> None:
    grid = Grid(2, 3, tiles=5, video=True)
    video = images(4, batch=1, grid=grid).features.view(5, 6, -1).double()
    planes = torch.tensor([[1.0, y, x] for y in range(2) for x in range(3)]).double()
    values = signal(
        "prediction_surprise", plain(video.flatten(0, 1).float(), grid), decay=0.8
    )[0]
    mean = None
    motion = torch.zeros_like(video[0])
    for frame in range(1, 5):
        error = (video[frame] - video[frame - 1] - motion).square().sum(dim=1)
        mean = error if mean is None else 0.8 * mean + 0.2 * error
        torch.testing.assert_close(
            values[frame], (error / mean).float(), rtol=1e-4, atol=1e-4
        )
        change = video[frame] - video[frame - 1]
        motion = change - planes @ torch.linalg.lstsq(planes, change).solution
