"""SafetyCheck: run a policy on synthetic images and record whether its guarantees hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_autoprune.ops.rowwise import mask_from_indices
from vllm_autoprune.tpdsl.atoms.safety import (
    VERDICTS,
    DeterminismCall,
    SafetyRecord,
    Verdict,
)
from vllm_autoprune.tpdsl.base_policy import RefinedTokens, TokenSelection
from vllm_autoprune.tpdsl.materialize import PruningPolicy, materialize
from vllm_autoprune.tpdsl.prefix import RecordedPrefix
from vllm_autoprune.tpdsl.refine import refine
from vllm_autoprune.tpdsl.tokens import (
    Grid,
    Instruction,
    MergerInput,
    NextLayer,
    TowerStates,
    VisualTokens,
    Words,
)

_TOWER_WIDTH = 24
_RELEVANCE_WIDTH = 16
_TEXT = 6
_HEADS = 2
_HEAD_WIDTH = 8

_HOST = torch.device("cpu")


def synthetic_probes(budget: int, device: torch.device = _HOST) -> list[VisualTokens]:
    """Clustered, constant and tiled images with N just above K, which include degenerate cases.

    They have the same values on every device.
    """
    side = max(4, math.ceil(math.sqrt(budget + 1)))
    tile = max(4, math.ceil(math.sqrt((budget + 1) / 5)))
    return [
        _make_probe(Grid(side, side), 1, device, clusters=6, noise=0.5),
        _make_probe(Grid(side, side), 2, device, clusters=1, noise=0.0),
        _make_probe(Grid(tile, tile, tiles=5), 3, device, clusters=3, noise=0.0),
    ]


def _make_probe(
    grid: Grid,
    seed: int,
    device: torch.device = _HOST,
    *,
    clusters: int,
    noise: float,
    batch: int = 2,
    width: int = 32,
) -> VisualTokens:
    """Random images whose tokens belong to random clusters.

    In clustered inputs, the tokens of a cluster have the same values, apart from ``noise``. A token
    belongs to the same cluster in all of these inputs.

    Clustered are features, relevance, the tower's output and keys, and the next layer's attention
    and output. Not clustered are [CLS] attention, and keys and attention of the language prefix.
    """
    source = torch.Generator().manual_seed(seed)
    owner = torch.randint(clusters, (batch, grid.tokens), generator=source).to(device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source).to(device)

    def clustered(width: int) -> Tensor:
        return normal(clusters, width)[owner] + noise * normal(*owner.shape, width)

    features = clustered(width)
    instruction = Instruction(
        patches=clustered(_RELEVANCE_WIDTH),
        text=normal(batch, 1, _RELEVANCE_WIDTH),
        segments=torch.ones(batch, 1, dtype=torch.bool, device=device),
        sign=1,
    )
    attention = normal(batch, grid.tokens).softmax(dim=1)
    projector = normal(_TOWER_WIDTH, width) / _TOWER_WIDTH**0.5
    # Clustered like the features: with one cluster and no noise, all tokens get equal attention.
    next_attention = clustered(1)[:, :, 0].softmax(dim=1)
    encoder = clustered(_TOWER_WIDTH)
    tower = TowerStates(
        patches=encoder,
        keys=clustered(_HEAD_WIDTH),
        project=lambda rows: rows @ projector.to(rows, non_blocking=True),
        cls=normal(batch, grid.tiles, _TOWER_WIDTH),
        next_layer=NextLayer(next_attention, clustered(_TOWER_WIDTH)),
    )
    # One token before the image and six text tokens, of which the last two are padding in every
    # second image.
    text = torch.arange(_TEXT) < _TEXT - 2 * (torch.arange(batch)[:, None] % 2)
    entering = torch.cat(
        [normal(batch, 1, width), features, normal(batch, _TEXT, width)], dim=1
    )
    by_text = normal(batch, _HEADS, _TEXT, entering.shape[1])
    language = RecordedPrefix(
        start=1,
        text=text.to(device),
        # More layers than any state may name; the same recorded tensors serve for all of them.
        layers=1024,
        recorded={
            **dict.fromkeys(("embeddings", "states", "normed"), entering),
            "keys": normal(batch, _HEADS, entering.shape[1], _HEAD_WIDTH),
            "attention": by_text.softmax(dim=-1),
        },
    )
    return VisualTokens(
        features,
        grid,
        cls_attention=attention,
        instruction=instruction,
        tower=tower,
        language=language,
        encoder=encoder,
        words=Words(entering[:, -_TEXT:], language.text),
        merger_input=MergerInput(
            torch.stack([encoder.abs().sum(dim=2), encoder.norm(dim=2)], dim=2)
        ),
    )


MAX_PROBED_BUDGET = 640
"""Largest K that is checked; a policy with a larger K is checked at this one instead.

