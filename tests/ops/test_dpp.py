"""Greedy MAP: its definition, anchors, conditioning and caps; and the Triton form of it.

The kernel runs without a GPU, by Triton's interpreter and up to the binary, in a process of its
own because Triton reads its environment when a kernel is declared: this module as a command prints,
with ``compare``, the picks of both implementations, with ``compile-80`` the vector loads of the
kernels, and with ``count`` what is compiled at start-up and for images of many sizes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vllm_autoprune.ops import dpp
from vllm_autoprune.ops.dpp import compile_for, greedy_map
from vllm_autoprune.ops.greedy import (
    Cap,
    Conditioned,
    capped_greedy_map,
    greedy_map_torch,
)
from vllm_autoprune.ops.rowwise import TIE
from vllm_autoprune.ops.similarity import cosines

NONE = torch.empty(1, 0, dtype=torch.int64)


def kernel(seed: int, batch: int, size: int, rank: int = 24) -> tuple[Tensor, Tensor]:
    """Cosines of random directions, and qualities between 0.2 and 1."""
    source = torch.Generator().manual_seed(seed)
    rows = torch.randn(batch, size, rank, generator=source)
    unit = rows / rows.norm(dim=-1, keepdim=True)
    return unit @ unit.transpose(1, 2), 0.2 + 0.8 * torch.rand(
        batch, size, generator=source
    )


@given(seed=st.integers(0, 10_000), size=st.integers(6, 12), data=st.data())
def test_picks_have_the_largest_determinant_given_the_anchors_among_the_eligible(
    seed: int, size: int, data: st.DataObject
) -> None:

    def by_determinant(
        similarity: Tensor,
        quality: Tensor,
        count: int,
        start: list[int],
        allowed: list[int],
    ) -> list[int]:
        """Greedy MAP from the definition: every determinant is computed, in float64.

        The diagonal of cosines is 1, and the lowest index within the tolerance is picked.
        """
        exact = similarity.double().fill_diagonal_(1)
        matrix = quality[:, None].double() * exact * quality.double()
        picks = list(start)
        while len(picks) < count:
            rest = [j for j in allowed if j not in picks]
            gains = [
                float(torch.det(matrix[[*picks, j]][:, [*picks, j]])) for j in rest
            ]
            bound = min(max(gains), max(gains) * (1 - TIE))
            picks.append(
                next(j for j, gain in zip(rest, gains, strict=True) if gain >= bound)
            )
        return picks

    similarity, quality = kernel(seed, 2, size)
    order = data.draw(st.permutations(range(size)))
    forced = data.draw(st.integers(0, 4))
    open_to = sorted(order[: data.draw(st.integers(max(forced, 1), size))])
    count = data.draw(st.integers(max(forced, 1), len(open_to)))
    eligible = torch.zeros(2, size, dtype=torch.bool)
    eligible[:, open_to] = True
    anchors = torch.tensor([order[:forced]] * 2, dtype=torch.int64)
    picks = greedy_map(
        similarity,
        quality,
        count,
        anchors=anchors if forced else None,
        eligible=None if len(open_to) == size else eligible,
    )
    for s, q, row in zip(similarity, quality, picks.tolist(), strict=True):
        assert row == by_determinant(s, q, count, order[:forced], open_to)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_first_pick_does_not_depend_on_how_the_diagonal_is_rounded(
    dtype: torch.dtype,
) -> None:
    source = torch.Generator().manual_seed(8)
    rows = torch.randn(4, 96, 512, generator=source).exp().to(dtype)
    similarity = cosines(rows, rows.norm(dim=-1, keepdim=True))
    quality = torch.ones(4, 96)
    assert not bool((similarity.diagonal(dim1=1, dim2=2).argmax(dim=1) == 0).all())
    every = torch.ones(4, 96, dtype=torch.bool)
    capped = capped_greedy_map(
        similarity,
        quality,
        2,
        anchors=NONE.expand(4, 0),
        eligible=every,
        cap=Cap(every.long(), 96),
    )
    assert (
        capped[:, 0].tolist()
        == greedy_map(similarity, quality, 2)[:, 0].tolist()
        == [0] * 4
    )
    eligible = every.index_fill(1, torch.tensor([0, 1, 2]), False)
    assert (
        greedy_map(similarity, quality, 2, eligible=eligible)[:, 0].tolist() == [3] * 4
    )


def test_an_exhausted_kernel_is_filled_up_by_quality_among_the_eligible() -> None:
    quality = torch.tensor([[0.1, 0.5, 0.9, 0.5, 0.3]])
    eligible = torch.tensor([[True, True, True, True, False]])
    flat = torch.ones(1, 5, 5)
    assert greedy_map(flat, quality, 4, eligible=eligible).tolist() == [[2, 1, 3, 0]]
    conditioned = Conditioned.on(flat, torch.tensor([[2, 0]]))
    assert greedy_map(flat, quality, 3, conditioned=conditioned).tolist() == [[1, 3, 4]]


@given(seed=st.integers(0, 10_000), data=st.data())
def test_conditioning_on_tokens_gives_the_picks_that_follow_them_as_anchors(
    seed: int, data: st.DataObject
) -> None:
    similarity, quality = kernel(seed, 3, 40)
    forced = data.draw(st.integers(1, 18))
    count = data.draw(st.integers(1, 6))
    order = data.draw(st.permutations(range(40)))
    anchors = torch.tensor(
        [order[:forced], order[1 : forced + 1], order[2 : forced + 2]]
    )
    anchored = greedy_map(similarity, quality, forced + count, anchors=anchors)
    conditioned = Conditioned.on(similarity, anchors)
    picks = greedy_map(similarity, quality, count, conditioned=conditioned)
    assert picks.tolist() == anchored[:, forced:].tolist()
    alone = Conditioned.on(similarity[2:], anchors[2:])
    assert torch.equal(conditioned.factors[2:], alone.factors)
    assert torch.equal(conditioned.residual[2:], alone.residual)
    # Tokens that are not valid do not condition.
    valid = torch.arange(forced + 1).expand(3, -1) < forced
    more = Conditioned.on(
        similarity, torch.cat([anchors, anchors[:, :1]], dim=1), valid
    )
    assert torch.equal(more.residual, conditioned.residual)


@given(seed=st.integers(0, 10_000), cap=st.integers(1, 5), forced=st.integers(0, 4))
def test_no_cell_gets_more_than_the_cap_and_a_core_counts(
    seed: int, cap: int, forced: int
) -> None:
    source = torch.Generator().manual_seed(seed)
    (similarity, quality) = kernel(seed, 2, 20)
    cells = torch.randint(5, (2, 20), generator=source)
    order = torch.rand(2, 20, generator=source).argsort(dim=1)
    core = order[:, :6]
    anchors = order[:, 6 : 6 + forced]
    eligible = (torch.rand(2, 20, generator=source) < 0.8).scatter(
        1, order[:, 6:16], True
    )
    eligible = eligible.scatter(1, core, False)
    anchored = capped_greedy_map(
        similarity,
        quality,
        14,
        anchors=torch.cat([core, anchors], dim=1),
        eligible=eligible,
        cap=Cap(cells, cap),
    )
    conditioned = capped_greedy_map(
        similarity,
        quality,
        8,
        anchors=anchors,
        eligible=eligible,
        cap=Cap(cells, cap),
        conditioned=Conditioned.on(similarity, core),
    )
    assert torch.equal(conditioned, anchored[:, 6:])
    for image in range(2):
        members = [eligible[image] & (cells[image] == cell) for cell in range(5)]
        room = sum(min(cap, int(member.sum())) for member in members)
        row = slice(image, image + 1)
        picks = capped_greedy_map(
            similarity[row],
            quality[row],
            room,
            anchors=NONE,
            eligible=eligible[row],
            cap=Cap(cells[row], cap),
        )[0]
        assert len(set(picks.tolist())) == room and bool(eligible[image][picks].all())
        assert int(cells[image][picks].bincount().max()) <= cap


@dataclass(frozen=True)
class Inputs:
    """One call of greedy MAP; core ``(B, A)`` are tokens that the similarity is conditioned on."""

    similarity: Tensor
    quality: Tensor
    count: int
    anchors: Tensor | None = None
    eligible: Tensor | None = None
    core: Tensor | None = None

    def picks(
        self, implementation: Callable[..., Tensor], device: str = "cpu"
    ) -> list[list[int]]:
        def moved(part: Tensor | None) -> Tensor | None:
            return None if part is None else part.to(device)

        similarity = self.similarity.to(device)
        known = (
            None
            if self.core is None
            else Conditioned.on(similarity, self.core.to(device))
        )
        optional = (moved(self.anchors), moved(self.eligible), known)
        quality = self.quality.to(device)
        picks: list[list[int]] = implementation(
            similarity, quality, self.count, *optional
        ).tolist()
        return picks


def cases() -> Iterator[tuple[str, Inputs]]:
    """Inputs on which both implementations must agree: gains are far apart or bit-identical."""
    yield "one token", Inputs(*kernel(1, 1, 1, 4), 1)
    yield "every token", Inputs(*kernel(3, 2, 12, 32), 12)
    yield "five tiles", Inputs(*kernel(4, 5, 130, 96), 24)
    yield "true shape", Inputs(*kernel(5, 1, 576, 256), 24)

    plain = Inputs(*kernel(6, 3, 40, 48), 12)
    source = torch.Generator().manual_seed(7)
    anchors = torch.stack([torch.randperm(40, generator=source)[:4] for _ in range(3)])
    eligible = torch.rand(3, 40, generator=source) > 0.4
    yield "both", Inputs(plain.similarity, plain.quality, 12, anchors, eligible)
    apart = eligible.scatter(1, anchors, False)
    yield (
        "conditioned, some",
        Inputs(plain.similarity, plain.quality, 9, None, apart, anchors),
    )

    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.randn(3, 40, 512, generator=source).to(dtype)
        similarity = cosines(rows, rows.norm(dim=-1, keepdim=True))
        yield f"rounded 1 in {dtype}", Inputs(similarity, torch.ones(3, 40), 12)

    yield "ties", Inputs(torch.eye(9)[None], torch.ones(1, 9), 6)
    # Every token the same: the rank is 1, and all but the first pick go by quality.
    scores = torch.tensor([[0.25, 0.5, 1.0, 0.5, 0.25, 2.0]])
    some = torch.tensor([[True, True, False, True, True, True]])
    yield "rank 1, some", Inputs(torch.ones(1, 6, 6), scores, 5, None, some)
    yield "same anchors", Inputs(torch.ones(1, 6, 6), scores, 4, torch.tensor([[0, 3]]))
    yield "zero rows", Inputs(torch.zeros(2, 5, 5), scores[:, :5].repeat(2, 1), 5)

    bad = plain.quality.clone()
    bad[1, 5] = torch.nan
    bad[2, 0], bad[2, 3], bad[2, 4] = torch.inf, torch.nan, -torch.inf
    yield "quality not finite", Inputs(plain.similarity, bad, 40)
    broken = plain.similarity.clone()
    broken[0, 3], broken[0, :, 3], broken[2] = torch.nan, torch.nan, torch.nan
    yield (
        "similarity NaN, anchors",
        Inputs(broken, plain.quality, 12, anchors, eligible),
    )


CASES = dict(cases())


def _compile(gpu: int) -> dict[str, int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vllm_autoprune.ops.dpp_triton import _greedy_map, _launch_options

    types = dict.fromkeys(("similarity", "quality", "residuals", "factors"), "*fp32")
    types |= {"eligible": "*i1", "anchors": "*i64", "picks": "*i64"}
    types |= dict.fromkeys(("tokens", "count", "forced", "fixed"), "i32")
    types |= dict.fromkeys(("exhausted", "divisor", "huge", "unit", "tie"), "fp32")
    aligned = {(_greedy_map.arg_names.index("factors"),): [["tt.divisibility", 16]]}
    actual = {}
    for tokens in (64, 576, 2880):
        block, rows, warps = _launch_options(tokens)
        fixed = {"block": block, "rows": rows}
        signature = {n: types.get(n, "constexpr") for n in _greedy_map.arg_names}
        built = triton.compile(
            ASTSource(
                fn=_greedy_map, signature=signature, constexprs=fixed, attrs=aligned
            ),
            target=GPUTarget("cuda", gpu, 32),
            options={"num_warps": warps},
        )
        assert built.asm["cubin"]
        actual[f"sm_{gpu}, N = {tokens}"] = built.asm["ptx"].count("ld.global.v4")
    return actual


class _Recorder:
    """In the place of the kernel: keeps what Triton would compile for launches on an H100."""

    def __init__(self, kernel: Any) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        backend = make_backend(GPUTarget("cuda", 90, 32))
        self._bind = create_function_from_signature(
            kernel.signature, kernel.params, backend
        )
        self.variants: set[str] = set()

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *arguments: object, **options: object) -> None:
        _, specialization, parsed = self._bind(*arguments, **options)
        self.variants.add(repr((specialization, parsed)))


class _CudaOnHost(TorchFunctionMode):
    """Makes tensors for a GPU on the host."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        return func(
            *args, **{**kwargs, **({"device": "cpu"} if "device" in kwargs else {})}
        )


