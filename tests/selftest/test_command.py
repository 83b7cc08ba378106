"""The selftest command on fake runs, and the model runners it can use."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.selftest.test_checks import good
from vllm_autoprune.cli.commands import selftest
from vllm_autoprune.cli.main import main
from vllm_autoprune.selftest.backbones import BUILDERS
from vllm_autoprune.selftest.checks import CHECKS, SPLIT_QUESTION
from vllm_autoprune.selftest.device import SelectionResult
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


class Machine:
    """Fake runs of backbones: ``calls`` of them, ``broken`` reports, and the runners there are.

    ``broken`` has changes to a report that passes every check by backbone and runner, or None for
    no report. Packages in ``absent`` are not installed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.calls: list[tuple[str, str]] = []
        self.broken: dict[tuple[str, str], Mapping[str, object] | None] = {}
        self.available: tuple[str, ...] = ("v1", "v2")
        self.absent: set[str] = set()
        self._capsys = capsys
        find = importlib.util.find_spec

        def run_backbone(name: str, environment: Mapping[str, str], timeout: float) -> Report:
            (runner,) = (name for name, variables in RUNNERS.items() if variables == environment)
            self.calls.append((name, runner))
            changes = self.broken.get((name, runner), {})
            if changes is None:
                raise SelftestError(f"{name} ended with 1")
            return good().model_copy(update={"runner": runner, **changes})

        monkeypatch.setattr(selftest, "run_backbone", run_backbone)
        monkeypatch.setattr(selftest, "available_runners", lambda: self.available)
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name in self.absent else find(name)
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        """Exit status, and what is printed: errors where there are no results."""
        self.calls.clear()
        status = main(["selftest", *arguments])
        printed = self._capsys.readouterr()
        return status, printed.err if status == 2 else printed.out


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Machine:
    return Machine(monkeypatch, capsys)


def rows(text: str) -> dict[str, list[str]]:
    """Cells of the table by what must hold; columns are two spaces apart."""
    lines = text.partition("\ncheck ")[2].splitlines()[2:]
    cells = [[cell for cell in line.split("  ") if cell.strip()] for line in lines]
    return {row[0]: [cell.strip() for cell in row[1:]] for row in cells if len(row) > 1}


@pytest.mark.parametrize("more", [(), ("--runner", "both")])
def test_both_runners_in_one_table(machine: Machine, more: tuple[str, ...]) -> None:
    status, output = machine.run("qwen2_vl", "gemma3", *more)
    assert status == 0
    assert machine.calls == [(n, r) for n in ("qwen2_vl", "gemma3") for r in ("v1", "v2")]
    assert output.count("\ncheck ") == 1 and "All checks passed." in output
    assert rows(output)["runners agree"] == ["yes", "yes"]
    assert len(rows(output)) == len(CHECKS) + 2
    assert rows(output)["kept rows are the model's own"] == ["yes", "yes"]


def test_one_runner(machine: Machine) -> None:
    status, output = machine.run("gemma3", "--runner", "v2")
    assert (status, machine.calls) == (0, [("gemma3", "v2")])
    assert "runners agree" not in rows(output)


def test_without_a_second_runner(machine: Machine) -> None:
    machine.available = ("v1",)
    status, output = machine.run("gemma3")
    assert (status, machine.calls) == (0, [("gemma3", "v1")])
    assert "no Triton" in output
    for runner in ("v2", "both"):
        status, output = machine.run("gemma3", "--runner", runner)
        assert (status, machine.calls) == (2, [])
        assert "no model runner v2 here" in output


def test_a_failed_check_is_reported_with_its_runner(machine: Machine) -> None:
    machine.broken = {("gemma3", "v2"): {"vision_runs": 3}, ("qwen2_vl", "v1"): None}
    status, output = machine.run("qwen2_vl", "gemma3")
    assert status == 1
    assert rows(output)["images are seen once"] == ["yes", "no (v2)"]
    assert rows(output)["served"] == ["no (v1)", "yes"]
    assert rows(output)["runners agree"] == ["-", "yes"]
    assert "gemma3, v2, images are seen once: it ran 3 times more" in output


