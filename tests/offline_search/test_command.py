from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offline_search.dataset import Dataset
from tests.offline_search.endpoint import Answer, Body, Told, endpoint, error, said
from tests.offline_search.replies import valid_replies
from vllm_autoprune import load_state
from vllm_autoprune.cli.main import main

SOUND = valid_replies(12)


def model(body: Body, number: int) -> Answer:
    """A served model and a proposer in one: the more relevance a state has, the surer it is."""
    if "mm_processor_kwargs" not in body:
        return said(SOUND[number % len(SOUND)])
    answer = body["messages"][-1]["content"]
    signals = body["mm_processor_kwargs"]["autoprune"].get("policy", {}).get("scoring", {})
    names = json.dumps(signals)
    value = -0.1 - 0.1 * (len(names) % 7)
    token = {"1": {"logprob": value, "rank": 1, "decoded_token": f" {answer}"}}
    return 200, json.dumps({"prompt_logprobs": [None, token]}).encode(), {}


@pytest.fixture
def served() -> Iterator[Told]:
    with endpoint(model) as told:
        yield told


def call(told: Told, data: Dataset, ledger: Path, *more: str) -> int:
    return main([
        "search", "--data", str(data.folder), "--ledger", str(ledger), "--server-url", told.url,
        "--proposer-url", told.url, "--proposer-model", "m", "--budget", "8", "--rounds", "2",
        "--per-round", "2", "--strategy", "autoprune", *more,
    ])  # fmt: skip


def test_from_a_folder_of_questions_to_a_state_that_loads(
    served: Told, data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, page, ledger = tmp_path / "s.json", tmp_path / "p.html", tmp_path / "l.jsonl"
    assert call(served, data, ledger, "-o", str(state)) == 0
    told = capsys.readouterr()
    assert "| winner |" in told.out and "round 2" in told.err and "left" in told.err
    found = load_state(state)
    assert found.provenance.scores and "autoprune" in found.provenance.found_by
    assert main(["validate", str(state)]) == 0

    assert main(["search", "report", "--ledger", str(ledger), "-o", str(page)]) == 0
    assert page.read_text().startswith("<!doctype html>")
    capsys.readouterr()

    asked = len(served.asked)
    again = tmp_path / "again.jsonl"
    replayed = ["search", "--replay", str(ledger), "--ledger", str(again), "--json"]
    assert main([*replayed, "--data", str(data.folder)]) == 0
    told = capsys.readouterr()
    before, after = (line.split()[1] for line in told.err.splitlines())
    assert before == after and len(served.asked) == asked, "a replay asks nobody"
    assert json.loads(told.out)["digest"] == found.digest


def test_a_ledger_is_not_gone_on_with_by_accident(
    served: Told, data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = tmp_path / "l.jsonl"
    assert call(served, data, ledger) == 0
    asked = len(served.asked)
    assert call(served, data, ledger) == 1
    assert "--resume" in capsys.readouterr().err
    assert call(served, data, ledger, "--resume") == 0
    # Both sides are looked at before anything is gone on with; nothing else is asked again.
    assert len(served.asked) - asked <= 3
    assert call(served, data, ledger, "--resume", "--seed", "5") == 1
    assert "belongs to another search" in capsys.readouterr().err


def test_a_dry_run_asks_nobody_and_says_what_it_would(
    served: Told, data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(served, data, tmp_path / "l", "--dry-run", "--price", "1", "2", "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["calls"] == 4 and found["money"] > 0 and found["prompt_tokens"] > 1000
    assert found["answers"]["search"] == 24 * (1 + 1 + 4)
    assert "quality_topk_selector" in found["messages"][0]["content"]
    assert not served.asked and not (tmp_path / "l").exists()
    assert call(served, data, tmp_path / "l", "--dry-run") == 0
    assert "--- system" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "said_"),
    [
        (["--strategy", "magic"], "--strategy: 'magic' is not known"),
        (["--base-policy", "none"], "--base-policy: 'none' is not known"),
        (["--rounds", "0"], "rounds"),
        (["--data", "/nowhere"], "search.jsonl"),
        (["--seed", "-1"], "seed"),
    ],
)
def test_a_wrong_call_is_one_error_with_the_way_out(
    more: list[str], said_: str, served: Told, data: Dataset, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert call(served, data, tmp_path / "l", *more) == 1
    told = capsys.readouterr().err
    assert said_ in told and "->" in told and "Traceback" not in told
    assert not served.asked


def test_a_server_that_takes_no_states_ends_it_before_the_first_round(
    data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with endpoint(lambda b, n: error(400, "requests may not bring a state")) as told:
        assert call(told, data, tmp_path / "l") == 1
    assert "--autoprune-requests states" in capsys.readouterr().err


def test_a_wrong_key_ends_it_before_the_first_round(
    data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(body: Body, number: int) -> Answer:
        return model(body, number) if "mm_processor_kwargs" in body else error(401, "bad key")

    with endpoint(answer) as told:
        assert call(told, data, tmp_path / "l") == 1
    assert "--proposer-key-env" in capsys.readouterr().err


def test_a_report_on_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "report", "--ledger", str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_the_ablation_of_the_proposer(
    served: Told, data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(served, data, tmp_path / "l", "--no-proposer") == 1
    assert "autoprune needs a proposer" in capsys.readouterr().err
    alone = ("--no-proposer", "--strategy", "autoprune+", "--dry-run", "--json")
    assert call(served, data, tmp_path / "l", *alone) == 0
    assert json.loads(capsys.readouterr().out)["calls"] == 0
