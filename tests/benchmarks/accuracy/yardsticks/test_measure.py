from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.accuracy.yardsticks.cases import build_cases
from benchmarks.accuracy.yardsticks.journal import YardstickJournal
from benchmarks.accuracy.yardsticks.measure import Results, measure
from benchmarks.yardsticks.yardstick import Case
from tests.benchmarks.accuracy.yardsticks.sample import SampleYardstick
from vllm_autoprune.evaluation.journal import EvaluationError
from vllm_autoprune.evaluation.run import Progress

NAMES = ("random", "divprune", "instruction-free")


def _cases() -> list[Case]:
    return build_cases(SampleYardstick.budgets, SampleYardstick.available, NAMES)


def _measure(yardstick: SampleYardstick, path: Path, images: int, lines: list[str]) -> Results:
    with YardstickJournal(path, yardstick.model) as journal:
        return measure(yardstick, _cases(), images, journal, Progress(lines.append))


def test_a_repeated_run_measures_only_what_is_missing(tmp_path: Path) -> None:
    path, first, lines = tmp_path / "journal.jsonl", SampleYardstick(), list[str]()
    before = _measure(first, path, 3, lines)
    assert len(first.scored) == 3 * len(_cases())
    again = SampleYardstick()
    assert _measure(again, path, 3, lines).cases == before.cases and again.scored == []
    more = SampleYardstick()
    results = _measure(more, path, 5, lines)
    assert len(more.scored) == 2 * len(_cases())
    assert all(len(result.right) == 10 for result in results.cases)


def test_scores_of_other_weights_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    _measure(SampleYardstick(), path, 2, [])
    other = SampleYardstick(model="sample 2")
    _measure(other, path, 2, [])
    assert len(other.scored) == 2 * len(_cases())


def test_a_line_cut_off_by_a_kill_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    _measure(SampleYardstick(), path, 2, [])
    path.write_bytes(path.read_bytes()[:-10])
    again = SampleYardstick()
    _measure(again, path, 2, [])
    assert len(again.scored) == 1


def test_two_runs_do_not_write_one_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with (
        YardstickJournal(path, "sample 1"),
        pytest.raises(EvaluationError, match="another process is writing it"),
    ):
        YardstickJournal(path, "sample 1")
