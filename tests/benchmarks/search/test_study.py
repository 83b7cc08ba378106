"""Comparisons and studies: run, resumed, confirmed and printed, on a synthetic evaluator."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.search import __main__ as command
from benchmarks.search import study as module
from benchmarks.search.results import (
    _CURVE_SHARES,
    BASE,
    Confirmed,
    _format_both,
    _format_mean,
    format_tables,
    read_confirmed,
    read_results,
)
from benchmarks.search.study import (
    ARMS,
    WITHOUT_PROPOSER,
    Study,
    asks_model,
)
from offline_search.candidates import base_state
from offline_search.dataset import Dataset
from offline_search.ledger import ReplyRecord, TrialRecord, WinnerRecord, read_ledger
from offline_search.settings import Settings
from offline_search.strategies import STRATEGIES
from tests.offline_search.rewrite_recorded import RECORDED
from tests.offline_search.synthetic import (
    VALID_REPLIES,
    ScriptedProposer,
    SyntheticEvaluator,
    dataset,
)
from tests.tables import parametrize_from_file
from vllm_autoprune import load_state
from vllm_autoprune.errors import SearchError

SMALL = Settings(rounds=2, per_round=3, budgets=(8,))


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    return dataset(tmp_path / "data")


def test_a_comparison_resumes_with_the_same_settings_only(
    data: Dataset, tmp_path: Path
) -> None:
    evaluator = SyntheticEvaluator(data)
    arms = ("tpe", "random")
    Study(tmp_path, arms, [0], SMALL).search(evaluator)
    count = len(evaluator.jobs)
    Study(tmp_path, arms, [0], SMALL).search(evaluator)
    assert len(evaluator.jobs) == count, "nothing is measured again"
    Study(tmp_path, arms, [0, 1], SMALL).search(evaluator)
    assert list(read_results(tmp_path)) == ["random-0", "random-1", "tpe-0", "tpe-1"]
    with pytest.raises(SearchError, match="tpe-0 has other settings"):
        Study(tmp_path, arms, [0], Settings(rounds=3)).search(evaluator)


def test_a_result_is_what_the_ledger_says(data: Dataset, tmp_path: Path) -> None:
    Study(tmp_path, ["random"], [0], SMALL).search(SyntheticEvaluator(data))
    result = read_results(tmp_path)["random-0"]
    records = read_ledger(tmp_path / "random-0.jsonl")
    trials = [record for record in records if isinstance(record, TrialRecord)]
    assert result.candidates == len(trials) and result.invalid == result.replies == 0
    assert result.answers == sum(trial.examples for trial in trials)
    assert len(result.curve) == len(_CURVE_SHARES) and result.curve[0] is None
    assert isinstance(records[-1], WinnerRecord) and result.winner is not None
    assert load_state(result.winner.state).digest == records[-1].digest


def test_each_winner_is_confirmed_once(data: Dataset, tmp_path: Path) -> None:
    arms = ("tpe", "random")
    study = Study(tmp_path, arms, [0, 1], SMALL)
    study.search(SyntheticEvaluator(data))
    evaluator = SyntheticEvaluator(data)
    study.confirm(evaluator, {})
    confirmed = read_confirmed(tmp_path)
    count = len(evaluator.jobs)
    assert confirmed.keys() == read_results(tmp_path).keys()
    study.confirm(evaluator, {})
    assert len(evaluator.jobs) == count
    assert {job.split for job in evaluator.jobs} == {"test"}
    text = format_tables(tmp_path, arms, range(3))
    gaps = [
        confirmed[f"random-{n}"].objective - confirmed[f"tpe-{n}"].objective
        for n in (0, 1)
    ]
    assert f"{statistics.mean(gaps):.2f} ±" in text and "24 questions" in text
    assert text.count("| tpe | 2 |") == 2 and "gap" not in text


def test_leaders_are_measured_on_new_questions(data: Dataset, tmp_path: Path) -> None:
    """Of a search that has ended, without asking a search question again."""
    evaluator = SyntheticEvaluator(data)
    seeds = (0, 1)
    Study(tmp_path, ["tpe"], seeds, SMALL).search(evaluator)
    asked = len(evaluator.jobs)
    study = Study(tmp_path, ["tpe"], seeds, SMALL, leaders=2)
    study.search(evaluator)
    assert len(evaluator.jobs) == asked
    study.confirm(evaluator, {BASE: base_state(SMALL)})
    confirmed = read_confirmed(tmp_path)
    gaps = []
    ranks = []
    for name, result in read_results(tmp_path).items():
        trials = [
            r
            for r in read_ledger(tmp_path / f"{name}.jsonl")
            if isinstance(r, TrialRecord)
        ]
        searched = {r.name: r.score for r in trials if r.score is not None}
        best = sorted(searched, key=lambda trial: -searched[trial])[:5]
        assert [leader.name for leader in result.leaders] == best
        new = [confirmed[f"{name} {trial}"].objective for trial in best]
        places = np.argsort(np.argsort(new)[::-1]).tolist()
        ranks.append(statistics.correlation(range(5), places))
        assert result.winner is not None and result.base_objective is not None
        base = confirmed[BASE].objective
        winner = next(
            each.name for each in result.leaders if each.digest == result.winner.digest
        )
        gap = (
            searched[winner]
            - result.base_objective
            - (confirmed[name].objective - base)
        )
        gaps.append(gap)
    row = f"| tpe | 2 | {_format_mean(gaps, 2)} | {_format_mean(ranks, 2)} |"
    assert row in format_tables(tmp_path, ["tpe"], seeds)


def test_winners_are_confirmed_again_by_another_evaluator(
    data: Dataset, tmp_path: Path
) -> None:
    study = Study(tmp_path, ["random"], [0], SMALL)
    study.search(SyntheticEvaluator(data))
    study.confirm(SyntheticEvaluator(data), {})
    other = SyntheticEvaluator(data)
    other.name = "other questions"
    study.confirm(other, {})
    assert other.jobs
    assert read_confirmed(tmp_path)["random-0"].evaluator == "other questions"


@pytest.mark.slow
def test_searches_with_a_capable_proposer_replay(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main(["replay"]) == 0
    *joint, llava, qwen, earlier, latest = capsys.readouterr().out.splitlines()
    winners = [re.findall(r"^([a-z]+)-\d: candidate (\S+),", line) for line in joint]
    free = [[("free", name)] for name in ("5.0", "4.1", "4.1")]
    assert winners[:3] == free
    assert winners[3:] == [[("joint", name)] for name in ("2.1", "2.3", "4.11", "5.2")]
    assert earlier.startswith("reading-7: candidate 4.0, ")
    assert latest.startswith("reading-9: candidate 4.1, ")
    assert llava.startswith("minillava: candidate 10.1, search objective -1.39; ")
    assert qwen.startswith("miniqwen: candidate 9.4, search objective -0.48; ")


def test_a_replay_that_differs_is_an_error(
    data: Dataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        module, "open_yardstick", lambda name: SimpleNamespace(name=name)
    )
    synthetic = SyntheticEvaluator(data, probes=False)
    monkeypatch.setattr(module, "YardstickEvaluator", lambda *_, **options: synthetic)
    recording = RECORDED / "lists.jsonl"
    assert module.replay_study(recording).startswith("lists: candidate ")
    changed = tmp_path / "lists.jsonl"
    changed.write_text(
        recording.read_text().replace('"status":"evaluated"', '"status":"dropped"')
    )
    with pytest.raises(SearchError, match="its replay differs"):
        module.replay_study(changed)


def test_a_language_model_is_asked_by_the_arms_that_name_it(
    data: Dataset, tmp_path: Path
) -> None:
    """One that writes nothing valid does not stop the others."""

    def connecting(replies: Sequence[str]) -> module.Connect:
        model = ScriptedProposer(replies)
        return lambda: nullcontext(model)

    settings = Settings(rounds=6, per_round=5, budgets=(8,), proposer="m")
    for folder, replies in (
        (tmp_path / "a", VALID_REPLIES[:8]),
        (tmp_path / "b", ["no"]),
    ):
        connect = connecting(replies)
        arms = ("autoprune", "autoprune+@none")
        evaluator = SyntheticEvaluator(data)
        Study(folder, arms, [0], settings, connect, at_once=2).search(evaluator)
        for arm in arms:
            records = read_ledger(folder / f"{arm}-0.jsonl")
            asked = any(isinstance(record, ReplyRecord) for record in records)
            assert asked == (arm == "autoprune")
    results = read_results(tmp_path / "b")
    assert results["autoprune-0"].winner is None and results["autoprune+@none-0"].winner
    assert results["autoprune-0"].invalid == results["autoprune-0"].candidates == 25
    text = format_tables(tmp_path / "b", arms, [0])
    assert (
        "| autoprune | 0 |  |  |  |  |  | 100 |" in text
        and "| autoprune+@none | 1 |" in text
    )


@pytest.mark.parametrize(
    ("count", "quantile"), [(5, 2.776), (10, 2.262), (11, 2.228), (24, 2.069)]
)
def test_a_mean_has_a_student_t_interval(count: int, quantile: float) -> None:
    values = [float(value) for value in range(count)]
    mean, width = _format_mean(values, 2).split(" ± ")
    assert float(mean) == pytest.approx((count - 1) / 2, abs=0.01)
    half = quantile * statistics.stdev(values) / count**0.5
    assert float(width) == pytest.approx(half, abs=0.01)
    assert _format_mean([2.0]) == "2.0000", "one value has no interval"


def test_intervals_of_differences_are_over_seeds_and_questions() -> None:
    def score(*blocks: float) -> Confirmed:
        mean = statistics.mean(blocks)
        return Confirmed(
            questions=2,
            evaluator="e",
            digest="d",
            objective=mean,
            accuracy=mean / 10,
            blocks=blocks,
            accuracy_blocks=tuple(block / 10 for block in blocks),
        )

    base = score(0.0, 0.0)
    assert _format_both([(score(1.0, 3.0), base)]) == ("2.00 ± 12.71", "20.0 ± 127.1")
    both = [(score(1.0, 3.0), base), (score(2.0, 2.0), base)]
    nats, points = _format_both(both)
    assert (nats, points) == ("2.00 ± 6.36", "20.0 ± 63.6"), "the seeds' means agree"


@pytest.fixture
def small(data: Dataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Options of two short searches of an arm, measured on a synthetic evaluator."""
    monkeypatch.setattr(
        command, "open_yardstick", lambda name: SimpleNamespace(name="stand-in")
    )
    synthetic = SyntheticEvaluator(data, probes=False)
    monkeypatch.setattr(module, "YardstickEvaluator", lambda *_, **options: synthetic)
    monkeypatch.setitem(module.RELEASED, "minillava", ("divprune", 8))
    return ["--out", str(tmp_path), "--seeds", "2", "--rounds", "1"]


