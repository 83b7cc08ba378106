from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.common.fake_server import Answer, Body
from offline_search.dataset import Dataset
from offline_search.ledger import (
    Clock,
    EvaluationRecord,
    Ledger,
    SettingsRecord,
    SummaryRecord,
    TrialRecord,
    WinnerRecord,
    digest_records,
    read_ledger,
)
from offline_search.settings import Settings
from tests.offline_search.endpoint import endpoint
from tests.offline_search.synthetic import answer_search
from vllm_autoprune.errors import SearchError


def summary(number: int, text: str = "so far") -> SummaryRecord:
    return SummaryRecord(round=number, text=text, clock=Clock(at=number, seconds=1))


def test_records_persist_and_only_their_clock_may_differ(tmp_path: Path) -> None:
    path = tmp_path / "a" / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.put(SettingsRecord(settings=Settings()))
        ledger.put(summary(1))
        digest = ledger.digest()
        with pytest.raises(SearchError, match="another process is writing"):
            Ledger(path)
    with Ledger(path) as again:
        assert again.digest() == digest
        assert again.find(SummaryRecord, "summary/1") == summary(1)
        assert again.find(SummaryRecord, "summary/2") is None
        again.put(summary(1).model_copy(update={"clock": Clock(at=99, seconds=9)}))
        with pytest.raises(SearchError, match="does not follow"):
            again.put(summary(1, "something else"))
    assert [record.key for record in read_ledger(path)] == ["opened", "summary/1"]


def test_the_digest_ignores_clocks_and_order() -> None:
    records = [summary(number) for number in (1, 2)]
    reordered = [record.model_copy(update={"clock": Clock()}) for record in reversed(records)]
    assert digest_records(records) == digest_records(reordered)
    assert digest_records([*records, summary(3)]) != digest_records(records)


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


def slow_model(body: Body, number: int) -> Answer:
    """The model of a search, slow enough to be killed during it."""
    time.sleep(0.002)
    return answer_search(body, number)


def run_killed_command(data: Dataset, *more: str) -> list[str]:
    """Run a search that is killed again and again, and one that is not, on the same data.

    Returns what is printed: the number of kills, exit codes, and the digests of both ledgers.
    """
    with endpoint(slow_model) as server:
        command = [sys.executable, "-m", "tests.offline_search.killed_command"]
        ended = subprocess.run(
            [*command, server.url, str(data.folder), *more],
            capture_output=True,
            text=True,
            timeout=600,
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout.split()


@pytest.mark.slow
def test_a_command_killed_twenty_times_has_the_same_ledger(data: Dataset) -> None:
    hit, *codes, complete, killed = run_killed_command(data, "20")
    assert int(hit) >= 3, "kills came too late to tell anything"
    assert codes == ["0", "0", "0"] and killed == complete
    records = read_ledger(data.folder / "cut.jsonl")
    keys = [record.key for record in records]
    assert len(set(keys)) == len(keys), "nothing was measured twice"
    assert any(isinstance(record, EvaluationRecord) for record in records)


def test_a_full_disk_stops_the_command_and_it_resumes(data: Dataset) -> None:
    _, *codes, complete, filled = run_killed_command(data, "0", "20000")
    assert codes == ["0", "1", "0"] and filled == complete
    errors = (data.folder / "errors").read_text()
    assert "make room and resume" in errors and "Traceback" not in errors
    assert any(
        isinstance(record, WinnerRecord) for record in read_ledger(data.folder / "cut.jsonl")
    )
