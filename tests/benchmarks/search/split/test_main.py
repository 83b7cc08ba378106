from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from benchmarks.search.split.__main__ import (
    ALL_BUDGETS,
    REFERENCES,
    build_parser,
    count_questions,
    run,
)
from benchmarks.search.split.candidates import start_states
from benchmarks.search.split.halving import (
    PARENTS,
    Effort,
    Measurement,
    halve,
    judge_at,
    judge_worst,
)
from offline_search.dataset import Dataset
from offline_search.evaluation.evaluator import RecordedEvaluator
from offline_search.ledger import Ledger
from offline_search.ledger.records import SettingsRecord
from offline_search.settings import Settings
from tests.offline_search.synthetic import SyntheticEvaluator, dataset, score_state
from vllm_autoprune import load_state
from vllm_autoprune.errors import SearchError


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    folder = tmp_path / "data"
    folder.mkdir()
    return dataset(folder)


def options(folder: Path) -> argparse.Namespace:
    arguments = ["--scenes", "2", "12", "--budgets", "8", "16", "--rounds", "1", "--keep", "20"]
    return build_parser().parse_args(["--out", str(folder), *arguments])


async def test_a_search_resumes_and_compares_its_winners(data: Dataset, tmp_path: Path) -> None:
    evaluator = SyntheticEvaluator(data)
    settings = options(tmp_path)
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        report = await run(settings, ledger, evaluator)
    measured = len(evaluator.jobs)
    first = next(i for i, job in enumerate(evaluator.jobs) if job.split == "test")
    assert {job.split for job in evaluator.jobs[:first]} == {"validation"}
    tested = evaluator.jobs[first:]
    assert {job.split for job in tested} == {"test"}, "test questions choose nothing"
    entered = {row.state.digest for row in report.rows}
    assert {job.candidate.digest for job in tested if job.candidate is not None} == entered
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        again = await run(settings, ledger, evaluator)
    assert len(evaluator.jobs) == measured, "nothing is measured again"
    assert again.as_json() == report.as_json()
    labels = ["best split", "best unsplit", "best question-free", ALL_BUDGETS, *REFERENCES]
    assert [row.label for row in report.rows] == 2 * labels
    assert [row.family for row in report.rows[:4]] == ["split", "unsplit", "question-free", "split"]
    split, unsplit = report.rows[:2]
    gap = split.differences["best unsplit"]
    assert gap.value == pytest.approx(split.accuracy.value - unsplit.accuracy.value, abs=0.02)
    assert gap.low <= gap.value <= gap.high
    text = report.markdown()
    verdict = "holds" if gap.high >= 0 else "does not hold"
    assert re.search(rf"\| 8 \| best unsplit \| [^|]+ \| {verdict} \|", text)
    assert f"| best split | split | {split.core} |" in text and "K = 16" in text


async def test_a_ledger_of_other_questions_is_refused(data: Dataset, tmp_path: Path) -> None:
    evaluator = SyntheticEvaluator(data)
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.put(SettingsRecord(settings=Settings(evaluator="others")))
        with pytest.raises(SearchError, match="does not follow"):
            await run(options(tmp_path), ledger, evaluator)


async def test_halving_asks_few_questions_of_most_states(data: Dataset, tmp_path: Path) -> None:
    evaluator = SyntheticEvaluator(data)
    examples = data.examples("validation")
    stops = count_questions(examples, [3, 12])
    assert stops == [6, 24] and len(examples) == 24
    states = start_states("unsplit", 8)
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        measurement = Measurement(RecordedEvaluator(ledger, evaluator), "validation", stops)
        ranked = await halve(states, judge_at(measurement, 8), Effort(2, keep=8, rounds=0))
    asked = sum(job.stop - job.start for job in evaluator.jobs)
    finalists = -(-len(states) // 8)
    assert asked == len(states) * 6 + finalists * 18
    assert PARENTS <= len(ranked) == finalists
    scores = sorted(map(score_state, states), reverse=True)
    assert score_state(ranked[0]) >= scores[len(states) // 3]


async def test_the_worst_budget_judges_a_state_for_all(data: Dataset, tmp_path: Path) -> None:
    evaluator = SyntheticEvaluator(data)
    one, other = load_state("autoprune"), load_state("minillava")
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        measurement = Measurement(RecordedEvaluator(ledger, evaluator), "validation", [24])
        judge = judge_worst(measurement, {8: other, 16: one})
        worst, mean = await judge(one, 0)
        gain = await measurement.accuracy(one, 8, 0) - await measurement.accuracy(other, 8, 0)
    assert gain != 0
    assert worst == min(gain, 0.0) and mean == gain / 2
