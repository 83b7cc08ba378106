from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.tpdsl.samples import call, images, plain
from vllm_autoprune.ops.rowwise import gather_rows
from vllm_autoprune.tpdsl.atoms import reassembly
from vllm_autoprune.tpdsl.base_policy import ReferenceSelection
from vllm_autoprune.tpdsl.outcome import TokenSelection
from vllm_autoprune.tpdsl.registry import AtomCall
from vllm_autoprune.tpdsl.tokens import VisualTokens

KEPT = torch.tensor([[0, 3]])
# Tokens 1 and 2 point as 0 does and token 4 as 3 does; 5 is as near to one as to the other.
TOKENS = plain(
    torch.tensor([[4.0, 0.0], [2.0, 0.0], [8.0, 2.0], [0.0, 4.0], [2.0, 10.0], [3.0, 3.0]])
)


def run_reassembly(atom: AtomCall, tokens: VisualTokens, indices: Tensor) -> Tensor:
    """Rows of these tokens, as if nothing had been merged into them."""
    whole = torch.zeros(tokens.batch, dtype=torch.uint8)
    chosen = TokenSelection(indices, ReferenceSelection(indices), whole)
    rows, order = reassembly.run_reassembly(atom, tokens, chosen)
    assert torch.equal(order, indices)
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_strength_zero_is_a_bit_identical_gather(dtype: torch.dtype) -> None:
    tokens = images(1, dtype=dtype)
    indices = torch.tensor([[2, 3, 11], [0, 30, 35]])
    rows = run_reassembly(call("mean_residual"), tokens, indices)
    assert rows.dtype == dtype
    assert torch.equal(rows[1, 2], tokens.features[1, 35])
    assert torch.equal(rows, gather_rows(tokens.features, indices))


def test_half_strength_by_hand() -> None:
    rows = run_reassembly(call("mean_residual", strength=0.5), TOKENS, KEPT)
    # Row 0: mean of (2, 0), (8, 2), and (3, 3) as ties go to the first: (13/3, 5/3).
    # Row 1: (2, 10) alone.
    first = [4 + 0.5 * (13 / 3 - 4), 0.5 * (5 / 3)]
    assert rows[0].tolist() == [pytest.approx(first), pytest.approx([1.0, 7.0])]


def test_strength_is_linear() -> None:
    half = run_reassembly(call("mean_residual", strength=0.5), TOKENS, KEPT)
    tenth = run_reassembly(call("mean_residual", strength=0.1), TOKENS, KEPT)
    anchors = gather_rows(TOKENS.features, KEPT)
    assert torch.allclose((half - anchors) / 5, tenth - anchors, atol=1e-6)


def test_anchor_without_members_is_unchanged() -> None:
    tokens = plain(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]))
    rows = run_reassembly(call("mean_residual", strength=0.5), tokens, torch.tensor([[0, 2]]))
    assert rows[0, 1].tolist() == [0.0, 1.0]
    assert rows[0, 0].tolist() == [1.0, pytest.approx(0.05)]


def test_kept_tokens_are_not_merged_into_each_other() -> None:
    tokens = plain(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]))
    rows = run_reassembly(call("mean_residual", strength=0.5), tokens, torch.tensor([[0, 1, 2]]))
    assert torch.equal(rows, tokens.features)


def test_dtype_and_shape_stay() -> None:
    tokens = images(2, dtype=torch.bfloat16)
    rows = run_reassembly(call("mean_residual", strength=0.3), tokens, torch.tensor([[1, 5]] * 2))
    assert rows.shape == (2, 2, 16) and rows.dtype == torch.bfloat16
