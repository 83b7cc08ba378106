"""Searches of a comparison and of a study, resumed and printed, on a synthetic evaluator."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.search import __main__ as commands
from benchmarks.search import study as study_module
from benchmarks.search.__main__ import main
from benchmarks.search.results import (
    add_result,
    ledger_path,
    read_confirmation,
    read_results,
    results_of,
)
from benchmarks.search.study import (
    ABLATIONS,
    ARMS,
    CachingEvaluator,
    Study,
    format_tables,
    needs_proposer,
    run_comparison,
)
from benchmarks.search.tables import format_mean, format_searches
from benchmarks.yardsticks.yardstick import Yardstick
from offline_search.dataset import Dataset, Split
from offline_search.evaluator import EvaluationJob
from offline_search.ledger import Ledger, ReplyRecord, SettingsRecord, read_ledger
from offline_search.settings import Settings
from offline_search.strategies import STRATEGIES
from tests.offline_search.synthetic import (
    ScriptedProposer,
    SyntheticEvaluator,
    WaitingProposer,
    dataset,
    list_reply,
    run_search,
    valid_replies,
)
from vllm_autoprune.errors import SearchError


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    folder = tmp_path / "data"
    folder.mkdir()
    return dataset(folder)


TWO = ("tpe", "random")


def test_a_comparison_resumes_and_prints_its_results(data: Dataset, tmp_path: Path) -> None:
    settings = Settings(rounds=2, per_round=3, budgets=(8,))
    evaluator = SyntheticEvaluator(data)
    run_comparison(tmp_path, TWO, [0], settings, CachingEvaluator(evaluator), None)
    asked = len(evaluator.jobs)
    run_comparison(tmp_path, TWO, [0], settings, CachingEvaluator(evaluator), None)
    assert len(evaluator.jobs) == asked, "nothing is measured again"
    run_comparison(tmp_path, TWO, [0, 1], settings, CachingEvaluator(evaluator), None)
    known = read_results(tmp_path)
    winners = {
        name: [one.winner for one in results_of(known, name, range(3)).values() if one.winner]
        for name in TWO
    }
    assert [len(ended) for ended in winners.values()] == [2, 2]
    text = format_searches(tmp_path, TWO, range(3))
    gaps = [
        one.objective - other.objective
        for one, other in zip(winners["tpe"], winners["random"], strict=True)
    ]
    assert f"tpe less random, paired by seed: {format_mean(gaps)}" in text
    assert "| tpe | 2 |" in text


def test_only_strategies_that_ask_for_lists_get_them(data: Dataset, tmp_path: Path) -> None:
    settings = Settings(
        rounds=1, per_round=3, budgets=(8,), proposer="scripted", proposals_per_reply=3
    )
    arms = {"autoprune": 3, "autoprune+": 3, "autoprune+@none": 1, "tpe": 1}
    proposer = ScriptedProposer([list_reply(0, 3)])
    run_comparison(tmp_path, list(arms), [0], settings, SyntheticEvaluator(data), lambda: proposer)
    for arm, length in arms.items():
        record = read_ledger(tmp_path / f"{arm}-0.jsonl")[0]
        assert isinstance(record, SettingsRecord)
        assert record.settings.proposals_per_reply == length


def test_concurrent_searches_have_the_same_ledgers(data: Dataset, tmp_path: Path) -> None:
    settings = Settings(rounds=2, per_round=3, budgets=(8,), proposer="m")
    names, seeds, evaluator = ("autoprune", "random"), (0, 1), SyntheticEvaluator(data)
    alone, together = (
        ScriptedProposer(valid_replies(20)),
        WaitingProposer(valid_replies(20), 2 * settings.per_round),
    )
    run_comparison(tmp_path / "a", names, seeds, settings, evaluator, lambda: alone)
    run_comparison(tmp_path / "b", names, seeds, settings, evaluator, lambda: together, 4)
    for name in names:
        for seed in seeds:
            with (
                Ledger(tmp_path / "a" / f"{name}-{seed}.jsonl") as one,
                Ledger(tmp_path / "b" / f"{name}-{seed}.jsonl") as other,
            ):
                assert one.digest() == other.digest()


def test_a_model_that_writes_nothing_valid_does_not_stop_other_arms(
    data: Dataset, tmp_path: Path
) -> None:
    settings = Settings(rounds=6, per_round=5, budgets=(8,), proposer="m")
    names, evaluator = ("autoprune", "random"), SyntheticEvaluator(data)
    model = ScriptedProposer(["no"])
    run_comparison(tmp_path, names, [0], settings, evaluator, lambda: model)
    results = read_results(tmp_path)
    assert results["autoprune-0"].winner is None and results["random-0"].winner is not None
    assert results["autoprune-0"].invalid == results["autoprune-0"].candidates == 25
    lines = format_searches(tmp_path, names, [0]).splitlines()
    assert "| autoprune | 0 |  |  |  |  | 100 |" in lines
    assert any(line.startswith("| random | 1 |") and line.endswith("| 0 |") for line in lines)


async def test_answers_are_cached_across_searches(data: Dataset) -> None:
    evaluator = SyntheticEvaluator(data)
    remembering = CachingEvaluator(evaluator)
    job = EvaluationJob(None, 0, "search", 0, 4)
    assert await remembering.evaluate(job) == await remembering.evaluate(job)
    assert len(evaluator.jobs) == 1


async def _add_search(folder: Path, data: Dataset, seed: int, base_policy: str) -> None:
    settings = Settings(
        strategy="random", rounds=1, per_round=2, budgets=(8,), seed=seed, base_policy=base_policy
    )
    await run_search(folder / f"random-{seed}.jsonl", settings, SyntheticEvaluator(data))
    add_result(folder, "random", seed)


def test_winners_are_confirmed_on_the_base_policy_of_their_search(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bases: list[str] = []

    def evaluator(
        yardstick: Yardstick, images: dict[Split, int], *, each: int, base_policy: str
    ) -> SyntheticEvaluator:
        bases.append(base_policy)
        return SyntheticEvaluator(data)

    monkeypatch.setattr(commands, "open_yardstick", lambda name, checkpoint: None)
    monkeypatch.setattr(commands, "YardstickEvaluator", evaluator)
    asyncio.run(_add_search(tmp_path, data, 0, "divprune"))
    assert main(["confirm", "--out", str(tmp_path), "--strategies", "random"]) == 0
    assert bases == ["divprune"] and set(read_confirmation(tmp_path)) == {"random-0"}


def test_a_folder_of_several_base_policies_is_refused(
    data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, base_policy in enumerate(("divprune", "visionzip")):
        asyncio.run(_add_search(tmp_path, data, seed, base_policy))
    assert main(["confirm", "--out", str(tmp_path)]) == 1
    assert "2 base policies (divprune, visionzip) ->" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["compare", "study"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--proposals-per-reply", "5"], "no language model writes -> give --proposer-url"),
        (["--strategies", "tpe", "autoprune"], "some ask a language model -> give --proposer-url"),
        (["--proposer-url", "http://localhost:1/v1"], "give --proposer-model"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    command: str,
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([command, "--out", str(tmp_path / "out"), *options]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


class StandIn:
    """A yardstick's name, where its model is not needed."""

    name = "stand-in"


