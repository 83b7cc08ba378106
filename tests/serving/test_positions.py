"""Positions of requests on a served model: none passes the context that it is served with."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from tests.serving.engine import built, greedy, raw_prompt, said, start, turn
from tests.serving.runners import in_engine
from vllm_autoprune.selftest.questions import picture
from vllm_autoprune.selftest.run import BLOCK
from vllm_autoprune.serving.api import processor
from vllm_autoprune.serving.api.positions import PromptItem, pack_items

pytestmark = pytest.mark.engine

CONTEXT = 1024


@pytest.mark.both
@in_engine
def test_thin_images_are_refused_where_their_positions_pass_the_context() -> None:
    """8 tokens an image, so that vLLM's own bound of tokens lets hundreds of them pass."""
    # An image of 100 tokens in one row, which takes 100 positions however few are kept.
    thin = (28 * 100, 28)
    from vllm.exceptions import VLLMValidationError

    settings = {"state": "cen_divprune", "budget": 8}
    engine = start(settings, built("qwen2_5_vl"), max_model_len=CONTEXT)

    def answer(images: int, tokens: int) -> int:
        """Number of tokens that a prompt with so many images is answered by."""
        text = (
            "user " + "<|vision_start|><|image_pad|><|vision_end|>" * images + " what"
        )
        prompt = raw_prompt(text, [picture(*thin, seed) for seed in range(images)])
        sampling = greedy(tokens, ignore_eos=True)
        (output,) = engine.llm.generate([prompt], sampling, use_tqdm=False)
        return len(output.outputs[0].token_ids)

    # An image and its two marks take 102 positions, the text 2; seven images end within three
    # quarters of the context, and those behind them stand one after the other.
    assert answer(2, 30) == 30
    assert answer(7, 900) == CONTEXT - 7 * 102 - 2
    assert answer(10, 900) == CONTEXT - 7 * 102 - 3 * 10 - 2
    for images in (40, 100):
        with pytest.raises(VLLMValidationError, match="positions, for which"):
            answer(images, 1)
    assert answer(10, 1) == 1


N = 144
K = 8
"""Tokens of an image of mini-LLaVA, and those that are kept."""

SETTINGS = {"state": "cen_divprune", "budget": K, "positions": "true"}


@pytest.mark.both
@in_engine
def test_later_images_are_packed_and_what_passes_the_context_is_refused() -> None:
    """On one axis: five images end within three quarters of the context, the sixth does not."""
    from vllm.exceptions import VLLMValidationError

    engine = start(SETTINGS, max_model_len=CONTEXT)

    def answer(images: int, tokens: int) -> tuple[int, int]:
        """Tokens of a prompt with so many images, and of its answer."""
        pictures = [picture(84, 84, seed) for seed in range(images)]
        prompt = raw_prompt("USER: " + "<image>" * images + " what", pictures)
        sampling = greedy(tokens, ignore_eos=True)
        (output,) = engine.llm.generate([prompt], sampling, use_tqdm=False)
        return len(output.prompt_token_ids), len(output.outputs[0].token_ids)

    text = answer(1, 1)[0] - K
    for images in (5, 6, 30):
        positions = text + images * K + min(images, 5) * (N - K)
        assert answer(images, CONTEXT) == (text + images * K, CONTEXT - positions)
    assert text + 50 * K < CONTEXT / 2  # vLLM's own bound would let them pass
    with pytest.raises(VLLMValidationError, match="positions, for which"):
        answer(50, 1)
    assert answer(1, 1) == (text + K, 1)


@pytest.mark.both
@in_engine
def test_a_chat_that_grows_by_images_keeps_its_prefix_across_the_bound() -> None:
    """Every turn finds the blocks of the turns before it, of packed images or not."""
    engine = start({**SETTINGS, "budget": 40}, max_model_len=CONTEXT)
    packed = list[set[int]]()

    def record(items: list[PromptItem], context: int) -> tuple[set[int], int]:
        packed.append(pack_items(items, context)[0])
        return pack_items(items, context)

    talk = list[dict[str, object]]()
    length = 0
    with patch.object(processor, "pack_items", record):
        for number in range(8):
            talk.append(turn("what colour is it", picture(84, 84, number)))
            (answer,) = engine.chat(talk)
            assert answer["cached"] >= length // BLOCK * BLOCK
            length = answer["prompt_tokens"]
            talk.append(said(answer["text"]))
    assert packed[-1] == {4, 5, 6, 7}
    assert packed == [{i for i in packed[-1] if i < count} for count in range(1, 9)]
