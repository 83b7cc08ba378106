"""`python -m benchmarks.cost selection`: time of CDPruner's selection against its published code.

Images are random but clustered like a picture, so that the kernel does not have full rank. Both
codes run in turn, and swap their order every second round. Nothing here needs vLLM; ``--gpu`` needs
Triton.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import BenchmarkError
from benchmarks.common.report import (
    format_environment,
    format_estimate,
    format_spread,
    log_progress,
)
from vllm_autoprune import Grid, Instruction, VisualTokens
from vllm_autoprune.report import Table
from vllm_autoprune.statistics import Estimate, Spread, Verdict
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

_WIDTH = 4096
_CLIP_WIDTH = 768
_CLUSTERS = 48
"""D of LLaVA-1.5-7B, width of CLIP's joint space, and clusters in an image."""
_PROMISES = {
    "cpu": ("selection never slower than the published loop", 1.0),
    "cuda": ("selection at least five times as fast as the published loop", 0.2),
}
"""The promise on each device, and its maximum ratio to the published loop's time."""


@dataclass(frozen=True)
class BatchSize:
    """A batch of images: n tokens in each of T tiles, K kept tokens over all tiles."""

    per_tile: int
    tiles: int
    batch: int
    kept: int

    @property
    def tokens(self) -> int:
        """N, the tokens of all tiles."""
        return self.per_tile * self.tiles

    def __str__(self) -> str:
        tiles = "" if self.tiles == 1 else f" ({self.tiles} x {self.per_tile})"
        return f"{self.tokens}{tiles} → {self.kept}, batch {self.batch}"

    def draw_tokens(
        self, device: str = "cpu", dtype: torch.dtype = torch.bfloat16
    ) -> VisualTokens:
        """Draw random images with CDPruner's inputs: features in the server's dtype, relevance."""
        source = torch.Generator().manual_seed(0)
        batch = self.batch
        tokens = self.tokens
        owner = torch.randint(_CLUSTERS, (batch, tokens), generator=source).to(device)

        def normal(*shape: int, kind: torch.dtype) -> Tensor:
            return torch.randn(*shape, generator=source).to(device, kind)

        def clustered(width: int, kind: torch.dtype) -> Tensor:
            return normal(_CLUSTERS, width, kind=kind)[owner] + normal(
                batch, tokens, width, kind=kind
            )

        side = round(self.per_tile**0.5)
        height = side if side * side == self.per_tile else 1
        present = torch.ones(batch, 1, dtype=torch.bool, device=device)
        text = normal(batch, 1, _CLIP_WIDTH, kind=torch.float32)
        return VisualTokens(
            clustered(_WIDTH, dtype),
            Grid(height, self.per_tile // height, self.tiles),
            None,
            Instruction(clustered(_CLIP_WIDTH, torch.float32), text, present, -1),
        )


_SIZES = [
    BatchSize(tokens, tiles, batch, tiles * (tokens // 9))
    for tiles, counts in (
        (1, (64, 144, 256, 576, 1024, 2880)),
        (5, (64, 144, 256, 576)),
    )
    for tokens in counts
    for batch in (1, 2, 4, 8)
]
"""N from 64 to 2880, one or five tiles, 1 to 8 images; one token in nine is kept."""


def _select_as_published(tokens: VisualTokens, budget: int) -> Tensor:
    """Picks ``(B, K)`` of CDPruner's published code, which selects within tiles; ascending.

    The kernel of a tile is L = diag(r) S diag(r) in float32. Relevance r is scaled over all tiles
    of an image; similarity S is within a tile. The published code takes one image at a time; here
    one loop handles all images of a batch, which favours the baseline.
    """
    grid = tokens.grid
    instruction = tokens.instruction
    assert instruction is not None
    tiles = len(tokens.features) * grid.tiles
    unit = (tokens.features / tokens.features.norm(dim=-1, keepdim=True)).float()
    unit = unit.view(tiles, grid.per_tile, -1)
    patches = instruction.patches / instruction.patches.norm(dim=-1, keepdim=True)
    text = instruction.text / instruction.text.norm(dim=-1, keepdim=True)
    r = -(patches @ text.transpose(1, 2)).mean(dim=-1)
    low = r.amin(dim=1, keepdim=True)
    high = r.amax(dim=1, keepdim=True)
    r = ((r - low + 1e-6) / (high - low)).view(tiles, -1)
    kernel = r[:, :, None] * (unit @ unit.transpose(1, 2)) * r[:, None, :]
    tile = torch.arange(tiles, device=kernel.device)
    gain = kernel.diagonal(dim1=1, dim2=2).clone()
    count = budget // grid.tiles
    factors = kernel.new_zeros(count, tiles, grid.per_tile)
    picks = torch.empty(count, tiles, dtype=torch.int64, device=kernel.device)
    for step in range(count):
        best = gain.argmax(dim=1)
        picks[step] = best
        column = factors[:step, tile, best]
        done = factors[:step]
        projected = torch.einsum("tb,tbn->bn", column, done)
        update = (kernel[tile, best] - projected) / gain[tile, best].sqrt()[:, None]
        factors[step] = update
        gain -= update.square()
        gain[tile, best] = -torch.inf
    begin = tile % grid.tiles * grid.per_tile
    return (picks + begin).T.reshape(-1, budget).sort(dim=1).values


class _Measurement(NamedTuple):
    """Seconds of every round at one size, and the share of equal picks."""

    size: BatchSize
    published: Sequence[float]
    ours: Sequence[float]
    alike: float = 1.0

    @property
    def ratio(self) -> Estimate:
        """Ratio of our time to that of the published code."""
        return Estimate.ratio_of_medians(self.ours, self.published)

    @classmethod
    def of(cls, size: BatchSize, device: str) -> _Measurement:
        """Time CDPruner from features to indices; the order swaps every second round."""
        tokens = size.draw_tokens(device)
        base = BASE_POLICIES["cdpruner"]
        works: tuple[Callable[[], Tensor], ...] = (
            lambda: _select_as_published(tokens, size.kept),
            # A copy has no cached results of earlier rounds.
            lambda: base.select(base.default_params, replace(tokens), size.kept).picks,
        )
        # These rounds take about ten seconds a size; at least five are needed.
        rounds = max(
            5, min(31, int(8e7 / (size.batch * size.tiles * size.per_tile**2)))
        )
        seconds: tuple[list[float], list[float]] = ([], [])
        with torch.inference_mode():
            for _ in range(2):
                published, ours = (work() for work in works)
            for turn in range(rounds):
                for index in (1, 0) if turn % 2 else (0, 1):
                    _synchronize(device)
                    begin = time.perf_counter()
                    works[index]()
                    _synchronize(device)
                    seconds[index].append(time.perf_counter() - begin)
        equal = published[:, :, None] == ours[:, None, :]
        log_progress(str(size))
        return cls(size, *seconds, float(equal.any(dim=2).float().mean()))


def _synchronize(device: str) -> None:
    """Wait for the queued kernels of a GPU, so that their time is measured."""
    if device == "cuda":
        torch.cuda.synchronize()


def _format_table(device: str, measurements: Sequence[_Measurement]) -> str:
    """The table, and the verdict on the promise, which the worst size decides."""
    promise, bound = _PROMISES[device]
    ratios = {measurement.size: measurement.ratio for measurement in measurements}
    verdicts = [ratio.at_most(bound) for ratio in ratios.values()]
    counts = (
        f"{v} at {verdicts.count(v)} of {len(verdicts)} sizes"
        for v in sorted(set(verdicts))
    )
    worst = max(ratios, key=lambda size: ratios[size].value)
    largest = format_estimate(ratios[worst], digits=2)
    order: tuple[Verdict, ...] = ("does not hold", "inconclusive", "holds")
    verdict = next(verdict for verdict in order if verdict in verdicts)
    rows = [
        (
            str(size),
            format_spread(Spread.of(published)),
            format_spread(Spread.of(ours)),
            format_estimate(ratios[size], digits=2),
            f"{100 * alike:.1f}",
            str(len(ours)),
        )
        for size, published, ours, alike in measurements
    ]
    columns = (
        "N → K",
        "published, ms",
        "ours, ms",
        "ours / published",
        "same picks, %",
        "rounds",
    )
    return (
        f"CDPruner from features (bfloat16, D = {_WIDTH}) to "
        f"indices, {torch.get_num_threads()} threads: medians (quartiles), and ratios with 95 % "
        f"intervals.\n\n{promise}: {', '.join(counts)}; largest ratio {largest} at {worst}: "
        f"**{verdict}**\n\n{Table('', columns, rows).markdown()}\n"
    )


OPTIONS = {"--gpu": {"action": "store_true", "help": "measure on a CUDA device"}}


def run(options: argparse.Namespace) -> int:
    """Measure and print; returns 0 whatever the verdicts are.

    Raises :class:`BenchmarkError` if ``--gpu`` finds no GPU, or none that Triton compiles for.
    """
    device = "cpu"
    name = ""
    if options.gpu:
        if not torch.cuda.is_available():
            raise BenchmarkError.of("--gpu", "no CUDA device here", "leave it out")
        from vllm_autoprune.ops import dpp_triton

        if not dpp_triton.works():
            raise BenchmarkError.of(
                "--gpu", "Triton does not work on this machine; the log says why"
            )
        device = "cuda"
        name = f" on {torch.cuda.get_device_name()}"
    measurements = [_Measurement.of(size, device) for size in _SIZES]
    print(f"# Selection{name}\n\n{_format_table(device, measurements)}")
    print(format_environment())
    return 0
