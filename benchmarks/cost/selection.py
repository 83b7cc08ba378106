"""`python -m benchmarks.cost selection`: time of choosing which tokens are kept, as tables.

Random images stand for a server's: clustered like a picture, so that the kernel does not have full
rank. The baseline is CDPruner's selection as its published code does it. What is compared runs in
turn, every second round in reverse order. Nothing here needs vLLM; ``--gpu`` needs Triton.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import BenchmarkError
from benchmarks.common.report import (
    environment,
    format_environment,
    format_estimate,
    format_spread,
    log_progress,
)
from vllm_autoprune import (
    Grid,
    Instruction,
    PruningPolicy,
    VisualTokens,
    load_state,
    materialize,
    refine,
)
from vllm_autoprune.report import Table
from vllm_autoprune.statistics import Estimate, Verdict, at_most, ratio_of_medians, spread
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.prefix import RecordedPrefix
from vllm_autoprune.tpdsl.tokens import NextLayer, TowerStates, Words

_Times = Mapping[str, Sequence[float]]
"""Seconds of each work, one value a round."""
_Work = Callable[[], object]

_WIDTH, _CLIP_WIDTH, _TOWER_WIDTH, _CLUSTERS = 4096, 768, 1024, 48
"""D of LLaVA-1.5-7B, widths of CLIP's joint space and of its vision tower, clusters in an image."""
_INNER, _HEADS, _LAYERS, _TEXT, _WORDS = 11008, 32, 32, 60, 16
"""Widths and depth of Llama-2-7B; text tokens around an image, and those of the question."""
_SHARE = 0.03
"""Share of the pruned prefill that a selection may take."""
_PROMISES = {
    "cpu": ("selection never slower than the published loop", 1.0),
    "cuda": ("selection at least five times as fast as the published loop", 0.2),
}
"""What is promised on each device, and the largest ratio to the published loop."""


@dataclass(frozen=True)
class _Size:
    """A batch of images: n tokens in each of T tiles, K kept tokens over all tiles."""

    per_tile: int
    tiles: int
    batch: int
    kept: int

    @property
    def tokens(self) -> int:
        """N, over all tiles."""
        return self.per_tile * self.tiles

    def __str__(self) -> str:
        tiles = "" if self.tiles == 1 else f" ({self.tiles} x {self.per_tile})"
        return f"{self.tokens}{tiles} → {self.kept}, batch {self.batch}"


