"""The selftest command on fake runs, and the model runners it can use."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Mapping

import pytest
import torch

from tests.selftest.test_checks import good
from vllm_autoprune.cli.commands import selftest
from vllm_autoprune.cli.main import main
from vllm_autoprune.selftest.backbones import BUILDERS
from vllm_autoprune.selftest.checks import CHECKS, SPLIT_QUESTION
from vllm_autoprune.selftest.run import RUNNERS, Report, SelftestError, available_runners


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("triton: True\n", ("v1", "v2")),
        ("a warning\ntriton: False\n", ("v1",)),
        ("", ("v1",)),  # vLLM could not be imported: the backbones will say why
    ],
)
def test_second_runner_requires_triton(
    monkeypatch: pytest.MonkeyPatch, output: str, expected: tuple[str, ...]
) -> None:
    done = subprocess.CompletedProcess[str]([], 0, stdout=output, stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *command, **options: done)
    assert available_runners() == expected


@pytest.mark.compat
def test_vllm_reads_the_runner_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs

    for environment, meant in zip(RUNNERS.values(), (False, True), strict=True):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert envs.VLLM_USE_V2_MODEL_RUNNER is meant


Calls = list[tuple[str, str]]
BrokenReports = Mapping[tuple[str, str], Mapping[str, object] | None]
"""(backbone, runner) -> changes to a report that passes every check, or None for no report."""


def fake_runs(
    monkeypatch: pytest.MonkeyPatch,
    broken_reports: BrokenReports | None = None,
    available: tuple[str, ...] = ("v1", "v2"),
) -> Calls:
    """Replace the runs of backbones; returns the list of calls."""
    calls: Calls = []

    def run_backbone(name: str, environment: Mapping[str, str], timeout: float) -> Report:
        (runner,) = (runner for runner, given in RUNNERS.items() if given == environment)
        calls.append((name, runner))
        changes = (broken_reports or {}).get((name, runner), {})
        if changes is None:
            raise SelftestError(f"{name} ended with 1")
        return good().model_copy(update={"runner": runner, **changes})

    monkeypatch.setattr(selftest, "run_backbone", run_backbone)
    monkeypatch.setattr(selftest, "available_runners", lambda: available)
    return calls


def rows(text: str) -> dict[str, list[str]]:
    """Cells of the table by what must hold; columns are two spaces apart."""
    lines = text.partition("\ncheck ")[2].splitlines()[2:]
    cells = [[cell for cell in line.split("  ") if cell.strip()] for line in lines]
    return {row[0]: [cell.strip() for cell in row[1:]] for row in cells if len(row) > 1}


@pytest.mark.parametrize("more", [(), ("--runner", "both")])
def test_both_runners_in_one_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    calls = fake_runs(monkeypatch)
    assert main(["selftest", "qwen2_vl", "gemma3", *more]) == 0
    assert calls == [(n, r) for n in ("qwen2_vl", "gemma3") for r in ("v1", "v2")]
    output = capsys.readouterr().out
    assert output.count("\ncheck ") == 1 and "All checks passed." in output
    assert rows(output)["runners agree"] == ["yes", "yes"]
    assert len(rows(output)) == len(CHECKS) + 2
    assert rows(output)["kept rows are the model's own"] == ["yes", "yes"]


def test_one_runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls = fake_runs(monkeypatch)
    assert main(["selftest", "gemma3", "--runner", "v2"]) == 0
    assert calls == [("gemma3", "v2")]
    assert "runners agree" not in rows(capsys.readouterr().out)


def test_without_a_second_runner(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = fake_runs(monkeypatch, available=("v1",))
    assert main(["selftest", "gemma3"]) == 0
    assert calls == [("gemma3", "v1")]
    assert "no Triton" in capsys.readouterr().out
    for runner in ("v2", "both"):
        assert main(["selftest", "gemma3", "--runner", runner]) == 2
        assert "no model runner v2 here" in capsys.readouterr().err
    assert len(calls) == 1


def test_a_failed_check_is_reported_with_its_runner(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_runs(monkeypatch, {("gemma3", "v2"): {"vision_runs": 3}, ("qwen2_vl", "v1"): None})
    assert main(["selftest", "qwen2_vl", "gemma3"]) == 1
    output = capsys.readouterr().out
    assert rows(output)["images are seen once"] == ["yes", "no (v2)"]
    assert rows(output)["served"] == ["no (v1)", "yes"]
    assert rows(output)["runners agree"] == ["-", "yes"]
    assert "gemma3, v2, images are seen once: it ran 3 times more" in output


def test_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake_runs(monkeypatch, {("gemma3", "v1"): {"kept": {SPLIT_QUESTION: [[0, 2, 5, 7, 11]]}}})
    assert main(["selftest", "gemma3", "--json"]) == 1
    output = json.loads(capsys.readouterr().out)
    assert (output["holds"], output["runners"]) == (False, ["v1", "v2"])
    broken = {
        runner: [check for check, wrong in checked.items() if wrong]
        for runner, checked in output["found"]["gemma3"].items()
    }
    assert broken == {"v1": ["positions_are_a_gather"], "v2": [], "both": ["runners_agree"]}


def test_a_different_runner_than_requested_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_runs(monkeypatch, {("gemma3", "v2"): {"runner": "v1"}})
    assert main(["selftest", "gemma3", "--runner", "v2"]) == 1
    assert "vLLM used v1 instead" in capsys.readouterr().out


def test_a_backbone_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "gpt"]) == 2
    assert "no such backbone: gpt" in capsys.readouterr().err


def test_a_backbone_without_its_package_is_left_out_unless_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = fake_runs(monkeypatch, {("smolvlm", "v1"): None}, available=("v1",))
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "num2words" else find(name)
    )
    assert main(["selftest"]) == 0
    assert [name for name, _ in calls] == [name for name in BUILDERS if name != "smolvlm"]
    output = capsys.readouterr().out
    assert "smolvlm: not served, its processor needs the package num2words" in output
    assert "All checks that were run passed." in output
    assert main(["selftest", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["left_out"]) == ["smolvlm"]
    assert main(["selftest", "smolvlm"]) == 1


def stand_in_gpu(monkeypatch: pytest.MonkeyPatch, broken: str = "") -> None:
    """Let the command find a GPU, and give the results of its checks."""
    from vllm_autoprune.selftest.device import SelectionResult

    results = [
        SelectionResult("cdpruner", 1.0, 0.002, ""),
        SelectionResult("trim", 0.5, 0.1, broken),
    ]
    monkeypatch.setattr(selftest, "find_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(selftest, "check_kernel", lambda device: "")
    monkeypatch.setattr(selftest, "check_selections", lambda device: iter(results))


def test_a_gpu_is_needed_for_its_checks(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert main(["selftest", "--gpu"]) == 2
    assert "no CUDA device here" in capsys.readouterr().err


def test_selections_and_two_backbones_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in_gpu(monkeypatch)
    calls = fake_runs(monkeypatch)
    assert main(["selftest", "--gpu"]) == 0
    assert calls == [(name, "v2") for name in selftest.GPU_BACKBONES]
    output = capsys.readouterr().out
    assert "trim" in output and "2.00" in output
    assert rows(output)["kept rows are the model's own"] == ["yes", "yes"]
    assert "All checks that were run passed." in output


def test_a_selection_that_fails_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in_gpu(monkeypatch, broken="unique: the same index twice")
    fake_runs(monkeypatch)
    assert main(["selftest", "--gpu", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["holds"]
    assert report["selections"][1]["wrong"] == "unique: the same index twice"


def test_on_a_gpu_without_vllm_nothing_is_served(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in_gpu(monkeypatch)
    calls = fake_runs(monkeypatch)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name)
    )
    assert main(["selftest", "--gpu"]) == 0
    assert calls == []
    assert "qwen3_vl: not served, vLLM is not installed" in capsys.readouterr().out


def test_on_a_gpu_no_backbone_starts_without_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in_gpu(monkeypatch)
    calls = fake_runs(monkeypatch)
    monkeypatch.setattr(selftest, "GPU_SECONDS", 30)
    assert main(["selftest", "--gpu"]) == 0
    assert calls == []
    assert "llava_next: not served, no time left" in capsys.readouterr().out
