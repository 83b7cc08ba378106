"""Optimiser: orthogonal steps, a falling loss, and exact continuation from a snapshot."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.minillava.training.optimiser import FlatMuon, orthogonalise, schedule


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8))


def _loss(model: nn.Module, step: int) -> torch.Tensor:
    inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
    target = inputs[:, :8].sin()
    return (model(inputs.bfloat16()).float() - target).square().mean()


def _train(model: nn.Module, optimiser: FlatMuon, steps: range) -> float:
    loss = torch.tensor(0.0)
    for step in steps:
        loss = _loss(model, step)
        loss.backward()
        optimiser.step(1.0)
    return float(loss.detach())


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 48, 16), (2, 16, 48)])
def test_orthogonal_matrices_have_singular_values_of_about_one(shape: tuple[int, ...]) -> None:
    result = orthogonalise(
        torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    )

    values = torch.linalg.svdvals(result.float())
    assert result.shape == shape
    assert values.min() > 0.3 and values.max() < 1.5


def test_a_zero_gradient_stays_zero() -> None:
    assert not orthogonalise(torch.zeros(1, 8, 8, dtype=torch.bfloat16)).any()


def test_steps_lower_the_loss() -> None:
    model = _model()
    optimiser = FlatMuon({"model": model}, peak=0.01)

    first = _train(model, optimiser, range(1))
    assert _train(model, optimiser, range(1, 150)) < 0.3 * first


def test_a_restored_optimiser_continues_exactly() -> None:
    whole = _model()
    optimiser = FlatMuon({"model": whole}, peak=0.01)
    _train(whole, optimiser, range(10))
    half = _model()
    stopped = FlatMuon({"model": half}, peak=0.01)
    _train(half, stopped, range(4))
    again = _model()
    resumed = FlatMuon({"model": again}, peak=0.01)
    resumed.restore(stopped.state())
    _train(again, resumed, range(4, 10))

    for one, other in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    model = _model()
    optimiser = FlatMuon({"model": model}, peak=0.01)
    before = [parameter.clone() for parameter in model.parameters()]
    (_loss(model, 0) * float("inf")).backward()
    optimiser.step(1.0)

    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(
        not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None
    )


def test_the_rate_rises_stays_and_falls() -> None:
    shares = [schedule(step, 1000, 100) for step in range(1000)]

    assert shares[0] == pytest.approx(0.01)
    assert set(shares[100:600]) == {1.0}
    assert shares[600:] == sorted(shares[600:], reverse=True)
    assert shares[-1] == pytest.approx(0.02, abs=0.01)
    assert schedule(999, 1000, 100, fall=0.0) == 1.0
