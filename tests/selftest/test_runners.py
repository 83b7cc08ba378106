from __future__ import annotations

import subprocess

import pytest

from vllm_autoprune.selftest.run import RUNNERS, available_runners


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
