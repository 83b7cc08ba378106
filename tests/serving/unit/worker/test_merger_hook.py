"""Hooks on patch mergers: what enters them, by plain arithmetic and by transformers' own models."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm_autoprune.serving.worker.merger_hook import MergerHook

PATCHES, WIDTH, N = 4, 6, 5


def entering(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Patches ``(N, 4, C)`` of N tokens."""
    source = torch.Generator().manual_seed(seed)
    return torch.randn(N, PATCHES, WIDTH, generator=source).to(dtype)


def mean_and_norms(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and norms of tokens, one patch after the other."""
    rows, norms = [], []
    for token in patches.double():
        rows.append(sum(token) / len(token))
        sizes = [[float(patch.abs().sum()), float((patch**2).sum()) ** 0.5] for patch in token]
        norms.append(torch.tensor(sizes, dtype=torch.float64).mean(dim=0))
    return torch.stack(rows).float(), torch.stack(norms).float()


def test_rows_are_the_mean_of_patches_and_norms_the_mean_of_theirs() -> None:
    merger = nn.Identity()
    hook, patches = MergerHook(merger, PATCHES, merger), entering()
    with hook.recording():
        merger(patches.view(N * PATCHES, 1, WIDTH))
    for found, expected in zip(hook.take(), mean_and_norms(patches), strict=True):
        torch.testing.assert_close(found, expected)


def test_norms_may_be_read_before_another_merger() -> None:
    merger, first = nn.Identity(), nn.Identity()
    hook = MergerHook(merger, PATCHES, first)
    early, last = entering(1), entering(2)
    with hook.recording():
        first(early.flatten(0, 1))
        merger(last.flatten(0, 1))
    rows, norms = hook.take()
    torch.testing.assert_close(rows, mean_and_norms(last)[0])
    torch.testing.assert_close(norms, mean_and_norms(early)[1])


def test_joined_patches_are_one_vector_to_a_norm() -> None:
    merger = nn.Identity()
    hook, patches = MergerHook(merger, PATCHES, merger, joined=True), entering()
    with hook.recording():
        merger(patches.view(1, N, PATCHES * WIDTH))
    rows, norms = hook.take()
    torch.testing.assert_close(rows, mean_and_norms(patches)[0])
    whole = patches.view(N, -1)
    expected = torch.stack([whole.abs().sum(dim=1), (whole**2).sum(dim=1).sqrt()], dim=1)
    torch.testing.assert_close(norms, expected)


def test_half_precision_is_widened_before_it_is_summed() -> None:
    merger = nn.Identity()
    hook, patches = MergerHook(merger, PATCHES, merger), entering(dtype=torch.bfloat16)
    with hook.recording():
        merger(patches.flatten(0, 1))
    for found, expected in zip(hook.take(), mean_and_norms(patches), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_nothing_is_read_or_kept_outside_of_a_recording() -> None:
    merger = nn.Identity()
    hook = MergerHook(merger, PATCHES, merger)
    assert not merger._forward_pre_hooks
    with hook.recording():
        merger(entering().flatten(0, 1))
    assert not merger._forward_pre_hooks
    rows, _ = hook.take()
    merger(entering(1).flatten(0, 1))
    with hook.recording():
        merger(entering().flatten(0, 1))
    assert torch.equal(hook.take()[0], rows)
    assert rows.untyped_storage().nbytes() == N * WIDTH * 4, "the merger's input is not kept"
