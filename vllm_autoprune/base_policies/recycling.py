"""Density peaks: how SparseVLM groups the tokens that it recycles.

Knows nothing about which tokens are recycled or what becomes of a group.

Source: SparseVLM's published code, after Du et al. 2016 (DPC-KNN). The published code adds random
noise of 1e-6 to the density, so that of two tokens as dense as each other one belongs to the
other. Here the lower index is the denser one [ours], or neither, as recordings without noise are.
"""

from __future__ import annotations

import torch
from torch import Tensor


def recycled_count(pruned: int) -> int:
    """How many of ``pruned`` tokens are recycled."""
    return min(pruned, int(0.3 * pruned) + 1)


def cluster_count(recycled: int) -> int:
    """How many groups ``recycled`` tokens make."""
    return int(recycled / 10) + 1


def clusters(states: Tensor, count: int, *, break_ties: bool = True) -> Tensor:
    """Membership ``(B, n, count)`` float32, one 1 in each row, of states ``(B, n, D)``.

    A centre is dense and far from everything denser: the ``count`` largest products of density
    and distance. Every token belongs to the centre that it is nearest to.
    """
    states = states.float()
    distance = torch.stack([torch.cdist(one, one) for one in states]) / states.shape[2] ** 0.5
    near = distance.topk(min(count, distance.shape[2]), dim=2, largest=False).values
    density = (-near.square().mean(dim=2)).exp()
    denser = density[:, None, :] > density[:, :, None]
    if break_ties:
        place = torch.arange(states.shape[1], device=states.device)
        denser |= (density[:, None, :] == density[:, :, None]) & (place < place[:, None])
    farthest = distance.flatten(1).amax(dim=1)[:, None, None]
    apart = torch.where(denser, distance, farthest).amin(dim=2)
    chosen = (apart * density).argsort(dim=1, descending=True, stable=True)[:, :count]
    towards = distance.gather(1, chosen[:, :, None].expand(-1, -1, distance.shape[2]))
    nearest = towards.argmin(dim=1)
    members = torch.zeros(*nearest.shape, count, device=states.device)
    return members.scatter_(2, nearest[:, :, None], 1.0)
