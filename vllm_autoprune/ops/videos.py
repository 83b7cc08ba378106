"""Differences between the frames of a video, and exact division of a budget over frames.

A video is ``(T, n, D)`` float32: T frames of n tokens in time order. Functions take one video at a
time, so that it has the same bits alone and in a batch.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as functional
from torch import Tensor

from vllm_autoprune.ops.rowwise import rank_descending

_NEGLIGIBLE = 1e-100
"""Lower bound of a weight, so that frames of weight 0 get tokens once all other frames are full."""

_ROUNDS = 64
"""Maximum rounds of quotas, after which the rest of the budget goes by remainder; 2 T always
suffice."""


def _directions(rows: Tensor) -> Tensor:
    return functional.normalize(rows, dim=-1)


def cosine_to_previous(video: Tensor, initial: float) -> Tensor:
    """Cosine ``(T, n)`` of each token with the token at its position in the previous frame.

    The first frame gets ``initial``.
    """
    unit = _directions(video)
    cosine = (unit[1:] * unit[:-1]).sum(dim=-1)
    return torch.cat([torch.full_like(unit[:1, :, 0], initial), cosine])


def echo_of_previous(
    video: Tensor, tau: float, initial: float, width: int = 0
) -> Tensor:
    """Mean cosine ``(T, n)`` with the tokens of the previous frame.

    The mean is weighted by softmax(cosine / tau). If ``width``, the width of the grid, is not 0,
    only the 3 x 3 positions around each token count. The first frame gets ``initial``.
    """
    unit = _directions(video)
    echoes = [torch.full_like(video[0, :, 0], initial)]
    position = torch.arange(video.shape[1], device=video.device)
    y = position // max(width, 1)
    x = position % max(width, 1)
    far = torch.maximum((y[:, None] - y).abs(), (x[:, None] - x).abs()) > 1
    for previous, frame in pairwise(unit):
        cosine = frame @ previous.T
        logits = (cosine / tau).masked_fill(far, -torch.inf) if width else cosine / tau
        echoes.append((logits.softmax(dim=-1) * cosine).sum(dim=-1))
    return torch.stack(echoes)


def distance_from_mean(video: Tensor) -> Tensor:
    """One minus the cosine ``(T, n)`` of each token with the mean token of its frame."""
    mean = _directions(video.mean(dim=1, keepdim=True))
    return 1 - (_directions(video) * mean).sum(dim=-1)


def surprise_of_motion(video: Tensor, height: int, width: int, decay: float) -> Tensor:
    """Error of a linear prediction, divided by the running mean of such errors, ``(T, n)``.

    A token's prediction is its value in the previous frame plus its last change there, minus the
    plane over rows and columns that best fits the changes of all tokens. Source: SURGE (ICLR 2026),
    by a port of it.
    """
    # Coordinates centred at 0, so that the three planes are orthogonal.
    y, x = (
        torch.arange(side, device=video.device) - (side - 1) / 2
        for side in (height, width)
    )
    ones = torch.ones(height * width, device=video.device)
    planes = torch.stack([ones, y.repeat_interleave(width), x.repeat(height)])
    basis = functional.normalize(planes, dim=-1)
    surprises = [torch.full_like(video[0, :, 0], 1 / (1 - decay))]
    motion = torch.zeros_like(video[0])
    mean = None
    for change in video.diff(dim=0):
        error = (change - motion).square().sum(dim=-1)
        mean = error if mean is None else decay * mean + (1 - decay) * error
        surprises.append(error / (mean + 1e-8))
        motion = change - basis.T @ (basis @ change)
    return torch.stack(surprises)


def typicality(video: Tensor) -> tuple[Tensor, Tensor]:
    """How near each token is to the mean of the video, and to that of its frame, both ``(T, n)``.

    Nearness is a sum of Gaussians of five widths. It compares directions in the half of the
    channels that vary least.
    """
    variance = video.flatten(0, 1).var(dim=0, correction=0)
    steady = variance.argsort(stable=True)[: max(1, video.shape[2] // 2)]
    rows = _directions(video.index_select(2, steady))

    def nearness(centre: Tensor) -> Tensor:
        squared = (rows - centre).square().sum(dim=-1)
        total = torch.zeros_like(squared)
        for exponent in range(-3, 2):
            total = total + torch.exp(-squared / 2 ** (exponent + 1))
        return total

    return nearness(rows.mean(dim=(0, 1))), nearness(rows.mean(dim=1, keepdim=True))


def curvature(video: Tensor) -> Tensor:
    """One minus the cosine between the steps into and out of each frame's mean, ``(T,)`` float64.

    The means are normalised to unit length. The value is 1 for the first and last frame, and where
    nothing moves.
    """
    mean = _directions(video.mean(dim=1).double())
    step = _directions(mean.diff(dim=0))
    bend = 1 - (step[:-1] * step[1:]).sum(dim=-1)
    ends = torch.ones_like(mean[:, 0])
    return torch.cat([ends[:1], bend, ends[1:2]]) if len(ends) > 1 else ends


def split_exactly(weights: Tensor, total: int, low: int, high: int) -> Tensor:
    """Shares ``(B, T)`` int64 of ``total`` by weights ``(B, T)``, each from ``low`` to ``high``.

    Each round divides the rest in proportion to the weights of frames that are not full, and gives
    the floors of these quotas. Once all floors are 0, the frames with the largest remainders get
    one token each; ties go to the earlier frame. Needs T low <= total <= T high.
    """
    weights = weights.double().nan_to_num(nan=0.0, posinf=0.0).clamp_min(_NEGLIGIBLE)
    shares = torch.full_like(weights, low, dtype=torch.int64)
    fraction = weights
    for _ in range(min(_ROUNDS, 2 * weights.shape[1]) + 1):
        missing = total - shares.sum(dim=1, keepdim=True)
        free = weights.where(shares < high, 0.0)
        quota = free / free.sum(dim=1, keepdim=True).clamp_min(_NEGLIGIBLE) * missing
        # With a tolerance, because a third of 3 as it is computed may be just below 1.
        floor = (quota + 1e-9).floor()
        fraction = (quota - floor).round(decimals=9)
        shares = shares + torch.minimum(floor.to(torch.int64), high - shares)
    order = rank_descending(fraction.masked_fill(shares >= high, -1.0))
    for step in (1, high):  # first one token each, then as many as there is room for
        room = (high - shares).clamp_max(step).gather(1, order)
        missing = total - shares.sum(dim=1, keepdim=True)
        reached = room.cumsum(dim=1) - room  # given to the frames before, in this order
        added = torch.minimum((missing - reached).clamp_min(0), room)
        shares = shares.scatter_add(1, order, added)
    return shares
