"""Evidence that resizing beats a state, from its provenance and from a report of an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.samples import contents
from tests.evaluation.test_report import CONTROL, STATE, report_of, scores
from vllm_autoprune import load_state
from vllm_autoprune.cli.commands.validate import find_losses
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.report import Report, build_report
from vllm_autoprune.evaluation.run import format_report
from vllm_autoprune.tpdsl.state import PruningState

SHIPPED = load_state("visionzip")


def with_scores(scores: dict[str, Any]) -> PruningState:
    provenance = SHIPPED.provenance.model_copy(update={"scores": scores})
    return SHIPPED.model_copy(update={"provenance": provenance})


UNKNOWN = with_scores({})


def row(value: float, low: float, high: float, **more: object) -> dict[str, object]:
    return {"budget": 16, "less_resized": {"value": value, "low": low, "high": high}, **more}


LOST = (-4.0, -7.0, -1.0)
BY_4 = "by 4.0 points (1.0 to 7.0)"
SHARE = row(*LOST, budget="N/8", model="mini-Qwen3-VL 12ab")


@pytest.mark.parametrize(
    ("scores", "losses"),
    [
        ({"model": "mini", "rows": [row(3.0, 1.0, 5.0), row(*LOST), row(-1.0, -3.0, 1.0)]},
         [f"/provenance/scores/rows/1: resizing beats it at K = 16 {BY_4}"]),
        ({"rows": [SHARE]}, [f"/provenance/scores/rows/0: resizing beats it at K = N/8 on "
                             f"mini-Qwen3-VL 12ab {BY_4}"]),
        *((scores, []) for scores in ({}, {"mme": 1}, {"rows": 3}, {"rows": [{"budget": 1}]})),
    ],
)  # fmt: skip
def test_losses_in_the_provenance_are_found_with_their_place(
    scores: dict[str, Any], losses: list[str]
) -> None:
    problems = find_losses(with_scores(scores))
    assert [str(problem).partition(" ->")[0] for problem in problems] == losses


def saved(report: Report, folder: Path) -> Path:
    path = folder / "report.json"
    path.write_text(format_report(report, "json"))
    return path


def test_losses_in_a_report_are_found_by_kind(tmp_path: Path) -> None:
    mine = STATE.model_copy(update={"digest": SHIPPED.digest, "base": ""})
    lost = report_of((CONTROL, scores(1, 1)), (mine, scores(1, 0)))
    assert [problem.what for problem in find_losses(UNKNOWN, saved(lost, tmp_path))] == [
        "resizing beats it at K = 8 by 50.0 points (50.0 to 50.0)",
        "resizing beats it at K = 8 on 'count' by 100.0 points (100.0 to 100.0)",
    ]
    won = report_of((CONTROL, scores(0, 0)), (mine, scores(1, 0)))
    assert list(find_losses(UNKNOWN, saved(won, tmp_path))) == []
    other = report_of((CONTROL, scores(1, 1)), (STATE, scores(1, 0)))
    (problem,) = find_losses(UNKNOWN, saved(other, tmp_path))
    assert "does not compare 'visionzip'" in problem.what


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ('{"rows": 3}', "is not a report"),
        ("[3]", "is not a report"),
        (format_report(build_report(contents((CONTROL, [1.0] * 6))), "json"), "is not valid"),
    ],
)
def test_files_that_are_no_valid_report(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        list(find_losses(UNKNOWN, path))
