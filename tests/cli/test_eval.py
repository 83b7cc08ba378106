from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from benchmarks.accuracy.minillava.cases import BUDGETS, FAMILIES
from tests.benchmarks.accuracy.minillava.server import answering
from tests.offline_search.endpoint import Answer, Body, endpoint, error
from vllm_autoprune.cli.main import main, parser

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md").read_text()
CALLS = [
    shlex.split(call.replace("\\\n", " "))[1:]
    for call in re.findall(r"^vllm-autoprune eval (?:.*\\\n)*.*", PAGE, re.MULTILINE)
]

SMALL = ["--scenes", "1", "--budgets", "8", "--cases", "random"]


def test_the_page_s_calls_parse() -> None:
    assert len(CALLS) == 3
    parsed = [parser().parse_args(call) for call in CALLS]
    assert {options.command for options in parsed} == {"eval"}
    assert len(parsed[1].arm) == 3 and parsed[2].include_path == Path("lmms-task")


def test_the_defaults_are_the_suite_s_own() -> None:
    options = parser().parse_args(["eval", "--suite", "minillava"])
    assert (tuple(options.budgets), tuple(options.cases)) == (BUDGETS, FAMILIES)


def test_one_command_makes_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with endpoint(answering) as told:
        call = ["eval", "--suite", "minillava", "--server-url", told.url, "--out", str(tmp_path)]
        assert main([*call, *SMALL]) == 0
        shown = capsys.readouterr()
        assert "## K = 8" in shown.out and "Verdict: valid" in shown.out
        assert "100%" in shown.err
        assert main([*call, *SMALL, "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["valid"] is True
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"report.json", "report.md", "report.tex", "samples.jsonl"}


def test_what_is_not_valid_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusing(body: Body, number: int) -> Answer:
        return error(400, "no") if number == 3 else answering(body, number)

    with endpoint(refusing) as told:
        call = ["eval", "--suite", "minillava", "--server-url", told.url, "--out", str(tmp_path)]
        assert main([*call, *SMALL]) == 1
    assert "NOT VALID" in capsys.readouterr().out


def test_a_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    call = ["eval", "--suite", "minillava", "--dry-run", "--out", str(out), *SMALL]
    assert main(call) == 0
    assert "vllm serve" in capsys.readouterr().out and not out.exists()
    lmms = ["eval", "--suite", "lmms:mme", "--served-name", "m", "--arm", "full=http://h:1"]
    assert main([*lmms, "--dry-run"]) == 0
    assert "--tasks mme" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (["--suite", "imagenet"], "is no suite"),
        (["--suite", "lmms:mme", "--arm", "full=http://h"], "--served-name: is missing"),
        (["--suite", "lmms:mme", "--served-name", "m"], "--arm: is missing"),
        (
            ["--suite", "lmms:mine", "--served-name", "m", "--include-path", "/nowhere"],
            "--include-path /nowhere: holds no task",
        ),
        (["--suite", "minillava", "--model", "/nowhere"], "has no llava/config.json"),
        (["--suite", "minillava", "--budgets", "144"], "are not within 1..143"),
        (
            ["--suite", "lmms:mme", "--served-name", "m", "--backbone", "x"],
            "--backbone x: is in no table",
        ),
    ],
)
def test_what_cannot_begin_says_why(
    call: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *call]) == 1
    assert told in capsys.readouterr().err


def test_an_installed_package_without_the_repository_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "benchmarks", None)
    assert main(["eval", "--suite", "minillava"]) == 1
    assert "clone the repository" in capsys.readouterr().err
