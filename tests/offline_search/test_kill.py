from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from offline_search.dataset import Dataset
from offline_search.ledger import read_ledger
from offline_search.ledger.records import EvaluationRecord, WinnerRecord
from tests.offline_search.endpoint import Answer, Body, completion, endpoint
from tests.offline_search.replies import valid_replies
from tests.offline_search.synthetic import hash_request

KILLS = 20


@pytest.mark.slow
def test_a_search_killed_twenty_times_has_the_same_ledger(data: Dataset) -> None:
    folder = data.folder
    process = subprocess.run(
        [sys.executable, "-m", "tests.offline_search.killed_search", str(folder), str(KILLS)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stderr[-2000:]
    hit, whole, killed = process.stdout.split()
    assert int(hit) >= 3, "kills came too late to tell anything"
    assert killed == whole
    records = read_ledger(folder / "killed.jsonl")
    assert len({record.key for record in records}) == len(records)
    # What was measured before a kill was not measured after it: each evaluation is there once,
    # and a second one would have been refused or would stand beside it.
    assert any(isinstance(record, EvaluationRecord) for record in records)


VALID_REPLIES = valid_replies(12)


def model(body: Body, number: int) -> Answer:
    """Served model and proposer in one; equal requests get equal answers."""
    if "mm_processor_kwargs" not in body:
        messages = tuple(body["messages"])
        return completion(
            VALID_REPLIES[hash_request(messages, body.get("seed", 0)) % len(VALID_REPLIES)]
        )
    time.sleep(0.002)
    answer = body["messages"][-1]["content"]
    signals = body["mm_processor_kwargs"]["autoprune"].get("state", {}).get("scoring", {})
    value = -0.1 - 0.1 * (len(json.dumps(signals)) % 7)
    token = {"1": {"logprob": value, "rank": 1, "decoded_token": f" {answer}"}}
    return 200, json.dumps({"prompt_logprobs": [None, token]}).encode(), {}


def run_killed_command(data: Dataset, *more: str) -> list[str]:
    """Output of the killed command: hits, exit codes, and both digests."""
    with endpoint(model) as server:
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
