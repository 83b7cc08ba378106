"""Winners on models that their searches have not seen."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.cost.turns import Table
from benchmarks.search.study import PROPOSED
from benchmarks.search.transfer import (
    TransferRow,
    Winner,
    judge,
    measure_transfer,
    read_winners,
    tabulate_transfer,
    write_rows,
)
from benchmarks.yardsticks import open_yardstick
from offline_search.ledger import WinnerRecord, read_ledger, select_records
from vllm_autoprune.errors import SearchError
from vllm_autoprune.statistics import Estimate
from vllm_autoprune.tpdsl.loading import load_state

JOINT = PROPOSED / "joint-0.jsonl"

JsonObject = dict[str, Any]


def _rewrite(
    folder: Path, name: str, kind: str, change: Callable[[JsonObject], None]
) -> Path:
    """The recorded search of two models with another record of a kind, as another's ledger."""
    lines = []
    for line in JOINT.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] == kind:
            change(record)
        lines.append(f"{json.dumps(record)}\n")
    path = folder / f"{name}.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    return path


def test_a_winner_has_the_gain_by_which_its_search_chose_it() -> None:
    (record,) = select_records(read_ledger(JOINT), WinnerRecord)
    winner = Winner.read(JOINT)
    assert winner.state.digest == record.digest
    assert winner.gain == record.gains[record.winner]
    assert winner.base_policy == "pivoted_qr"
    assert winner.seen == ("minillava", "miniqwen")


def test_a_ledger_without_a_joint_winner_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SearchError, match="no winner of a search of several models"):
        read_winners([PROPOSED / "minillava.jsonl"])
    lines = JOINT.read_text(encoding="utf-8").splitlines(keepends=True)
    unfinished = tmp_path / "unfinished.jsonl"
    unfinished.write_text("".join(lines[:20]), encoding="utf-8")
    with pytest.raises(SearchError, match="name ledgers of finished searches"):
        read_winners([unfinished])


def test_winners_upon_different_policies_are_not_compared(tmp_path: Path) -> None:
    def change(record: JsonObject) -> None:
        record["settings"]["base_policy"] = "divprune"

    other = _rewrite(tmp_path, "other", "opened", change)
    with pytest.raises(SearchError, match="upon divprune and pivoted_qr"):
        read_winners([JOINT, other])


@pytest.mark.parametrize(
    ("value", "comparisons", "verdict"),
    [
        (0.0, 1, "level"),
        (2.1, 1, "ahead"),  # 1.96 standard errors
        (2.1, 16, "level"),  # 2.95 standard errors
        (3.1, 16, "ahead"),
        (-3.1, 16, "behind"),
    ],
)
def test_a_difference_is_told_apart_as_one_of_many(
    value: float, comparisons: int, verdict: str
) -> None:
    draws = value + np.tile([-1.0, 1.0], 1000)
    assert judge(np.array([value, *draws]), comparisons) == verdict


def _winner(name: str, low: float) -> Winner:
    state = load_state({"pivoted_qr": "pivoted_qr", "other": "norm"}[name])
    return Winner(name, state, "pivoted_qr", Estimate(0.5, low, 1.0), ("minillava",))


def test_a_winner_that_is_the_base_policy_gains_nothing_anywhere() -> None:
    """Rows of real models, seen and not seen, with another winner that does differ."""
    winners = [_winner("pivoted_qr", 0.1), _winner("other", 0.0)]
    for model in ("minillava", "minigemma"):
        yardstick = open_yardstick(model)
        rows = [*measure_transfer(winners, yardstick, images=4, models=2)]
        assert [row.budget for row in rows] == [b.label for b in yardstick.budgets]
        for row in rows:
            assert row.gain == Estimate(0.0, 0.0, 0.0) and row.verdict == "level"
            assert row.base == row.accuracy
            assert row.was_seen == (model == "minillava")
        assert any(row.others != (0.0,) for row in rows)


def test_rows_name_the_chosen_winner_and_every_gain() -> None:
    winners = [_winner("pivoted_qr", 0.1), _winner("other", 0.0)]
    gain = Estimate(3.0, 1.0, 5.0)
    row = TransferRow("mini-X", False, "K = 9", 40, 50.0, 53.0, gain, "ahead", (-2.5,))
    text = tabulate_transfer(winners, [row])
    assert "Chosen of 2 winners: pivoted_qr (" in text
    assert "| mini-X, not seen | K = 9 | 50.0 | 53.0 | +3.0 (1.0 to 5.0) |" in text
    assert text.endswith("| ahead | -2.5 to -2.5 |")
    file = io.StringIO()
    write_rows(Table(file), winners, [row])
    records = [*csv.DictReader(file.getvalue().splitlines())]
    assert [record["value"] for record in records] == ["50", "53", "3", "-2.5"]
    assert records[2]["verdict"] == "ahead"
    assert records[3]["setting"] == "mini-X, K = 9; other"


def test_the_chosen_winner_has_the_highest_lower_bound(tmp_path: Path) -> None:
    def change(record: JsonObject) -> None:
        record["gains"][record["winner"]] |= {"value": -1.0, "low": 0.9}
        record["state"]["reassembly"]["strength"] = 0.2

    better = _rewrite(tmp_path, "better", "chosen", change)
    assert [w.name for w in read_winners([JOINT, better])] == ["better", "joint-0"]
    assert [w.name for w in read_winners([JOINT, JOINT])] == ["joint-0"]
