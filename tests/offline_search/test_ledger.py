"""The ledger of a search, kills of what writes it, the scores of answers, and history."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from offline_search.dataset import Dataset
from offline_search.differences import Difference, compare
from offline_search.history import Answers, History, Trial
from offline_search.ledger import (
    Clock,
    EvaluationRecord,
    Ledger,
    SettingsRecord,
    SummaryRecord,
    TrialRecord,
    WinnerRecord,
    digest_records,
    read_ledger,
)
from offline_search.settings import Settings
from tests.fake_server import Answer, Body
from tests.offline_search.synthetic import answer_search, endpoint, trial
from vllm_autoprune.errors import SearchError
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.statistics import ClusterBootstrap, Estimate


def test_records_persist_and_only_their_clock_may_differ(tmp_path: Path) -> None:

    def summary(number: int, text: str = "so far") -> SummaryRecord:
        return SummaryRecord(round=number, text=text, clock=Clock(at=number, seconds=1))

    path = tmp_path / "a" / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.put(SettingsRecord(settings=Settings()))
        ledger.put(summary(1))
        digest = digest_records(ledger)
        with pytest.raises(SearchError, match="another process is writing"):
            Ledger(path)
    with Ledger(path) as again:
        assert digest_records(again) == digest
        assert again.find(SummaryRecord, "summary/1") == summary(1)
        assert again.find(SummaryRecord, "summary/2") is None
        again.put(summary(1).model_copy(update={"clock": Clock(at=99, seconds=9)}))
        with pytest.raises(SearchError, match="does not follow"):
            again.put(summary(1, "something else"))
    records = read_ledger(path)
    assert [record.key for record in records] == ["opened", "summary/1"]
    timeless = [
        record.model_copy(update={"clock": Clock()}) for record in reversed(records)
    ]
    assert digest_records(timeless) == digest, "neither clocks nor order count"
    assert digest_records([*records, summary(3)]) != digest


def test_a_replay_takes_only_external_records_from_the_recording(
    tmp_path: Path,
) -> None:
    effect = EvaluationRecord(
        split="search",
        digest="d",
        budget=8,
        start=0,
        stop=1,
        logprob=(-1.0,),
        right="1",
        clock=Clock(at=5, seconds=2),
    )
    derived = TrialRecord(round=1, index=0, status="same")
    with Ledger(tmp_path / "replayed", [effect, derived]) as replayed:
        assert replayed.find(TrialRecord, derived.key) is None
        assert replayed.find(EvaluationRecord, effect.key) == effect
        assert list(replayed) == read_ledger(tmp_path / "replayed") == [effect]


@pytest.mark.slow
def test_a_command_that_is_killed_has_the_same_ledger(data: Dataset) -> None:

    def slow_model(body: Body, number: int) -> Answer:
        """The model of a search, slow enough to be killed during it."""
        time.sleep(0.002)
        return answer_search(body, number)

    with endpoint(slow_model) as server:
        ended = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.offline_search.killed_command",
                server.url,
                str(data.folder),
                "12",
            ],
            capture_output=True,
            text=True,
            timeout=600,
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert ended.returncode == 0, ended.stderr[-2000:]
    kills, *codes, complete, cut = ended.stdout.split()
    assert cut == complete and codes == ["0", "0"]
    assert int(kills) >= 3, "kills came too late to tell anything"
    assert "Traceback" not in (data.folder / "errors").read_text()
    records = read_ledger(data.folder / "cut.jsonl")
    assert len({record.key for record in records}) == len(records), (
        "nothing was measured twice"
    )
    assert isinstance(records[-1], WinnerRecord)


# ---- scores of answers, and their errors ----


def example(image: int, category: str = "digit", pair: int | None = None) -> Example:
    return Example(
        image=f"{image}", question="q", answer="a", category=category, pair=pair
    )


MIXED = [
    *(example(n // 2, "c", n // 2) for n in range(8)),
    *(example(10 + n // 3, "d") for n in range(6)),
    example(9, "c"),
]


@pytest.mark.parametrize("seed", range(4))
def test_values_of_examples_have_the_objective_as_their_mean(seed: int) -> None:

    def answers(*right: int) -> Answers:
        return Answers(
            tuple(-1.0 - i for i in range(len(right))), tuple(map(bool, right))
        )

    def mme_points(chosen: Answers) -> float:
        """MME's total as MME defines it: accuracy+ counts pairs, or images where there are none."""
        points = 0.0
        for name in ("c", "d"):
            rows = [row for row, each in enumerate(MIXED) if each.category == name]
            points += 100 * sum(chosen.right[row] for row in rows) / len(rows)
            groups: dict[object, bool] = {}
            for row in rows:
                if name == "d" or MIXED[row].pair is not None:
                    key = (MIXED[row].image, MIXED[row].pair)
                    groups[key] = groups.get(key, True) and chosen.right[row]
            points += 100 * sum(groups.values()) / len(groups)
        return points

    rng = np.random.default_rng(seed)
    pruned, full = (answers(*rng.integers(0, 2, 15)) for _ in range(2))
    values = pruned.relative_to(full, MIXED, "mme")
    assert 1000 * pruned.mme_shares(MIXED).mean() == pytest.approx(mme_points(pruned))
    assert 1000 * values.mean() == pytest.approx(mme_points(pruned) - mme_points(full))
    # After a part of the examples, those of the other categories do not change.
    part = answers(*pruned.right[:8]).relative_to(full, MIXED, "mme")
    assert part == pytest.approx(values[:8])
    less = Answers((-1.0, -0.5, -0.25), (True,) * 3)
    assert less.relative_to(Answers((-0.5,) * 4, (True,) * 4), MIXED).tolist() == [
        -0.5,
        0.0,
        0.25,
    ]


