"""The ledger of a search, the history that is read from it, and reports of both."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.fake_server import Answer, Body
from offline_search.candidates import base_state
from offline_search.dataset import Dataset
from offline_search.evaluator import EvaluationJob
from offline_search.history import (
    Answers,
    History,
    Trial,
    accuracy,
    accuracy_plus,
    bootstrap_mean,
    mme_total,
    paired_error,
    relative_values,
    significantly_below,
)
from offline_search.ledger import (
    Clock,
    Cost,
    EvaluationRecord,
    Ledger,
    SettingsRecord,
    SummaryRecord,
    TrialRecord,
    WinnerRecord,
    digest_records,
    read_ledger,
)
from offline_search.proposer import SpendingLimits
from offline_search.replay import replay
from offline_search.report import SearchReport, as_html, as_markdown, describe_leader, read_report
from offline_search.search import ProgressLog, Search
from offline_search.settings import Settings
from tests.offline_search.synthetic import (
    HOSTILE,
    ScriptedProposer,
    Searches,
    SyntheticEvaluator,
    answer_search,
    endpoint,
    list_reply,
    settings_of,
    trial,
    valid_replies,
)
from vllm_autoprune.errors import SearchError
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.statistics import count_decimals
from vllm_autoprune.tpdsl.loading import load_state

# ---- ledger ----


def summary(number: int, text: str = "so far") -> SummaryRecord:
    return SummaryRecord(round=number, text=text, clock=Clock(at=number, seconds=1))


def test_records_persist_and_only_their_clock_may_differ(tmp_path: Path) -> None:
    path = tmp_path / "a" / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.put(SettingsRecord(settings=Settings()))
        ledger.put(summary(1))
        digest = ledger.digest()
        with pytest.raises(SearchError, match="another process is writing"):
            Ledger(path)
    with Ledger(path) as again:
        assert again.digest() == digest
        assert again.find(SummaryRecord, "summary/1") == summary(1)
        assert again.find(SummaryRecord, "summary/2") is None
        again.put(summary(1).model_copy(update={"clock": Clock(at=99, seconds=9)}))
        with pytest.raises(SearchError, match="does not follow"):
            again.put(summary(1, "something else"))
    assert [record.key for record in read_ledger(path)] == ["opened", "summary/1"]


def test_the_digest_ignores_clocks_and_order() -> None:
    records = [summary(number) for number in (1, 2)]
    reordered = [record.model_copy(update={"clock": Clock()}) for record in reversed(records)]
    assert digest_records(records) == digest_records(reordered)
    assert digest_records([*records, summary(3)]) != digest_records(records)


def test_a_replay_takes_only_external_records_from_the_recording(tmp_path: Path) -> None:
    effect = EvaluationRecord(
        split="search", digest="d", budget=8, start=0, stop=1, logprob=(-1.0,), right="1",
        clock=Clock(at=5, seconds=2),
    )  # fmt: skip
    derived = TrialRecord(round=1, index=0, status="same")
    with Ledger(tmp_path / "recorded") as recorded:
        recorded.put(effect)
        recorded.put(derived)
        recording = read_ledger(tmp_path / "recorded")
        with Ledger(tmp_path / "replayed", recording) as replayed:
            assert replayed.find(TrialRecord, derived.key) is None
            assert replayed.find(EvaluationRecord, effect.key) == effect
            replayed.put(derived)
            assert replayed.digest() == recorded.digest() == digest_records(recording)
    assert (tmp_path / "replayed").read_bytes() == (tmp_path / "recorded").read_bytes()


def slow_model(body: Body, number: int) -> Answer:
    """The model of a search, slow enough to be killed during it."""
    time.sleep(0.002)
    return answer_search(body, number)


def run_killed_command(data: Dataset, *more: str) -> list[str]:
    """Run a search that is killed again and again, and one that is not, on the same data.

    Returns what is printed: the number of kills, exit codes, and the digests of both ledgers.
    """
    with endpoint(slow_model) as server:
        command = [sys.executable, "-m", "tests.offline_search.killed_command"]
        ended = subprocess.run(
            [*command, server.url, str(data.folder), *more],
            capture_output=True,
            text=True,
            timeout=600,
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout.split()


@pytest.mark.slow
def test_a_command_killed_twenty_times_has_the_same_ledger(data: Dataset) -> None:
    hit, *codes, complete, killed = run_killed_command(data, "20")
    assert int(hit) >= 3, "kills came too late to tell anything"
    assert codes == ["0", "0", "0"] and killed == complete
    records = read_ledger(data.folder / "cut.jsonl")
    keys = [record.key for record in records]
    assert len(set(keys)) == len(keys), "nothing was measured twice"
    assert any(isinstance(record, EvaluationRecord) for record in records)


def test_a_full_disk_stops_the_command_and_it_resumes(data: Dataset) -> None:
    _, *codes, complete, filled = run_killed_command(data, "0", "20000")
    assert codes == ["0", "1", "0"] and filled == complete
    errors = (data.folder / "errors").read_text()
    assert "make room and resume" in errors and "Traceback" not in errors
    assert any(
        isinstance(record, WinnerRecord) for record in read_ledger(data.folder / "cut.jsonl")
    )


# ---- scores of answers, their errors, and what is known of trials ----


def example(image: int, category: str = "digit", pair: int | None = None) -> Example:
    return Example(image=f"{image}", question="q", answer="a", category=category, pair=pair)


def answers(*right: int) -> Answers:
    return Answers(tuple(-1.0 - i for i in range(len(right))), tuple(map(bool, right)))


def test_accuracy_plus_requires_both_answers_of_a_pair() -> None:
    paired = [example(0, pair=0), example(0, pair=0), example(1, pair=1), example(1, pair=1)]
    assert accuracy(answers(1, 1, 1, 0)) == 0.75
    assert accuracy_plus(paired, answers(1, 1, 1, 0)) == 0.5
    mixed = [*paired, example(2)]
    assert accuracy_plus(mixed, answers(1, 1, 1, 1, 0)) == 1.0, "a lone question is in no pair"
    alone = [example(0), example(0), example(1), example(1)]
    assert accuracy_plus(alone, answers(1, 1, 1, 0)) == 0.5, "without pairs: by image"


MIXED = [
    *(example(n // 2, "c", n // 2) for n in range(8)),
    *(example(10 + n // 3, "d") for n in range(6)),
    example(9, "c"),
]


def mme_points(chosen: Answers) -> float:
    """MME's total as MME defines it."""
    points = 0.0
    for name in ("c", "d"):
        rows = [row for row, each in enumerate(MIXED) if each.category == name]
        part = answers(*(chosen.right[row] for row in rows))
        points += 100 * (accuracy(part) + accuracy_plus([MIXED[row] for row in rows], part))
    return points