def test_as_json(machine: Machine) -> None:
    machine.broken = {("gemma3", "v1"): {"kept": {SPLIT_QUESTION: [[0, 2, 5, 7, 11]]}}}
    status, output = machine.run("gemma3", "--json")
    report = json.loads(output)
    assert (status, report["holds"], report["runners"]) == (1, False, ["v1", "v2"])
    broken = {
        runner: [check for check, wrong in checked.items() if wrong]
        for runner, checked in report["found"]["gemma3"].items()
    }
    assert broken == {"v1": ["positions_are_a_gather"], "v2": [], "both": ["runners_agree"]}


def test_a_different_runner_than_requested_fails(machine: Machine) -> None:
    machine.broken = {("gemma3", "v2"): {"runner": "v1"}}
    status, output = machine.run("gemma3", "--runner", "v2")
    assert status == 1
    assert "vLLM used v1 instead" in output


def test_a_backbone_that_does_not_exist(machine: Machine) -> None:
    status, output = machine.run("gpt")
    assert status == 2
    assert "no such backbone: gpt" in output


def test_a_backbone_without_its_package_is_left_out_unless_named(machine: Machine) -> None:
    machine.broken = {("smolvlm", "v1"): None}
    machine.available, machine.absent = ("v1",), {"num2words"}
    status, output = machine.run()
    assert status == 0
    assert [name for name, _ in machine.calls] == [name for name in BUILDERS if name != "smolvlm"]
    assert "smolvlm: not served, its processor needs the package num2words" in output
    assert "All checks that were run passed." in output
    assert list(json.loads(machine.run("--json")[1])["left_out"]) == ["smolvlm"]
    assert machine.run("smolvlm")[0] == 1


# ---- on a GPU, for which the CPU stands in ----


@pytest.fixture
def gpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(selftest, "find_gpu", lambda: torch.device("cpu"))
    select(monkeypatch)
    return machine


def select(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Replace the results of the checks of selections."""
    sound = SelectionResult("cdpruner", 1.0, 0.002, "")
    fields = {"name": "trim", "share": 0.5, "seconds": 0.1, "wrong": "", **changes}
    results = [sound, SelectionResult(**fields)]
    monkeypatch.setattr(selftest, "check_kernel", lambda device: "")
    monkeypatch.setattr(selftest, "check_selections", lambda device: iter(results))


def test_a_gpu_is_needed_for_its_checks(machine: Machine) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    status, output = machine.run("--gpu")
    assert status == 2
    assert "no CUDA device here" in output


def test_selections_and_two_backbones_on_a_gpu(gpu: Machine) -> None:
    status, output = gpu.run("--gpu")
    assert (status, gpu.calls) == (0, [(name, "v2") for name in selftest.GPU_BACKBONES])
    assert "trim" in output and "2.00" in output
    assert rows(output)["kept rows are the model's own"] == ["yes", "yes"]
    assert "All checks that were run passed." in output


def test_a_selection_that_fails_on_a_gpu(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    select(monkeypatch, wrong="unique: the same index twice")
    status, output = gpu.run("--gpu", "--json")
    report = json.loads(output)
    assert status == 1 and not report["holds"]
    assert report["selections"][1]["wrong"] == "unique: the same index twice"


def test_on_a_gpu_without_vllm_nothing_is_served(gpu: Machine) -> None:
    gpu.absent = {"vllm"}
    status, output = gpu.run("--gpu")
    assert (status, gpu.calls) == (0, [])
    assert "qwen3_vl: not served, vLLM is not installed" in output


def test_on_a_gpu_no_backbone_starts_without_time(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "GPU_SECONDS", 30)
    status, output = gpu.run("--gpu")
    assert (status, gpu.calls) == (0, [])
    assert "llava_next: not served, no time left" in output
