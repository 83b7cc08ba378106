"""Groups of tokens by principal direction, their distinct members, and a budget over groups.

The steps of PruneSID. R tiles of n tokens, q groups.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vllm_autoprune.ops.rowwise import rank_descending
from vllm_autoprune.ops.similarity import matmul_each


def principal_loadings(rows: Tensor, groups: int) -> Tensor:
    """Absolute top left singular vectors ``(R, n, q)`` of sigmoid(rows), each row less its mean.

    rows ``(R, n, D)``. Exact and in float64: groups are decided by small differences. Rows that are
    not finite count as 0, because a decomposition of them raises.
    """
    squashed = torch.sigmoid(rows.double().nan_to_num())
    centred = squashed - squashed.mean(dim=2, keepdim=True)
    _, vectors = torch.linalg.eigh(matmul_each(centred, centred.transpose(1, 2)))
    loadings: Tensor = vectors[:, :, -groups:].flip(2).abs()
    return loadings


def mean_of_pairs(similarity: Tensor) -> Tensor:
    """Mean similarity ``(R, 1)`` of two different tokens, from ``(R, n, n)``."""
    size = similarity.shape[1]
    total = torch.stack([one.sum() - one.diagonal().sum() for one in similarity])
    return total[:, None] / max(1, size * (size - 1))


def find_distinct(similarity: Tensor, order: Tensor, group: Tensor, bound: Tensor) -> Tensor:
    """Tokens ``(R, n)`` bool that are at most ``bound`` similar to every better one of their group.

    Non-maximum suppression: similarity ``(R, n, n)``, order ``(R, n)`` token indices from best to
    worst, group ``(R, n)``, bound ``(R, 1)``. One step a token, because a token that is dropped
    drops no other.
    """
    size = order.shape[1]
    rows = similarity.gather(1, order[:, :, None].expand(-1, -1, size))
    ordered = rows.gather(2, order[:, None, :].expand(-1, size, -1))
    owner = group.gather(1, order)
    drops = (ordered > bound[:, :, None]) & (owner[:, :, None] == owner[:, None, :])
    drops = drops.triu(1)
    distinct = torch.ones_like(owner, dtype=torch.bool)
    for place in range(size - 1):
        distinct &= ~(drops[:, place] & distinct[:, place, None])
    return torch.zeros_like(distinct).scatter_(1, order, distinct)


def count_members(group: Tensor, groups: int, counted: Tensor | None = None) -> Tensor:
    """Tokens of each group ``(R, q)``; only those of a mask ``(R, n)`` where one is given."""
    ones = torch.ones_like(group) if counted is None else counted.to(group.dtype)
    return torch.zeros_like(group[:, :1]).expand(-1, groups).scatter_add(1, group, ones)


def group_quotas(members: Tensor, distinct: Tensor, budget: int, total: int) -> Tensor:
    """Tokens ``(R, q)`` that each group gives, ``total`` together, by its distinct members.

    members and distinct ``(R, q)`` are the sizes of the groups. ``budget`` is that of the method's
    own rules, which may count a row of [CLS] beside the ``total`` tokens.
    """
    least = members.clamp_max(1)
    most = torch.minimum(members, distinct).clamp_max(5 * math.ceil(budget / 64))
    most = _raise_until(most, members, budget)
    extra = total - least.sum(dim=1, keepdim=True)
    share = distinct.float() / distinct.sum(dim=1, keepdim=True).float()
    ends = (share.cumsum(dim=1) * extra).round().to(torch.int64)
    take = torch.minimum(ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1])) + least, most)
    # What a group has no room for goes to the groups with most distinct members.
    largest = rank_descending(distinct)
    room = (most - take).gather(1, largest)
    missing = total - take.sum(dim=1, keepdim=True)
    added = torch.minimum((missing - (room.cumsum(dim=1) - room)).clamp_min(0), room)
    return take.scatter_add(1, largest, added)


def _raise_until(most: Tensor, members: Tensor, budget: int) -> Tensor:
    """Raise every bound ``(R, q)`` by the same number until they sum to the budget, if they can."""
    size = int(members.shape[1])
    steps = torch.arange(budget + 1, device=most.device)[:, None]
    raised = torch.minimum(most[:, None] + steps, members[:, None])
    short = (raised.sum(dim=2) < budget).sum(dim=1).clamp_max(budget)
    return raised.gather(1, short[:, None, None].expand(-1, 1, size))[:, 0]
