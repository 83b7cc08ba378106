"""Resident memory from /proc, on made-up and on real processes."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.overhead.resident import group_of, resident_bytes, resident_of_group


def _process(proc: Path, pid: int, group: int, pages: int, name: str = "vllm") -> None:
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "stat").write_text(f"{pid} ({name}) S 1 {group} {group} 0 -1 4194560 1 0\n")
    (folder / "statm").write_text(f"{9 * pages} {pages} 7 1 0 5 0\n")


def test_a_name_may_hold_spaces_and_brackets() -> None:
    assert group_of("12 (VLLM :: (Worker) 3) S 1 4711 4711 0 -1") == 4711


def test_the_second_field_counts_resident_pages() -> None:
    assert resident_bytes("900 100 7 1 0 5 0", 4096) == 409_600


def test_only_the_group_counts_and_what_ended_is_left_out(tmp_path: Path) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    _process(tmp_path, 10, group=10, pages=3)
    _process(tmp_path, 11, group=10, pages=4, name="a (b) c")
    _process(tmp_path, 12, group=12, pages=5)
    (tmp_path / "13").mkdir()  # ended between listing and reading
    (tmp_path / "meminfo").write_text("MemTotal: 1 kB\n")

    assert resident_of_group(10, tmp_path) == {10: 3 * page, 11: 4 * page}


def test_this_process_is_resident() -> None:
    assert resident_of_group(os.getpgrp())[os.getpid()] > 1 << 20
