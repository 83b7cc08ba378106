"""`python -m benchmarks.cost selection`: time and memory of choosing which tokens are kept.

Random images stand for a server's: clustered like a picture, so that the kernel does not have full
rank. The baseline is CDPruner's selection as its published code does it. Works that are compared
run in turn, every second round in reverse order.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

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
from vllm_autoprune.backbones import find_backbone
from vllm_autoprune.report import Table
from vllm_autoprune.statistics import (
    Estimate,
    Verdict,
    at_most,
    ratio_of_medians,
    spread,
)
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, ReferenceSelection
from vllm_autoprune.tpdsl.prefix import RecordedPrefix
from vllm_autoprune.tpdsl.tokens import NextLayer, TowerStates, Words

_Work = Callable[[], object]
Times = dict[str, list[float]]
"""Seconds by the name of the work, one value a round."""

WIDTH, CLIP_WIDTH, CLUSTERS = 4096, 768, 48
"""D of LLaVA-1.5-7B, the width of CLIP's joint space, and clusters of tokens in an image."""


@dataclass(frozen=True)
class Size:
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


LLAVA = (Size(576, 1, 1, 32), Size(576, 1, 1, 64))
LLAVA_NEXT = (Size(576, 5, 1, 160), Size(576, 5, 1, 320), Size(576, 5, 1, 640))


@dataclass(frozen=True)
class Images:
    """Features ``(B, N, D)``, patches ``(B, N, C)``, text ``(B, 1, C)``, attention ``(B, N)``."""

    size: Size
    features: Tensor
    patches: Tensor
    text: Tensor
    cls_attention: Tensor

    def tokens(self, **optional: object) -> VisualTokens:
        """Visual tokens with nothing computed yet."""
        side = round(self.size.per_tile**0.5)
        square = side * side == self.size.per_tile
        grid = Grid(side if square else 1, side if square else self.size.per_tile, self.size.tiles)
        used = self.text.new_ones(self.size.batch, 1).bool()
        instruction = Instruction(self.patches, self.text, used, -1)
        return VisualTokens(self.features, grid, self.cls_attention, instruction, **optional)  # type: ignore[arg-type]

    def select(self, base: PruningPolicy) -> Tensor:
        """CDPruner's picks ``(B, K)``, from features to indices."""
        params = base.state.base_policy.params
        return base.base.select(params, self.tokens(), base.budget).picks

    def select_as_published(self) -> Tensor:
        """Picks of the published code ``(B * T, K / T)`` within tiles, ascending.

        Relevance is scaled over all tiles of an image, similarity and selection are tile by tile.
        """
        kernel = build_published_kernel(self)
        return select_greedily(kernel, self.size.kept // self.size.tiles).sort(dim=1).values


def draw_images(
    size: Size, *, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", seed: int = 0
) -> Images:
    """Random images: features in the server's dtype, patches and text in float32."""
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source)

    owner = torch.randint(CLUSTERS, (size.batch, size.tokens), generator=source)
    features = normal(CLUSTERS, WIDTH)[owner] + normal(size.batch, size.tokens, WIDTH)
    patches = normal(CLUSTERS, CLIP_WIDTH)[owner] + normal(size.batch, size.tokens, CLIP_WIDTH)
    return Images(
        size,
        features.to(device, dtype),
        patches.to(device),
        normal(size.batch, 1, CLIP_WIDTH).to(device),
        normal(size.batch, size.tokens).softmax(dim=1).to(device),
    )


def build_published_kernel(images: Images) -> Tensor:
    """L = diag(r) S diag(r) of every tile, ``(B * T, n, n)`` float32, as published."""
    size = images.size
    unit = (images.features / images.features.norm(dim=-1, keepdim=True)).float()
    unit = unit.view(size.batch * size.tiles, size.per_tile, -1)
    similarity = unit @ unit.transpose(1, 2)
    patches = images.patches / images.patches.norm(dim=-1, keepdim=True)
    text = images.text / images.text.norm(dim=-1, keepdim=True)
    r = -(patches @ text.transpose(1, 2)).mean(dim=-1)
    low, high = r.amin(dim=1, keepdim=True), r.amax(dim=1, keepdim=True)
    r = ((r - low + 1e-6) / (high - low)).view(size.batch * size.tiles, -1)
    return r[:, :, None] * similarity * r[:, None, :]


