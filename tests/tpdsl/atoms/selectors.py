"""Helpers of the selector tests: run one selector on given inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.tpdsl.samples import call
from vllm_autoprune import VisualTokens
from vllm_autoprune.ops.rowwise import mask_from_indices
from vllm_autoprune.tpdsl.atoms.selectors import SelectorInputs, run_selector


def select_batch(
    name: str,
    tokens: VisualTokens,
    g: Tensor,
    reference: Tensor,
    pool: Tensor,
    quota: int,
    **parameters: object,
) -> Tensor:
    """Kept tokens as a mask ``(B, N)``."""
    revision = SelectorInputs(
        tokens=tokens,
        picks=reference,
        pool=pool,
        g=g,
        quota=quota,
        kernel_call=call("pairwise_cosine_kernel"),
        partition_call=call("spatial_grid_partition"),
    )
    return run_selector(call(name, **parameters), revision)


def select_one(
    name: str,
    tokens: VisualTokens,
    g: list[float],
    reference: list[int],
    pool: list[int],
    **parameters: object,
) -> list[int]:
    """Tokens that a selector keeps of one image, with quota q_e."""
    quota = parameters.get("q_e", 2)
    assert isinstance(quota, int)
    kept = select_batch(
        name,
        tokens,
        torch.tensor([g]),
        torch.tensor([reference]),
        mask_from_indices(torch.tensor([pool], dtype=torch.int64), len(g)),
        quota,
        **parameters,
    )
    actual: list[int] = kept[0].nonzero().flatten().tolist()
    return actual
