from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.accuracy.yardsticks.yardstick import Yardstick
from benchmarks.search import study as study_module
from benchmarks.search.__main__ import main
from benchmarks.search.comparison import needs_proposer
from benchmarks.search.results import ledger_path, read_results
from benchmarks.search.study import ABLATIONS, ARMS, Study, format_tables
from offline_search.dataset import Dataset, Split
from offline_search.ledger import ReplyRecord, SettingsRecord, read_ledger
from offline_search.settings import Settings
from offline_search.strategies import STRATEGIES
from tests.offline_search.replies import valid_replies
from tests.offline_search.synthetic import (
    ScriptedProposer,
    SyntheticEvaluator,
    WaitingProposer,
    dataset,
)
from vllm_autoprune.errors import SearchError


class StandIn:
    """A yardstick's name, where its model is not needed."""

    name = "stand-in"


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    folder = tmp_path / "data"
    folder.mkdir()
    return dataset(folder)


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
