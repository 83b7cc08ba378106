from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from offline_search.examples import Dataset
from offline_search.ledger import read
from offline_search.records import Evaluated

KILLS = 20


@pytest.mark.slow
def test_kill_9_at_twenty_random_moments_ends_in_the_same_ledger(data: Dataset) -> None:
    folder = data.folder
    ran = subprocess.run(
        [sys.executable, "-m", "tests.offline_search.victim", str(folder), str(KILLS)],
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
    records = read(folder / "killed.jsonl")
    assert len({record.key for record in records}) == len(records)
    # What was measured before a kill was not measured after it: each evaluation is there once,
    # and a second one would have been refused or would stand beside it.
    assert any(isinstance(record, Evaluated) for record in records)