def _count_variants() -> dict[str, int]:
    """Variants ``compiled`` for images of up to 4,096 tokens, and ``missing`` for 500 such calls.

    Sizes are uniform in their logarithm; every other tensor begins at an address that is not a
    multiple of 16.
    """
    from vllm_autoprune.ops import dpp_triton

    dpp_triton._greedy_map = recorder = _Recorder(dpp_triton._greedy_map)
    with _CudaOnHost():
        compile_for(4096, torch.device("cuda"))
    compiled = set(recorder.variants)
    source = torch.Generator().manual_seed(0)
    for number in range(500):
        tokens = int(4096 ** float(torch.rand(1, generator=source)))
        count = int(torch.randint(1, tokens + 1, (1,), generator=source))
        skipped = number % 2
        similarity = torch.empty(tokens * tokens + skipped)[skipped:].view(
            1, tokens, tokens
        )
        quality = torch.empty(tokens + skipped)[skipped:].view(1, tokens)
        anchors = torch.zeros(1, number % 18, dtype=torch.int64) if number % 3 else None
        eligible = torch.empty_like(quality, dtype=torch.bool) if number % 5 else None
        conditioned = Conditioned(torch.empty(1, number % 19, tokens), quality)
        dpp_triton.greedy_map_triton(
            similarity,
            quality,
            min(count, 64),
            anchors,
            eligible,
            conditioned if number % 7 else None,
        )
    return {"compiled": len(compiled), "missing": len(recorder.variants - compiled)}


