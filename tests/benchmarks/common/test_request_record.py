"""The journal of records: incomplete lines, full disks, missing folders."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.common.request_record import Journal, read_journal
from tests.benchmarks.load.samples import record


def test_records_are_written_when_they_are_added(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "deep" / "records.jsonl")
    journal.add(record(1))
    journal.add(record(0, error="gone"))
    # Not closed: what a killed process leaves behind.
    assert read_journal(tmp_path / "deep" / "records.jsonl") == [record(0, error="gone"), record(1)]
    journal.close()


def test_a_truncated_last_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(record(0).model_dump_json() + "\n" + record(1).model_dump_json()[:40])
    assert read_journal(path) == [record(0)]


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_full_disk_is_reported_and_records_stay_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.symlink_to("/dev/full")
    journal = Journal(path)
    for index in range(3):
        journal.add(record(index))
    journal.close()
    assert journal.failure is not None and "No space left on device" in journal.failure
    assert [kept.index for kept in journal.records] == [0, 1, 2]


def test_a_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    journal = Journal(tmp_path / "file" / "records.jsonl")
    journal.add(record(0))
    journal.close()
    assert journal.failure is not None and len(journal.records) == 1
