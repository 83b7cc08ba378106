"""`python -m benchmarks.cost launches`: kernels that a selection launches on a GPU, and its time.

Launches and bytes are counted on torch's ``meta`` device, where tensors have shapes and no numbers.
The time is a model of an H100 (:class:`_Gpu`), to be checked on one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.cost.turns import Table
from vllm_autoprune import Grid, Instruction, VisualTokens
from vllm_autoprune.ops import (
    dpp,
    dpp_triton,
    exchange,
    exchange_triton,
    farthest,
    farthest_triton,
)
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.refine import refine

_WIDTH = 4096
_CLIP_WIDTH = 768
"""D of a 7B language model, and width of CLIP's joint space."""


@dataclass(frozen=True)
class Size:
    """K tokens of T tiles of n tokens each."""

    per_tile: int
    kept: int
    tiles: int = 1

    def __str__(self) -> str:
        tiles = "" if self.tiles == 1 else f" ({self.tiles} tiles)"
        return f"{self.per_tile * self.tiles:,}{tiles} → {self.kept:,}"

    def tokens(self, batch: int) -> VisualTokens:
        """Images in bfloat16 on the meta device."""
        count = self.per_tile * self.tiles
        side = int(self.per_tile**0.5)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device="meta")

        return VisualTokens(
            empty(batch, count, _WIDTH, dtype=torch.bfloat16),
            Grid(side, self.per_tile // side, self.tiles),
            None,
            Instruction(
                empty(batch, count, _CLIP_WIDTH),
                empty(batch, 1, _CLIP_WIDTH),
                empty(batch, 1, dtype=torch.bool),
                -1,
            ),
        )


_SIZES = (Size(576, 320, 5), Size(1024, 128), Size(4096, 512), Size(16384, 2048))
"""LLaVA-NeXT's tiles, and images of Qwen from one to sixteen megapixels."""

_POLICIES = ("divprune", "cen_divprune", "cdpruner", "cen_cdpruner")
_STATES = ("cen_divprune", "pivoted_qr-searched-free")


@dataclass(frozen=True)
class _Gpu:
    """What a kernel takes on an H100, by published bandwidths; in seconds and bytes."""

    launch: float = 6.5e-6
    """Time of the host for a launch; the GPU waits for it where its kernels are shorter."""
    kernel: float = 2e-6
    """Least time of a kernel."""
    bandwidth: float = 2.5e12
    """Bytes a second of a kernel that uses the whole GPU."""
    program: float = 100e9
    """Bytes a second of one program, on one multiprocessor."""
    meeting: float = 1.5e-6
    """Time for all programs of an image to wait for each other."""
    reduction: float = 1e-6
    """Time for the threads of a program to find a maximum, and the token that has it."""
    float32_flops: float = 60e12
    """Floating-point operations a second of a float32 matrix product without TF32."""
    half_flops: float = 600e12
    """As many of a product in half precision, on tensor cores."""

    def flops(self, dtype: torch.dtype) -> float:
        """Floating-point operations a second of a matrix product."""
        return self.half_flops if dtype.itemsize == 2 else self.float32_flops

    def walk(self, tokens: int, count: int, width: int) -> float:
        """Farthest points: a row of distances, and four passes over N numbers, per pick."""
        return count * (self.reduction + (width + 16) * tokens / self.program)

    def exchange(self, tokens: int, count: int) -> float:
        """All of q exchanges: q rows that wait, written and read; seven passes over N numbers."""
        waiting = 8 * count * tokens / self.program
        return waiting + count * (2 * self.reduction + 28 * tokens / self.program)

    def greedy_map(self, tokens: int, count: int) -> float:
        """DPP: all earlier factors per pick, 2 K^2 N bytes in all."""
        factors = 2 * count * count * tokens
        launch = dpp_triton.Launch.of(tokens, count)
        if not launch.shared:
            return count * self.reduction + factors / self.program
        bandwidth = min(self.bandwidth, launch.programs * self.program)
        step = self.reduction + 2 * self.meeting
        return count * step + factors / bandwidth


@dataclass
class _Count(TorchDispatchMode):
    """Counts launches and adds up the time of the kernels of all operations in it."""

    gpu: _Gpu
    launches: int = 0
    parts: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("products", "picks", "the rest"), 0.0)
    )
    """Seconds of all kernels, by what they are for."""

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if _launches(func):
            inputs = [*args, *(kwargs or {}).values()]
            part = "products" if func.overloadpacket in _PRODUCTS else "the rest"
            self.add(part, self._kernel_seconds(func, inputs, result))
        return result

    def add(self, part: str, seconds: float) -> None:
        """Count a launch of a kernel that takes so long."""
        self.launches += 1
        self.parts[part] += max(self.gpu.kernel, seconds)

    def _kernel_seconds(self, func: Any, inputs: list[Any], result: Any) -> float:
        tensors = [
            leaf for leaf in tree_leaves([inputs, result]) if isinstance(leaf, Tensor)
        ]
        if func.overloadpacket in _READ_AS_MUCH_AS_WRITTEN:
            tensors = [result, result]
        touched = sum(leaf.numel() * leaf.element_size() for leaf in tensors)
        seconds = touched / self.gpu.bandwidth
        if func.overloadpacket in _PRODUCTS:
            product = 2 * inputs[0].numel() * inputs[1].shape[-1]
            seconds = max(seconds, product / self.gpu.flops(inputs[0].dtype))
        return seconds


