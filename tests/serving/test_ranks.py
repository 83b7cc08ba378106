"""Invariant 1 across tensor-parallel ranks: they choose the same tokens before they agree."""

from __future__ import annotations

import pytest

from tests.serving.runners import Runner

pytestmark = pytest.mark.engine


ENVIRONMENT = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


def test_ranks_choose_the_same_tokens_and_answer_like_one(runner: Runner) -> None:
    one, two = runner.run("one_rank", ENVIRONMENT), runner.run("two_ranks", ENVIRONMENT)
    first, second = two["kept"]
    assert len(first) > 0
    assert first == second
    same = [a["text"] == b["text"] for a, b in zip(one["answers"], two["answers"], strict=True)]
    # Sharded sums round differently, so a near tie may flip; most answers cannot.
    assert sum(same) >= 0.9 * len(same)


@pytest.mark.parametrize("name", ["visionzip", "prumerge_plus", "fastv"])
def test_ranks_choose_the_same_by_what_they_hold_in_parts(name: str) -> None:
    """Heads of the vision tower and of the language model are spread over the ranks.

    By one model runner: ranks agree within the model, which both runners call alike, and three
    more pairs of workers would cost a minute.
    """
    report = Runner("v1", frozenset({"v1"})).run(f"two_ranks_{name}", ENVIRONMENT)
    first, second = report["kept"]
    assert len(first) > 0
    assert first == second
    assert all(len(kept) in (15, 16) for batch in first for kept in batch)
    assert all(answer["text"] for answer in report["answers"])


def test_ranks_of_a_model_with_m_rope_choose_the_same() -> None:
    report = Runner("v1", frozenset({"v1"})).run("two_ranks_qwen2_5_vl", ENVIRONMENT)
    first, second = report["kept"]
    assert first == second
    assert [len(kept) for batch in first for kept in batch] == [8, 8, 8]
    assert len({str(batch) for batch in first}) == 3
