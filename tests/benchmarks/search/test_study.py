"""Comparisons and studies: run, resumed, confirmed and printed, on a synthetic evaluator."""

from __future__ import annotations

import statistics
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.search import __main__ as command
from benchmarks.search import study
from benchmarks.search.study import (
    _CURVE_SHARES,
    ARMS,
    BASE,
    WITHOUT_PROPOSER,
    _confirm,
    _Confirmed,
    _format_difference,
    _format_mean,
    _read_confirmed,
    _read_results,
    _run_comparison,
    asks_model,
    format_tables,
    run_study,
)
from offline_search.dataset import Dataset
from offline_search.ledger import (
    ReplyRecord,
    SettingsRecord,
    TrialRecord,
    WinnerRecord,
    read_ledger,
)
from offline_search.settings import Settings
from offline_search.strategies import STRATEGIES
from tests.offline_search.synthetic import (
    VALID_REPLIES,
    ScriptedProposer,
    SyntheticEvaluator,
    dataset,
)
from vllm_autoprune.errors import SearchError

TWO = ("tpe", "random")
SMALL = Settings(rounds=2, per_round=3, budgets=(8,))
ASKING = SMALL.model_copy(update={"proposer": "m"})


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    folder = tmp_path / "data"
    folder.mkdir()
    return dataset(folder)


