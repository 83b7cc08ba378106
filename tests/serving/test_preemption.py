"""Requests that are preempted while the prefix cache covers their images."""

from __future__ import annotations

import pytest

from tests.serving.engine import Engine, built, greedy, start, turn
from tests.serving.runners import in_engine
from vllm_autoprune.selftest.questions import picture

pytestmark = pytest.mark.engine

BLOCKS = 12
"""Of 32 tokens: for either of the two requests, and not for both."""


def complete_preempted(engine: Engine, conversation: list[object]) -> list[int]:
    """Token ids of an answer that is preempted when its image is no longer cached anywhere else.

    A request of text, which came first, takes the blocks of the prefix.
    """
    core = engine.llm.llm_engine
    core.engine_core.engine_core.reset_encoder_cache()
    text = {"prompt": "user " + " blue" * 60}
    engine.llm.enqueue(text, greedy(250, ignore_eos=True), use_tqdm=False)
    for _ in range(3):
        core.step()
    sampling = greedy(110, ignore_eos=True)
    engine.llm.enqueue_chat([conversation], sampling, use_tqdm=False)
    answers = {}
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)
    return next(ids for ids in answers.values() if len(ids) == 110)


@pytest.mark.both
@in_engine
def test_an_image_that_the_prefix_cache_no_longer_covers_is_encoded_again() -> None:
    """Stock vLLM's engine ends there under Model Runner V1."""
    for backbone in (
        "qwen3_vl",
        "internvl",
    ):  # with M-RoPE something is left of a covered image
        settings = {"state": "cen_divprune", "budget": 16}
        limits = {"max_model_len": 352, "num_gpu_blocks_override": BLOCKS}
        engine = start(settings, built(backbone), disable_log_stats=False, **limits)
        # Text before the image, so that its block is not the first of the prefix, taken last.
        message = turn("red " * 36)
        question = turn("what " * 40, picture(160, 160, 1))
        content = [*message["content"], *question["content"]]
        conversation: list[object] = [{"role": "user", "content": content}]
        sampling = greedy(110, ignore_eos=True)
        (alone,) = engine.llm.chat([conversation], sampling, use_tqdm=False)
        answer = complete_preempted(engine, conversation)
        assert engine.counter("vllm:num_preemptions") > 0
        assert answer == list(alone.outputs[0].token_ids)
        engine.stop()
