"""Selection as a share of the prefill that it leaves, at the true shapes.

Knows nothing about how either is done.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.ops import ours
from benchmarks.ops.alternate import Work, alternately
from benchmarks.ops.images import LLAVA, LLAVA_NEXT, WIDTH, Images, Size, make
from benchmarks.ops.prefill import LAYERS, TEXT, Layer, faster_dtype
from benchmarks.ops.setting import Setting, progress, told
from benchmarks.overhead.report import Claim, Section, Table, quartiles
from benchmarks.overhead.statistics import Estimate, at_most, ratio_of_medians, spread
from vllm_autoprune import PruningPolicy, RefinedTokens, refine

BOUND = 0.03
NAMES = {1: "LLaVA-1.5-7B", 5: "LLaVA-NeXT-7B"}

Times = dict[str, list[float]]


def measure(setting: Setting) -> Section:
    """One layer and one selection in turn; the layer counts 32 times."""
    dtype, seconds = faster_dtype()
    both = ", ".join(f"{name} {1000 * value:.0f} ms" for name, value in seconds.items())
    progress(f"one layer at {64 + TEXT} tokens: {both}")
    layer = Layer(dtype)
    found: dict[Size, Times] = {}
    for of in LLAVA[:1] if setting.quick else (*LLAVA, *LLAVA_NEXT):
        works: dict[str, Work] = {
            "selection": partial(_select, ours.policy(of.kept), of, make(of)),
            "layer": partial(layer, torch.randn(of.kept + TEXT, WIDTH, dtype=dtype)),
        }
        found[of] = alternately(works, setting.rounds(15), warm_up=1)
        told(of, found[of])
    return section(str(dtype).removeprefix("torch."), found)


def _select(policy: PruningPolicy, of: Size, images: Images) -> RefinedTokens:
    return refine(policy, ours.tokens(of, images))


def section(dtype: str, found: dict[Size, Times]) -> Section:
    """The share at every shape."""
    claims, rows = [], []
    for of, times in found.items():
        share = ratio_of_medians(
            [[t] for t in times["selection"]], [[LAYERS * t] for t in times["layer"]]
        )
        name = f"{NAMES[of.tiles]}, {of.tokens} → {of.kept}"
        promise = f"{name}: selection at most {BOUND:.0%} of the pruned prefill"
        claims.append(Claim(promise, _percent(share), at_most(share, BOUND)))
        layer, selection = spread(times["layer"]), spread(times["selection"])
        rows.append((name, quartiles(selection), quartiles(layer), f"{LAYERS * layer.median:.2f}"))
    setup = [
        "selection: state `autoprune` as served, signals, exchange and gathering included; "
        "nothing kept from an earlier question",
        f"prefill: {LAYERS} times one decoder layer (D = 4096, MLP 11008, {dtype}) on K + {TEXT} "
        f"tokens; {torch.get_num_threads()} threads for both",
    ]
    columns = ("shape", "selection, ms", "one layer, ms", f"{LAYERS} layers, s")
    data = {str(of): times for of, times in found.items()}
    table = Table("Medians (quartiles), in turn.", columns, rows)
    return Section("share", "Selection's share of the prefill", setup, claims, [table], data)


def _percent(of: Estimate) -> str:
    value, low, high = (f"{100 * x:.2f}" for x in (of.value, of.low, of.high))
    return f"{value} % (95 %: {low} to {high})"
