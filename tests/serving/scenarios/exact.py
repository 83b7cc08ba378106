"""Bit-exact comparisons: without a state, K >= N, chunked prefill, caches off."""

from __future__ import annotations

from collections.abc import Mapping

from tests.serving.engine import STATE, chat, examples, start, turn
from tests.serving.scenarios import Report, scenario
from tests.serving.selection_recorder import watch


@scenario
def plain() -> Report:
    """Tokens and exact log-probabilities of a model without a state."""
    return _exact(None)


@scenario
def everything_kept() -> Report:
    """Outputs of an engine whose state has a K of at least N, so that nothing is pruned."""
    return _exact({**STATE, "budget": 4096})


def _exact(settings: Mapping[str, object] | None) -> Report:
    llm = start(settings)
    questions = [[turn(e.question, e.image)] for e in examples(2)]
    both = [[turn("Which shape is red?", examples(2)[0].image, examples(2)[-1].image)]]
    return [answer.plain() for one in [*questions, *both] for answer in chat(llm, [one], tokens=8)]


@scenario
def whole_prefill() -> Report:
    """Answers and kept tokens when every prompt is prefilled in one step."""
    return _prefilled(max_num_batched_tokens=4096)


@scenario
def chunked_prefill() -> Report:
    """The same with prefill chunks of 16 tokens, which split the image."""
    return _prefilled(max_num_batched_tokens=16, max_num_seqs=4)


@scenario
def no_caches() -> Report:
    """The same without prefix cache, multi-modal caches and feature cache."""
    return _prefilled({"feature_cache_gb": 0}, enable_prefix_caching=False, mm_processor_cache_gb=0)


def _prefilled(settings: Mapping[str, object] | None = None, **options: object) -> Report:
    llm = start({**STATE, **(settings or {})}, **options)
    seen = watch()
    questions = examples(3)[:8]
    answers = [chat(llm, [[turn(e.question, e.image)]])[0].plain() for e in questions]
    pair = chat(
        llm, [[turn("What digit is on the red shape?", questions[0].image, questions[-1].image)]]
    )
    return {
        "answers": [*answers, pair[0].plain()],
        "kept": [[list(p.instruction), rows] for p, rows in seen.kept.items()],
    }
