from __future__ import annotations

import json

import pytest

from vllm_autoprune.cli.main import main
from vllm_autoprune.tpdsl.loading import shipped_states


def test_every_shipped_state_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[2:-2]} == set(shipped_states())


def test_the_list_says_what_a_choice_depends_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    records = {record["name"]: record for record in json.loads(capsys.readouterr().out)}
    assert records["autoprune"]["base_policy"] == "cdpruner"
    assert (records["autoprune"]["exchanges"], records["cdpruner"]["exchanges"]) == (2, 0)
    assert records["autoprune"]["reads_instruction"] is True
    assert records["visionzip"]["reads_instruction"] is False
    assert records["minillava-split"]["core"] > 0