def select_greedily(kernel: Tensor, count: int) -> Tensor:
    """The ``count`` picks of the published loop on L ``(B, n, n)``, in pick order.

    The published code takes one image at a time; here one loop handles all images of a batch, which
    favours the baseline.
    """
    batch, tokens, _ = kernel.shape
    image = torch.arange(batch, device=kernel.device)
    gain = kernel.diagonal(dim1=1, dim2=2).clone()
    factors = kernel.new_zeros(count, batch, tokens)
    picks = torch.empty(count, batch, dtype=torch.int64, device=kernel.device)
    for step in range(count):
        best = gain.argmax(dim=1)
        picks[step] = best
        column, done = factors[:step, image, best], factors[:step]
        projected = torch.einsum("tb,tbn->bn", column, done)
        update = (kernel[image, best] - projected) / gain[image, best].sqrt()[:, None]
        factors[step] = update
        gain -= update.square()
        gain[image, best] = -torch.inf
    return picks.T


def build_policy(kept: int, *, exchange: bool = True) -> PruningPolicy:
    """The state `autoprune` at a budget; without ``exchange``, its base policy alone."""
    state = load_state("autoprune")
    if not exchange:
        selector = state.constraints.selector.model_copy(update={"q_e": 0, "r_min": None})
        constraints = state.constraints.model_copy(update={"selector": selector})
        state = state.model_copy(update={"constraints": constraints})
    return materialize(state, kept)


