from __future__ import annotations

import torch
from vllm.multimodal.processing.processor import PromptUpdateDetails

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
