"""Values of atoms by hand, and against plain loops.

What a state of each atom keeps is pinned (``tests/pins``).
"""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.tpdsl.samples import (
    Changes,
    around,
    call,
    images,
    plain,
    state,
    with_relevance,
)
from vllm_autoprune import BudgetError, Grid, Instruction, VisualTokens, materialize
from vllm_autoprune.ops.rowwise import mask_from_indices
from vllm_autoprune.tpdsl.atoms.pools import build_pool
from vllm_autoprune.tpdsl.atoms.reassembly import PRINTED, RECIPES
from vllm_autoprune.tpdsl.atoms.scoring import Kernel, run_fusion
from vllm_autoprune.tpdsl.atoms.selectors import SelectorInputs
from vllm_autoprune.tpdsl.atoms.signals import run_signal
from vllm_autoprune.tpdsl.atoms.source import FIXED_BUDGETS, BudgetCall, PriorInputs
from vllm_autoprune.tpdsl.base_policy import (
    BASE_POLICIES,
    ReferenceSelection,
    TokenSelection,
)
from vllm_autoprune.tpdsl.registry import ATOMS, run

E1 = [1.0, 0.0]
E2 = [0.0, 1.0]


def asked(sign: int = 1, used: tuple[bool, ...] = (True, True)) -> VisualTokens:
    """Cosines with the two segments: (1, 0), (0, 1), (0.6, 0.8); a zero patch has none."""
    patches = torch.tensor([[[2.0, 0.0], [0.0, 0.5], [3.0, 4.0], [0.0, 0.0]]])
    text = torch.tensor([[[7.0, 0.0], [0.0, 0.1]]])
    instruction = Instruction(patches, text, torch.tensor([used]), sign)
    return replace(plain(torch.ones(4, 3)), instruction=instruction)


# Directions add up to (1, 3), whatever the lengths.
LONG = plain(
    torch.tensor([[2.0, 0.0], E2, [0.0, 5.0], [0.0, 3.0]]), Grid(1, 2, tiles=2)
)


def evaluate(name: str, tokens: VisualTokens, **parameters: object) -> list[float]:
    """Values of a signal, with the reference selection 3, 0, 4, 1 of five tokens or 0."""
    picks = torch.tensor([[3, 0, 4, 1] if tokens.count == 5 else [0]])
    (values,) = run_signal(call(name, **parameters), tokens, picks).tolist()
    return [*values]


def test_relevance_is_the_mean_over_segments() -> None:
    values = evaluate("instruction_guided_visual_relevance", asked())
    assert values == pytest.approx([0.5, 0.5, 0.7, 0.0], abs=1e-4)


def test_relevance_may_be_the_maximum_over_segments() -> None:
    values = evaluate("instruction_guided_visual_relevance", asked(), reduce="max")
    assert values == pytest.approx([1.0, 1.0, 0.8, 0.0], abs=1e-4)


def test_nothing_is_relevant_to_no_instruction() -> None:
    values = evaluate("instruction_guided_visual_relevance", asked(1, (False, False)))
    assert values == pytest.approx([0.0] * 4, abs=1e-4)


def test_the_sign_of_relevance_is_the_towers() -> None:
    values = evaluate("instruction_guided_visual_relevance", asked(-1, (True, False)))
    assert values == pytest.approx([-1.0, 0, -0.6, 0], abs=1e-4)


def test_a_state_may_say_the_sign_of_relevance() -> None:
    values = evaluate(
        "instruction_guided_visual_relevance", asked(-1, (True, False)), sign="+"
    )
    assert values == pytest.approx([1.0, 0, 0.6, 0], abs=1e-4)


def test_temperature_flattens_attention() -> None:

    def attended(*values: float) -> VisualTokens:
        return replace(
            plain(torch.ones(len(values), 2)), cls_attention=torch.tensor([values])
        )

    values = evaluate(
        "attention_proxy_saliency", attended(0.04, 0.64, 0.36), temperature=2.0
    )
    assert values == pytest.approx([0.2, 0.8, 0.6], abs=1e-4)


