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
from tests.offline_search.endpoint import Answer, Body, endpoint, said
from tests.offline_search.replies import valid_replies
from tests.offline_search.synthetic import scripted

KILLS = 20


@pytest.mark.slow
def test_kill_9_at_twenty_random_moments_ends_in_the_same_ledger(data: Dataset) -> None:
    folder = data.folder
    ran = subprocess.run(
        [sys.executable, "-m", "tests.offline_search.killed_search", str(folder), str(KILLS)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    hit, whole, killed = ran.stdout.split()
    assert int(hit) >= 3, "kills came too late to tell anything"
    assert killed == whole
    records = read_ledger(folder / "killed.jsonl")
    assert len({record.key for record in records}) == len(records)
    # What was measured before a kill was not measured after it: each evaluation is there once,
    # and a second one would have been refused or would stand beside it.
    assert any(isinstance(record, EvaluationRecord) for record in records)


SOUND = valid_replies(12)


def model(body: Body, number: int) -> Answer:
    """A served model and a proposer in one; both answer the same to the same."""
    if "mm_processor_kwargs" not in body:
        messages = tuple(body["messages"])
        return said(SOUND[scripted(messages, body.get("seed", 0)) % len(SOUND)])
    time.sleep(0.002)
    answer = body["messages"][-1]["content"]
    signals = body["mm_processor_kwargs"]["autoprune"].get("policy", {}).get("scoring", {})
    value = -0.1 - 0.1 * (len(json.dumps(signals)) % 7)
    token = {"1": {"logprob": value, "rank": 1, "decoded_token": f" {answer}"}}
    return 200, json.dumps({"prompt_logprobs": [None, token]}).encode(), {}


def ran(data: Dataset, *more: str) -> list[str]:
    """Output of the killed command: hits, exit codes, and both digests."""
    with endpoint(model) as told:
        command = [sys.executable, "-m", "tests.offline_search.killed_command"]
        ended = subprocess.run(
            [*command, told.url, str(data.folder), *more],
            capture_output=True,
            text=True,
            timeout=600,
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout.split()


@pytest.mark.slow
def test_the_command_killed_at_twenty_random_moments_loses_nothing(data: Dataset) -> None:
    hit, *codes, whole, killed = ran(data, "20")
    assert int(hit) >= 3, "kills came too late to tell anything"
    assert codes == ["0", "0", "0"] and killed == whole
    records = read_ledger(data.folder / "cut.jsonl")
    keys = [record.key for record in records]
    assert len(set(keys)) == len(keys), "nothing was measured twice"
    assert any(isinstance(record, EvaluationRecord) for record in records)


def test_a_full_disk_ends_the_command_and_it_goes_on_when_there_is_room(data: Dataset) -> None:
    _, *codes, whole, filled = ran(data, "0", "20000")
    assert codes == ["0", "1", "0"] and filled == whole
    told = (data.folder / "errors").read_text()
    assert "make room and resume" in told and "Traceback" not in told
    assert any(
        isinstance(record, WinnerRecord) for record in read_ledger(data.folder / "cut.jsonl")
    )
