"""Positions of requests on a served model: none passes the context that it is served with."""

from __future__ import annotations

import pytest

from tests.serving.engine import built, greedy, raw_prompt, start
from tests.serving.runners import in_engine
from vllm_autoprune.selftest.serve import picture

pytestmark = pytest.mark.engine

CONTEXT = 1024
THIN = (28 * 100, 28)
"""An image of 100 tokens in one row, which takes 100 positions however few are kept."""


@pytest.mark.both
@in_engine
def test_thin_images_are_refused_where_their_positions_pass_the_context() -> None:
    """8 tokens an image, so that vLLM's own bound of tokens lets hundreds of them pass."""
    from vllm.exceptions import VLLMValidationError

    settings = {"state": "cen_divprune", "budget": 8}
    engine = start(settings, built("qwen2_5_vl"), max_model_len=CONTEXT)

    def answer(images: int, tokens: int) -> int:
        """Number of tokens that a prompt with so many images is answered by."""
        text = "user " + "<|vision_start|><|image_pad|><|vision_end|>" * images + " what"
        prompt = raw_prompt(text, [picture(*THIN, seed) for seed in range(images)])
        sampling = greedy(tokens, ignore_eos=True)
        (output,) = engine.llm.generate([prompt], sampling, use_tqdm=False)
        return len(output.outputs[0].token_ids)

    # An image and its two marks take 102 positions, the text 2.
    assert answer(2, 30) == 30
    assert answer(10, 900) == CONTEXT - 10 * 102 - 2
    for images in (11, 100):
        with pytest.raises(VLLMValidationError, match="positions, for which"):
            answer(images, 1)
    assert answer(10, 1) == 1
