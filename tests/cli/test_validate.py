"""Evidence that resizing beats a state, from its provenance and from a report of an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.samples import FULL
from tests.evaluation.test_report import CONTROL, STATE, report_of, scores
from vllm_autoprune import PruningState, load_state
from vllm_autoprune.cli.commands.validate import find_losses, find_reported_losses
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.report import Report
from vllm_autoprune.evaluation.run import as_json

ROW = {"budget": 16, "accuracy": 60.0, "accuracy_plus": 50.0, "prompt_tokens": 30.0}


def with_scores(scores: Any) -> PruningState:
    state = load_state("visionzip")
    provenance = state.provenance.model_copy(update={"scores": scores})
    return state.model_copy(update={"provenance": provenance})


def less_resized(value: float, low: float, high: float) -> dict[str, object]:
    return {**ROW, "less_resized": {"value": value, "low": low, "high": high}}


def test_a_loss_in_the_provenance_is_found_with_its_place() -> None:
    rows = [less_resized(3.0, 1.0, 5.0), less_resized(-4.0, -7.0, -1.0), less_resized(-1, -3, 1)]
    (loss,) = find_losses(with_scores({"model": "mini", "rows": rows}))
    assert loss.where == "/provenance/scores/rows/1"
    assert loss.what == "resizing beats it at K = 16 by 4.0 points (1.0 to 7.0)"
    assert loss.fix


def test_a_loss_at_a_share_of_the_tokens_names_its_model() -> None:
    row = {**less_resized(-4.0, -7.0, -1.0), "budget": "N/8", "model": "mini-Qwen3-VL 12ab"}
    (loss,) = find_losses(with_scores({"rows": [row]}))
    assert loss.what == (
        "resizing beats it at K = N/8 on mini-Qwen3-VL 12ab by 4.0 points (1.0 to 7.0)"
    )


@pytest.mark.parametrize("scores", [{}, {"mme": 1.0}, {"rows": 3}, {"rows": [ROW]}])
def test_scores_that_say_nothing_about_resizing(scores: Any) -> None:
    assert list(find_losses(with_scores(scores))) == []


def saved(report: Report, folder: Path) -> Path:
    path = folder / "report.json"
    path.write_text(as_json(report))
    return path


def test_losses_in_a_report_are_found_by_kind(tmp_path: Path) -> None:
    state = load_state("visionzip")
    own = STATE.model_copy(update={"digest": state.digest, "base": ""})
    lost = report_of((FULL, scores(1, 1)), (CONTROL, scores(1, 1)), (own, scores(1, 0)))
    said = [problem.what for problem in find_reported_losses(state, saved(lost, tmp_path))]
    assert said == [
        "resizing beats it at K = 8 by 50.0 points (50.0 to 50.0)",
        "resizing beats it at K = 8 on 'count' by 100.0 points (100.0 to 100.0)",
    ]
    won = report_of((FULL, scores(1, 1)), (CONTROL, scores(0, 0)), (own, scores(1, 0)))
    assert list(find_reported_losses(state, saved(won, tmp_path))) == []


def test_a_report_without_the_state_is_said_to_be_none_of_it(tmp_path: Path) -> None:
    report = report_of((FULL, scores(1, 1)), (CONTROL, scores(1, 1)), (STATE, scores(1, 0)))
    (problem,) = find_reported_losses(load_state("visionzip"), saved(report, tmp_path))
    assert "does not compare 'visionzip'" in problem.what


def test_files_that_are_no_valid_report(tmp_path: Path) -> None:
    state, path = load_state("visionzip"), tmp_path / "report.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        list(find_reported_losses(state, path))
    path.write_text('{"rows": 3}')
    with pytest.raises(ConfigError, match="is not a report"):
        list(find_reported_losses(state, path))
    saved(report_of((CONTROL, scores(1, 1))), tmp_path)
    with pytest.raises(ConfigError, match="is not valid"):
        list(find_reported_losses(state, path))