_SHAPES = {_Size(576, 1, 1, 64): "LLaVA-1.5-7B", _Size(576, 5, 1, 320): "LLaVA-NeXT-7B"}
_LOOP_SIZES = [
    _Size(tokens, tiles, batch, tiles * (tokens // 9))
    for tiles, counts in ((1, (64, 144, 256, 576, 1024, 2880)), (5, (64, 144, 256, 576)))
    for tokens in counts
    for batch in (1, 2, 4, 8)
]
"""N from 64 to 2880, one tile and five, 1 to 8 images; one token in nine is kept."""


def _draw_tokens(
    size: _Size, device: str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> VisualTokens:
    """Random images with every input of a policy: features in the server's dtype."""
    source, batch, tokens = torch.Generator().manual_seed(0), size.batch, size.tokens
    owner = torch.randint(_CLUSTERS, (batch, tokens), generator=source).to(device)

    def normal(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=source).to(device, kind)

    def clustered(width: int, kind: torch.dtype) -> Tensor:
        return normal(_CLUSTERS, width, kind=kind)[owner] + normal(batch, tokens, width, kind=kind)

    side = round(size.per_tile**0.5)
    height = side if side * side == size.per_tile else 1
    asked = torch.ones(batch, 1, dtype=torch.bool, device=device)
    text = normal(batch, 1, _CLIP_WIDTH, kind=torch.float32)
    attention = normal(batch, tokens, kind=torch.float32).softmax(dim=1)
    patches, projector = normal(batch, tokens, _TOWER_WIDTH), normal(_TOWER_WIDTH, _WIDTH)
    tower = TowerStates(
        patches=patches,
        keys=normal(batch, tokens, 64),
        project=lambda rows: rows @ projector,
        cls=normal(batch, size.tiles, _TOWER_WIDTH),
        next_layer=NextLayer(attention, normal(batch, tokens, _TOWER_WIDTH)),
    )
    length = 1 + tokens + _WORDS
    entering, used = normal(batch, length, _WIDTH), asked.expand(-1, _WORDS)
    recorded = {
        **dict.fromkeys(("embeddings", "states", "normed"), entering),
        "keys": normal(batch, _HEADS, length, _WIDTH // _HEADS),
        "attention": normal(batch, _HEADS, _WORDS, length).float().softmax(dim=-1),
    }
    return VisualTokens(
        clustered(_WIDTH, dtype),
        Grid(height, size.per_tile // height, size.tiles),
        attention,
        Instruction(clustered(_CLIP_WIDTH, torch.float32), text, asked, -1),
        tower=tower,
        encoder=patches,
        words=Words(entering[:, -_WORDS:], used),
        language=RecordedPrefix(start=1, text=used, recorded=recorded),
    )


def _select_tokens(tokens: VisualTokens, policy: str, kept: int) -> Tensor:
    """Picks ``(B, K)`` of a base policy, from features to indices."""
    base = BASE_POLICIES[policy]
    return base.select(base.default_params, replace(tokens), kept).picks  # nothing computed yet


def _select_by_state(tokens: VisualTokens, policy: PruningPolicy) -> Tensor:
    return refine(policy, replace(tokens)).indices


def _select_as_published(tokens: VisualTokens, kept: int) -> Tensor:
    """Picks of CDPruner's published code ``(B, K)``, within tiles, ascending.

    The kernel of a tile is L = diag(r) S diag(r) in float32: relevance r is scaled over all tiles
    of an image, similarity S is within a tile. The published code takes one image at a time; here
    one loop handles all images of a batch, which favours the baseline.
    """
    grid, instruction = tokens.grid, tokens.instruction
    assert instruction is not None
    tiles = len(tokens.features) * grid.tiles
    unit = (tokens.features / tokens.features.norm(dim=-1, keepdim=True)).float()
    unit = unit.view(tiles, grid.per_tile, -1)
    patches = instruction.patches / instruction.patches.norm(dim=-1, keepdim=True)
    text = instruction.text / instruction.text.norm(dim=-1, keepdim=True)
    r = -(patches @ text.transpose(1, 2)).mean(dim=-1)
    low, high = r.amin(dim=1, keepdim=True), r.amax(dim=1, keepdim=True)
    r = ((r - low + 1e-6) / (high - low)).view(tiles, -1)
    kernel = r[:, :, None] * (unit @ unit.transpose(1, 2)) * r[:, None, :]
    tile = torch.arange(tiles, device=kernel.device)
    gain = kernel.diagonal(dim1=1, dim2=2).clone()
    count = kept // grid.tiles
    factors = kernel.new_zeros(count, tiles, grid.per_tile)
    picks = torch.empty(count, tiles, dtype=torch.int64, device=kernel.device)
    for step in range(count):
        best = gain.argmax(dim=1)
        picks[step] = best
        column, done = factors[:step, tile, best], factors[:step]
        projected = torch.einsum("tb,tbn->bn", column, done)
        update = (kernel[tile, best] - projected) / gain[tile, best].sqrt()[:, None]
        factors[step] = update
        gain -= update.square()
        gain[tile, best] = -torch.inf
    begin = tile % grid.tiles * grid.per_tile
    return (picks + begin).T.reshape(-1, kept).sort(dim=1).values


def _measure_alternately(
    works: Mapping[str, _Work],
    rounds: int,
    *,
    warm_up: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each work in each round; every second round is in reverse order."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    await_device: Callable[[], None] = (
        torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    )
    with torch.inference_mode():
        for name in [*works] * warm_up:
            works[name]()
        for turn in range(rounds):
            for name in [*works][:: -1 if turn % 2 else 1]:
                await_device()
                begin = clock()
                works[name]()
                await_device()
                seconds[name].append(clock() - begin)
    return seconds


def _ratio(over: Sequence[float], under: Sequence[float]) -> Estimate:
    return ratio_of_medians([[value] for value in over], [[value] for value in under])


def _format_part(
    title: str, setup: Sequence[str], claims: Sequence[Sequence[str]], table: Table
) -> str:
    """Setup, promises with their verdicts, and the table, as Markdown."""
    promises = Table("", ("promise", "measured", "verdict"), claims).markdown()
    lines = "\n".join(f"* {line}" for line in setup)
    return f"## {title}\n\n{lines}\n\n{promises}\n\n{table.caption}\n\n{table.markdown()}\n"


def _measure_loops(device: str, sizes: Sequence[_Size] = _LOOP_SIZES) -> str:
    """CDPruner from features to indices at 40 sizes: the published code and ours."""
    by_size, alike = dict[_Size, _Times](), dict[_Size, float]()
    for size in sizes:
        tokens = _draw_tokens(size, device)
        published = partial(_select_as_published, tokens, size.kept)
        ours = partial(_select_tokens, tokens, "cdpruner", size.kept)
        # About ten seconds a size, but never fewer than five rounds.
        rounds = max(5, min(31, int(8e7 / (size.batch * size.tiles * size.per_tile**2))))
        by_size[size] = _measure_alternately({"published": published, "ours": ours}, rounds)
        equal = published()[:, :, None] == ours()[:, None, :]
        alike[size] = float(equal.any(dim=2).float().mean())
        log_progress(str(size))
    return _format_loops(device, by_size, alike)


def _format_loops(
    device: str, by_size: Mapping[_Size, _Times], alike: Mapping[_Size, float]
) -> str:
    """The part of the report on the published loop; the worst size decides its promise."""
    promise, bound = _PROMISES[device]
    ratios = {size: _ratio(times["ours"], times["published"]) for size, times in by_size.items()}
    verdicts = [at_most(ratio, bound) for ratio in ratios.values()]
    counts = (f"{v} at {verdicts.count(v)} of {len(verdicts)} sizes" for v in sorted(set(verdicts)))
    worst = max(ratios, key=lambda size: ratios[size].value)
    largest = format_estimate(ratios[worst], digits=2)
    order: tuple[Verdict, ...] = ("does not hold", "inconclusive", "holds")
    verdict = next(verdict for verdict in order if verdict in verdicts)
    claim = (promise, f"{', '.join(counts)}; largest ratio {largest} at {worst}", f"**{verdict}**")
    rows = [
        (
            str(size),
            *(format_spread(spread(times[name])) for name in ("published", "ours")),
            format_estimate(ratios[size], digits=2),
            f"{100 * alike[size]:.1f}",
            str(len(times["ours"])),
        )
        for size, times in by_size.items()
    ]
    columns = (
        "N → K", "published, ms", "ours, ms", "ours / published", "same picks, %", "rounds",
    )  # fmt: skip
    setup = (
        f"CDPruner from features (bfloat16, D = {_WIDTH}) to indices; "
        f"{torch.get_num_threads()} threads",
        "published: the algorithm of the published code, all images in one loop",
        "random clustered features; both in turn, every second round in reverse order",
    )
    caption = "From features to indices: medians (quartiles), and ratios with 95 % intervals."
    table = Table(caption, columns, rows)
    return _format_part("Selection against the published loop", setup, [claim], table)


_LAYER, _FULL_LAYER = "one layer", "one layer, all tokens"


def _build_layer(rows: int, device: str) -> _Work:
    """A decoder layer of Llama-2-7B's true widths on so many rows, with random weights.

    A prefill is taken as 32 of them. Rotary embedding, embedding, final norm and logits are left
    out, which makes it shorter and the share of selection larger.
    """

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device) / shape[-1] ** 0.5

    states, qkv, out = draw(rows, _WIDTH), draw(3 * _WIDTH, _WIDTH), draw(_WIDTH, _WIDTH)
    gate_and_up, down = draw(2 * _INNER, _WIDTH), draw(_WIDTH, _INNER)

    def run_layer() -> Tensor:
        normed = functional.rms_norm(states, (_WIDTH,))
        projected = functional.linear(normed, qkv).view(rows, 3, _HEADS, -1)
        query, key, value = projected.permute(1, 2, 0, 3)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = states + functional.linear(mixed.transpose(0, 1).reshape(rows, _WIDTH), out)
        normed = functional.rms_norm(hidden, (_WIDTH,))
        gate, up = functional.linear(normed, gate_and_up).chunk(2, dim=-1)
        return hidden + functional.linear(functional.silu(gate) * up, down)

    return run_layer


def _measure_policies(device: str, sizes: Sequence[_Size] = tuple(_SHAPES)) -> str:
    """Every base policy, the state, and a layer, in turn: on a CPU the time of one thread."""
    threads, by_size = torch.get_num_threads(), dict[_Size, _Times]()
    clock = time.process_time if device == "cpu" else time.perf_counter
    torch.set_num_threads(1)
    try:
        for size in sizes:
            tokens = _draw_tokens(size, device)
            policy = materialize(load_state("autoprune"), size.kept)
            works: dict[str, _Work] = {
                name: partial(_select_tokens, tokens, name, size.kept) for name in BASE_POLICIES
            }
            works["state autoprune"] = partial(_select_by_state, tokens, policy)
            works[_LAYER] = _build_layer(size.kept + _TEXT, device)
            works[_FULL_LAYER] = _build_layer(size.tokens + _TEXT, device)
            by_size[size] = _measure_alternately(works, 7, warm_up=1, clock=clock)
            log_progress(f"{size}: {len(works)} works")
    finally:
        torch.set_num_threads(threads)
    return _format_policies(by_size)


def _format_policies(by_size: Mapping[_Size, _Times]) -> str:
    """The part of the report on policies: shares of the prefill of 32 layers, and a promise."""
    names = sorted(next(iter(by_size.values())).keys() - {_LAYER, _FULL_LAYER})
    ranking = dict.fromkeys(names, 0) | {
        name: policy.layers_read(policy.default_params, _LAYERS)
        for name, policy in BASE_POLICIES.items()
    }
    claims, cells, columns = [], {name: [f"`{name}`"] for name in names}, ["policy"]
    for size, times in by_size.items():
        shape = f"{_SHAPES[size]}, {size.tokens} → {size.kept}"
        columns += [f"{shape}, ms", "share, %"]
        prefill, shares = [_LAYERS * seconds for seconds in times[_LAYER]], {}
        for name in names:
            # Policies that read the language model's first layers run those over all tokens.
            pairs = zip(times[name], times[_FULL_LAYER], strict=True)
            total = [alone + ranking[name] * layer for alone, layer in pairs]
            shares[name] = _ratio(total, prefill)
            cells[name] += [format_spread(spread(total)), f"{100 * shares[name].value:.2f}"]
        worst = max((n for n in names if not ranking[n]), key=lambda name: shares[name].value)
        share = format_estimate(shares[worst], 100, 2, " to ").replace(" (", " % (95 %: ")
        promise = f"every policy that runs no language layer at most {_SHARE:.0%}"
        claims.append((
            f"{shape}: {promise} of the pruned prefill",
            f"`{worst}` is slowest: {share}",
            f"**{at_most(shares[worst], _SHARE)}**",
        ))  # fmt: skip
    heavy = ", ".join(f"`{name}`" for name in names if ranking[name])
    setup = (
        "the base policy alone, with default parameters, and the state with its exchange; every "
        "input given, nothing computed yet",
        f"prefill: {_LAYERS} times a decoder layer (D = {_WIDTH}, bfloat16) on K + {_TEXT} tokens",
        "on a CPU the time of one thread for both, which other work on the machine changes little",
        f"{heavy} run first layers of the language model over all tokens, in their time too",
    )
    table = Table("Medians (quartiles), in turn.", columns, [cells[name] for name in names])
    return _format_part("Selection time of every policy", setup, claims, table)


_PARTS: Mapping[str, Callable[[str], str]] = {
    "selection": _measure_loops,
    "policies": _measure_policies,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options; each has a default."""
    parser.add_argument("--only", choices=tuple(_PARTS), help="one of the two parts")
    parser.add_argument("--gpu", action="store_true", help="measure on a CUDA device")


def run(options: argparse.Namespace) -> int:
    """The exit status: 0 once everything is measured, whatever the verdicts.

    Raises :class:`BenchmarkError` where ``--gpu`` finds no GPU, or none that Triton compiles for.
    """
    device, name = "cpu", ""
    if options.gpu:
        if not torch.cuda.is_available():
            raise BenchmarkError("no CUDA device here -> leave out --gpu")
        from vllm_autoprune.ops import dpp_triton

        if not dpp_triton.works():
            raise BenchmarkError("Triton does not work on this machine; the log says why")
        device, name = "cuda", f" on {torch.cuda.get_device_name()}"
    chosen = [options.only] if options.only else list(_PARTS)
    print("\n".join([f"# Selection{name}\n", *(_PARTS[part](device) for part in chosen)]))
    print(f"Environment: {format_environment(environment())}.")
    return 0
