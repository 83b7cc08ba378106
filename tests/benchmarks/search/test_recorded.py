"""The ledger that the repository ships replays bit for bit, without a model or a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.search.scenes import RECORDED, RECORDED_SCENES, write_data
from offline_search.ledger import read_ledger
from offline_search.ledger.records import ProposalRecord, ReplyRecord, WinnerRecord
from vllm_autoprune import load_state
from vllm_autoprune.cli.main import main


def test_the_shipped_ledger_replays_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_data(tmp_path / "data", RECORDED_SCENES, each=1)
    arguments = ["search", "--data", str(tmp_path / "data"), "--ledger", str(tmp_path / "again")]
    state = tmp_path / "found.json"
    assert main([*arguments, "--replay", str(RECORDED), "-o", str(state)]) == 0
    before, after = (line.split()[-1] for line in capsys.readouterr().err.splitlines()[-2:])
    assert before == after
    (winner,) = (one for one in read_ledger(RECORDED) if isinstance(one, WinnerRecord))
    assert load_state(json.loads(state.read_text())).digest == winner.digest


def test_it_holds_replies_of_a_model_that_were_used() -> None:
    records = read_ledger(RECORDED)
    replies = [one for one in records if isinstance(one, ReplyRecord)]
    assert replies and all(one.text and one.cost.prompt_tokens for one in replies)
    asked = {(one.round, one.index) for one in replies if one.attempt != "skill"}
    assert asked
    by_model = {
        (one.round, one.index)
        for one in records
        if isinstance(one, ProposalRecord) and one.origin in ("llm", "ranked")
    }
    assert asked == by_model


def test_another_data_folder_is_refused(tmp_path: Path) -> None:
    scenes = {**RECORDED_SCENES, "search": RECORDED_SCENES["search"] + 1}
    write_data(tmp_path / "data", scenes, each=1)
    arguments = ["search", "--data", str(tmp_path / "data"), "--ledger", str(tmp_path / "again")]
    assert main([*arguments, "--replay", str(RECORDED)]) != 0
