"""SafetyCheck: run a policy on synthetic images and record whether its guarantees hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_autoprune.tpdsl.atoms.safety import (
    CHECKS,
    VERDICTS,
    DeterminismCall,
    Expectation,
    SafetyRecord,
    Verdict,
)
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

_BATCH = 2
_WIDTH = 32
_TOWER_WIDTH = 24
_TEXT = 6
_HEADS, _HEAD_WIDTH = 2, 8


_HOST = torch.device("cpu")


def synthetic_probes(budget: int, device: torch.device = _HOST) -> list[VisualTokens]:
    """Clustered, constant and tiled images with N just above K, which include degenerate cases.

    They have the same values on every device.
    """
    side = max(4, math.ceil(math.sqrt(budget + 1)))
    tile = max(4, math.ceil(math.sqrt((budget + 1) / 5)))
    return [
        _Probe(Grid(side, side), device, seed=1, clusters=6, noise=0.5).tokens(),
        _Probe(Grid(side, side), device, seed=2, clusters=1, noise=0.0).tokens(),
        _Probe(Grid(tile, tile, tiles=5), device, seed=3, clusters=3, noise=0.0).tokens(),
    ]


def _norms(rows: Tensor) -> Tensor:
    """Sum of absolute values and Euclidean norm ``(B, N, 2)`` of rows ``(B, N, Dv)``."""
    return torch.stack([rows.abs().sum(dim=2), rows.norm(dim=2)], dim=2)


class _Probe:
    """Two images whose tokens form clusters, in the feature space and in every other input."""

    def __init__(
        self, grid: Grid, device: torch.device, *, seed: int, clusters: int, noise: float
    ) -> None:
        self._grid, self._clusters, self._noise = grid, clusters, noise
        self._device = device
        self._source = torch.Generator().manual_seed(seed)
        owner = torch.randint(clusters, (_BATCH, grid.tokens), generator=self._source)
        self._owner = owner.to(device)

    def tokens(self) -> VisualTokens:
        """The images, with every optional input present."""
        features, patches = self._clustered(_WIDTH), self._clustered(16)
        used = torch.ones(_BATCH, 1, dtype=torch.bool, device=self._device)
        instruction = Instruction(patches, self._normal(_BATCH, 1, 16), used, sign=1)
        attention = self._normal(_BATCH, self._grid.tokens).softmax(dim=1)
        tower, language = self._tower(), self._language(features)
        text = language.embeddings()
        return VisualTokens(
            features,
            self._grid,
            cls_attention=attention,
            instruction=instruction,
            tower=tower,
            language=language,
            encoder=tower.patches,
            words=Words(text[:, -_TEXT:], language.text),
            merger_input=MergerInput(_norms(tower.patches)),
        )

    def _tower(self) -> TowerStates:
        projector = self._normal(_TOWER_WIDTH, _WIDTH) / _TOWER_WIDTH**0.5
        # Constant within a cluster, so all tokens of the second probe get equal attention.
        attention = self._clustered(1)[:, :, 0].softmax(dim=1)
        return TowerStates(
            patches=self._clustered(_TOWER_WIDTH),
            keys=self._clustered(_HEAD_WIDTH),
            project=lambda rows: rows @ projector,
            cls=self._normal(_BATCH, self._grid.tiles, _TOWER_WIDTH),
            next_layer=NextLayer(attention, self._clustered(_TOWER_WIDTH)),
        )

    def _language(self, features: Tensor) -> RecordedPrefix:
        """One token before the image and six text tokens, the last two padding in image 2."""
        text = torch.arange(_TEXT) < torch.tensor([[_TEXT], [_TEXT - 2]])
        sequence = [self._normal(_BATCH, 1, _WIDTH), features, self._normal(_BATCH, _TEXT, _WIDTH)]
        entering = torch.cat(sequence, dim=1)
        length = entering.shape[1]
        rows = self._normal(_BATCH, _HEADS, _TEXT, length)
        return RecordedPrefix(
            start=1,
            text=text.to(self._device),
            # More layers than any state may name; the recorded tensors serve for all of them.
            layers=1024,
            recorded={
                **dict.fromkeys(("embeddings", "states", "normed"), entering),
                "keys": self._normal(_BATCH, _HEADS, length, _HEAD_WIDTH),
                "attention": rows.softmax(dim=-1),
            },
        )

    def _clustered(self, width: int) -> Tensor:
        centres = self._normal(self._clusters, width)
        return centres[self._owner] + self._noise * self._normal(*self._owner.shape, width)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._source).to(self._device)


MAX_PROBED_BUDGET = 640
"""Largest K that is checked; a policy with a larger K is checked at this one instead.

A probe has N > K tokens and N x N cosines, which at K = 65536 would take 34 GB. Since r_min and q_e
are at most 640, every guarantee of a policy already applies at this K.
"""


def safety_check(
    policy: PruningPolicy, probes: Sequence[VisualTokens] | None = None
) -> SafetyRecord:
    """d_alpha^(K) = SafetyCheck(pi, K): the five verdicts over all probes (equation 7).

    Never raises: a policy that raises fails every verdict, with the exception as detail. Without
    ``probes``, a K above :data:`MAX_PROBED_BUDGET` is checked at that K, which the record mentions.
    """
    full_budget = policy.budget
    if not probes and full_budget > MAX_PROBED_BUDGET:
        policy = materialize(policy.state, MAX_PROBED_BUDGET)
    verdicts: dict[str, Verdict] = {}
    for tokens in probes or synthetic_probes(policy.budget):
        for verdict in _check_probe(policy, tokens):
            if verdict.name not in verdicts or not verdict.ok:
                verdicts[verdict.name] = verdict
    if policy.budget < full_budget:
        count = verdicts["exact_count"]
        detail = f"{count.detail}, checked in place of K = {full_budget}"
        verdicts["exact_count"] = dataclasses.replace(count, detail=detail)
    return SafetyRecord(tuple(verdicts[name] for name in VERDICTS))


def _check_probe(policy: PruningPolicy, tokens: VisualTokens) -> tuple[Verdict, ...]:
    calls = {call.atom: call for call in policy.state.safety}
    repeat = calls.get("deterministic")
    repeats = repeat.repeats if isinstance(repeat, DeterminismCall) else 2
    try:
        sized = policy.at(tokens.count, tokens.grid.tiles)
        budget = min(sized.budget, tokens.count)
        expected = Expectation(budget, min(sized.r_min, budget), sized.quota)
        runs = [refine(policy, tokens) for _ in range(repeats)]
        verdicts: list[Verdict] = []
        for check in CHECKS:
            verdicts += check(calls.get(check.__name__), tokens, runs, expected)
        return tuple(verdicts)
    except Exception as error:  # any failure of the policy is a result of this check
        return tuple(Verdict(name, False, f"{type(error).__name__}: {error}") for name in VERDICTS)
