"""The dtype of this machine's models: chosen by what the CPU can do, and named nowhere else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from benchmarks.server import command
from vllm_autoprune.ops.dtype import choose_dtype

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("gpus", "onednn", "avx512", "amx", "limit", "expected"),
    [
        (0, True, True, False, "", "bfloat16"),
        (0, True, False, True, "", "bfloat16"),
        (0, True, False, False, "", "float32"),  # AVX-512 without BF16
        (0, False, True, False, "", "float32"),
        (0, True, True, False, "AVX512_CORE", "float32"),  # a limit that oneDNN emulates below
        (1, False, False, False, "", "bfloat16"),
    ],
)
def test_bfloat16_needs_a_gpu_or_the_instructions(
    gpus: int,
    onednn: bool,
    avx512: bool,
    amx: bool,
    limit: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    capabilities = {"avx512_bf16": avx512, "amx_bf16": amx}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert choose_dtype() == expected
    assert choose_dtype(exact=True) == ("bfloat16" if gpus else "float32")
    assert command("model", 1)[-2:] == ["--dtype", expected]
    assert command("model", 1, ("--dtype", "half"))[-1] == "half", "flags win, being last"


def test_no_server_start_names_bfloat16() -> None:
    named = re.compile(r"--dtype[\"', =]+bfloat16|(LLM|EngineArgs)\([^)]*=\"bfloat16\",")
    wrong = [
        str(path.relative_to(ROOT))
        for top in ("benchmarks", "offline_search", "vllm_autoprune/selftest", "tests", "docs",
                    "examples", "scripts")
        for path in (ROOT / top).rglob("*")
        if path.suffix in {".py", ".md", ".sh", ".yaml"} and path != Path(__file__)
        if named.search(path.read_text())
    ]  # fmt: skip
    assert not wrong, "leave --dtype out, or pass choose_dtype()"
