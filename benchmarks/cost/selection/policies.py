"""Selection time of every base policy alone, as a share of the pruned prefill.

CPU seconds of one thread, so that other work on the machine changes little. Policies that read the
language model's first layers pay for running those over all tokens.
"""

from __future__ import annotations

import time
from functools import partial

import torch
from torch import Tensor

from benchmarks.common.report import Claim, Section, Table, format_spread
from benchmarks.cost.selection import ours
from benchmarks.cost.selection.images import LLAVA, LLAVA_NEXT, WIDTH, Size, draw_images
from benchmarks.cost.selection.share import (
    BOUND,
    HEADS,
    LAYERS,
    NAMES,
    TEXT,
    Layer,
    format_percent,
)
from benchmarks.cost.selection.timing import (
    Settings,
    Times,
    Work,
    log_medians,
    measure_alternately,
)
from vllm_autoprune import VisualTokens
from vllm_autoprune.base_policies.published_forms import PUBLISHED_FORMS
from vllm_autoprune.statistics import at_most, ratio_of_medians, spread
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, ReferenceSelection
from vllm_autoprune.tpdsl.prefix import RecordedPrefix
from vllm_autoprune.tpdsl.tokens import NextLayer, TowerStates, Words

SIZES = (LLAVA[1], LLAVA_NEXT[1])
"""576 to 64 and 2880 to 320."""

TOWER, WORDS, HEAD_WIDTH = 1024, 16, 128
"""Width of the vision tower of LLaVA-1.5-7B, tokens of a question, width of an attention head."""

LAYER, FULL_LAYER = "one layer", "one layer, all tokens"


def measure(settings: Settings) -> Section:
    """Measure every policy and one layer of the prefill, in turn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        layer, by_size = Layer(torch.bfloat16), {}
        for size in SIZES[:1] if settings.quick else SIZES:
            by_size[size] = _measure_size(size, layer, settings.rounds(7))
            log_medians(size, by_size[size])
    finally:
        torch.set_num_threads(threads)
    return build_section(by_size)


def _measure_size(size: Size, layer: Layer, rounds: int) -> Times:
    draw = TokenSource(size)
    works: dict[str, Work] = {
        name: partial(select, name, draw, size.kept) for name in sorted(BASE_POLICIES)
    }
    for name, tokens in ((LAYER, size.kept), (FULL_LAYER, size.tokens)):
        works[name] = partial(layer, torch.randn(tokens + TEXT, WIDTH, dtype=torch.bfloat16))
    return measure_alternately(works, rounds, warm_up=1, clock=time.process_time)


def select(name: str, draw: TokenSource, budget: int) -> ReferenceSelection:
    """One selection of a policy, from features to indices."""
    policy = BASE_POLICIES[name]
    return policy.select(policy.default_params, draw.tokens(), budget)


class TokenSource:
    """Random images with every input of a policy; each call has nothing computed yet."""

    def __init__(self, size: Size, device: str = "cpu") -> None:
        self._size, self._images = size, draw_images(size, device=device)
        source = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(size.batch, *shape, generator=source).bfloat16().to(device)

        patches = normal(size.tokens, TOWER)
        projector = torch.randn(TOWER, WIDTH).bfloat16().to(device)
        following = NextLayer(self._images.cls_attention, normal(size.tokens, TOWER))
        self._tower = TowerStates(
            patches=patches,
            keys=normal(size.tokens, 64),
            project=lambda rows: rows @ projector,
            cls=normal(size.tiles, TOWER),
            next_layer=following,
        )
        used = torch.ones(size.batch, WORDS, dtype=torch.bool, device=device)
        length = 1 + size.tokens + WORDS
        entering = normal(length, WIDTH)
        self._words = Words(entering[:, -WORDS:], used)
        self._language = RecordedPrefix(
            start=1,
            text=used,
            recorded_embeddings=entering,
            recorded_states=entering,
            recorded_normed=entering,
            recorded_keys=normal(HEADS, length, HEAD_WIDTH),
            recorded_attention=normal(HEADS, WORDS, length).float().softmax(dim=-1),
        )

    def tokens(self) -> VisualTokens:
        """The images, as VisualTokens of their own."""
        plain = ours.build_tokens(self._size, self._images)
        return VisualTokens(
            plain.features,
            plain.grid,
            plain.cls_attention,
            plain.instruction,
            tower=self._tower,
            language=self._language,
            encoder=self._tower.patches,
            words=self._words,
        )


def selection_times(name: str, times: Times) -> list[float]:
    """Seconds of each selection, with the layers that the policy runs over all tokens."""
    layers = PUBLISHED_FORMS[name].layers
    return [own + layers * layer for own, layer in zip(times[name], times[FULL_LAYER], strict=True)]


def build_section(by_size: dict[Size, Times]) -> Section:
    """A claim for each shape, without policies that run the language model, and a row a policy."""
    shapes = {size: f"{NAMES[size.tiles]}, {size.tokens} → {size.kept}" for size in by_size}
    names = sorted(name for name in next(iter(by_size.values())) if name in BASE_POLICIES)
    claims, cells = [], {name: [f"`{name}`"] for name in names}
    for size, times in by_size.items():
        whole = [[LAYERS * t] for t in times[LAYER]]
        shares = {}
        for name in names:
            own = selection_times(name, times)
            shares[name] = ratio_of_medians([[t] for t in own], whole)
            cells[name] += [format_spread(spread(own)), f"{100 * shares[name].value:.2f}"]
        light = [name for name in names if not PUBLISHED_FORMS[name].layers]
        worst = max(light, key=lambda name: shares[name].value)
        promise = (
            f"{shapes[size]}: every policy that runs no language layer at most {BOUND:.0%} of the "
            "pruned prefill"
        )
        measured = f"`{worst}` is slowest: {format_percent(shares[worst])}"
        claims.append(Claim(promise, measured, at_most(shares[worst], BOUND)))
    heavy = ", ".join(f"`{name}`" for name in names if PUBLISHED_FORMS[name].layers)
    setup = [
        "the base policy alone, with default parameters; every input given, nothing computed yet",
        f"prefill: {LAYERS} times one decoder layer (D = {WIDTH}, bfloat16) on K + {TEXT} tokens",
        "CPU time of one thread for both, which other work on the machine changes little",
    ]
    if heavy:
        setup.append(
            f"{heavy} run first layers of the language model over all tokens, which is in their "
            "time"
        )
    columns = ["policy"]
    for shape in shapes.values():
        columns += [f"{shape}, ms", "share, %"]
    data = {str(size): times for size, times in by_size.items()}
    rows = [tuple(cells[name]) for name in names]
    table = Table("Medians (quartiles), in turn.", tuple(columns), rows)
    return Section("policies", "Selection time of every policy", setup, claims, [table], data)
