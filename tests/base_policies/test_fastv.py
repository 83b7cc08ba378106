from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.base_policies.samples import prefix, select
from vllm_autoprune import SelectionError
from vllm_autoprune.tpdsl.prefix import RecordedPrefix, last_token_rows

NOTHING = torch.nan


def attention_of(last: list[list[float]], rows: int = 3, at: int = 2) -> Tensor:
    """Attention ``(H, rows, L)`` with one known row; the others are NaN, as FastV reads none."""
    result = torch.full((len(last), rows, len(last[0])), NOTHING)
    result[:, at] = torch.tensor(last)
    return result


# One token before the image, four of it, three after.
HEADS = [
    [9.0, 0.1, 0.4, 0.0, 0.2, 9.0, 9.0, 9.0],
    [9.0, 0.1, 0.0, 0.5, 0.3, 9.0, 9.0, 9.0],
]


def test_the_last_tokens_attention_decides_averaged_over_heads() -> None:
    tokens = prefix(4, [True] * 3, attention=attention_of(HEADS))
    # Means 0.1, 0.2, 0.25, 0.25: no head's own favourite, and the tie goes to the lower index.
    assert select("fastv", tokens, 3).picks.tolist() == [[2, 3, 1]]


def test_the_last_token_is_the_last_that_is_no_padding() -> None:
    tokens = prefix(4, [True, True, False], attention=attention_of(HEADS, at=1))
    assert select("fastv", tokens, 3).picks.tolist() == [[2, 3, 1]]


def test_text_tokens_before_or_after_the_image_are_never_picked() -> None:
    tokens = prefix(4, [True] * 3, attention=attention_of(HEADS))
    actual = select("fastv", tokens, 3)
    assert actual.merged is None and actual.extra is None
    assert int(actual.picks.max()) < 4


class LayerRecorder(RecordedPrefix):
    """Records the layers whose attention is read."""

    def attention(self, layer: int) -> Tensor:
        raise KeyError(layer)


@pytest.mark.parametrize(("params", "layer"), [({}, 1), ({"layer": 1}, 0), ({"layer": 3}, 2)])
def test_attention_is_of_the_layer_before_the_one_that_prunes(
    params: dict[str, object], layer: int
) -> None:
    tokens = prefix(4, [True] * 3)
    object.__setattr__(tokens, "language", LayerRecorder(1, torch.ones(1, 3, dtype=torch.bool)))
    with pytest.raises(KeyError, match=str(layer)):
        select("fastv", tokens, 2, **params)


def test_missing_layer_is_named_in_the_error() -> None:
    tokens = prefix(4, [True] * 3, attention=attention_of(HEADS), layers=4)
    with pytest.raises(SelectionError, match=r"reads layer 7.*layers 0 to 3.*'layer'"):
        select("fastv", tokens, 2, layer=8)


def test_rows_are_taken_where_each_sequence_ends() -> None:
    rows = torch.arange(2 * 1 * 3 * 2.0).reshape(2, 1, 3, 2)
    text = torch.tensor([[True, True, True], [True, False, False]])
    assert last_token_rows(rows, text).tolist() == [[[4.0, 5.0]], [[6.0, 7.0]]]
