from __future__ import annotations

import json
from pathlib import Path

import pytest

from offline_search.dataset import Dataset, read_dataset
from offline_search.ledger import Ledger, ProposalRecord, ReplyRecord
from offline_search.replay import replay
from offline_search.settings import Settings, Strategy
from tests.offline_search.replies import HOSTILE, valid_replies
from tests.offline_search.synthetic import (
    STATE_STRATEGIES,
    VALID_REPLIES,
    SyntheticEvaluator,
    ledger_digest,
    records_of_kind,
    run_search,
)
from vllm_autoprune.errors import SearchError


@pytest.mark.parametrize("strategy", STATE_STRATEGIES)
async def test_a_finished_search_repeats_no_step(
    strategy: Strategy, settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"strategy": strategy})
    evaluator = SyntheticEvaluator(data)
    first = await run_search(tmp_path / "l", settings, evaluator)
    before, jobs = (tmp_path / "l").read_bytes(), len(evaluator.jobs)
    assert await run_search(tmp_path / "l", settings, evaluator, []) == first
    assert (tmp_path / "l").read_bytes() == before and len(evaluator.jobs) == jobs


@pytest.mark.parametrize("strategy", STATE_STRATEGIES)
async def test_a_search_resumes_from_any_prefix_of_its_ledger(
    strategy: Strategy, settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"strategy": strategy, "rounds": 2})
    await run_search(tmp_path / "whole", settings, SyntheticEvaluator(data))
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    for end in range(0, len(lines), max(1, len(lines) // 6)):
        part = tmp_path / f"part-{end}"
        part.write_bytes(b"".join(lines[:end]) + lines[end][: len(lines[end]) // 2])
        evaluator = SyntheticEvaluator(data)
        await run_search(part, settings, evaluator)
        assert ledger_digest(part) == ledger_digest(tmp_path / "whole")
        records = [json.loads(line) for line in lines[:end]]
        known = {
            (r["digest"], r["split"], r["start"]) for r in records if r["kind"] == "evaluation"
        }
        for job in evaluator.jobs:
            digest = "full" if job.candidate is None else job.candidate.digest
            assert (digest, job.split, job.start) not in known, "measured again"


async def test_a_ledger_with_other_settings_is_refused(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    await run_search(tmp_path / "l", settings, SyntheticEvaluator(data))
    other = settings.model_copy(update={"rounds": 7, "seed": 3})
    with pytest.raises(SearchError, match=r"rounds is 7, was 3.*seed is 3, was 0"):
        await run_search(tmp_path / "l", other, SyntheticEvaluator(data))


@pytest.mark.parametrize("strategy", STATE_STRATEGIES)
async def test_a_recorded_search_replays_without_endpoints(
    strategy: Strategy, settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"strategy": strategy})
    replies = [*VALID_REPLIES[:5], HOSTILE["prose"], None]
    chosen = await run_search(tmp_path / "l", settings, SyntheticEvaluator(data), replies)
    again, before, after = await replay(tmp_path / "l", tmp_path / "replayed", data)
    assert before == after
    assert again.digest == chosen.digest and again.test == chosen.test


async def test_a_recording_is_only_read(settings: Settings, data: Dataset, tmp_path: Path) -> None:
    recording = tmp_path / "l"
    await run_search(recording, settings, SyntheticEvaluator(data))
    recording.write_bytes(recording.read_bytes() + b'{"kind": "pro')  # cut off by a kill
    content = recording.read_bytes()
    _, before, after = await replay(recording, tmp_path / "replayed", data)
    assert before == after and recording.read_bytes() == content
    with Ledger(recording):  # no replay waits for its lock
        await replay(recording, tmp_path / "again", data)


async def test_a_missing_recording_is_not_created(data: Dataset, tmp_path: Path) -> None:
    with pytest.raises(SearchError, match="name the ledger of a search that has begun"):
        await replay(tmp_path / "typo" / "l", tmp_path / "replayed", data)
    assert not (tmp_path / "typo").exists() and not (tmp_path / "replayed").exists()
    (tmp_path / "empty").touch()
    with pytest.raises(SearchError, match="contains no search"):
        await replay(tmp_path / "empty", tmp_path / "replayed", data)


@pytest.mark.parametrize("change", ["images", "questions"])
async def test_other_data_than_the_recorded_are_named_as_the_cause(
    change: str, settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    evaluator = SyntheticEvaluator(data)
    evaluator.name = f"m through vLLM, data {data.digest[:12]}"
    await run_search(tmp_path / "l", settings, evaluator)
    await replay(tmp_path / "l", tmp_path / "same", data)
    other = read_dataset(data.folder, limit=5)
    if change == "questions":
        path = data.folder / "test.jsonl"
        path.write_text(path.read_text().replace("Is it", "Could it be"))
        other = read_dataset(data.folder)
    with pytest.raises(SearchError, match=r"other questions .* -> give the data folder and the --"):
        await replay(tmp_path / "l", tmp_path / "replayed", other)
    assert not (tmp_path / "replayed").exists()


async def test_an_incomplete_recording_is_an_error(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    await run_search(tmp_path / "l", settings, SyntheticEvaluator(data))
    lines = (tmp_path / "l").read_bytes().splitlines(keepends=True)
    (tmp_path / "l").write_bytes(b"".join(lines[: len(lines) // 2]))
    with pytest.raises(SearchError, match="resume the recorded search"):
        await replay(tmp_path / "l", tmp_path / "replayed", data)


async def test_a_changed_recording_does_not_replay(
    settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    await run_search(tmp_path / "l", settings, SyntheticEvaluator(data))
    first = next(r for r in records_of_kind(tmp_path / "l", ReplyRecord) if r.text)
    changed = valid_replies(31)[-1]
    assert first.text
    old, new = json.dumps(first.text)[1:-1], json.dumps(changed)[1:-1]
    text = (tmp_path / "l").read_text().replace(old, new)
    (tmp_path / "l").write_text(text)
    with pytest.raises(SearchError):
        await replay(tmp_path / "l", tmp_path / "replayed", data)


@pytest.mark.parametrize("strategy", STATE_STRATEGIES)
async def test_a_search_of_cores_replays(
    strategy: Strategy, settings: Settings, data: Dataset, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"strategy": strategy, "core": True, "rounds": 4})
    chosen = await run_search(tmp_path / "l", settings, SyntheticEvaluator(data))
    again, before, after = await replay(tmp_path / "l", tmp_path / "replayed", data)
    assert before == after and again.digest == chosen.digest
    proposals = records_of_kind(tmp_path / "l", ProposalRecord)
    cores = [p for p in proposals if p.state is not None and p.state.get("core")]
    assert bool(cores) == (strategy in ("autoprune+", "random", "tpe"))