_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.bmm)
_READ_AS_MUCH_AS_WRITTEN = (torch.ops.aten.index_select, torch.ops.aten.gather)


def _launches(func: Any) -> bool:
    """Whether an operation launches a kernel: it makes no view, and does more than allocate."""
    if func.overloadpacket is torch.ops.aten._unsafe_view:
        return False
    returned = [part.alias_info for part in func._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in returned)
    return not is_view and "empty" not in str(func)


@dataclass(frozen=True)
class _Kernel:
    """In the place of a Triton kernel: counts its launches, which write nothing."""

    count: _Count
    seconds: Callable[[dict[str, Any]], float]
    """Time of a launch with these arguments."""
    names: list[str]

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *arguments: object, **options: object) -> None:
        named = dict(zip(self.names, arguments, strict=False))
        self.count.add("picks", self.seconds(named))


@contextmanager
def _counted_kernels(count: _Count) -> Iterator[None]:
    """Run the functions that launch Triton kernels, which are counted and not run."""

    def walk(arguments: dict[str, Any]) -> float:
        width = arguments["distance"].element_size()
        return count.gpu.walk(arguments["tokens"], arguments["count"], width)

    def greedy_map(arguments: dict[str, Any]) -> float:
        return count.gpu.greedy_map(arguments["tokens"], arguments["count"])

    def exchanges(arguments: dict[str, Any]) -> float:
        return count.gpu.exchange(arguments["tokens"], arguments["count"])

    farthest_kernel = _Kernel(count, walk, farthest_triton._farthest.arg_names)
    map_kernel = _Kernel(count, greedy_map, dpp_triton._greedy_map.arg_names)
    exchange_kernel = _Kernel(count, exchanges, exchange_triton._exchange.arg_names)
    fastest_exchange = exchange_triton.exchange_triton
    with (
        patch.object(farthest, "fastest_walk", lambda *_: farthest_triton.walk_triton),
        patch.object(farthest_triton, "_farthest", farthest_kernel),
        patch.object(
            dpp, "fastest_implementation", lambda *_: dpp_triton.greedy_map_triton
        ),
        patch.object(dpp_triton, "_greedy_map", map_kernel),
        patch.object(exchange, "fastest_exchange", lambda *_: fastest_exchange),
        patch.object(exchange_triton, "_exchange", exchange_kernel),
    ):
        yield


@dataclass(frozen=True)
class SelectionCost:
    """What one selection launches, and how long it takes by the model."""

    launches: int
    seconds: float
    parts: dict[str, float]
    """Seconds of the kernels alone, by what they are for."""

    @classmethod
    def of(
        cls, policy: str, size: Size, *, batch: int = 1, kernels: bool = True
    ) -> SelectionCost:
        """Run a base policy on the meta device, with the Triton kernels or the loops in torch."""
        method = BASE_POLICIES[policy]
        tokens = size.tokens(batch)
        return cls._count(
            lambda: method.select(method.default_params, tokens, size.kept), kernels
        )

    @classmethod
    def of_state(
        cls, name: str, size: Size, *, batch: int = 1, kernels: bool = True
    ) -> SelectionCost:
        """The same of a shipped state, its kept rows made."""
        policy = materialize(load_state(name), size.kept)
        tokens = size.tokens(batch)
        return cls._count(lambda: refine(policy, tokens), kernels)

    @classmethod
    def _count(cls, select: Callable[[], object], kernels: bool) -> SelectionCost:
        counted = _Count(_Gpu())
        with _counted_kernels(counted) if kernels else nullcontext(), counted:
            select()
        host = counted.launches * counted.gpu.launch
        seconds = max(host, sum(counted.parts.values()))
        return cls(counted.launches, seconds, counted.parts)


OPTIONS = {
    "--batch": {"type": int, "default": 1, "help": "images that are selected together"}
}

_MOST_LAUNCHES = 40
_MOST_SECONDS = {4096: 3e-3, 16384: 25e-3}
"""Budgets of an image, by N."""


def run(options: argparse.Namespace) -> int:
    """Count and print rows of ``docs/data``; returns 0."""
    table = Table()
    for name in (*_POLICIES, *(f"state {name}" for name in _STATES)):
        state = name.removeprefix("state ")
        count = SelectionCost.of if name == state else SelectionCost.of_state
        for size in _SIZES:
            cost = count(state, size, batch=options.batch)
            loop = count(state, size, batch=options.batch, kernels=False)
            setting = f"{name}, {size}, batch {options.batch}"
            few = soon = ""
            if name in _POLICIES:
                few = _verdict(cost.launches, _MOST_LAUNCHES)
                soon = _verdict(cost.seconds, _MOST_SECONDS.get(size.per_tile))
            table.add("launches", setting, float(cost.launches), "", few)
            table.add("launches of the loop", setting, float(loop.launches), "")
            table.add("time, modelled", setting, 1e3 * cost.seconds, "ms", soon)
            for part, seconds in cost.parts.items():
                table.add(f"of it {part}", setting, 1e3 * seconds, "ms")
            table.add("time of the loop, modelled", setting, 1e3 * loop.seconds, "ms")
    return 0


def _verdict(value: float, maximum: float | None) -> str:
    """Whether a value keeps its budget; empty without one."""
    if maximum is None:
        return ""
    return "holds" if value <= maximum else "does not hold"
