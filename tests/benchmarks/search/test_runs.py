"""Statistics of the candidates of finished searches, and of searches by their proposer."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from benchmarks.search import __main__ as command
from offline_search.ledger import TrialRecord, WinnerRecord
from tests.offline_search.synthetic import (
    HOSTILE,
    VALID_REPLIES,
    ScriptedProposer,
    Searches,
    dataset,
)


async def test_runs_and_proposers_have_a_table_of_their_candidates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two seeds of one proposer, one of another, whose replies repeat and are invalid at times.

    A search of several models has another unit, in which means are taken apart.
    """
    search = Searches(dataset(tmp_path / "data"), tmp_path)
    replies = [*VALID_REPLIES[:4], *[HOSTILE["unknown atom"]] * 4]
    trials: dict[str, list[TrialRecord]] = {}
    winners: dict[str, WinnerRecord] = {}
    for name, seed, proposer in (("a", 1, "m"), ("b", 2, "m"), ("c", 1, "other")):
        winners[name] = await search(replies, ledger=name, seed=seed, proposer=proposer)
        trials[name] = search.records(TrialRecord)
    await search(replies, ledger="joint", proposer="m", models=("left", "right"))
    trials["joint"] = search.records(TrialRecord)
    paths = [str(tmp_path / name) for name in trials]
    assert command.main(["runs", *paths, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    for run, results in zip(record["runs"], trials.values(), strict=True):
        by_name = {result.name: result for result in results}
        scores = [
            score
            for result in results
            if (score := by_name[result.same_as or result.name].score) is not None
        ]
        assert run["measured"] == len(scores) <= run["valid"] <= run["candidates"]
        assert run["best"] == max(scores) and run["minimum"] == min(scores)
        assert run["mean"] == pytest.approx(statistics.mean(scores))
        assert run["deviation"] == pytest.approx(statistics.stdev(scores))
    assert any(run["valid"] < run["candidates"] for run in record["runs"])
    twice, once, joint = record["proposers"]
    assert (twice["proposer"], twice["runs"], once["runs"]) == ("m", 2, 1)
    assert (twice["unit"], joint["unit"]) == ("nats", "of the base policy's loss")
    assert (joint["proposer"], joint["runs"]) == ("m", 1)
    gains = [winners[name].test.gain.value for name in "ab"]
    assert twice["gain"] == pytest.approx(statistics.mean(gains))


async def test_the_tables_are_printed_and_a_file_that_is_no_ledger_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    search = Searches(dataset(tmp_path / "data"), tmp_path)
    replies = ScriptedProposer(VALID_REPLIES, in_order=True)
    await search(replies, ledger="run.jsonl", seed=43)
    assert command.main(["runs", str(tmp_path / "run.jsonl")]) == 0
    text = capsys.readouterr().out
    assert "| run.jsonl | autoprune | scripted | 43 | 9 of 9 | 9 |" in text
    assert "| scripted | 1 |" in text and text.count("| nats |") == 2
    (tmp_path / "other").write_text("no ledger")
    assert command.main(["runs", str(tmp_path / "other")]) == 1
