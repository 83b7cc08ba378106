from __future__ import annotations

import json

import pytest

from tests.selftest.test_checks import good
from vllm_autoprune.cli.commands import selftest
from vllm_autoprune.cli.main import main
from vllm_autoprune.selftest.report import Report
from vllm_autoprune.selftest.run import SelftestError


def test_what_holds_is_shown_for_each_backbone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, dict[str, str]]] = []

    def examine(name: str, environment: dict[str, str]) -> Report:
        asked.append((name, environment))
        return good()

    monkeypatch.setattr(selftest, "examine", examine)
    assert main(["selftest", "qwen2_vl", "gemma3", "--runner", "v2"]) == 0
    assert asked == [(name, {"VLLM_USE_V2_MODEL_RUNNER": "1"}) for name in ("qwen2_vl", "gemma3")]
    shown = capsys.readouterr().out
    assert "qwen2_vl" in shown and "Everything holds." in shown


def test_what_does_not_hold_is_told_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def examine(name: str, environment: dict[str, str]) -> Report:
        if name == "gemma3":
            raise SelftestError("gemma3 ended with 1")
        return good().model_copy(update={"vision_runs": 3})

    monkeypatch.setattr(selftest, "examine", examine)
    assert main(["selftest", "qwen2_vl", "gemma3", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["found"]
    assert found["gemma3"] == {"served": "gemma3 ended with 1"}
    assert [name for name, wrong in found["qwen2_vl"].items() if wrong] == ["images_are_seen_once"]


def test_a_backbone_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "gpt"]) == 2
    assert "no such backbone: gpt" in capsys.readouterr().err