@parametrize_from_file("message", "options")
def test_a_study_that_cannot_ask_its_language_model_is_refused(
    small: list[str],
    capsys: pytest.CaptureFixture[str],
    message: str,
    options: list[str],
) -> None:
    assert command.main(["study", *small, *options]) == 1
    assert message in capsys.readouterr().err


def test_a_study_is_printed_again_from_its_results_alone(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["study", *small, "--yardsticks", "minillava", "--budgets", "8"]
    assert command.main(words) == 0
    text = capsys.readouterr().out.partition("## stand-in, K = 8\n\n")[2].rstrip()
    references = ("tpe", "autoprune+@none")
    assert all(f"less {arm}, paired by seed" in text for arm in references)
    folder = tmp_path / "minillava-k8"
    for ledger in folder.glob("*-[01].jsonl"):
        ledger.unlink()
    assert command.main(["table", "--out", str(folder), "--seeds", "2"]) == 0
    assert text == capsys.readouterr().out.rstrip()


def test_a_joint_study_is_confirmed_on_each_model(
    data: Dataset,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    synthetic = SyntheticEvaluator(data, probes=False)
    synthetic.dataset = data.ask_models(("minillava", "miniqwen"))
    monkeypatch.setattr(module, "open_evaluator", lambda *_: synthetic)
    monkeypatch.setattr(
        command, "open_yardstick", lambda name: SimpleNamespace(name=name)
    )
    words = ["study", "--out", str(tmp_path), "--joint", "--budgets", "1/8"]
    words += ["--seeds", "1", "--rounds", "1", "--strategies", "random"]
    assert command.main(words) == 0
    assert "## minillava and miniqwen, K = 1/8" in capsys.readouterr().out
    folder = tmp_path / "minillava-miniqwen-k1-8"
    assert read_results(folder)["random-0"].settings.models == ("minillava", "miniqwen")
    confirmed = read_confirmed(folder)
    assert confirmed[BASE].models["miniqwen"][0] == pytest.approx(-1, abs=1e-4)
    score = confirmed["random-0"]
    objectives = [objective for objective, _ in score.models.values()]
    assert score.objective == pytest.approx(statistics.mean(objectives), abs=1e-5)
    text = format_tables(folder, ["random"], [0])
    assert "| state | mean | minillava | miniqwen |" in text


def test_ablations_compare_smaller_spaces_and_quotas(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["ablations", "--yardstick", "minillava", *small]) == 0
    text = capsys.readouterr().out
    results = read_results(tmp_path / "minillava-k8")
    for arm in module.ABLATIONS:
        settings = results[f"{arm}-1"].settings
        assert arm == f"autoprune+@none@{settings.space}"
        assert settings.base_policy == "divprune"
        assert f"| {arm} | 2 |" in text
    assert "less autoprune+@none@released" in text and "less base policy" in text
    rows = [quota for quota in (0, 1, 2, 4, 8, 16) if f"| q_e = {quota} |" in text]
    assert rows == [0, 1, 2, 4, 8], "no quota above K"


def test_every_strategy_is_an_arm_and_the_model_is_left_out_where_an_arm_says_so() -> (
    None
):
    assert {arm.removesuffix("@none") for arm in ARMS} == set(STRATEGIES)
    asking = SMALL.model_copy(update={"proposer": "m"})
    assert {arm for arm in ARMS if not asks_model(arm, asking)} == set(WITHOUT_PROPOSER)
