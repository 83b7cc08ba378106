from __future__ import annotations

import pytest
import torch

from tests.tpdsl.atom_policies import means
from tests.tpdsl.samples import call
from vllm_autoprune.tpdsl.atoms.scoring import run_fusion

PRODUCT = call("weighted_product_fusion")
PICKS = torch.tensor([[2, 0]])


@means("weighted_product_fusion")
def test_product_of_powers_by_hand() -> None:
    first = torch.tensor([[0.0, 5.0, 10.0]])  # normalised: 0, 0.5, 1
    second = torch.tensor([[8.0, 4.0, 0.0]])  # normalised: 1, 0.5, 0
    g = run_fusion(PRODUCT, [first, second], [2.0, 0.5], PICKS)
    expected = [0.001**2, 0.5**2 * 0.5**0.5, 0.001**0.5]
    assert g[0].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("eps", [1e-6, 0.05])
def test_lowest_value_of_a_signal_becomes_the_floor(eps: float) -> None:
    g = run_fusion(
        call("weighted_product_fusion", eps=eps), [torch.tensor([[3.0, 4.0, 7.0]])], [1.0], PICKS
    )
    assert g[0].tolist() == pytest.approx([eps, 0.25, 1.0], rel=1e-5)


def test_a_signal_of_weight_zero_changes_nothing() -> None:
    one, other = torch.rand(2, 9), torch.rand(2, 9)
    with_it = run_fusion(PRODUCT, [one, other], [0.7, 0.0], PICKS)
    assert torch.equal(with_it, run_fusion(PRODUCT, [one], [0.7], PICKS))


def test_a_constant_signal_changes_no_order() -> None:
    one = torch.tensor([[0.2, 0.9, 0.4]])
    g = run_fusion(PRODUCT, [one, torch.full((1, 3), 0.3)], [1.0, 4.0], PICKS)
    assert torch.equal(g, run_fusion(PRODUCT, [one], [1.0], PICKS))


def test_images_are_normalised_each_on_its_own() -> None:
    g = run_fusion(PRODUCT, [torch.tensor([[0.0, 1.0], [10.0, 20.0]])], [1.0], PICKS)
    assert torch.equal(g[0], g[1])


def test_nan_is_not_hidden_by_the_floor() -> None:
    g = run_fusion(PRODUCT, [torch.tensor([[0.0, torch.nan], [0.0, 1.0]])], [1.0], PICKS)
    assert not g[0].isfinite().all() and g[1].isfinite().all()


@means("weighted_sum_fusion")
def test_sum_by_hand() -> None:
    first = torch.tensor([[0.0, 5.0, 10.0]])
    second = torch.tensor([[8.0, 4.0, 0.0]])
    g = run_fusion(call("weighted_sum_fusion"), [first, second], [2.0, 0.5], PICKS)
    assert g.tolist() == [[0.5, 1.25, 2.0]]


@means("reference_confidence_weighted_product_fusion")
def test_confidence_raises_the_first_pick_most_by_hand() -> None:
    fusion = call("reference_confidence_weighted_product_fusion", beta=0.5)
    signal = torch.tensor([[0.0, 5.0, 10.0]])
    g = run_fusion(fusion, [signal], [1.0], PICKS)
    # Token 2 was picked first: confidence 1; token 0 second of two: 0.5; token 1 not at all.
    assert g[0].tolist() == pytest.approx([0.001 * 1.25, 0.5, 1.5], rel=1e-5)
    none = call("reference_confidence_weighted_product_fusion", beta=0.0)
    assert torch.equal(
        run_fusion(none, [signal], [1.0], PICKS), run_fusion(PRODUCT, [signal], [1.0], PICKS)
    )
