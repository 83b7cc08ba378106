"""Wins in nats against wins in right answers, on scores whose order is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.search import __main__ as command
from benchmarks.search.results import BASE, CONFIRMED, Confirmed


def test_wins_in_nats_are_counted_by_what_they_are_in_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two states ahead of the base policy one answers fewer; only one pair is told apart."""
    scores = {
        BASE: (-2.0, 0.5, (-2.0, -2.0, -2.1, -1.9)),
        "better": (-1.0, 0.6, (-1.0, -1.1, -0.9, -1.0)),
        "better again": (-1.0, 0.6, (-1.0, -1.1, -0.9, -1.0)),
        "unsure": (-1.9, 0.4, (-9.0, 3.0, -9.0, 7.4)),
    }
    confirmed = {
        name: Confirmed(
            questions=40,
            evaluator="e",
            digest=name.removesuffix(" again"),
            objective=objective,
            accuracy=accuracy,
            blocks=blocks,
        )
        for name, (objective, accuracy, blocks) in scores.items()
    }
    (tmp_path / "confirmation.json").write_bytes(CONFIRMED.dump_json(confirmed))
    assert command.main(["agreement", str(tmp_path)]) == 0
    row = capsys.readouterr().out.splitlines()[-1].strip("| ").split(" | ")
    assert row[1:] == [
        "3",
        "1 of 2 (50.0 %), 1 fewer",
        "2 of 3 (66.7 %), 1 fewer",
        "1 of 1 (100.0 %), 0 fewer",
        "-",
        "-",
    ]


def test_a_ledger_s_candidates_rank_new_questions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main(["agreement"]) == 0
    rows = [
        line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()
    ]
    by_name = {row[0]: row[1:] for row in rows}
    assert by_name["proposed/minillava"] == [
        "51",
        "49 of 49 (100.0 %), 0 fewer",
        "1147 of 1275 (90.0 %), 93 fewer",
        "714 of 716 (99.7 %), 2 fewer",
        "0.81",
        "0.79",
    ]
