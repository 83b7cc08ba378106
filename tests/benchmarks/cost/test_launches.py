"""Launches of a selection: counted on the meta device, and independent of K by the kernels."""

from __future__ import annotations

import pytest

from benchmarks.cost.launches import SelectionCost, Size


@pytest.mark.parametrize(
    ("policy", "maximum"),
    [("divprune", 40), ("cdpruner", 40), ("cen_divprune", 40), ("cen_cdpruner", 60)],
)
def test_a_selection_launches_as_often_for_every_budget(
    policy: str, maximum: int
) -> None:
    for tiles in (1, 5):
        few = SelectionCost.of(policy, Size(576, 16, tiles))
        many = SelectionCost.of(policy, Size(576, 288, tiles))
        assert few.launches == many.launches <= maximum


@pytest.mark.parametrize(
    ("state", "maximum"), [("cen_divprune", 80), ("pivoted_qr-searched-free", 250)]
)
def test_a_state_launches_as_often_for_every_budget(state: str, maximum: int) -> None:
    few = SelectionCost.of_state(state, Size(576, 16))
    many = SelectionCost.of_state(state, Size(576, 288))
    assert few.launches == many.launches <= maximum


def test_the_loop_in_torch_launches_kernels_for_every_kept_token() -> None:
    few = SelectionCost.of("cen_divprune", Size(576, 16), kernels=False)
    many = SelectionCost.of("cen_divprune", Size(576, 288), kernels=False)
    assert many.launches - few.launches >= 7 * (288 - 16)
    assert many.seconds > few.seconds
