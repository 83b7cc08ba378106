from __future__ import annotations

import pytest
import torch

from vllm_autoprune import SelectionError
from vllm_autoprune.tpdsl.prefix import LanguagePrefix, RecordedPrefix, attention_rows


def test_recording_returns_its_tensors_for_any_layer() -> None:
    states = torch.randn(1, 5, 4)
    prefix: LanguagePrefix = RecordedPrefix(
        1, torch.ones(1, 2, dtype=torch.bool), recorded_states=states
    )
    assert prefix.states(0) is prefix.states(7) is states


def test_missing_recording_is_named_in_the_error() -> None:
    nothing = RecordedPrefix(1, torch.ones(1, 2, dtype=torch.bool))
    for ask, name in (
        (nothing.embeddings, "embeddings"),
        (lambda: nothing.states(0), "states"),
        (lambda: nothing.normed(0), "normed states"),
        (lambda: nothing.keys(0), "keys"),
        (lambda: nothing.attention(0), "attention"),
    ):
        with pytest.raises(SelectionError, match=f"has no {name}"):
            ask()


def test_attention_rows_are_causal_and_heads_share_keys() -> None:
    queries, keys = torch.randn(4, 3, 8), torch.randn(2, 7, 8)
    rows = attention_rows(queries, keys)
    assert rows.shape == (4, 3, 7)
    torch.testing.assert_close(rows.sum(dim=-1), torch.ones(4, 3))
    # The first of the last three positions sees five of seven, and so on.
    assert [[int((row > 0).sum()) for row in head] for head in rows] == [[5, 6, 7]] * 4
    shared = torch.stack([keys[0], keys[0], keys[1], keys[1]])
    torch.testing.assert_close(rows, attention_rows(queries, shared))
    last = (queries[3, 2] @ keys[1].T * 8**-0.5).softmax(dim=0)
    torch.testing.assert_close(rows[3, 2], last)
