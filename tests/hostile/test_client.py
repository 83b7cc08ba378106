"""Distances between answers."""

from __future__ import annotations

import pytest

from tests.hostile.client import Reply, distance, entry, nearest


def test_an_answer_is_nearest_to_itself() -> None:
    references = [{"1": -1.0, "2": -2.0}, {"1": -2.0, "3": -1.0}]
    assert [nearest(r, references) for r in references] == [0, 1]
    assert nearest({"1": -1.1, "2": -1.9}, references) == 0


def test_refused_request_is_nearest_to_no_answer() -> None:
    refused = Reply(400, '{"error": {"message": "no"}}', 0.1)
    assert (refused.message, refused.logprobs) == ("no", {})
    assert distance(refused.logprobs, {"1": -1.0}) == float("inf")


def test_a_token_that_one_answer_lacks_counts_as_its_least_likely() -> None:
    assert distance({"1": -1.0, "2": -3.0}, {"1": -1.0, "3": -4.0}) == pytest.approx(2 / 3)


def test_entry_is_placed_in_mm_processor_kwargs() -> None:
    assert entry(budget=8) == {"mm_processor_kwargs": {"autoprune": {"budget": 8}}}
