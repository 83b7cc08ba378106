from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from tests.selftest.test_checks import good
from vllm_autoprune.cli.commands import selftest
from vllm_autoprune.cli.main import main
from vllm_autoprune.selftest.checks import CHECKS
from vllm_autoprune.selftest.report import Report
from vllm_autoprune.selftest.run import RUNNERS, SelftestError

Asked = list[tuple[str, str]]
Spoilt = Mapping[tuple[str, str], Mapping[str, object] | None]
"""By backbone and runner: changes to a report that keeps all promises, or None for no report."""


def serving(
    monkeypatch: pytest.MonkeyPatch,
    spoilt: Spoilt | None = None,
    here: tuple[str, ...] = ("v1", "v2"),
) -> Asked:
    """What is examined from now on, of which ``spoilt`` does not hold."""
    asked: Asked = []

    def examine(name: str, environment: Mapping[str, str]) -> Report:
        (runner,) = (runner for runner, given in RUNNERS.items() if given == environment)
        asked.append((name, runner))
        changes = (spoilt or {}).get((name, runner), {})
        if changes is None:
            raise SelftestError(f"{name} ended with 1")
        return good().model_copy(update={"runner": runner, **changes})

    monkeypatch.setattr(selftest, "examine", examine)
    monkeypatch.setattr(selftest, "present", lambda: here)
    return asked


def rows(shown: str) -> dict[str, list[str]]:
    """Cells of the table by what must hold; columns are two spaces apart."""
    lines = shown.partition("what must hold")[2].splitlines()[2:]
    cells = [[cell for cell in line.split("  ") if cell.strip()] for line in lines]
    return {row[0]: [cell.strip() for cell in row[1:]] for row in cells if len(row) > 1}


@pytest.mark.parametrize("more", [(), ("--runner", "both")])
def test_both_runners_in_one_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    asked = serving(monkeypatch)
    assert main(["selftest", "qwen2_vl", "gemma3", *more]) == 0
    assert asked == [(n, r) for n in ("qwen2_vl", "gemma3") for r in ("v1", "v2")]
    shown = capsys.readouterr().out
    assert shown.count("what must hold") == 1 and "Everything holds." in shown
    assert rows(shown)["runners agree"] == ["yes", "yes"]
    assert len(rows(shown)) == len(CHECKS) + 2
    assert rows(shown)["kept rows are the model's own"] == ["yes", "yes"]


def test_one_runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = serving(monkeypatch)
    assert main(["selftest", "gemma3", "--runner", "v2"]) == 0
    assert asked == [("gemma3", "v2")]
    assert "runners agree" not in rows(capsys.readouterr().out)


def test_where_there_is_no_second_runner(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = serving(monkeypatch, here=("v1",))
    assert main(["selftest", "gemma3"]) == 0
    assert asked == [("gemma3", "v1")]
    assert "no Triton" in capsys.readouterr().out
    for runner in ("v2", "both"):
        assert main(["selftest", "gemma3", "--runner", runner]) == 2
        assert "no model runner v2 here" in capsys.readouterr().err
    assert len(asked) == 1


def test_a_broken_promise_is_told_with_its_runner(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serving(monkeypatch, {("gemma3", "v2"): {"vision_runs": 3}, ("qwen2_vl", "v1"): None})
    assert main(["selftest", "qwen2_vl", "gemma3"]) == 1
    shown = capsys.readouterr().out
    assert rows(shown)["images are seen once"] == ["yes", "no (v2)"]
    assert rows(shown)["served"] == ["no (v1)", "yes"]
    assert rows(shown)["runners agree"] == ["-", "yes"]
    assert "gemma3, v2, images are seen once: it ran 3 times more" in shown


def test_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    serving(monkeypatch, {("gemma3", "v1"): {"kept": {"q": [[0, 2, 5, 7, 11]]}}})
    assert main(["selftest", "gemma3", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["holds"], said["runners"]) == (False, ["v1", "v2"])
    broken = {
        runner: [check for check, wrong in checked.items() if wrong]
        for runner, checked in said["found"]["gemma3"].items()
    }
    assert broken == {"v1": ["positions_are_a_gather"], "v2": [], "both": ["runners_agree"]}


def test_another_runner_than_asked_for_is_no_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serving(monkeypatch, {("gemma3", "v2"): {"runner": "v1"}})
    assert main(["selftest", "gemma3", "--runner", "v2"]) == 1
    assert "vLLM used v1 instead" in capsys.readouterr().out


def test_a_backbone_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "gpt"]) == 2
    assert "no such backbone: gpt" in capsys.readouterr().err