@pytest.fixture(autouse=True)
def measured(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> list[SyntheticEvaluator]:
    """The evaluators that studies open, which take the place of a yardstick's model."""
    used: list[SyntheticEvaluator] = []

    def evaluator(
        yardstick: Yardstick, images: dict[Split, int], *, each: int, base_policy: str
    ) -> SyntheticEvaluator:
        used.append(SyntheticEvaluator(data, probes=False))
        return used[-1]

    monkeypatch.setattr(study_module, "open_yardstick", lambda name: StandIn())
    monkeypatch.setattr(study_module, "YardstickEvaluator", evaluator)
    return used


def test_a_study_compares_arms_with_and_without_a_model(
    measured: list[SyntheticEvaluator], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = ("tpe", "autoprune+@none", "autoprune+")
    study = Study(tmp_path / "out", arms, range(2), 2, "scripted")
    assert study.needs_proposer(["minillava"], [8])
    proposers: list[ScriptedProposer] = []

    def connect() -> ScriptedProposer:
        proposers.append(ScriptedProposer(valid_replies(8)))
        return proposers[-1]

    text = study.run("minillava", 8, connect)
    assert "## stand-in, K = 8" in text and "| autoprune+@none | 2 |" in text
    for arm in ("tpe", "autoprune+@none"):
        assert f"less {arm}, paired by seed" in text
    folder = tmp_path / "out" / "minillava-k8"
    for arm, asks in zip(arms, (False, False, True), strict=True):
        records = read_ledger(ledger_path(folder, arm, 1))
        first = records[0]
        assert isinstance(first, SettingsRecord)
        assert first.settings.strategy == arm.removesuffix("@none")
        assert bool(first.settings.proposer) == asks
        assert any(isinstance(record, ReplyRecord) for record in records) == asks
    # Printing it again takes the results alone, and measures and asks nothing.
    for ledger in folder.glob("*-[01].jsonl"):
        ledger.unlink()
    assert not study.needs_proposer(["minillava"], [8])
    assert study.needs_proposer(["minillava"], [8, 16])
    assert study.run("minillava", 8, None) == text
    assert not measured[-1].jobs and not measured[-2].jobs and len(proposers) == 1
    capsys.readouterr()
    assert main(["table", "--out", str(folder), "--strategies", *arms, "--seeds", "2"]) == 0
    assert text == f"## stand-in, K = 8\n\n{capsys.readouterr().out}"
    second = ["--first-seed", "1", "--seeds", "1"]
    assert main(["table", "--out", str(folder), "--strategies", "tpe", *second]) == 0
    assert format_tables(folder, ["tpe"], [1]) == capsys.readouterr().out
    other = replace(study, rounds=3)
    with pytest.raises(SearchError, match="has other settings"):
        other.run("minillava", 8, None)


def test_searches_of_a_study_share_the_batches_of_the_model(tmp_path: Path) -> None:
    arms = ("random", "autoprune")
    study = Study(tmp_path / "out", arms, range(2), 1, "scripted", concurrency=4)
    # Replies wait until two searches have sent the five requests of a round.
    proposer = WaitingProposer(valid_replies(20), 10)
    text = study.run("minillava", 8, lambda: proposer)
    assert "| autoprune | 2 |" in text and "less random, paired by seed" in text


def test_the_ablations_search_smaller_spaces_and_sweep_the_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(study_module.RELEASED, "minillava", ("divprune", 8))
    command = ["ablations", "--yardstick", "minillava", "--out", str(tmp_path), "--seeds", "2"]
    assert main([*command, "--rounds", "1"]) == 0
    text = capsys.readouterr().out
    folder = tmp_path / "minillava-k8"
    for arm in ABLATIONS:
        settings = read_results(folder)[f"{arm}-1"].settings
        assert arm == f"autoprune+@none@{settings.space}" and settings.base_policy == "divprune"
        assert f"| {arm} | 2 |" in text
    assert "less autoprune+@none@released" in text and "less base policy" in text
    assert [f"| q_e = {quota} |" in text for quota in (0, 1, 2, 4, 8, 16)] == [True] * 5 + [False]


def test_every_strategy_is_an_arm_and_the_model_is_left_out_where_an_arm_says_so() -> None:
    assert {arm.removesuffix("@none") for arm in ARMS} == set(STRATEGIES)
    settings = Settings(proposer="m")
    without: Sequence[str] = ("random", "tpe", "autoprune+@none")
    assert not needs_proposer(without, settings)
    assert all(needs_proposer([arm], settings) for arm in ARMS if arm not in without)