def test_without_attention_closeness_to_the_mean_token() -> None:
    # The mean token points along (1, 1), so closeness is (x + y) / sqrt 2.
    close = [math.exp(value / math.sqrt(2)) for value in (2, 1, 3)]
    values = evaluate(
        "attention_proxy_saliency", plain(torch.tensor([[2.0, 0.0], E2, [1.0, 2.0]]))
    )
    assert values == pytest.approx([weight / sum(close) for weight in close], abs=1e-4)


def test_the_centre_counts_most() -> None:
    # Rows at -0.5 and 0.5, columns at -2/3, 0, 2/3; 2 sigma^2 is 0.5 for the default.
    corner = math.exp(-(0.25 + 4 / 9) / 0.5)
    middle = math.exp(-0.25 / 0.5)
    values = evaluate("spatial_centrality_prior", plain(torch.ones(6, 2), Grid(2, 3)))
    assert values == pytest.approx([corner, middle, corner] * 2, abs=1e-4)


def test_redundancy_is_the_similarity_to_the_most_similar_other() -> None:
    # Cosines: 0 with 1: 1, 0 with 2: 0, 0 with 3: -1, 2 with the others: 0.
    cross = plain(torch.tensor([E1, [2.0, 0.0], E2, [-1.0, 0.0]]))
    values = evaluate("redundancy_density_penalty", cross, m=1)
    assert values == pytest.approx([-1.0, -1.0, 0.0, 0.0], abs=1e-4)


def test_the_norm_is_euclidean() -> None:
    values = evaluate(
        "visual_token_norm_saliency", plain(torch.tensor([[3.0, -4.0], [0.0, 2.0]]))
    )
    assert values == pytest.approx([5, 2], abs=1e-4)


def test_a_clusters_centre_is_most_similar_to_its_centroid() -> None:
    # Centroids point to 0 and 180 degrees.
    rim = math.cos(math.radians(10))
    values = evaluate(
        "cluster_centroid_representativeness",
        around([-10, 0, 10, 170, 190]),
        clusters=2,
    )
    assert values == pytest.approx([rim, 1.0, rim, rim, rim], abs=1e-4)


def test_tokens_are_compared_with_the_mean_direction_of_the_image() -> None:
    values = evaluate("global_mean_representativeness", LONG)
    assert values == pytest.approx(
        [1 / math.sqrt(10), *[3 / math.sqrt(10)] * 3], abs=1e-4
    )


def test_tokens_may_be_compared_with_the_mean_direction_of_their_tile() -> None:
    half = 1 / math.sqrt(2)
    values = evaluate("global_mean_representativeness", LONG, scope="tile")
    assert values == pytest.approx([half, half, 1.0, 1.0], abs=1e-4)


def test_entropy_is_largest_where_channels_are_alike() -> None:
    values = evaluate(
        "channel_entropy_informativeness",
        plain(torch.tensor([[1.0, -1.0, 1.0, -1.0], [0, 0, 0, 50], [0, 0, 0, 0]])),
    )
    assert values == pytest.approx([1.0, 0.0, 1.0], abs=1e-4)


def test_confidence_decreases_with_pick_order_to_the_floor() -> None:
    values = evaluate("reference_selection_confidence", plain(torch.eye(5)), floor=0.5)
    assert values == pytest.approx([0.875, 0.625, 0.5, 1.0, 0.75], abs=1e-4)


def test_dissimilarity_is_that_to_the_mean_of_the_others() -> None:
    # Two tokens of one direction and one across: mean cosines of 1/2, 1/2 and 0.
    values = evaluate(
        "mean_dissimilarity_saliency", plain(torch.tensor([E1, [2.0, 0.0], E2]))
    )
    assert values == pytest.approx([0.0, 0.0, 1.0], abs=1e-4)


RISING = torch.tensor([[0.0, 5.0, 10.0]])
FALLING = torch.tensor([[8.0, 4.0, 0.0]])


def fuse(
    name: str, signals: list[Tensor], weights: list[float], **parameters: object
) -> list[float]:
    """Quality of three tokens, of which 2 and 0 were picked."""
    picks = torch.tensor([[2, 0]])
    (g,) = run_fusion(call(name, **parameters), signals, weights, picks).tolist()
    return [*g]


