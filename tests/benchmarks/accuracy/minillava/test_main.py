from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from benchmarks.accuracy.minillava.__main__ import main, parser
from tests.benchmarks.accuracy.minillava.server import answering
from tests.offline_search.endpoint import Answer, Body, endpoint, error

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "benchmarks.md").read_text()
SMALL = ["--scenes", "1", "--budgets", "8", "--cases", "random"]


def test_the_calls_in_the_docs_parse() -> None:
    calls = re.findall(r"^python -m benchmarks\.accuracy\.minillava(.*)", PAGE, re.MULTILINE)
    assert calls
    for call in calls:
        parser().parse_args(shlex.split(call))


def test_one_command_writes_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with endpoint(answering) as server:
        call = ["--server-url", server.url, "--out", str(tmp_path)]
        assert main([*call, *SMALL]) == 0
        captured = capsys.readouterr()
        assert "## K = 8" in captured.out and "Verdict: valid" in captured.out
        assert "100%" in captured.err
        assert main([*call, *SMALL, "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["valid"] is True
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"report.html", "report.json", "report.md", "report.tex", "samples.jsonl"}


def test_an_invalid_report_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusing(body: Body, number: int) -> Answer:
        return error(400, "no") if number == 3 else answering(body, number)

    with endpoint(refusing) as server:
        assert main(["--server-url", server.url, "--out", str(tmp_path), *SMALL]) == 1
    assert "NOT VALID" in capsys.readouterr().out


def test_a_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["--dry-run", "--out", str(out), *SMALL]) == 0
    assert "vllm serve" in capsys.readouterr().out and not out.exists()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (["--model", "/nowhere"], "has no llava/config.json"),
        (["--budgets", "144"], "are not within 1..143"),
    ],
)
def test_a_run_that_cannot_start_says_why(
    call: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(call) == 1
    assert message in capsys.readouterr().err
