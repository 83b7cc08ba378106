"""The table of both yardsticks: its cases, its journal, and its rows in every format."""

from __future__ import annotations

import csv
import json
from fractions import Fraction
from pathlib import Path

import pytest

from benchmarks.accuracy.yardsticks import (
    Measured,
    Results,
    Row,
    YardstickJournal,
    as_csv,
    as_json,
    as_markdown,
    build_cases,
    build_rows,
    measure,
    write_between_markers,
)
from benchmarks.yardsticks.minillava import MiniLlava
from benchmarks.yardsticks.miniqwen import MiniQwen
from benchmarks.yardsticks.yardstick import Budget, Case
from tests.benchmarks.accuracy.sample_yardstick import SampleYardstick
from vllm_autoprune.evaluation.journal import EvaluationError
from vllm_autoprune.evaluation.run import Progress
from vllm_autoprune.statistics import Estimate
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

EIGHTH = Budget("K = N/8", Fraction(1, 8))


def test_a_fixed_grid_has_every_base_policy_and_its_own_budgets() -> None:
    names = {case.name for case in build_cases(MiniLlava.budgets, MiniLlava.available)}
    assert {*BASE_POLICIES, "full", "resized", "random", "oracle", "minillava"} <= names
    assert [budget.tokens(144) for budget in MiniLlava.budgets] == [72, 36, 18, 9]
    assert MiniLlava.eighth == "K = 18"


def test_qwen_has_the_policies_whose_inputs_its_server_provides() -> None:
    names = {case.name for case in build_cases(MiniQwen.budgets, MiniQwen.available)}
    assert {"cdpruner", "divprune", "mmtok", "holov", "autoprune"} <= names
    assert not {"visionzip", "trim", "prumerge_plus", "fastv", "dart", "sparsevlm"} & names


def test_a_share_of_the_tokens_is_rounded_down_and_at_least_one() -> None:
    assert [EIGHTH.tokens(count) for count in (36, 54, 108, 4)] == [4, 6, 13, 1]


def test_named_cases_keep_what_they_are_compared_with() -> None:
    cases = build_cases([EIGHTH], MiniQwen.available, ["divprune"])
    assert [case.name for case in cases] == ["full", "resized", "divprune"]
    assert cases[2].reads_question is False and cases[1].reads_question is None


def test_the_key_of_a_state_changes_with_its_digest() -> None:
    (case,) = [one for one in build_cases([EIGHTH], MiniQwen.available) if one.name == "autoprune"]
    assert case.state is not None and case.state.digest[:12] in case.key
    assert case.base == "cdpruner" and case.reads_question


def test_states_also_rank_before_the_merger_where_there_is_one() -> None:
    names = {case.name: case for case in build_cases([EIGHTH], MiniQwen.available)}
    before = names["divprune@merger_in"]
    assert before.state is not None and before.state.rank_at == "merger_in"
    assert before.base == "divprune", "the paired interval is that of before against after"
    assert before.key != names["divprune"].key
    assert "autoprune@merger_in" in names
    assert not {"scope@merger_in", "mmtok@merger_in", "prunesid@merger_in", "holov@merger_in"} & {
        *names
    }
    assert not [
        case
        for case in build_cases([EIGHTH], MiniLlava.available)
        if case.name.endswith("@merger_in")
    ]


def test_any_shipped_state_can_be_named() -> None:
    names = ["cdpruner", "ablation-quota-8"]
    cases = build_cases([EIGHTH], MiniLlava.available, names)
    assert [case.name for case in cases] == ["full", "resized", *names]
    assert cases[3].base == "cdpruner"
    assert "ablation-quota-8" not in {c.name for c in build_cases([EIGHTH], MiniLlava.available)}


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


METHODS = ("divprune", "instruction-free")


def _rows(tmp_path: Path, *wrong: str) -> list[Row]:
    yardstick = SampleYardstick(wrong=wrong)
    cases = build_cases(yardstick.budgets, yardstick.available, METHODS)
    with YardstickJournal(tmp_path / "journal.jsonl", yardstick.model) as journal:
        progress = Progress(lambda line: None)
        return list(build_rows(measure(yardstick, cases, 8, journal, progress)))


def _find(rows: list[Row], name: str, category: str | None = None) -> Row:
    return next(row for row in rows if (row.name, row.category, row.kind) == (name, category, None))


def test_differences_are_paired_with_the_control_and_the_base(tmp_path: Path) -> None:
    rows = _rows(tmp_path, "resized", "divprune")
    state = _find(rows, "instruction-free")
    assert state.accuracy == Estimate(50, 50, 50) and state.tokens == 4
    assert state.less_resized == state.less_base == Estimate(50, 50, 50)
    assert _find(rows, "instruction-free", "first").less_resized == Estimate(100, 100, 100)
    assert _find(rows, "instruction-free", "second").less_resized == Estimate(0, 0, 0)
    assert _find(rows, "divprune").less_resized == Estimate(0, 0, 0)
    assert _find(rows, "divprune").less_base is None
    assert _find(rows, "divprune").less_default == Estimate(-50, -50, -50)
    assert state.less_default is None, "it is the default itself"
    assert _find(rows, "full").less_resized is None
    assert _find(rows, "resized").less_resized is None


@pytest.mark.parametrize(
    ("wrong", "verdict"),
    [
        (("resized",), "`instruction-free` is better than resizing"),
        (("instruction-free",), "resizing is better than `instruction-free`"),
        ((), "not decided"),
    ],
)
def test_the_page_says_who_wins(tmp_path: Path, wrong: tuple[str, ...], verdict: str) -> None:
    rows = _rows(tmp_path, *wrong)
    page = as_markdown([Measured("sample", "sample 1", "instruction-free", "K = 4", rows)])
    line = next(line for line in page.splitlines() if line.startswith("- K = 4, all questions"))
    assert line.endswith(verdict)
    assert "| **instruction-free** | not read | " in page


def test_json_has_every_kind_at_every_budget(tmp_path: Path) -> None:
    rows = _rows(tmp_path)
    (document,) = json.loads(as_json([Measured("sample", "sample 1", "", "K = 4", rows)]))
    kinds = {(row["budget"], row["kind"]) for row in document["rows"]}
    assert kinds == {(budget, kind) for budget in ("all", "K = 4") for kind in (None, "a", "b")}


def test_the_rows_are_a_table_of_data(tmp_path: Path) -> None:
    rows = _rows(tmp_path, "resized")
    text = as_csv([Measured("sample", "sample 1", "", "K = 4", rows)])
    records = list(csv.DictReader(text.splitlines()))
    assert len(records) == len(rows)
    (state,) = (
        one
        for one in records
        if (one["name"], one["category"], one["kind"]) == (METHODS[1], "", "")
    )
    assert (state["accuracy"], state["less_resized_low"]) == ("50.0", "50.0")
    assert records[0]["name"] == "full" and records[0]["less_resized"] == ""


def test_only_what_stands_between_the_markers_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- yardsticks -->\nold\n<!-- /yardsticks -->\nafter\n")
    write_between_markers(page, "new\n")
    assert page.read_text() == (
        "before\n<!-- yardsticks -->\n\nnew\n\n<!-- /yardsticks -->\nafter\n"
    )
    page.write_text("no markers")
    with pytest.raises(ValueError, match="has no <!-- yardsticks -->"):
        write_between_markers(page, "new\n")