def test_quality_is_a_product_of_powers() -> None:
    # Normalised: 0, 0.5, 1 and 1, 0.5, 0.
    values = fuse("weighted_product_fusion", [RISING, FALLING], [2.0, 0.5])
    assert values == pytest.approx([0.001**2, 0.5**2 * 0.5**0.5, 0.001**0.5], rel=1e-5)


def test_quality_may_be_a_weighted_sum() -> None:
    values = fuse("weighted_sum_fusion", [RISING, FALLING], [2.0, 0.5])
    assert values == pytest.approx([0.5, 1.25, 2.0], rel=1e-5)


def test_confidence_raises_the_first_pick_most() -> None:
    # Token 2 was picked first: confidence 1; token 0 second of two: 0.5; token 1 not at all.
    values = fuse(
        "reference_confidence_weighted_product_fusion", [RISING], [1.0], beta=0.5
    )
    assert values == pytest.approx([0.001 * 1.25, 0.5, 1.5], rel=1e-5)


THREE = plain(torch.tensor([E1, [3.0, 4.0], [-2.0, 0.0]]))
COSINES = [[1, 0.6, -1], [0.6, 1, -0.6], [-1, -0.6, 1]]
PAIRS = [[1.0, -1, 0, 0], [-1.0, 1, 0, 0], [0.0, 0, 1, -1], [0.0, 0, -1, 1]]


def compare(name: str, tokens: VisualTokens, **parameters: object) -> Kernel:
    """A kernel of tokens of quality g = 0.1, 0.3, ..."""
    g = 0.1 + 0.2 * torch.arange(tokens.count)[None]
    return run(Kernel, call(name, **parameters), tokens, g)


def assert_kernel(
    kernel: Kernel, similarity: list[list[float]], quality: list[float]
) -> None:
    assert torch.allclose(
        kernel.similarity[0], torch.tensor(similarity).float(), atol=1e-4
    )
    assert kernel.quality[0].tolist() == pytest.approx(quality, rel=1e-4, abs=1e-4)


def test_opposite_tokens_may_count_as_unrelated() -> None:
    kernel = compare("pairwise_cosine_kernel", THREE, clamp_negative=True)
    assert_kernel(kernel, [[1, 0.6, 0], [0.6, 1, 0], [0, 0, 1]], [1, 1, 1])


def test_normalised_quality_scales() -> None:
    kernel = compare("runtime_conditional_similarity_kernel", THREE, eps=1e-3)
    assert_kernel(kernel, COSINES, [0.0025, 0.5025, 1.0025])


def test_theta_is_the_exponential_balance() -> None:
    # alpha = 0.8 / (2 * 0.2) = 2
    kernel = compare("runtime_conditional_similarity_kernel", THREE, theta=0.8)
    assert_kernel(kernel, COSINES, [1, math.e, math.e**2])


def test_a_centred_kernel_takes_the_mean_of_each_tile() -> None:
    in_tiles = plain(
        torch.tensor([E1, [3.0, 0.0], [0.0, 5.0], [0.0, 9.0]]), Grid(1, 2, tiles=2)
    )
    kernel = compare("centred_cosine_kernel", in_tiles)
    assert_kernel(kernel, PAIRS, [1] * 4)


def test_scaled_variance_lets_none_dominate() -> None:
    dominated = plain(
        torch.tensor([[1e3, 1.0], [1e3, -1.0], [-1e3, 1.0], [-1e3, -1.0]])
    )
    kernel = compare("centred_cosine_kernel", dominated, scale_variance=True)
    assert_kernel(
        kernel, [[1, 0, 0, -1], [0, 1, -1, 0], [0, -1, 1, 0], [-1, 0, 0, 1]], [1] * 4
    )


def test_a_centred_kernel_may_be_scaled_by_quality() -> None:
    # The mean token is (2, 4): less it, two tokens are opposite and one stands across them.
    four = plain(torch.tensor([[1.0, 4.0], [3.0, 4.0], [2.0, 7.0], [2.0, 1.0]]))
    kernel = compare("centred_cosine_kernel", four, weighted=True)
    assert_kernel(kernel, PAIRS, [0, 1 / 3, 2 / 3, 1])


def positions(mask: Tensor) -> list[int]:
    places: list[int] = mask[0].nonzero().flatten().tolist()
    return places