@pytest.mark.parametrize("seed", range(8))
def test_values_of_examples_have_mmes_total_as_their_mean(seed: int) -> None:
    rng, settings = np.random.default_rng(seed), Settings(objective="mme")
    pruned, full = (answers(*rng.integers(0, 2, 15)) for _ in range(2))
    values = relative_values(settings, MIXED, pruned, full)
    assert mme_total(MIXED, pruned) == pytest.approx(mme_points(pruned))
    assert 1000 * values.mean() == pytest.approx(mme_points(pruned) - mme_points(full))
    # After a part of the examples, those of the other categories do not change.
    part = relative_values(settings, MIXED, answers(*pruned.right[:8]), full)
    assert part == pytest.approx(values[:8])


async def test_a_search_for_mmes_total_finds_what_log_probability_hides(
    data: Dataset, tmp_path: Path
) -> None:
    class MoreRightLessLikely(SyntheticEvaluator):
        """An exchange of few tokens answers more questions, at lower probabilities."""

        def answer(self, job: EvaluationJob) -> Answers:
            count = job.stop - job.start
            if job.candidate is None:
                return Answers((0.0,) * count, (True,) * count)
            few = '"q_e":1' in job.candidate.model_dump_json()  # type: ignore[union-attr]
            right = tuple(bool(few or number % 2) for number in range(count))
            return Answers((-2.0 if few else -1.0,) * count, right)

    search = Searches(data, tmp_path)
    for objective, total, values in (("mme", 400, {0.0, -0.3}), ("quality", 100, {-1.0, -2.0})):
        winner = await search(
            (), MoreRightLessLikely(data, probes=False), objective, objective=objective,
            strategy="random", rounds=4, per_round=5, proposer="",
        )  # fmt: skip
        assert {trial.objective for trial in search.records(TrialRecord)} == values
        assert winner.test.mme_total == total
        assert ("thousand points" in str(winner.state)) == (objective == "mme")