def measure_alternately(
    works: Mapping[str, _Work],
    rounds: int,
    *,
    warm_up: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Seconds of each work in each round; every second round is in reverse order."""
    names = list(works)
    seconds: Times = {name: [] for name in names}
    on_gpu = torch.cuda.is_available()
    with torch.inference_mode():
        for name in names * warm_up:
            works[name]()
        for turn in range(rounds):
            for name in names if turn % 2 == 0 else reversed(names):
                if on_gpu:
                    torch.cuda.synchronize()
                begin = clock()
                works[name]()
                if on_gpu:
                    torch.cuda.synchronize()
                seconds[name].append(clock() - begin)
    return seconds


class _Claim(NamedTuple):
    """A promise, what was measured, and whether it holds."""

    promise: str
    measured: str
    verdict: Verdict


@dataclass(frozen=True)
class Section:
    """One part of the report; ``times`` holds every single measured value."""

    name: str
    title: str
    setup: Sequence[str]
    claims: Sequence[_Claim]
    table: Table
    times: Mapping[Size, Times]
    environment: Mapping[str, str] = field(default_factory=environment)

    def to_json(self) -> dict[str, object]:
        """Plain data; a claim is an object."""
        return {
            "name": self.name,
            "title": self.title,
            "setup": self.setup,
            "claims": [claim._asdict() for claim in self.claims],
            "data": {str(size): times for size, times in self.times.items()},
            "environment": self.environment,
            "tables": [dataclasses.asdict(self.table)],
        }

    def markdown(self) -> str:
        """Setup, claims with their verdicts, table, environment."""
        claims = [(*claim[:2], f"**{claim.verdict}**") for claim in self.claims]
        return "\n".join(
            [
                f"## {self.title}\n",
                *(f"* {line}" for line in self.setup),
                f"\n{Table('', _Claim._fields, claims).markdown()}\n",
                f"{self.table.caption}\n\n{self.table.markdown()}\n",
                f"Environment: {format_environment(self.environment)}.\n",
            ]
        )


def _ratio(times: Times, over: str, under: str, factor: float = 1.0) -> Estimate:
    return ratio_of_medians([[t] for t in times[over]], [[factor * t] for t in times[under]])


def _milliseconds(times: Times, *names: str) -> list[str]:
    return [format_spread(spread(times[name])) for name in names]


def list_sizes(quick: bool) -> list[Size]:
    """N from 64 to 2880, one tile and five, 1 to 8 images; one token in nine is kept."""
    shapes = [(n, 1) for n in (64, 144, 256, 576, 1024, 2880)]
    shapes += [(n, 5) for n in (64, 144, 256, 576)]
    if quick:
        return [Size(64, 1, 1, 7), Size(64, 5, 2, 35)]
    return [
        Size(n, tiles, batch, tiles * (n // 9)) for n, tiles in shapes for batch in (1, 2, 4, 8)
    ]


def _measure_selection(quick: bool) -> Section:
    """CDPruner from features to indices: the published code and ours."""

    def build_works(size: Size) -> dict[str, _Work]:
        images, base = draw_images(size), build_policy(size.kept, exchange=False)
        return {"published": images.select_as_published, "ours": lambda: images.select(base)}

    by_size: dict[Size, Times] = {}
    for size in list_sizes(quick):
        # About ten seconds a size, but never fewer than five rounds.
        work = size.batch * size.tiles * size.per_tile**2
        rounds = 2 if quick else max(5, min(31, int(8e7 / work)))
        by_size[size] = measure_alternately(build_works(size), rounds)
        log_progress(f"{size}: {', '.join(_milliseconds(by_size[size], 'published', 'ours'))} ms")
    return build_selection(by_size)


def build_selection(by_size: Mapping[Size, Times]) -> Section:
    """A claim on all sizes, with the worst of them."""
    ratios = {size: _ratio(times, "ours", "published") for size, times in by_size.items()}
    verdicts = [at_most(ratio, 1.0) for ratio in ratios.values()]
    counts = (f"{v} at {verdicts.count(v)} of {len(verdicts)} sizes" for v in sorted(set(verdicts)))
    worst = max(ratios, key=lambda size: ratios[size].value)
    largest = format_estimate(ratios[worst], digits=2)
    order: tuple[Verdict, ...] = ("does not hold", "inconclusive", "holds")
    claim = _Claim(
        "selection never slower than the published loop",
        f"{', '.join(counts)}; largest ratio {largest} at {worst}",
        next(verdict for verdict in order if verdict in verdicts),
    )
    rows = [
        (
            str(size),
            *_milliseconds(times, "published", "ours"),
            format_estimate(ratios[size], digits=2),
            str(len(times["ours"])),
        )
        for size, times in by_size.items()
    ]
    table = Table(
        "From features to indices: medians (quartiles), and ratios with 95 % intervals.",
        ("N → K", "published, ms", "ours, ms", "ours / published", "rounds"),
        rows,
    )
    setup = [
        "CDPruner from features (bfloat16, D = 4096) to indices; "
        f"{torch.get_num_threads()} threads",
        "published: the algorithm of the published code, all images in one loop",
        "random clustered features; both in turn, every second round in reverse order",
    ]
    title = "Selection against the published loop"
    return Section("selection", title, setup, [claim], table, by_size)


INNER, HEADS, LAYERS, TEXT = 11008, 32, 32, 60
"""Widths and depth of Llama-2-7B; text tokens around the image: template and question."""
_BOUND = 0.03
"""Share of the prefill that a selection may take."""
_NAMES = {1: "LLaVA-1.5-7B", 5: "LLaVA-NeXT-7B"}
LAYER, FULL_LAYER, STATE = "one layer", "one layer, all tokens", "state autoprune"


def _build_layer(rows: int) -> _Work:
    """A decoder layer of Llama-2-7B's true widths on so many rows, with random weights.

    A prefill is taken as 32 of them. Embedding, final norm and logits are left out, which makes it
    shorter and the share of selection larger.
    """
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=WIDTH, intermediate_size=INNER, num_attention_heads=HEADS)
    config._attn_implementation = "sdpa"
    states = torch.randn(1, rows, WIDTH, dtype=torch.bfloat16)
    positions = LlamaRotaryEmbedding(config)(states, torch.arange(rows)[None])
    layer = LlamaDecoderLayer(config, 0).bfloat16()
    return partial(layer, states, position_embeddings=positions)


class TokenSource:
    """Random images with every input of a policy; each selection has nothing computed yet."""

    def __init__(self, size: Size, device: str = "cpu") -> None:
        self._images = draw_images(size, device=device)
        source = torch.Generator().manual_seed(1)
        tower, words = 1024, 16  # width of LLaVA's vision tower, and tokens of a question

        def normal(*shape: int) -> Tensor:
            return torch.randn(size.batch, *shape, generator=source).bfloat16().to(device)

        patches = normal(size.tokens, tower)
        projector = torch.randn(tower, WIDTH).bfloat16().to(device)
        self._tower = TowerStates(
            patches=patches,
            keys=normal(size.tokens, 64),
            project=lambda rows: rows @ projector,
            cls=normal(size.tiles, tower),
            next_layer=NextLayer(self._images.cls_attention, normal(size.tokens, tower)),
        )
        used = torch.ones(size.batch, words, dtype=torch.bool, device=device)
        length = 1 + size.tokens + words
        entering = normal(length, WIDTH)
        self._words = Words(entering[:, -words:], used)
        self._language = RecordedPrefix(
            start=1,
            text=used,
            recorded={
                **dict.fromkeys(("embeddings", "states", "normed"), entering),
                "keys": normal(HEADS, length, WIDTH // HEADS),
                "attention": normal(HEADS, words, length).float().softmax(dim=-1),
            },
        )

    def tokens(self) -> VisualTokens:
        """The images, as visual tokens of their own."""
        return self._images.tokens(
            tower=self._tower,
            language=self._language,
            encoder=self._tower.patches,
            words=self._words,
        )

    def select(self, name: str) -> ReferenceSelection:
        """One selection of a base policy, from features to indices."""
        policy = BASE_POLICIES[name]
        return policy.select(policy.default_params, self.tokens(), self._images.size.kept)


def _measure_policies(quick: bool) -> Section:
    """Every base policy, the state, and a layer: CPU seconds of one thread, in turn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    by_size = {}
    try:
        for size in (LLAVA[1],) if quick else (LLAVA[1], LLAVA_NEXT[1]):
            source = TokenSource(size)
            works: dict[str, _Work] = {n: partial(source.select, n) for n in sorted(BASE_POLICIES)}
            policy = build_policy(size.kept)
            works[STATE] = lambda policy=policy, source=source: refine(policy, source.tokens())  # type: ignore[misc]
            works[LAYER] = _build_layer(size.kept + TEXT)
            works[FULL_LAYER] = _build_layer(size.tokens + TEXT)
            rounds = 2 if quick else 7
            by_size[size] = measure_alternately(works, rounds, warm_up=1, clock=time.process_time)
            log_progress(f"{size}: {len(works)} works")
    finally:
        torch.set_num_threads(threads)
    return build_policies(by_size)


def build_policies(by_size: Mapping[Size, Times]) -> Section:
    """A claim for each shape, without policies that run the language model, and a row a policy."""
    names = sorted(next(iter(by_size.values())).keys() - {LAYER, FULL_LAYER})
    layers, depth = dict.fromkeys(names, 0), find_backbone("llava-1.5-7b").layers
    for name, policy in BASE_POLICIES.items():
        layers[name] = policy.layers_read(policy.default_params, depth)
    heavy = ", ".join(f"`{name}`" for name in names if layers[name])
    claims, cells = [], {name: [f"`{name}`"] for name in names}
    columns = ["policy"]
    for size, times in by_size.items():
        shape = f"{_NAMES[size.tiles]}, {size.tokens} → {size.kept}"
        columns += [f"{shape}, ms", "share, %"]
        shares = {}
        for name in names:
            pairs = zip(times[name], times[FULL_LAYER], strict=True)
            # Policies that read the language model's first layers run those over all tokens.
            total = times | {name: [alone + layers[name] * layer for alone, layer in pairs]}
            shares[name] = _ratio(total, name, LAYER, LAYERS)
            cells[name] += [*_milliseconds(total, name), f"{100 * shares[name].value:.2f}"]
        worst = max((n for n in names if not layers[n]), key=lambda name: shares[name].value)
        promise = (
            f"{shape}: every policy that runs no language layer at most {_BOUND:.0%} of the pruned "
            "prefill"
        )
        share = format_estimate(shares[worst], 100, 2, " to ").replace(" (", " % (95 %: ")
        measured = f"`{worst}` is slowest: {share}"
        claims.append(_Claim(promise, measured, at_most(shares[worst], _BOUND)))
    setup = [
        "the base policy alone, with default parameters, and the state with its exchange; every "
        "input given, nothing computed yet",
        f"prefill: {LAYERS} times one decoder layer (D = {WIDTH}, bfloat16) on K + {TEXT} tokens",
        "CPU time of one thread for both, which other work on the machine changes little",
    ]
    if heavy:
        setup.append(
            f"{heavy} run first layers of the language model over all tokens, in their time too"
        )
    table = Table("Medians (quartiles), in turn.", columns, [cells[name] for name in names])
    title = "Selection time of every policy"
    return Section("policies", title, setup, claims, table, by_size)


PARTS: Mapping[str, Callable[[bool], Section]] = {
    "selection": _measure_selection,
    "policies": _measure_policies,
}


def add_arguments(parser: argparse.ArgumentParser, command: str = "selection") -> None:
    """Add the options; each has a default."""
    add, devices = parser.add_argument, ("cpu", "gpu")
    add("device", nargs="?", default="cpu", choices=devices, help="where to measure")
    add("--only", choices=tuple(PARTS), help="one part of the CPU measurements")
    add("--quick", action="store_true", help="small sizes, as a trial run")
    add("--json", action="store_true", help="print JSON (a GPU always does)")


def run(options: argparse.Namespace) -> int:
    """The exit status on a CPU: 0 once everything is measured, whatever the verdicts."""
    names = [options.only] if options.only else list(PARTS)
    sections = [PARTS[name](options.quick) for name in names]
    if options.json:
        print(json.dumps([section.to_json() for section in sections], indent=1))
    else:
        print("\n".join(["# Selection\n", *(section.markdown() for section in sections)]))
    return 0
