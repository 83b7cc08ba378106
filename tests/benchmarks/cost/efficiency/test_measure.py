"""The score column: wrong answers and failed requests."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.common import BenchmarkError
from benchmarks.common.client import EMPTY, Client
from benchmarks.common.request_record import Record
from benchmarks.cost.efficiency.measure import measure_score
from tests.benchmarks.load.samples import record


class FakeClient(Client):
    """Gives every question the same answer; with ``failure``, every third request fails."""

    def __init__(self, text: str, failure: str | None = None) -> None:
        super().__init__("http://127.0.0.1:1")
        self.text, self.failure, self.asked = text, failure, itertools.count()

    def send(self, body: bytes, **_: object) -> Record:
        failed = self.failure is not None and next(self.asked) % 3 == 0
        return record(0, error=self.failure if failed else None, text="" if failed else self.text)


def test_an_answer_without_text_is_wrong() -> None:
    whole, _ = measure_score(FakeClient("yes"), 1)
    silent, _ = measure_score(FakeClient("yes", EMPTY), 1)
    assert 0 < silent < whole


def test_a_failed_request_raises() -> None:
    with pytest.raises(BenchmarkError, match="status 500"):
        measure_score(FakeClient("yes", "status 500: out of memory"), 1)
