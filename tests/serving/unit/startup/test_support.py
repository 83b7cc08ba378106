from __future__ import annotations

import ast
from pathlib import Path

import pytest

from vllm_autoprune.serving.startup.support import SUPPORT, Support

TESTS = Path(__file__).resolve().parents[3]
NEEDS_A_GPU = {
    "Encoder CUDA graphs",
    "Async scheduling",
    "GPUs, CUDA graphs of the language model",
    "vLLM 0.33 with a model",
}
"""What a CPU cannot run."""


def functions(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", SUPPORT, ids=[row.feature for row in SUPPORT])
def test_each_row_names_tests_that_exist(row: Support) -> None:
    assert row.tests or row.status == "untested"
    for test in row.tests:
        file, _, function = test.partition("::")
        assert function.startswith("test_")
        assert function in functions(file), test


def test_only_what_needs_a_gpu_is_untested() -> None:
    untested = {row.feature for row in SUPPORT if row.status == "untested"}
    assert untested == NEEDS_A_GPU


def test_no_feature_is_listed_twice() -> None:
    assert len({row.feature for row in SUPPORT}) == len(SUPPORT)