def built(
    calls: list[object], tokens: VisualTokens, g: list[float], reference: list[int]
) -> Tensor:
    return build_pool(calls, tokens, torch.tensor([g]), torch.tensor([reference]))  # type: ignore[arg-type]


BEST = "quality_pool_builder"
FAR = "diversity_pool_builder"
# Token 2 is the reference's twin in another tile; token 1, in its own tile, is at 60 degrees.
TWINS = around([0, 60, 0, 120], Grid(1, 2, tiles=2))


def test_a_pool_has_the_best_outside_the_reference() -> None:
    pool = built(
        [call(BEST)], plain(torch.eye(6)), [0.9, 0.8, 0.1, 0.7, 0.6, 0.2], [0, 4]
    )
    assert positions(pool) == [1, 3]


def test_a_pool_has_the_farthest_from_the_reference_and_each_other() -> None:
    # 180 degrees is farthest from 0; then 90 and 95 are, by 5 degrees, ahead of 185 and 5.
    six = around([0, 5, 90, 95, 180, 185])
    pool = built([call(FAR, pool_ratio=2.0)], six, [0.0] * 6, [0])
    assert positions(pool) == [2, 4]


def test_a_pool_compares_tokens_within_their_tile() -> None:
    # Within tiles the twin is nothing to the reference (cosine 0), so it is the farthest of all.
    pool = built([call(FAR)], TWINS, [0.0] * 4, [0])
    assert positions(pool) == [2]


def test_a_pool_compares_its_own_tokens_within_their_tile() -> None:
    # Token 3 lies opposite its own tile's token 2 once that is picked.
    pool = built([call(FAR, pool_ratio=2.0)], TWINS, [0.0] * 4, [0])
    assert positions(pool) == [2, 3]


def test_a_pool_may_compare_across_tiles() -> None:
    pool = built([call(FAR)], replace(TWINS, tile_scope="global"), [0.0] * 4, [0])
    assert positions(pool) == [3]


def test_a_pool_is_built_from_the_pool_before_it() -> None:
    # Token 4 is farthest of all, but a pool of good tokens does not hold it.
    good = plain(torch.tensor([E1] * 3 + [[1.0, 1.0], [-1.0, 0.0], [-1.0, 0.1]]))
    by_quality = [0.0, 0.9, 0.8, 0.7, 0.1, 0.2]
    pool = built([call(BEST, pool_ratio=3.0), call(FAR)], good, by_quality, [0])
    assert positions(pool) == [3]


def test_a_pool_has_the_best_of_each_cell_without_a_reference_token() -> None:
    # The last cell is all alike: the first of its tokens.
    cover = "spatial_coverage_pool_builder"
    # Two by two cells of two by two tokens; token 0 is in the reference, and so is its cell.
    upper = [0.9, 0.9, 0.1, 0.2, 0.9, 0.9, 0.4, 0.3]
    lower = [0.5, 0.6, 0.0, 0.0, 0.8, 0.7, 0.0, 0.0]
    square = plain(torch.eye(16), Grid(4, 4))
    pool = built([call(cover, cells=2)], square, upper + lower, [0])
    assert positions(pool) == [6, 10, 12]


def test_sources_of_a_pool_take_turns() -> None:
    # By quality 1, 2, 5, ...; by diversity 3, 4, ...
    joined = call(
        "multi_source_pool_builder",
        pool_ratio=3.0,
        sources=[{"atom": BEST, "pool_ratio": 8.0}, {"atom": FAR, "pool_ratio": 2.0}],
    )
    fan = around([0, 5, 10, 180, 90, 15])
    turns = [0.0, 0.9, 0.8, 0.1, 0.2, 0.7]
    pool = built([joined], fan, turns, [0])
    assert positions(pool) == [1, 2, 3]


def select(
    name: str,
    tokens: VisualTokens,
    g: list[float],
    reference: list[int],
    pool: list[int],
    q_e: int = 2,
    **parameters: object,
) -> list[int]:
    """Tokens that a selector keeps of one image, with quota q_e."""
    inputs = SelectorInputs(
        tokens=tokens,
        picks=torch.tensor([reference]),
        pool=mask_from_indices(torch.tensor([pool], dtype=torch.int64), len(g)),
        g=torch.tensor([g]),
        quota=q_e,
        kernel_call=call("pairwise_cosine_kernel"),
        partition_call=call("spatial_grid_partition"),
    )
    return positions(run(Tensor, call(name, **parameters), inputs))