def test_scores_are_relative_to_the_unpruned_model() -> None:
    full = Answers((-0.5, -0.5, -0.5), (True, True, True))
    pruned = Answers((-1.0, -0.5, -0.25), (True, True, True))
    assert relative_values(Settings(), [], pruned, full).tolist() == [-0.5, 0.0, 0.25]


def test_an_interval_resamples_images_not_questions() -> None:
    per_image = np.random.default_rng(0).normal(size=50)
    shared = bootstrap_mean([example(i // 4) for i in range(200)], np.repeat(per_image, 4))
    lone = bootstrap_mean([example(i) for i in range(200)], np.repeat(per_image, 4))
    assert shared.value == lone.value == pytest.approx(per_image.mean(), abs=1e-5)
    assert shared.high - shared.low > 1.5 * (lone.high - lone.low)
    assert shared.low < shared.value < shared.high


def test_the_error_of_a_paired_difference_is_that_of_resampled_images() -> None:
    generator = np.random.default_rng(3)
    counts = [1 + image % 5 for image in range(60)]
    rows = [example(image) for image, count in enumerate(counts) for _ in range(count)]
    gaps = generator.normal(size=60).repeat(counts) - 1.0
    interval = bootstrap_mean(rows, gaps)
    assert paired_error(rows, gaps) == pytest.approx((interval.high - interval.low) / 3.92, rel=0.1)
    constant = np.full(len(rows), -1.0)
    assert paired_error(rows, constant) == pytest.approx(0.0), "however many questions an image has"


def test_only_clearly_worse_candidates_are_significantly_below() -> None:
    generator = np.random.default_rng(1)
    rows = [example(i // 2) for i in range(80)]
    rival, noise = generator.normal(size=80), 0.1 * generator.normal(size=80)
    assert significantly_below(rows, rival - 0.5 + noise, rival)
    assert not significantly_below(rows, rival + noise, rival)
    assert not significantly_below(rows, rival + 0.5 + noise, rival)
    assert not significantly_below(rows[:6], rival[:6] - 0.5, rival), "three images tell nothing"
    rows = [example(i) for i in range(40)]
    dropped = 0
    for _ in range(500):
        rival = generator.normal(size=40)
        dropped += significantly_below(rows, rival + generator.normal(size=40), rival)
    assert dropped / 500 < 0.01, "equal candidates are rarely dropped"


EASY, HARD = [-1.0] * 4, [-3.0] * 4
STATE = load_state("autoprune")


def history(*trials: Trial, base: float = -2.0) -> History:
    result = TrialRecord(round=0, index=0, status="evaluated", objective=base)
    return History(result, np.array(EASY + HARD), list(trials))


def test_the_best_trial_may_be_as_good_as_the_unpruned_model() -> None:
    perfect, poor = trial("1.0", [0.0] * 8, STATE), trial("1.1", [-1.0] * 8, STATE)
    known = history(perfect, poor)
    assert known.best() is perfect and perfect.score == 0.0
    assert known.ranked() == [perfect, poor]
    assert known.best_values() is perfect.values
    known = history(poor, base=0.0)
    assert known.best_values() is known.base_values


def test_dropped_trials_are_estimated_by_the_difficulty_of_their_examples() -> None:
    """Both are at -1 on the easy half, where the average trial is at -1 as well."""
    dropped = trial("1.1", EASY, STATE, "dropped")
    known = history(trial("1.0", EASY + HARD, STATE), dropped)
    assert known.estimate(dropped) == pytest.approx(-2.0)
    assert known.objective_of("1.1") == pytest.approx(-2.0)
    with pytest.raises(ValueError, match="not evaluated to the end"):
        _ = dropped.score


# ---- report ----

SCRIPT_TAG = "<script>alert(1)</script>"


@pytest.fixture
async def ledger(search: Searches) -> Path:
    """A search with valid, invalid, hostile and failed replies."""
    evaluator = SyntheticEvaluator(search.data)
    evaluator.name = SCRIPT_TAG
    replies = [*valid_replies(4), HOSTILE["script"], None, HOSTILE["unknown atom"]]
    await search(replies, evaluator, strategy="autoprune+", rounds=4)
    return search.path


def text_of(page: str) -> str:
    body = re.sub(r"<svg.*?</svg>|<script>.*?</script>", "", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", body[body.index("<body>") :]).split())


async def test_markdown_and_page_have_the_result(ledger: Path, data: Dataset) -> None:
    report = read_report(read_ledger(ledger))
    winner = report.winner
    assert winner is not None and sum(report.statuses.values()) == len(report.rows)
    best = [value for _, value in report.curve()]
    assert best == sorted(best) and best[-1] == report.ranked[0].objective

    text, gain = as_markdown(report), winner.test.gain
    digits = count_decimals(gain.low, gain.high)
    figures = [f"{value:+.{digits}f}" for value in (gain.value, gain.low, gain.high)]
    assert f"Candidate {winner.winner} won" in text and "Evaluator: " in text
    assert f"| {report.ranked[0].name} | {report.ranked[0].objective:+.4f} |" in text
    assert f"| gain, paired | {figures[0]} ({figures[1]} to {figures[2]}) |" in text
    written = sum(reply.text is not None for reply in report.replies)
    assert f"{100 * written:,} prompt and {50 * written:,} completion tokens, at a price" in text
    for line in text.splitlines():
        assert not line.startswith("|") or line.endswith("|")

    page = text_of(as_html(report))
    answer = page[: page.index("Why this candidate")]
    assert f"Candidate {winner.winner} won" in answer and f"{gain.value:+.4f}" in answer
    (row,) = (row for row in report.rows if row.name == winner.winner)
    validation, test = winner.confirmed[winner.winner].objective, winner.test.objective
    side_by_side = (
        f"{winner.winner} winner {row.objective:+.4f} {validation.value:+.4f} "
        f"{validation.low:+.4f} to {validation.high:+.4f} "
        f"{winner.estimates[winner.winner]:+.4f} {test.value:+.4f}"
    )
    assert side_by_side in page
    rivals = [name for name in winner.confirmed if name != winner.winner]
    assert all(re.search(rf"{name} [-+.\d ]+to [-+.\d ]+not measured", page) for name in rivals)
    # The words are a reader's.
    assert " stopped early" in page and " with the same tokens as an earlier one" in page
    assert not re.search(r"dropped|\btpe\b|★|->", page)

    # The base policy alone is measured on the search split.
    evaluator, base = SyntheticEvaluator(data), base_state(report.settings)
    pruned, full = (
        evaluator.answer(EvaluationJob(candidate, 8, "search", 0, 24)).logprob
        for candidate in (base, None)
    )
    mean = np.mean(np.subtract(pruned, full))
    assert report.base_objective == pytest.approx(mean, abs=1e-6)
    assert f"base policy {mean:+.4f}" in page and f">base policy {mean:+.4f}</" in as_html(report)


async def test_the_page_is_self_contained_and_runs_no_script(
    ledger: Path, data: Dataset, tmp_path: Path
) -> None:
    report = read_report(read_ledger(ledger))
    page = as_html(report)
    tags, attributes = set[str](), set[str]()

    class Collector(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.add(tag)
            attributes.update(name for name, _ in attrs)

    Collector().feed(page)
    assert not tags & {"link", "img", "iframe", "object"}
    assert not {name for name in attributes if name.startswith("on") or name == "src"}
    assert "default-src 'none'" in page and "<script" not in page and "&lt;script&gt;" in page
    # Each point of the chart leads to its candidate.
    names = {row.name for row in report.rows if row.result.objective is not None}
    links = set(re.findall(r' href="#candidate-([^"]+)"', page))
    assert names <= links and page.count(' href="') == page.count(' href="#candidate-')
    for row in report.rows:
        assert f'<details id="candidate-{row.name}"><summary>{row.name} ' in page
    assert re.search(r"Against \d+\.\d+", page), "a candidate's difference to its parent"
    await replay(ledger, tmp_path / "again.jsonl", data)
    assert as_html(read_report(read_ledger(tmp_path / "again.jsonl"))) == page


async def test_the_page_has_the_hypothesis_of_a_proposal(search: Searches) -> None:
    reply = list_reply(0, 3, hypothesis=f"It helps {SCRIPT_TAG}.")
    await search([reply], proposals_per_reply=3, rounds=1)
    page = as_html(read_report(read_ledger(search.path)))
    assert page.count("explore: It helps &lt;script&gt;") == 3 and SCRIPT_TAG not in page


async def test_figures_have_the_digits_of_their_intervals(search: Searches) -> None:
    class Uncertain(SyntheticEvaluator):
        """Answers of pruned models that differ widely from image to image."""

        def answer(self, job: EvaluationJob) -> Answers:
            answers = super().answer(job)
            worst = -1 if job.candidate is None else int(job.candidate.digest[0], 16) % 4
            lost = [8.0 * (row // 2 % 4 == worst) for row in range(job.start, job.stop)]
            values = [value - loss for value, loss in zip(answers.logprob, lost, strict=True)]
            return Answers(tuple(values), answers.right)

    await search((), Uncertain(search.data))
    text = text_of(as_html(read_report(read_ledger(search.path))))
    assert not re.search(r"[-+]\d\.\d{3}", text[: text.index("Every candidate")])
    assert text.count("Objective: mean log-probability") == 1


async def test_a_running_search_can_be_reported(ledger: Path, tmp_path: Path) -> None:
    def read_part(lines: list[bytes]) -> SearchReport:
        part = tmp_path / "part.jsonl"
        part.write_bytes(b"".join(lines) + b'{"kind": "pro')
        return read_report(read_ledger(part))

    lines = ledger.read_bytes().splitlines(keepends=True)
    for end in (1, 5, len(lines) // 2, len(lines) - 1):
        report = read_part(lines[:end])
        assert "has not ended" in as_markdown(report) and "has not ended" in as_html(report)
    text = text_of(as_html(read_part(lines[:1])))
    assert "Nothing has been measured yet." in text and "Candidates" not in text
    with pytest.raises(SearchError, match="the ledger is empty"):
        read_part([])


def test_progress_shows_share_best_and_remaining_time() -> None:
    lines: list[str] = []
    now = iter([0.0, 10.0, 10.0, 70.0])
    progress = ProgressLog(lines.append, lambda: next(now))
    base = TrialRecord(round=0, index=0, status="evaluated", objective=-0.2)
    history = History(base, np.zeros(2))
    progress.on_start(history, 24)
    history.trials.append(trial("1.0", [-0.1]))
    history.trials.append(trial("1.1", status="invalid", reason="no such atom"))
    progress.on_round(1, history.trials, history, 0.25, Cost(prompt_tokens=9))
    assert lines[0] == "base policy -0.2000 on 24 examples (10 s)"
    leader = "1.0 by llm leads on the search split, -0.1000"
    assert f"25% round 1: 1 evaluated, 1 invalid; {leader}" in lines[1]
    assert "3 min left" in lines[1] and "no such atom" in lines[2]


async def test_progress_and_last_line_name_the_same_winner(data: Dataset, tmp_path: Path) -> None:
    lines: list[str] = []
    evaluator, progress = SyntheticEvaluator(data), ProgressLog(lines.append)
    proposer, limits = ScriptedProposer(valid_replies(8)), SpendingLimits()
    with Ledger(tmp_path / "l") as ledger:
        await Search(settings_of(rounds=4), ledger, evaluator, proposer, limits, progress).run()
    report = read_report(read_ledger(tmp_path / "l"))
    assert report.winner is not None
    leader = [line for line in lines if "leads on the search split" in line][-1]
    assert f"{report.ranked[0].name} by " in leader
    assert lines[-2].startswith(f"winner {report.winner.winner}: ")
    assert lines[-1] == describe_leader(report.winner, report.ranked[0].name)
    # Where validation chose another one, the last line says which, and why.
    other = describe_leader(report.winner, "9.9")
    assert other.startswith("On the search split alone 9.9 was better")
    assert f"{report.winner.winner} is" in other