@pytest.fixture
def measured(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> list[SyntheticEvaluator]:
    """The evaluators that studies open, which take the place of a yardstick's model."""
    used: list[SyntheticEvaluator] = []

    def open_evaluator(*arguments: object, **more: object) -> SyntheticEvaluator:
        used.append(SyntheticEvaluator(data, probes=False))
        return used[-1]

    monkeypatch.setattr(study, "open_yardstick", lambda name: SimpleNamespace(name="stand-in"))
    monkeypatch.setattr(study, "YardstickEvaluator", open_evaluator)
    return used


def test_a_comparison_resumes_and_each_winner_is_confirmed_once(
    data: Dataset, tmp_path: Path
) -> None:
    evaluator, confirming = SyntheticEvaluator(data), SyntheticEvaluator(data)
    _run_comparison(tmp_path, TWO, [0], SMALL, evaluator, None)
    asked = len(evaluator.jobs)
    _run_comparison(tmp_path, TWO, [0], SMALL, evaluator, None)
    assert len(evaluator.jobs) == asked, "nothing is measured again"
    _run_comparison(tmp_path, TWO, [0, 1], SMALL, evaluator, None)
    assert list(_read_results(tmp_path)) == ["random-0", "random-1", "tpe-0", "tpe-1"]
    with pytest.raises(SearchError, match="tpe-0 has other settings"):
        _run_comparison(tmp_path, TWO, [0], Settings(rounds=3), evaluator, None)

    _confirm(tmp_path, confirming, {}, 8)
    records = [*read_ledger(tmp_path / "random-0.jsonl")]
    trials = [record for record in records if isinstance(record, TrialRecord)]
    result = _read_results(tmp_path)["random-0"]
    assert result.candidates == len(trials) and result.invalid == result.replies == 0
    assert result.answers == sum(trial.examples for trial in trials)
    assert len(result.curve) == len(_CURVE_SHARES) and result.winner is not None
    assert result.curve[0] is None, "a tenth of the answers is less than one candidate"
    assert isinstance(records[-1], WinnerRecord)
    assert result.winner.load().digest == records[-1].digest
    confirmed, jobs = _read_confirmed(tmp_path), len(confirming.jobs)
    assert confirmed.keys() == _read_results(tmp_path).keys()
    _confirm(tmp_path, confirming, {}, 8)
    assert len(confirming.jobs) == jobs and {job.split for job in confirming.jobs} == {"test"}
    text = format_tables(tmp_path, TWO, range(3))
    gaps = [confirmed[f"random-{n}"].objective - confirmed[f"tpe-{n}"].objective for n in (0, 1)]
    assert f"{statistics.mean(gaps):.2f} ±" in text and "24 questions" in text
    assert text.count("| tpe | 2 |") == 2


def test_a_model_that_writes_nothing_valid_does_not_stop_other_arms(
    data: Dataset, tmp_path: Path
) -> None:
    settings = Settings(rounds=6, per_round=5, budgets=(8,), proposer="m")
    arms, model = ("autoprune", "random"), ScriptedProposer(["no"])
    _run_comparison(
        tmp_path, arms, [0], settings, SyntheticEvaluator(data), lambda: nullcontext(model)
    )
    results = _read_results(tmp_path)
    assert results["autoprune-0"].winner is None and results["random-0"].winner is not None
    assert results["autoprune-0"].invalid == results["autoprune-0"].candidates == 25
    lines = format_tables(tmp_path, arms, [0]).splitlines()
    assert "| autoprune | 0 |  |  |  |  | 100 |" in lines
    assert any(line.startswith("| random | 1 |") and line.endswith("| 0 |") for line in lines)


@pytest.mark.parametrize(("count", "quantile"), [(5, 2.776), (10, 2.262), (11, 2.228), (24, 2.069)])
def test_a_mean_has_a_student_t_interval(count: int, quantile: float) -> None:
    values = [float(value) for value in range(count)]
    mean, width = _format_mean(values, 2).split(" ± ")
    assert float(mean) == pytest.approx((count - 1) / 2, abs=0.01)
    half = quantile * statistics.stdev(values) / count**0.5
    assert float(width) == pytest.approx(half, abs=0.01)
    assert _format_mean([2.0]) == "2.0000", "one value has no interval"


def test_intervals_of_differences_are_over_seeds_and_questions() -> None:
    def score(*blocks: float) -> _Confirmed:
        mean = statistics.mean(blocks)
        return _Confirmed(
            questions=2, evaluator="e", digest="d", objective=mean, accuracy=0.0, blocks=blocks
        )

    base = score(0.0, 0.0)
    assert _format_difference([(score(1.0, 3.0), base)]) == "2.00 ± 12.71"
    both = [(score(1.0, 3.0), base), (score(2.0, 2.0), base)]
    assert _format_difference(both) == "2.00 ± 6.36", "the seeds agree in their means"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--strategies", "tpe", "autoprune"], "some ask a language model -> give --proposer-url"),
        (["--proposer-url", "http://localhost:1/v1"], "belong together -> give both"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["study", "--out", str(tmp_path / "out"), *options]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("measured")
def test_a_study_compares_arms_with_and_without_a_language_model(tmp_path: Path) -> None:
    arms, folder = ("tpe", "autoprune+@none", "autoprune+"), tmp_path / "minillava-k8"
    settings = ASKING.model_copy(update={"base_policy": "visionzip"})
    proposer = ScriptedProposer(VALID_REPLIES[:8])
    run_study(folder, "minillava", arms, range(2), settings, lambda: nullcontext(proposer))
    text = format_tables(folder, arms, range(2))
    assert text.count("| autoprune+@none | 2 |") == 3
    assert all(f"less {arm}, paired by seed" in text for arm in arms[:2])
    assert BASE in _read_confirmed(folder)
    for arm, asks in zip(arms, (False, False, True), strict=True):
        head, *records = read_ledger(folder / f"{arm}-1.jsonl")
        assert isinstance(head, SettingsRecord) and bool(head.settings.proposer) == asks
        assert head.settings.strategy == arm.removesuffix("@none")
        assert any(isinstance(record, ReplyRecord) for record in records) == asks


def test_a_study_is_run_and_printed_again_from_its_results(
    measured: list[SyntheticEvaluator], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["study", "--out", str(tmp_path), "--yardsticks", "minillava", "--budgets", "8"]
    call += ["--seeds", "1", "--rounds", "1"]
    assert command.main(call) == 0
    text = capsys.readouterr().out.partition("## stand-in, K = 8\n\n")[2].rstrip()
    folder = tmp_path / "minillava-k8"
    for ledger in folder.glob("*-0.jsonl"):
        ledger.unlink()
    assert command.main(call) == 0
    assert text in capsys.readouterr().out
    assert not measured[-1].jobs and not measured[-2].jobs
    assert command.main(["table", "--out", str(folder), "--seeds", "1"]) == 0
    assert text == capsys.readouterr().out.rstrip()


@pytest.mark.usefixtures("measured")
def test_the_ablations_search_smaller_spaces_and_sweep_the_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(study.RELEASED, "minillava", ("divprune", 8))
    call = ["ablations", "--yardstick", "minillava", "--out", str(tmp_path), "--seeds", "2"]
    assert command.main([*call, "--rounds", "1"]) == 0
    text = capsys.readouterr().out
    for arm in study.ABLATIONS:
        settings = _read_results(tmp_path / "minillava-k8")[f"{arm}-1"].settings
        assert arm == f"autoprune+@none@{settings.space}" and settings.base_policy == "divprune"
        assert f"| {arm} | 2 |" in text
    assert "less autoprune+@none@released" in text and "less base policy" in text
    assert [f"| q_e = {quota} |" in text for quota in (0, 1, 2, 4, 8, 16)] == [True] * 5 + [False]


def test_every_strategy_is_an_arm_and_the_model_is_left_out_where_an_arm_says_so() -> None:
    assert {arm.removesuffix("@none") for arm in ARMS} == set(STRATEGIES)
    assert {arm for arm in ARMS if not asks_model(arm, ASKING)} == set(WITHOUT_PROPOSER)
