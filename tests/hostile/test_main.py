"""A campaign that is run in pieces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tests.hostile.__main__ as under_test
from benchmarks.server import Server
from tests.hostile.attack import Attack, Profile
from tests.hostile.campaign import Outcome

ONE = ("--backbone", "llava", "--runner", "v1")
CHOSEN = ("--attack", "odd_uuids", "--attack", "uuid_alone")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the attacks that are run; ``uuid_alone`` finds a problem the first time."""
    names: list[str] = []

    def run(
        attack: Attack, backbone: str, runner: str, get: Callable[[Profile], Server]
    ) -> Outcome:
        broken = attack.name == "uuid_alone" and attack.name not in names
        names.append(attack.name)
        problems = ["a problem"] if broken else []
        return Outcome(attack.name, backbone, runner, 1.0, problems, ["a figure"], 7)

    monkeypatch.setattr(under_test, "run_attack", run)
    return names


def test_what_was_withstood_is_not_run_again(
    ran: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    piece = (*ONE, *CHOSEN, "--json", str(tmp_path / "outcomes.json"), "--resume")
    assert under_test.main(piece) == 1
    assert sorted(ran) == ["odd_uuids", "uuid_alone"]
    assert "2 attacks with 14 requests, 1 not withstood, 0 not run" in capsys.readouterr().out
    assert under_test.main(piece) == 0
    assert ran[2:] == ["uuid_alone"]
    assert "2 attacks with 14 requests, 0 not withstood, 0 not run" in capsys.readouterr().out
    assert under_test.main((*piece, "--runner", "v2")) == 0
    assert sorted(ran[3:]) == ["odd_uuids", "uuid_alone"]


def test_out_of_time_is_no_success(ran: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert under_test.main((*ONE, *CHOSEN, "--seconds", "-1")) == 1
    assert ran == []
    assert "0 attacks with 0 requests, 0 not withstood, 2 not run" in capsys.readouterr().out
