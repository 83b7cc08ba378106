from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.multimodal.processing.processor import PromptUpdateDetails

from vllm_autoprune.selftest.comparisons import count_between
from vllm_autoprune.serving.shared.placeholders import shorten_placeholders

IMAGE, OTHER = 7, 1


def test_a_run_of_placeholders_is_cut() -> None:
    assert shorten_placeholders(PromptUpdateDetails.from_seq([IMAGE] * 6), 4).full == [IMAGE] * 4
    whole = PromptUpdateDetails.from_seq([IMAGE] * 6)
    assert shorten_placeholders(whole, 6) is whole
    assert shorten_placeholders(whole, 60) is whole


def test_tokens_around_placeholders_are_kept() -> None:
    content = PromptUpdateDetails.select_token_id([OTHER, *[IMAGE] * 6, OTHER, OTHER], IMAGE)
    cut = shorten_placeholders(content, 2)
    assert cut.full == [OTHER, IMAGE, IMAGE, OTHER, OTHER]
    assert cut.is_embed is not None
    assert torch.equal(cut.is_embed(cut.full), torch.tensor([False, True, True, False, False]))


def test_each_tile_keeps_its_share() -> None:
    """What does not divide goes to the first tile, or to the one that shows the whole image."""
    tiles = [OTHER, *[IMAGE] * 3, OTHER, *[IMAGE] * 3, OTHER, *[IMAGE] * 3, OTHER]
    content = PromptUpdateDetails.select_token_id(tiles, IMAGE)
    assert _runs(shorten_placeholders(content, 5).full) == [2, 2, 1]
    assert _runs(shorten_placeholders(content, 5, first=-1).full) == [2, 1, 2]
    assert _runs(shorten_placeholders(content, 1, first=-1).full) == [0, 0, 1]
    assert shorten_placeholders(content, 9) is content


def _runs(ids: Sequence[int]) -> list[int]:
    return count_between(list(ids), IMAGE)[1:-1]