def test_intervals_and_errors_are_over_images_not_questions() -> None:
    counts = [1 + image % 5 for image in range(60)]
    rows = [example(image) for image, count in enumerate(counts) for _ in range(count)]
    gaps = np.random.default_rng(3).normal(size=60).repeat(counts) - 1.0
    bootstrap = ClusterBootstrap([row.image for row in rows])
    interval = Estimate.of(bootstrap.mean(gaps))
    zeros = np.zeros(len(rows))
    width = interval.high - interval.low
    assert compare(rows, gaps, zeros).error == pytest.approx(width / 3.92, rel=0.1)
    constant = compare(rows, np.full(len(rows), -1.0), zeros)
    assert constant.error == pytest.approx(0.0), "however many questions an image has"


def test_verdicts_of_paired_differences() -> None:
    generator = np.random.default_rng(1)
    rows = [example(i // 2) for i in range(80)]
    rival = generator.normal(size=80)
    noise = 0.1 * generator.normal(size=80)
    worse, better = (compare(rows, rival + gap + noise, rival) for gap in (-0.5, 0.5))
    assert (worse.verdict(errors=3), better.verdict()) == ("worse", "better")
    assert (worse.verdict(0.4), worse.verdict(0.6)) == ("worse", "same")
    tie = compare(rows, rival + noise, rival)
    assert tie.verdict() == tie.verdict(0.01) == "undecided"
    assert tie.verdict(0.1) == "same"
    few = compare(rows[:6], rival[:6] - 0.5, rival[:6])
    assert few.error == float("inf") and few.verdict() == "undecided", (
        "three images tell nothing"
    )
    rows = [example(i) for i in range(40)]
    rivals = [generator.normal(size=40) for _ in range(500)]
    equal = (compare(rows, each + generator.normal(size=40), each) for each in rivals)
    leads = [gap.verdict(errors=3) for gap in equal]
    assert leads.count("worse") / 500 < 0.01, "equal candidates are rarely dropped"


# ---- history ----


def test_dropped_trials_are_estimated_by_the_difficulty_of_their_examples() -> None:
    """Both are at -1 on the easy half, where the average trial is at -1 as well."""
    easy = [-1.0] * 4
    hard = [-3.0] * 4

    def history(*trials: Trial, base: float = -2.0) -> History:
        result = TrialRecord(round=0, index=0, status="evaluated", objective=base)
        baseline = Trial(trial("0.0").proposal, result, values=np.array(easy + hard))
        return History(baseline, list(trials))

    dropped = trial("1.1", easy, status="dropped")
    known = history(
        trial("1.0", easy + hard), dropped, trial("1.2", status="same", reason="1.1")
    )
    assert known.objective_of("1.1") == known.objective_of("1.2") == pytest.approx(-2.0)
    assert known.objective_of("base") == -2.0 and known.objective_of("9.9") is None
    with pytest.raises(ValueError, match="not evaluated to the end"):
        _ = dropped.score


def test_candidates_with_other_questions_are_compared_through_those_who_answered_both() -> (
    None
):
    """The second block is easy; without the correction who was asked it would lead."""
    rng = np.random.default_rng(0)
    rows = [example(i) for i in range(80)]
    hard = np.repeat([-3.0, -1.0], 40)
    skill = {"0.0": -1.0, "1.0": -0.2, "1.1": -0.5, "2.0": -0.4}
    blocks = {"1.0": slice(40, 80), "1.1": slice(40), "2.0": slice(40, 80)}
    trials = {}
    for name, value in skill.items():
        values = np.full(80, np.nan)
        asked = blocks.get(name, slice(80))
        values[asked] = (hard + value + 0.05 * rng.normal(size=80))[asked]
        trials[name] = trial(name, values)
    known = History(trials.pop("0.0"), list(trials.values()), rows)
    assert [each.name for each in known.ranked()] == ["1.0", "2.0", "1.1"]
    for name, each in trials.items():
        assert known.estimate(each) == pytest.approx(skill[name] - 2, abs=0.05)
    gap = known.compare(trials["1.1"], trials["2.0"])
    assert gap.value == pytest.approx(-0.1, abs=0.05) and 0 < gap.error < 0.05
    assert known.compare(trials["1.1"], trials["1.0"]).verdict() == "worse"
    # Asked the other block as well, it has all of its answers in one estimate.
    known.add_values("1.1", slice(40, 80), np.full(40, -1.4))
    again = known.find("1.1")
    assert again is not None and known.estimate(again) == pytest.approx(-2.45, abs=0.05)
    assert Difference(0.1, 0.01).estimate().low == pytest.approx(0.08)
