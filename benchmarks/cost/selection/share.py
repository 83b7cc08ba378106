"""Selection as a share of the pruned prefill, at the true shapes.

A prefill is taken as 32 decoder layers of Llama-2-7B's true widths, with random weights. Embedding,
final norm and logits are left out, which makes it shorter and the share of selection larger.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from benchmarks.common.report import Claim, Section, Table, format_spread
from benchmarks.cost.selection import ours
from benchmarks.cost.selection.images import LLAVA, LLAVA_NEXT, WIDTH, Images, Size, draw_images
from benchmarks.cost.selection.timing import (
    Settings,
    Times,
    Work,
    log_medians,
    log_progress,
    measure_alternately,
)
from vllm_autoprune import PruningPolicy, RefinedTokens, refine
from vllm_autoprune.statistics import Estimate, at_most, ratio_of_medians, spread

INNER, HEADS, LAYERS = 11008, 32, 32
TEXT = 60
"""Text tokens around the image: template and question."""

BOUND = 0.03
NAMES = {1: "LLaVA-1.5-7B", 5: "LLaVA-NeXT-7B"}


def measure(settings: Settings) -> Section:
    """Measure one layer, which counts 32 times, and one selection, in turn."""
    dtype, seconds = find_faster_dtype()
    both = ", ".join(f"{name} {1000 * value:.0f} ms" for name, value in seconds.items())
    log_progress(f"one layer at {64 + TEXT} tokens: {both}")
    layer = Layer(dtype)
    by_size: dict[Size, Times] = {}
    for size in LLAVA[:1] if settings.quick else (*LLAVA, *LLAVA_NEXT):
        works: dict[str, Work] = {
            "selection": partial(_select, ours.build_policy(size.kept), size, draw_images(size)),
            "layer": partial(layer, torch.randn(size.kept + TEXT, WIDTH, dtype=dtype)),
        }
        by_size[size] = measure_alternately(works, settings.rounds(15), warm_up=1)
        log_medians(size, by_size[size])
    return build_section(str(dtype).removeprefix("torch."), by_size)


def _select(policy: PruningPolicy, size: Size, images: Images) -> RefinedTokens:
    return refine(policy, ours.build_tokens(size, images))


def build_section(dtype: str, by_size: dict[Size, Times]) -> Section:
    """Claims and figures of every shape."""
    claims, rows = [], []
    for size, times in by_size.items():
        share = ratio_of_medians(
            [[t] for t in times["selection"]], [[LAYERS * t] for t in times["layer"]]
        )
        name = f"{NAMES[size.tiles]}, {size.tokens} → {size.kept}"
        promise = f"{name}: selection at most {BOUND:.0%} of the pruned prefill"
        claims.append(Claim(promise, format_percent(share), at_most(share, BOUND)))
        layer, selection = spread(times["layer"]), spread(times["selection"])
        rows.append(
            (name, format_spread(selection), format_spread(layer), f"{LAYERS * layer.median:.2f}")
        )
    setup = [
        "selection: state `autoprune` as served, signals, exchange and gathering included; "
        "nothing cached from an earlier question",
        f"prefill: {LAYERS} times one decoder layer (D = 4096, MLP 11008, {dtype}) on K + {TEXT} "
        f"tokens; {torch.get_num_threads()} threads for both",
    ]
    columns = ("shape", "selection, ms", "one layer, ms", f"{LAYERS} layers, s")
    data = {str(size): times for size, times in by_size.items()}
    table = Table("Medians (quartiles), in turn.", columns, rows)
    return Section("share", "Selection's share of the prefill", setup, claims, [table], data)


def format_percent(share: Estimate) -> str:
    """A share in per cent, with its interval."""
    value, low, high = (f"{100 * x:.2f}" for x in (share.value, share.low, share.high))
    return f"{value} % (95 %: {low} to {high})"


class Layer(nn.Module):
    """Norm, attention with rotary positions, norm, gated MLP; ``(L, D) -> (L, D)``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=dtype)

        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, dtype=dtype) for _ in range(2))
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.gate_up, self.down = linear(WIDTH, 2 * INNER), linear(INNER, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        """The layer on one prompt."""
        length = rows.shape[0]
        q, k, v = self.qkv(self.norms[0](rows)).view(length, 3, HEADS, -1).permute(1, 2, 0, 3)
        q, k = _rotate(q), _rotate(k)
        mixed = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)
        rows = rows + self.out(mixed[0].transpose(0, 1).reshape(length, WIDTH))
        gate, up = self.gate_up(self.norms[1](rows)).chunk(2, dim=-1)
        output: Tensor = rows + self.down(functional.silu(gate) * up)
        return output


def _rotate(heads: Tensor) -> Tensor:
    """Rotary position embedding of ``(H, L, d)``."""
    length, width = heads.shape[1:]
    rate = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angle = torch.arange(length)[:, None] * rate
    cos, sin = (torch.cat([x, x], dim=-1).to(heads.dtype) for x in (angle.cos(), angle.sin()))
    low, high = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-high, low], dim=-1) * sin


def find_faster_dtype() -> tuple[torch.dtype, dict[str, float]]:
    """The dtype in which a layer is faster on this machine, and the seconds of both."""
    layers = {dtype: Layer(dtype) for dtype in (torch.bfloat16, torch.float32)}
    prompts = {dtype: torch.randn(64 + TEXT, WIDTH, dtype=dtype) for dtype in layers}
    times = measure_alternately(
        {str(dtype): partial(layer, prompts[dtype]) for dtype, layer in layers.items()},
        3,
        warm_up=1,
    )
    seconds = {name: spread(values).median for name, values in times.items()}
    return min(layers, key=lambda dtype: seconds[str(dtype)]), seconds
