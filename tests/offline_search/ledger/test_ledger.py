from __future__ import annotations

from pathlib import Path

import pytest

from offline_search.ledger import (
    Clock,
    EvaluationRecord,
    Ledger,
    SettingsRecord,
    SummaryRecord,
    TrialRecord,
    digest_records,
    read_ledger,
)
from offline_search.settings import Settings
from vllm_autoprune.errors import SearchError


def summary(number: int, text: str = "so far") -> SummaryRecord:
    return SummaryRecord(round=number, text=text, clock=Clock(at=number, seconds=1))


def test_records_persist(tmp_path: Path) -> None:
    path = tmp_path / "a" / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.put(SettingsRecord(settings=Settings()))
        ledger.put(summary(1))
        digest = ledger.digest()
    with Ledger(path) as again:
        assert again.digest() == digest
        assert again.find(SummaryRecord, "summary/1") == summary(1)
        assert again.find(SummaryRecord, "summary/2") is None
    assert [record.key for record in read_ledger(path)] == ["opened", "summary/1"]


def test_a_conflicting_record_is_refused(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        first = ledger.put(summary(1))
        later = first.model_copy(update={"clock": Clock(at=99, seconds=9)})
        assert ledger.put(later) == first
        with pytest.raises(SearchError, match="does not follow"):
            ledger.put(summary(1, "something else"))
        assert len(ledger) == 1


def test_the_digest_ignores_clocks_and_order(tmp_path: Path) -> None:
    with Ledger(tmp_path / "a") as one, Ledger(tmp_path / "b") as other:
        for number in (1, 2):
            one.put(summary(number))
            other.put(summary(3 - number).model_copy(update={"clock": Clock()}))
        assert one.digest() == other.digest()
        other.put(summary(3))
        assert one.digest() != other.digest()


def test_two_searches_cannot_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path), pytest.raises(SearchError, match="another process is writing"):
        Ledger(path)


def test_a_replay_takes_only_external_records_from_the_recording(tmp_path: Path) -> None:
    effect = EvaluationRecord(
        split="search", digest="d", budget=8, start=0, stop=1, logprob=(-1.0,), right="1",
        clock=Clock(at=5, seconds=2),
    )  # fmt: skip
    derived = TrialRecord(round=1, index=0, status="same")
    with Ledger(tmp_path / "recorded") as recorded:
        recorded.put(effect)
        recorded.put(derived)
        recording = read_ledger(tmp_path / "recorded")
        with Ledger(tmp_path / "replayed", recording) as replayed:
            assert replayed.find(TrialRecord, derived.key) is None
            assert replayed.find(EvaluationRecord, effect.key) == effect
            replayed.put(derived)
            assert replayed.digest() == recorded.digest() == digest_records(recording)
    assert (tmp_path / "replayed").read_bytes() == (tmp_path / "recorded").read_bytes()


def test_a_missing_ledger_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SearchError, match="name the ledger of a search that has begun"):
        read_ledger(tmp_path / "folder" / "none.jsonl")
    assert not (tmp_path / "folder").exists()
