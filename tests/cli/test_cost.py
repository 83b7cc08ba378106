"""cost: the published figures on one line each, and what they rest on."""

from __future__ import annotations

import json

import pytest

from vllm_autoprune.cli.main import main

Captured = pytest.CaptureFixture[str]


def rows(text: str) -> list[list[str]]:
    """Cells of the lines between the rule under the head and the notes."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.lstrip().startswith("---")) + 1
    return [line.split() for line in lines[start : lines.index("", start)]]


def test_the_efficiency_table(capsys: Captured) -> None:
    assert main(["cost", "--backbone", "llava-next-7b", "--tokens", "2880", "320"]) == 0
    output = capsys.readouterr().out
    assert rows(output) == [
        ["2880", "41.65", "1440", "1.00x", "1.00x"],
        ["320", "4.198", "160", "9.92x", "9.00x"],
    ]
    assert "a multiply-accumulate is 2 FLOPs" in " ".join(output.split())
    assert "text not counted" in output


def test_average_over_layers(capsys: Captured) -> None:
    call = ["cost", "--backbone", "llava-next-7b", "--tokens", "2880", "320", "--full-layers", "2"]
    assert main(call) == 0
    assert rows(capsys.readouterr().out)[1][:3] == ["320", "4.436", "160.3125"]
    assert main([*call, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["rows"][1]["last_layer"] == 150
    assert record["rows"][1]["mean_over_layers"] == 320.625


def test_text_and_the_default_budgets(capsys: Captured) -> None:
    assert main(["cost", "--backbone", "llava-1.5-7b", "--text", "60", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [row["tokens"] for row in record["rows"]] == [576, 64]
    assert [row["kv_mib"] for row in record["rows"]] == [318, 62]
    assert record["assumptions"]