A probe has N > K tokens and N x N cosines, which at K = 65536 would take 34 GB. Since r_min and q_e
are at most 640, every guarantee of a policy already applies at this K.
"""


def safety_check(
    policy: PruningPolicy, probes: Sequence[VisualTokens] | None = None
) -> SafetyRecord:
    """d_alpha^(K) = SafetyCheck(pi, K): the five verdicts over all probes (equation 7).

    Never raises: a policy that raises an exception fails every verdict, with the exception as
    detail. Without ``probes``, a K above :data:`MAX_PROBED_BUDGET` is replaced by that K, which the
    record mentions.
    """
    full_budget = policy.budget
    if not probes and full_budget > MAX_PROBED_BUDGET:
        policy = materialize(policy.state, MAX_PROBED_BUDGET)
    deterministic = [c for c in policy.state.safety if isinstance(c, DeterminismCall)]
    repeats = deterministic[0].repeats if deterministic else 2
    verdicts: dict[str, Verdict] = {}
    for tokens in probes or synthetic_probes(policy.budget):
        try:
            runs = [refine(policy, tokens) for _ in range(repeats)]
            judged = _judge_runs(
                policy.at(tokens.count, tokens.grid.tiles), tokens, runs
            )
        # Any failure of the policy is a result of this check.
        except Exception as error:  # noqa: BLE001
            reason = f"{type(error).__name__}: {error}"
            judged = tuple(Verdict(name, False, reason) for name in VERDICTS)
        for verdict in judged:
            if verdict.name not in verdicts or not verdict.ok:
                verdicts[verdict.name] = verdict
    if policy.budget < full_budget:
        count = verdicts["exact_count"]
        detail = f"{count.detail}, checked in place of K = {full_budget}"
        verdicts["exact_count"] = dataclasses.replace(count, detail=detail)
    return SafetyRecord(tuple(verdicts[name] for name in VERDICTS))


def find_unsafe(
    policy: PruningPolicy, tokens: VisualTokens, chosen: TokenSelection
) -> Tensor:
    """Images ``(B,)`` bool with repeated tokens or with too few tokens of the base policy.

    The exchange may replace at most q_e of its tokens and must keep r_min. Never waits for the
    device.
    """
    policy = policy.at(tokens.count, tokens.grid.tiles)
    exchanges = min(policy.quota, max(0, policy.budget - policy.r_min))
    picks = chosen.reference.picks
    remaining = (
        mask_from_indices(chosen.indices, tokens.count).gather(1, picks).sum(dim=1)
    )
    repeat = (chosen.indices.sort(dim=1).values.diff(dim=1) == 0).any(dim=1)
    return repeat | (picks.shape[1] - remaining > exchanges)


def _judge_runs(
    policy: PruningPolicy, tokens: VisualTokens, runs: list[RefinedTokens]
) -> tuple[Verdict, ...]:
    """The five verdicts on ``runs`` of a policy on ``tokens``, for whose size it is resolved."""
    run = runs[0]
    budget = min(policy.budget, tokens.count)
    images, picked = run.indices.shape
    counted = (images, picked + run.extra) == (tokens.batch, budget) and picked > 0
    count = (
        f"{images} images of {picked} tokens and {run.extra} extra rows, K = {budget}"
    )
    valid = False
    detail = "not checked: the count is wrong"
    if counted:
        inside = bool(((run.indices >= 0) & (run.indices < tokens.count)).all())
        unique = bool((run.indices.sort(dim=1).values.diff(dim=1) > 0).all())
        distinct = bool((run.reference.sort(dim=1).values.diff(dim=1) > 0).all())
        detail = f"in range: {inside}, unique: {unique}, reference unique: {distinct}"
        valid = inside and unique and distinct
    if valid:
        member = mask_from_indices(run.indices, tokens.count)
        r_min = min(policy.r_min, budget)
        preserved = int(member.gather(1, run.reference).sum(dim=1).min()) + run.extra
        detail += f", reference tokens kept: {preserved} of at least {r_min}"
        valid = preserved >= r_min and budget - preserved <= policy.quota

    rows = bool(run.features.isfinite().all())
    fallbacks = int((run.fallback != 0).sum())
    shape = (tokens.batch, budget, tokens.features.shape[2])
    shaped = (
        tuple(run.features.shape) == shape
        and run.features.dtype == tokens.features.dtype
        and run.features.device == tokens.features.device
    )
    repeats = all(
        torch.equal(run.indices, other.indices)
        and torch.equal(run.features, other.features)
        for other in runs[1:]
    )
    finite = f"finite rows: {rows}, fell back: {fallbacks}"
    return (
        Verdict("exact_count", counted, count),
        Verdict("valid_indices", valid, detail),
        Verdict("finite_scores", rows and not fallbacks, finite),
        Verdict(
            "shapes", shaped, f"features {tuple(run.features.shape)}, expected {shape}"
        ),
        Verdict("determinism", repeats, f"{len(runs)} runs, all equal: {repeats}"),
    )
