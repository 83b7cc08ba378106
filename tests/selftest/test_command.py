"""The selftest command on fake runs, and selections compared between the host and a device."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from tests.selftest.test_checks import OTHERS, good
from vllm_autoprune.cli.commands import selftest
from vllm_autoprune.cli.main import main
from vllm_autoprune.selftest import device as device_checks
from vllm_autoprune.selftest.backbones import TINY_MODELS
from vllm_autoprune.selftest.checks import CHECKS
from vllm_autoprune.selftest.device import WAITING, SelectionResult, check_kernel, check_selections
from vllm_autoprune.selftest.run import (
    RUNNERS,
    SPLIT_QUESTION,
    Report,
    SelftestError,
    available_runners,
)
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, PolicyParams, ReferenceSelection
from vllm_autoprune.tpdsl.loading import load_state, shipped_states
from vllm_autoprune.tpdsl.tokens import VisualTokens

CPU = torch.device("cpu")


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


Run = Callable[..., tuple[int, str, list[tuple[str, str]]]]
"""Exit status of the command, what it prints, and the runs of backbones."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command on fake runs of backbones.

    ``broken`` has changes to a report that passes every check by backbone and runner, or None for
    no report; ``wrong`` is that of a selection on a GPU, for which the CPU stands in. Packages in
    ``absent`` are not installed.
    """
    find = importlib.util.find_spec

    def run_command(
        *arguments: str,
        broken: Mapping[tuple[str, str], Mapping[str, object] | None] | None = None,
        available: tuple[str, ...] = ("v1", "v2"),
        absent: str = "",
        wrong: str = "",
    ) -> tuple[int, str, list[tuple[str, str]]]:
        calls = []

        def run_backbone(name: str, environment: Mapping[str, str], timeout: float) -> Report:
            (runner,) = (name for name, variables in RUNNERS.items() if variables == environment)
            calls.append((name, runner))
            changes = (broken or {}).get((name, runner), {})
            if changes is None:
                raise SelftestError(f"{name} ended with 1")
            return good().model_copy(update={"runner": runner, **changes})

        for name, replacement in {
            "run_backbone": run_backbone,
            "available_runners": lambda: available,
            "check_kernel": lambda device: "",
            "check_selections": lambda device: [SelectionResult("trim", 0.5, 0.002, wrong)],
        }.items():
            monkeypatch.setattr(selftest, name, replacement)
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name == absent else find(name)
        )
        status = main(["selftest", *arguments])
        printed = capsys.readouterr()
        return status, printed.err if status == 2 else printed.out, calls

    return run_command


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "find_gpu", lambda: CPU)


def rows(text: str) -> dict[str, list[str]]:
    """Cells of the table by what must hold; columns are two spaces apart."""
    lines = text.partition("\ncheck ")[2].splitlines()[2:]
    cells = [[cell for cell in line.split("  ") if cell.strip()] for line in lines]
    return {row[0]: [cell.strip() for cell in row[1:]] for row in cells if len(row) > 1}


@pytest.mark.parametrize("more", [(), ("--runner", "both")])
def test_both_runners_in_one_table(run: Run, more: tuple[str, ...]) -> None:
    status, output, calls = run("qwen2_vl", "gemma3", *more)
    assert status == 0
    assert calls == [(n, r) for n in ("qwen2_vl", "gemma3") for r in ("v1", "v2")]
    assert output.count("\ncheck ") == 1 and "All checks passed." in output
    assert len(rows(output)) == len(CHECKS) + 2
    for check in ("runners agree", "kept rows are the model's own"):
        assert rows(output)[check] == ["yes", "yes"]


def test_one_runner(run: Run) -> None:
    status, output, calls = run("gemma3", "--runner", "v2")
    assert (status, calls) == (0, [("gemma3", "v2")])
    assert "runners agree" not in rows(output)
    status, output, _ = run("gemma3", "--runner", "v2", broken={("gemma3", "v2"): {"runner": "v1"}})
    assert status == 1 and "vLLM used v1 instead" in output
    status, output, calls = run("gemma3", available=("v1",))
    assert (status, calls) == (0, [("gemma3", "v1")])
    assert "no Triton" in output


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        *((("gemma3", "--runner", name), "no model runner v2 here") for name in ("v2", "both")),
        (("gpt",), "no such backbone: gpt"),
        (("--gpu",), "no CUDA device here"),
    ],
)
def test_what_cannot_be_run_is_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], refusal: str
) -> None:
    monkeypatch.setattr(selftest, "find_gpu", lambda: None)
    status, output, calls = run(*arguments, available=("v1",))
    assert (status, calls) == (2, []) and refusal in output


def test_a_failed_check_is_reported_with_its_runner(run: Run) -> None:
    unserved = {("gemma3", "v2"): {"vision_runs": 3}, ("qwen2_vl", "v1"): None}
    status, output, _ = run("qwen2_vl", "gemma3", broken=unserved)
    assert status == 1
    assert rows(output)["images are seen once"] == ["yes", "no (v2)"]
    assert rows(output)["served"] == ["no (v1)", "yes"]
    assert rows(output)["runners agree"] == ["-", "yes"]
    assert "gemma3, v2, images are seen once: it ran 3 times more" in output

    other_rows = {("gemma3", "v1"): {"kept": {SPLIT_QUESTION: [OTHERS]}}}
    status, output, _ = run("gemma3", "--json", broken=other_rows)
    report = json.loads(output)
    assert (status, report["holds"], report["runners"]) == (1, False, ["v1", "v2"])
    verdicts = report["found"]["gemma3"]
    broken = {by: [check for check, wrong in verdicts[by].items() if wrong] for by in verdicts}
    assert broken == {"v1": ["positions_are_a_gather"], "v2": [], "both": ["runners_agree"]}


def test_a_backbone_without_its_package_is_left_out_unless_named(run: Run) -> None:
    machine: dict[str, Any] = {"available": ("v1",), "absent": "num2words"}
    machine["broken"] = {("smolvlm", "v1"): None}
    status, output, calls = run(**machine)
    assert status == 0
    assert [name for name, _ in calls] == [name for name in TINY_MODELS if name != "smolvlm"]
    assert "smolvlm: not served, its processor needs the package num2words" in output
    assert "All checks that were run passed." in output
    assert list(json.loads(run("--json", **machine)[1])["left_out"]) == ["smolvlm"]
    assert run("smolvlm", **machine)[0] == 1


# ---- on a GPU ----


@pytest.mark.usefixtures("gpu")
def test_selections_and_two_backbones_on_a_gpu(run: Run) -> None:
    status, output, calls = run("--gpu")
    assert (status, calls) == (0, [(name, "v2") for name in selftest.GPU_BACKBONES])
    assert "trim" in output and "2.00" in output
    assert rows(output)["kept rows are the model's own"] == ["yes", "yes"]
    assert "All checks that were run passed." in output
    status, output, _ = run("--gpu", "--json", wrong="unique: the same index twice")
    report = json.loads(output)
    assert status == 1 and not report["holds"]
    assert report["selections"][0]["wrong"] == "unique: the same index twice"


@pytest.mark.usefixtures("gpu")
def test_on_a_gpu_no_backbone_starts_without_vllm_or_time(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, output, calls = run("--gpu", absent="vllm")
    assert (status, calls) == (0, [])
    assert "qwen3_vl: not served, vLLM is not installed" in output
    monkeypatch.setattr(selftest, "GPU_SECONDS", 30)
    status, output, calls = run("--gpu")
    assert (status, calls) == (0, [])
    assert "llava_next: not served, no time left" in output


def test_every_base_policy_and_shipped_state_is_selected_on_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host is both; then a device that keeps other tokens, and one that waits."""
    monkeypatch.setattr(device_checks, "ROUNDS", 1)
    assert check_kernel(CPU) == "runs on a GPU only"
    results = list(check_selections(CPU))
    assert {result.name for result in results} == {*BASE_POLICIES, *shipped_states()}
    assert all(r.wrong == "" and r.share == 1 and r.seconds > 0 for r in results)
    calls = iter(range(10_000))

    def different(params: PolicyParams, tokens: VisualTokens, budget: int) -> ReferenceSelection:
        start = 0 if next(calls) == 0 else tokens.count - budget
        return ReferenceSelection(torch.arange(start, start + budget).expand(tokens.batch, -1))

    def failing(params: PolicyParams, tokens: VisualTokens, budget: int) -> ReferenceSelection:
        raise RuntimeError("called a synchronizing CUDA operation")

    for name, function in {"cdpruner": different, "divprune": failing}.items():
        policy = dataclasses.replace(BASE_POLICIES[name], function=function)
        monkeypatch.setitem(BASE_POLICIES, name, policy)
    wrong = {result.name: result.wrong for result in check_selections(CPU)}
    assert "of the host's tokens are kept" in wrong["cdpruner"]
    assert wrong["divprune"] == "RuntimeError: called a synchronizing CUDA operation"
    assert wrong["trim"] == ""


def test_only_a_policy_that_has_to_wait_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(device: torch.device) -> AbstractContextManager[None]:
        raise RuntimeError("waits")

    monkeypatch.setattr(device_checks, "_forbid_waiting", forbid)
    waits = {result.name for result in check_selections(CPU) if not result.wrong}
    bases = {name: load_state(name).base_policy.name for name in shipped_states()}
    assert waits == WAITING | {name for name, base in bases.items() if base in WAITING}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_selections_on_a_gpu() -> None:
    assert check_kernel(torch.device("cuda")) == ""
    assert [r for r in check_selections(torch.device("cuda")) if r.wrong] == []
