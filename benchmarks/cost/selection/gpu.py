"""The selection on a GPU: published loop, torch form and Triton form, as JSON.

Of the package only the loops are imported, so that torch and triton are all that is needed.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from types import ModuleType

import torch

from benchmarks.cost.selection import published
from benchmarks.cost.selection.images import Size, draw_images
from benchmarks.cost.selection.timing import log_medians, measure_alternately

AIM = 5.0
"""How many times as fast as the published loop the Triton form has to be."""

SECONDS, FASTER = "seconds (median, quartiles)", "published loop / triton loop"

Json = dict[str, object]


def find_missing_requirement() -> str | None:
    """Why this machine cannot measure; None where it can."""
    if not torch.cuda.is_available():
        return "no CUDA device here; `python -m benchmarks.cost selection cpu` needs none"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    return None


def sizes(quick: bool) -> list[Size]:
    """LLaVA-1.5's and LLaVA-NeXT's shapes, and the smallest and largest N."""
    batches = (1,) if quick else (1, 2, 4, 8)
    shapes = [(576, 1, 64)] if quick else [(64, 1, 8), (576, 1, 32), (576, 1, 64)]
    if not quick:
        shapes += [(576, 5, 160), (576, 5, 320), (576, 5, 640), (2880, 1, 320)]
    return [Size(n, tiles, batch, kept) for n, tiles, kept in shapes for batch in batches]


def measure(quick: bool) -> Json:
    """Seconds of each, whether the picks agree, and whether the aim is met."""
    import_package_without_init()
    from vllm_autoprune.ops.dpp_triton import works

    if not works():
        raise RuntimeError("Triton does not work on this machine; the log says why")
    results = {str(size): measure_size(size, 5 if quick else 31) for size in sizes(quick)}
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "aim": f"the Triton form at least {AIM:g} times as fast as the published loop",
        "sizes": results,
        "verdict": "holds" if all(one["aim met"] for one in results.values()) else "does not hold",
    }


def measure_size(size: Size, rounds: int, device: str = "cuda") -> Json:
    """Times of the loops on a given kernel, and of selections from features to indices."""
    from vllm_autoprune.ops.dpp_torch import greedy_map_torch
    from vllm_autoprune.ops.dpp_triton import greedy_map_triton
    from vllm_autoprune.ops.similarity import cosines

    images = draw_images(size, device=device)
    count = size.kept // size.tiles
    tiled = images.features.view(size.batch * size.tiles, size.per_tile, -1)
    matrix = published.kernel(images.features, images.patches, images.text, size.tiles)
    # With q_j = r_j, L_jj = q_j^2; and S = L / (q_i q_j) are the cosines.
    quality = matrix.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
    similarity = cosines(tiled, tiled.norm(dim=-1, keepdim=True))

    def select_with_triton() -> object:
        matrix = cosines(tiled, tiled.norm(dim=-1, keepdim=True))
        return greedy_map_triton(matrix, quality, count)

    times = measure_alternately(
        {
            "published loop": partial(published.greedy, matrix, count),
            "torch loop": partial(greedy_map_torch, similarity, quality, count),
            "triton loop": partial(greedy_map_triton, similarity, quality, count),
            "published selection": partial(
                published.select, images.features, images.patches, images.text, size.tiles, count
            ),
            "triton selection, relevance given": select_with_triton,
        },
        rounds,
    )
    log_medians(size, times)
    ours = greedy_map_triton(similarity, quality, count)
    faster = median(times["published loop"]) / median(times["triton loop"])
    return {
        SECONDS: {name: [median(t), *quantiles(t, n=4)[::2]] for name, t in times.items()},
        FASTER: faster,
        "aim met": faster >= AIM,
        "picks as the published loop's": _agreement(ours, published.greedy(matrix, count)),
        "picks as the torch form's": _agreement(ours, greedy_map_torch(similarity, quality, count)),
    }


def _agreement(first: torch.Tensor, second: torch.Tensor) -> float:
    """Share of the picks that both have in common."""
    same = (first[:, :, None] == second[:, None, :]).any(dim=2)
    return float(same.float().mean())


def import_package_without_init() -> None:
    """Make ``vllm_autoprune.ops`` importable where the package's dependencies are missing."""
    if importlib.util.find_spec("pydantic") is None:
        package = ModuleType("vllm_autoprune")
        package.__path__ = [str(Path(__file__).resolve().parents[3] / "vllm_autoprune")]
        sys.modules.setdefault("vllm_autoprune", package)
