from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from offline_search.dataset import Dataset
from offline_search.ledger import EvaluationRecord, WinnerRecord, read_ledger
from tests.offline_search.endpoint import Answer, Body, endpoint
from tests.offline_search.synthetic import answer_search


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
    hit, *codes, whole, killed = run_killed_command(data, "20")
    assert int(hit) >= 3, "kills came too late to tell anything"
    assert codes == ["0", "0", "0"] and killed == whole
    records = read_ledger(data.folder / "cut.jsonl")
    keys = [record.key for record in records]
    assert len(set(keys)) == len(keys), "nothing was measured twice"
    assert any(isinstance(record, EvaluationRecord) for record in records)


def test_a_full_disk_stops_the_command_and_it_resumes(data: Dataset) -> None:
    _, *codes, whole, filled = run_killed_command(data, "0", "20000")
    assert codes == ["0", "1", "0"] and filled == whole
    errors = (data.folder / "errors").read_text()
    assert "make room and resume" in errors and "Traceback" not in errors
    assert any(
        isinstance(record, WinnerRecord) for record in read_ledger(data.folder / "cut.jsonl")
    )