EXCHANGE = "reference_residual_exchange_selector"
GATED = "reference_margin_gated_exchange_selector"
STRICT = "reference_strict_margin_exchange_selector"
FIVE = plain(torch.eye(5))
# Gains of the two best pairs: 1 - 0.25 = 0.75 and 0.4375 - 0.5 < 0.
GAINS = [0.5, 0.25, 1.0, 0.375, 0.4375]


def test_equal_quality_is_no_reason_to_swap() -> None:
    kept = select(EXCHANGE, plain(torch.eye(6)), [0.5] * 6, [1, 3, 5], [0, 2, 4], q_e=3)
    assert kept == [1, 3, 5]


def test_pairs_are_swapped_while_quality_rises() -> None:
    # The lowest goes for the best, 1 for 2; then 4 is no gain over 0.
    kept = select(EXCHANGE, FIVE, GAINS, [0, 1], [2, 3, 4])
    assert kept == [0, 2]


def test_marginal_relevance_is_that_to_the_tokens_kept_by_then() -> None:
    # 3 is opposite to 0 and enters for 1; then 2 is worth 0.7 x 0.6 + 0.3 and 0 is 0.65.
    marginal = "maximal_marginal_relevance_pool_selector"
    opposite = plain(torch.tensor([E1, E2, [2.0, 0.0], [-1.0, 0.0]]))
    kept = select(marginal, opposite, [0.5, 0.1, 0.6, 0.3], [0, 1], [2, 3])
    assert kept == [2, 3]


def test_a_swap_needs_the_margin() -> None:
    kept = select(GATED, FIVE, GAINS, [0, 1], [2, 3, 4], margin=0.75)
    assert kept == [0, 2]


def test_a_swap_is_refused_below_the_margin() -> None:
    kept = select(GATED, FIVE, GAINS, [0, 1], [2, 3, 4], margin=0.76)
    assert kept == [0, 1]


def test_a_strict_swap_needs_a_share_more() -> None:
    # 1 for 0.125, then 0.375 for 0.25: exactly half more.
    shares = [0.25, 0.125, 1.0, 0.375, 0.1]
    kept = select(STRICT, FIVE, shares, [0, 1], [2, 3, 4], margin=0.5)
    assert kept == [2, 3]


def test_a_strict_swap_refuses_what_is_like_a_kept_token() -> None:
    # Token 2 is the best and the same as 0, which stays; token 3 is unlike both.
    twin = plain(torch.tensor([[1.0, 0, 0], [0, 1, 0], [2, 0, 0], [0, 0, 1]]))
    kept = select(STRICT, twin, [0.5, 0.1, 0.9, 0.4], [0, 1], [2, 3], q_e=1)
    assert kept == [0, 3]


def test_similarity_to_removed_tokens_is_ignored() -> None:
    # 1 leaves first, so its twin 2 may come; then 2's twin 3 may not, and 0 stays.
    leaving = plain(torch.tensor([E1, E2, [0.0, 3.0], [0.0, 2.0]]))
    kept = select(STRICT, leaving, [0.3, 0.1, 0.9, 0.8], [0, 1], [2, 3])
    assert kept == [0, 2]


def test_preservation_keeps_the_reference() -> None:
    preserving = "reference_strict_preservation_selector"
    kept = select(preserving, FIVE, [0.0, 0.1, 0.9, 0.8, 0.7], [0, 1], [2, 3])
    assert kept == [0, 1]


def test_the_best_tokens_ignore_the_reference() -> None:
    top = "quality_topk_selector"
    kept = select(top, FIVE, [0.3, 0.1, 0.9, 0.8, 0.2], [0, 1], [4])
    assert kept == [2, 3]


def test_relevance_decides_at_run_time() -> None:
    runtime = "runtime_reference_anchor_pool_dpp_selector"
    # All unlike each other: relevance alone decides who joins anchor 0, whatever g says.
    asked = with_relevance(plain(torch.eye(4)), torch.tensor([[0.5, 0.1, 0.2, 0.9]]))
    kept = select(runtime, asked, [0.5, 0.1, 0.9, 0.0], [0, 1], [2, 3], q_e=1)
    assert kept == [0, 3]