def ran(command: str, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.test_dpp", command],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


@cache
def compared() -> dict[str, Any]:
    return ran("compare", TRITON_INTERPRET="1")


@pytest.mark.parametrize("name", CASES)
def test_picks_of_triton_equal_those_of_torch(name: str) -> None:
    in_torch, in_triton, in_a_larger_block = compared()[name]
    assert in_a_larger_block == in_triton == in_torch
    assert all(len(set(row)) == len(row) > 0 for row in in_torch)
    if name.startswith("rounded 1"):
        assert [row[0] for row in in_triton] == [0] * len(in_triton)


@pytest.mark.parametrize(
    "gpu",
    [90, *(pytest.param(gpu, marks=pytest.mark.exhaustive) for gpu in (80, 100, 120))],
)  # an H100; an A100, a B200 and an RTX 5090
def test_the_kernel_compiles_for_a_gpu(gpu: int, tmp_path: Path) -> None:
    built = ran(f"compile-{gpu}", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert len(built) == 3
    assert min(built.values()) >= 4, "rows of factors are read one number at a time"


def test_no_image_compiles_the_kernel_once_that_is_done_for_the_largest(
    tmp_path: Path,
) -> None:
    """In blocks of 128 to 4,096 tokens; by values and alignments these would be 254 variants."""
    counts = ran("count", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert counts == {"compiled": 6, "missing": 0}


def test_torch_is_used_on_a_cpu_and_on_a_gpu_without_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert dpp._fastest_implementation(torch.device("cpu"), 64) is greedy_map_torch
    monkeypatch.setitem(sys.modules, "vllm_autoprune.ops.dpp_triton", None)
    assert dpp._fastest_implementation(torch.device("cuda"), 64) is greedy_map_torch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("inputs", CASES.values(), ids=CASES)
def test_picks_on_a_gpu_equal_torch(inputs: Inputs) -> None:
    from vllm_autoprune.ops.dpp_triton import greedy_map_triton, works

    assert works()
    assert inputs.picks(greedy_map_triton, "cuda") == inputs.picks(greedy_map_torch)


if __name__ == "__main__":
    from vllm_autoprune.ops.dpp_triton import greedy_map_triton

    step, _, compute_capability = sys.argv[1].partition("-")
    if step == "compile":
        print(json.dumps(_compile(int(compute_capability))))
    elif step == "count":
        print(json.dumps(_count_variants()))
    else:
        in_larger_block = partial(greedy_map_triton, smallest_block=1024)
        ways: list[Callable[..., Tensor]] = [
            greedy_map_torch,
            greedy_map_triton,
            in_larger_block,
        ]
        print(
            json.dumps(
                {name: [*map(inputs.picks, ways)] for name, inputs in CASES.items()}
            )
        )
