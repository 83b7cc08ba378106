"""Density-peak clustering (DPC-KNN), by which SparseVLM groups the tokens that it recycles.

Source: SparseVLM's published code, after Du et al. 2016 (DPC-KNN). The published code adds random
noise of 1e-6 to the density to break ties. Here the lower index counts as denser [ours], or ties
stay unbroken, as in the golden cases, which were recorded without noise.
"""

from __future__ import annotations

import torch
from torch import Tensor


def recycled_count(pruned: int) -> int:
    """Number of recycled tokens among ``pruned`` ones."""
    return min(pruned, int(0.3 * pruned) + 1)


def cluster_count(recycled: int) -> int:
    """Number of clusters of ``recycled`` tokens."""
    return int(recycled / 10) + 1


def clusters(states: Tensor, count: int, *, break_ties: bool = True) -> Tensor:
    """One-hot membership ``(B, n, count)`` float32 of states ``(B, n, D)`` in clusters.

    Centres are the ``count`` tokens with the largest product of density and distance to the nearest
    denser token; every token belongs to its nearest centre.
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
