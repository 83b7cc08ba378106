"""The command: with transformers, and through a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.common.fake_server import Reply, fake_server
from benchmarks.minillava.conversations.__main__ import main

FEW = ["--conversations", "2", "--budgets", "8", "--recalls", "4", "--split", "validation"]


def test_transformers_score_every_arm(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*FEW, "--checkpoint", str(checkpoint), "--out", str(tmp_path)]) == 0

    text = capsys.readouterr().out
    assert "4 of the evidence" in text and "with transformers" in text
    data = json.loads((tmp_path / "conversations.json").read_text())["data"]
    assert len(data["right"]) == 8
    assert all(len(turns) == 4 for own in data["right"].values() for turns in own)
    assert data["log-probability"].keys() == data["right"].keys()
    assert (tmp_path / "summary.md").read_text().count("turn 4, %") == 1


def test_a_server_is_asked_for_all_arms_that_it_can_serve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_server(Reply(deltas=(" yes",), first=0, gaps=(0,))) as server:
        assert main([*FEW, "--server-url", f"{server.url}/v1", "--out", str(tmp_path)]) == 0

    text = capsys.readouterr().out
    assert "of the evidence" not in text and "| 600.0 |" in text
    assert len(server.seen) == 6 * 2 * 4
    assert {body["model"] for body in server.seen} == {"mock"}


def test_a_server_that_is_down_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_server() as server:
        url = server.url
    assert main([*FEW, "--server-url", url, "--out", str(tmp_path)]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_a_model_that_the_server_does_not_serve_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--served-name", "other", "--out", str(tmp_path)]
    with fake_server() as server:
        assert main([*FEW, "--server-url", server.url, *options]) == 1
    assert "does not serve 'other', only mock" in capsys.readouterr().err
    assert not server.seen