def test_a_part_of_the_image_takes_no_more_than_its_cap() -> None:
    capped = "constrained_pool_dpp_selector"
    # Cells are 0-2, 3-5 and so on. All are unlike each other, so the first open token joins
    # anchor 0; with a cap of 1 the anchor has filled its cell.
    twelve = plain(torch.eye(12), Grid(1, 12))
    kept = select(capped, twelve, [0.0] * 12, [0, 11], [1, 4], q_e=1, cell_cap=1)
    assert kept == [0, 4]


def test_the_first_picks_are_the_anchors() -> None:
    dpp = "anchor_controlled_pool_dpp_selector"
    # 0 and 1 point the same way: with 1 anchored nothing speaks for 0, which came last.
    second = plain(torch.tensor([E1, E1, E2]))
    kept = select(dpp, second, [1.0] * 3, [1, 0], [2], q_e=1)
    assert kept == [1, 2]


def test_priors() -> None:
    divprune = BASE_POLICIES["divprune"].call.model_validate({"name": "divprune"})
    six = PriorInputs(plain(torch.eye(6)), divprune, 2, torch.tensor([[4, 1]]))
    floor = run(Tensor, call("reference_mask_prior", floor=0.25), six)
    assert floor.tolist() == [[0.25, 1, 0.25, 0.25, 1, 0.25]]
    tokens = images(2, batch=1)
    second = BASE_POLICIES["cdpruner"]
    known = PriorInputs(tokens, divprune, 5, torch.arange(5)[None])
    prior = run(Tensor, call("external_policy", policy="cdpruner", weight=0.75), known)
    picks = second.select(second.default_params, tokens, 5).picks
    assert torch.equal(prior, torch.full((1, 36), 0.25).scatter(1, picks, 1.0))
    native = {"name": "cdpruner", "params": {"theta": 0.5}}
    known = replace(known, policy=BASE_POLICIES["cdpruner"].call.model_validate(native))
    prior = run(Tensor, call("native_teacher_mask_prior", weight=0.5), known)
    picks = second.select(known.policy.params, tokens, 5).picks
    assert torch.equal(prior, torch.full((1, 36), 0.5).scatter(1, picks, 1.0))


BUDGETS: list[tuple[str, Changes, int, int, int]] = [
    *((f"fixed_budget@{k}", {}, 576, 1, k) for k in FIXED_BUDGETS),
    (
        "ratio_budget",
        {"ratio": 0.3},
        100,
        1,
        30,
    ),  # 0.3 x 100 is 29.99... in binary fractions
    ("ratio_budget", {"ratio": 1 / 3}, 144, 1, 48),  # which is no binary fraction
    ("ratio_budget", {"ratio": 0.25}, 2880, 1, 640),  # the ceiling
    ("ratio_budget", {"ratio": 0.01}, 576, 1, 16),  # the floor
    ("ratio_budget", {"floor": 64, "ceiling": 32}, 576, 1, 32),  # the ceiling wins
    *(
        ("per_tile_budget", {"k": 40, "ceiling": 100}, 576, t, min(100, 40 * t))
        for t in range(1, 5)
    ),
]


@pytest.mark.parametrize(("name", "parameters", "tokens", "tiles", "kept"), BUDGETS)
def test_budgets(
    name: str, parameters: Changes, tokens: int, tiles: int, kept: int
) -> None:
    assert call(name, **parameters).tokens_kept(tokens, tiles) == kept
    policy = materialize(state({"/budget": {"atom": name, **parameters}}))
    assert policy.tokens_kept(tokens, tiles) == min(kept, tokens)


