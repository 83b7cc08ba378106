from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.base_policies.samples import native, prefix, select
from vllm_autoprune.tpdsl.prefix import RecordedPrefix, attention_rows


class LayerRecorder(RecordedPrefix):
    """Records the layers whose attention is read."""

    def attention(self, layer: int) -> Tensor:
        raise KeyError(layer)


@pytest.mark.parametrize(
    ("layers", "params", "layer"),
    [(32, {}, 8), (28, {}, 7), (4, {}, 1), (3, {}, 0), (32, {"layer": 24}, 24)],
)
def test_the_default_is_the_published_first_stage_a_quarter_of_the_depth(
    layers: int, params: dict[str, object], layer: int
) -> None:
    tokens = prefix(4, [True] * 3)
    requested = LayerRecorder(1, torch.ones(1, 3, dtype=torch.bool), layers)
    object.__setattr__(tokens, "language", requested)
    with pytest.raises(KeyError, match=str(layer)):
        select("pyramiddrop", tokens, 2, **params)


def test_one_stage_from_query_and_keys() -> None:
    # One head of width 1: the score is the softmax of the keys, whatever the other rows say.
    keys = torch.tensor([[[5.0], [0.1], [0.9], [0.3], [0.7], [2.0]]])
    rows = attention_rows(torch.tensor([[[0.0], [1.0]]]), keys)
    tokens = prefix(4, [True], attention=rows[:, 1:])
    assert select("pyramiddrop", tokens, 3).picks.tolist() == [[1, 3, 2]]
    assert native("pyramiddrop", tokens, 3).indices[0].tolist() == [1, 2, 3]
