"""docs/development.md: its steps, followed to the letter in a copy, leave the checks green."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/development.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_method_added_as_the_page_says_passes_the_checks(tmp_path: Path) -> None:
    """What takes minutes is left out: pins of refusals and of rows, and every other policy."""
    method = PAGE.partition("## Add a method")[2].partition("**An atom**")[0]
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns(".*", "out", "dist", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=ignored)
    environment = {**os.environ, "PYTHONPATH": str(copy), "HF_HUB_OFFLINE": "1"}

    def call(arguments: str, *more: str) -> None:
        result = subprocess.run(
            [sys.executable, *arguments.split(), *more],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, f"{arguments}\n{result.stdout}{result.stderr}"

    (code,) = re.findall(r"```python\n(.*?)```", method, re.DOTALL)
    with (copy / "vllm_autoprune/base_policies/importance.py").open("a") as module:
        module.write(f"\n\n{code}")
    page = copy / "docs/base-policies.md"
    row = "| `loudest` | pre-LLM selection | - | - |\n"
    paragraph = "**loudest**: The tokens of the largest norm. *Ours:* an example.\n\n"
    text = page.read_text(encoding="utf-8")
    text = text.replace("| `mmtok` |", f"{row}| `mmtok` |", 1)
    page.write_text(text.replace("**mmtok**:", f"{paragraph}**mmtok**:", 1))

    for command in (
        "python -m benchmarks.policies build && python scripts/readme.py",
        "vllm-autoprune validate loudest",
        "python -m tests.pins write refusals digests states",
    ):
        assert f"`{command}`" in method
    call("-m benchmarks.policies build")
    call("scripts/readme.py")
    call("-m vllm_autoprune validate loudest")
    call("-m tests.pins write digests")

    call("-m ruff check vllm_autoprune tests benchmarks")
    call("-m ruff format --check vllm_autoprune")
    call("-m tests.pins check digests")
    tests = "tests/test_budgets.py tests/benchmarks/test_policies.py"
    tests += " tests/base_policies tests/tpdsl"
    chosen = "loudest or test_budgets or test_policies"
    call(f"-m pytest -q -p no:cacheprovider {tests} -k", chosen)