@pytest.mark.parametrize(
    ("said", "rule", "kept"),
    [
        (64, 64, [64, 64, 64]),
        (" 64 ", 64, [64, 64, 64]),
        ("1/8", "1/8", [1, 18, 8192]),
        ("12.5%", "1/8", [1, 18, 8192]),
        ("1/3", "1/3", [1, 48, 21845]),
        ("1/8:64-640", "1/8:64-640", [64, 64, 640]),
        ("10%:1-65536", "1/10", [1, 14, 6553]),
        ("100%", "1/1", [3, 144, 65536]),
        ("66.6667%", "66.6667%", [2, 96, 43690]),
        *(
            (refused, None, [])
            for refused in (
                *cast(
                    "Any", (0, -1, 65537, 10**30, True, 1.5, 0.125, None, [8], {}, b"8")
                ),
                "",
                "0",
                "many",
                "65537",
                "-1",
                "1.5",
                "1e3",
                "9" * 99,
                "0/8",
                "9/8",
                "1/0",
                "1/200",
                "0.5%",
                "200%",
                "nan%",
                "%",
                "-5%",
                "1//8",
                "1/8:",
                "1/8:64",
                "64:1-9",
                "1/8:640-64",
                "1/8:0-9",
                "1/8:1-65537",
                "\u00bd",
                "\u0661/8",
                "1\u20448",
                "1/8\n2",
            )
        ),
    ],
)
def test_a_budget_is_read_as_people_say_it(
    said: object, rule: object, kept: list[int]
) -> None:
    """K of images of 3, 144 and 65,536 tokens."""
    if rule is not None:
        budget = BudgetCall.parse(said)
        assert (budget.rule(), [budget.tokens_kept(n) for n in (3, 144, 65536)]) == (
            rule,
            kept,
        )
        return
    with pytest.raises(BudgetError) as caught:
        BudgetCall.parse(said, "--here")
    (problem,) = caught.value.problems
    assert problem.where == "--here" and problem.fix and len(str(problem)) < 300


@given(
    st.integers(1, 99_999),
    st.floats(0.01, 1),
    st.integers(1, 65_535),
    st.integers(1, 65_536),
)
def test_a_share_is_exact_and_its_rule_says_it_again(
    many: int, ratio: float, floor: int, tokens: int
) -> None:
    few = math.ceil(ratio * many)
    budget = BudgetCall.parse(f"{few}/{many}:{floor}-65536")
    assert budget.tokens_kept(tokens) == max(floor, few * tokens // many)
    assert (
        BudgetCall.parse(budget.rule()) == budget == pickle.loads(pickle.dumps(budget))
    )


# Reassembly: rows of each composition, which scalar loops gave, and their orders.

FEATURES = [[4.0, -3], [3, 3], [-2, 3], [1, 4], [-3, -1], [5, -1], [3, 1], [0, 2]]
RELEVANCE = torch.tensor([[0.4, 0.2, 0.6, 0.9, 0.5, 0.8, 0.1, 1.0]])
TOKENS = with_relevance(plain(torch.tensor(FEATURES), Grid(2, 2, tiles=2)), RELEVANCE)
KEPT = torch.tensor([[0, 2, 7]])

# To 0: token 5; to 2: token 4; to 7: tokens 1, 3 and 6. Nearby, to 2: tokens 1 and 3; to 7: 5, 6.
ROWS = {
    "nearest.mean.residual": [4.0, -1.5, -2.5, 1.0, 1.0, 2.75],
    "nearest.mean.average": [4.0, -2.0, -2.25, 2.0, 0.667, 2.5],
    "nearest.mean.exchange": [5.0, -1.0, -2.0, 3.0, 1.0, 4.0],
    "nearest.similarity_weighted.residual": [4.113, -1.613, -2.5, 1.0, 0.922, 2.789],
    "nearest.similarity_weighted.average": [4.067, -2.174, -2.104, 2.583, 0.577, 2.494],
    "nearest.similarity_weighted.exchange": [5.0, -1.0, -2.0, 3.0, 1.0, 4.0],
    "nearest.semantic_gated.residual": [4.5, -2.0, -2.5, 1.0, 0.5, 3.0],
    "nearest.semantic_gated.average": [4.35, -2.3, -2.222, 2.111, 0.235, 2.471],
    "nearest.semantic_gated.exchange": [5.0, -1.0, -2.0, 3.0, 0.0, 2.0],
    "soft.mean.residual": [3.752, -1.415, -1.192, 2.019, 0.881, 2.156],
    "soft.mean.average": [3.841, -1.984, -1.534, 2.434, 0.572, 2.101],
    "soft.mean.exchange": [5.0, -1.0, -2.0, 3.0, 1.0, 4.0],
    "soft.similarity_weighted.residual": [4.194, -1.67, -1.19, 2.473, 0.968, 2.672],
    "soft.similarity_weighted.average": [4.103, -2.295, -1.75, 2.837, 0.513, 2.356],
    "soft.similarity_weighted.exchange": [5.0, -1.0, -2.0, 3.0, 1.0, 4.0],
    "soft.semantic_gated.residual": [4.114, -1.882, -1.359, 2.211, 0.451, 2.415],
    "soft.semantic_gated.average": [4.079, -2.22, -1.66, 2.582, 0.188, 2.173],
    "soft.semantic_gated.exchange": [5.0, -1.0, -2.0, 3.0, 0.0, 2.0],
    "local.mean.residual": [4.0, -3.0, 0.0, 3.25, 0.833, 0.833],
    "local.mean.average": [4.0, -3.0, -0.667, 3.167, 0.625, 1.125],
    "local.mean.exchange": [4.0, -3.0, 1.0, 4.0, 3.0, 1.0],
    "local.similarity_weighted.residual": [4.0, -3.0, -0.274, 3.387, 1.5, 1.5],
    "local.similarity_weighted.average": [4.0, -3.0, -1.198, 3.18, 0.36, 1.88],
    "local.similarity_weighted.exchange": [4.0, -3.0, -2.0, 3.0, 0.0, 2.0],
    "local.semantic_gated.residual": [4.0, -3.0, -0.5, 3.5, 1.045, 0.5],
    "local.semantic_gated.average": [4.0, -3.0, -1.077, 3.308, 0.575, 1.175],
    "local.semantic_gated.exchange": [4.0, -3.0, 1.0, 4.0, 0.0, 2.0],
}
"""Assignment, aggregation and output; the two channels of each kept row in raster order."""


@pytest.mark.parametrize("name", RECIPES)
def test_rows_of_every_composition_in_their_order(name: str) -> None:
    parameters = {
        "strength": 0.5,
        "margin": 0.02,
        "tau": 0.5,
        "radius": 1,
        "gate_quantile": 0.3,
    }
    # Ties of quality in raster order; after the picks what was exchanged in.
    orders = {"raster": [0, 2, 7], "score": [2, 0, 7], "pick": [7, 0, 2]}
    levels, _, order = RECIPES[name].level_names.rpartition(".")
    assert name == PRINTED.get(f"{levels}.{order}", f"reassemble/{levels}.{order}")
    quality = torch.tensor([[0.3, 0, 0.5, 0, 0, 0, 0, 0.3]])
    picks = torch.tensor([[7, 5, 0]])
    sound = torch.zeros(1, dtype=torch.uint8)
    chosen = TokenSelection(KEPT, ReferenceSelection(picks), sound, quality)
    taken = {
        key: parameters[key]
        for key in ATOMS[name].call.parameters()
        if key in parameters
    }
    rows, placed = RECIPES[name](call(name, **taken), TOKENS, chosen)
    assert placed[0].tolist() == orders[order]
    expected = dict(zip([0, 2, 7], torch.tensor(ROWS[levels]).view(3, 2), strict=True))
    wanted = torch.stack([expected[token] for token in orders[order]])
    torch.testing.assert_close(rows[0], wanted, atol=1e-3, rtol=0)


def test_eight_names_are_the_papers_and_rows_merged_by_the_base_policy_are_the_anchors() -> (
    None
):
    cells = [recipe.level_names for recipe in RECIPES.values()]
    assert len(PRINTED) == 8 and set(PRINTED) <= set(cells) and len(set(cells)) == 81
    # Token 2 is like 0, token 3 is between, token 4 is like 1; 0 and 1 are kept.
    tokens = plain(
        torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0], [1.0, 1.0], [1.0, 3.0]])
    )
    kept = torch.tensor([[0, 1]])
    merged = torch.tensor([[[9.0, 0.0], [0.0, 9.0]]])
    chosen = TokenSelection(
        kept, ReferenceSelection(kept, merged), torch.zeros(1).byte()
    )
    rows, _ = RECIPES["mean_residual"](
        call("mean_residual", strength=0.5), tokens, chosen
    )
    assert rows[0].tolist() == [[(9 + 1.5) / 2, 0.5], [0.5, 6.0]]
