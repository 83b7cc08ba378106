from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offline_search.cost_estimate import estimate_cost
from offline_search.dataset import Dataset
from offline_search.proposers.endpoint import Price
from offline_search.settings import Settings
from tests.offline_search.endpoint import Answer, Body, FakeEndpoint, endpoint, error
from tests.offline_search.synthetic import answer_search
from vllm_autoprune import load_state
from vllm_autoprune.cli.main import main


@pytest.fixture
def served() -> Iterator[FakeEndpoint]:
    with endpoint(answer_search) as server:
        yield server


def run_command(server: FakeEndpoint, data: Dataset, ledger: Path, *more: str) -> int:
    return main([
        "search", "--data", str(data.folder), "--ledger", str(ledger), "--server-url", server.url,
        "--proposer-url", server.url, "--proposer-model", "m", "--budget", "8", "--rounds", "2",
        "--per-round", "2", "--strategy", "autoprune", *more,
    ])  # fmt: skip


def test_the_command_searches_reports_and_replays(
    served: FakeEndpoint, data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, page, ledger = tmp_path / "s.json", tmp_path / "p.html", tmp_path / "l.jsonl"
    assert run_command(served, data, ledger, "-o", str(state)) == 0
    output = capsys.readouterr()
    assert "| winner |" in output.out and "round 2" in output.err and "left" in output.err
    winner = load_state(state)
    assert winner.provenance.scores and "autoprune" in winner.provenance.found_by
    assert main(["validate", str(state)]) == 0

    assert main(["search", "report", "--ledger", str(ledger), "-o", str(page)]) == 0
    assert page.read_text().startswith("<!doctype html>")
    capsys.readouterr()

    sent = len(served.requests)
    again = tmp_path / "again.jsonl"
    replayed = ["search", "--replay", str(ledger), "--ledger", str(again), "--json"]
    assert main([*replayed, "--data", str(data.folder)]) == 0
    output = capsys.readouterr()
    before, after = (line.split()[1] for line in output.err.splitlines())
    assert before == after and len(served.requests) == sent, "a replay sends no request"
    assert json.loads(output.out)["digest"] == winner.digest


def test_an_existing_ledger_needs_resume(
    served: FakeEndpoint, data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = tmp_path / "l.jsonl"
    assert run_command(served, data, ledger) == 0
    sent = len(served.requests)
    assert run_command(served, data, ledger) == 1
    assert "--resume" in capsys.readouterr().err
    assert run_command(served, data, ledger, "--resume") == 0
    # Server and proposer are checked before a search resumes; nothing else is sent again.
    assert len(served.requests) - sent <= 3
    assert run_command(served, data, ledger, "--resume", "--seed", "5") == 1
    assert "belongs to another search" in capsys.readouterr().err


def test_a_dry_run_prints_an_estimate_and_sends_no_request(
    served: FakeEndpoint, data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run_command(served, data, tmp_path / "l", "--dry-run", "--price", "1", "2", "--json") == 0
    )
    estimate: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert estimate["calls"] == 4 and estimate["money"] > 0 and estimate["prompt_tokens"] > 1000
    assert estimate["answers"]["search"] == 24 * (1 + 1 + 4)
    assert "quality_topk_selector" in estimate["messages"][0]["content"]
    assert not served.requests and not (tmp_path / "l").exists()
    assert run_command(served, data, tmp_path / "l", "--dry-run") == 0
    assert "--- system" in capsys.readouterr().out


def test_a_dry_run_counts_the_rounds_that_repeated_proposals_may_add(data: Dataset) -> None:
    for strategy, fixed, calls in (
        ("autoprune", False, 50), ("autoprune", True, 200), ("autoprune+", False, 200),
        ("random", True, 0),
    ):  # fmt: skip
        settings = Settings(strategy=strategy, equal_evaluations=fixed, proposer="scripted")
        assert estimate_cost(settings, data, Price()).calls == calls


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--strategy", "magic"], "--strategy: 'magic' is not known"),
        (["--base-policy", "none"], "--base-policy: 'none' is not known"),
        (["--rounds", "0"], "rounds"),
        (["--data", "/nowhere"], "search.jsonl"),
        (["--seed", "-1"], "seed"),
    ],
)
def test_wrong_options_give_one_error_with_a_fix(
    more: list[str], message: str, served: FakeEndpoint, data: Dataset, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert run_command(served, data, tmp_path / "l", *more) == 1
    errors = capsys.readouterr().err
    assert message in errors and "->" in errors and "Traceback" not in errors
    assert not served.requests


def test_a_server_without_request_states_is_an_error(
    data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with endpoint(lambda b, n: error(400, "requests may not bring a state")) as server:
        assert run_command(server, data, tmp_path / "l") == 1
    assert "--autoprune-requests states" in capsys.readouterr().err


def test_a_wrong_key_is_an_error(
    data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(body: Body, number: int) -> Answer:
        return (
            answer_search(body, number) if "mm_processor_kwargs" in body else error(401, "bad key")
        )

    with endpoint(answer) as server:
        assert run_command(server, data, tmp_path / "l") == 1
    assert "--proposer-key-env" in capsys.readouterr().err


def test_a_report_on_a_missing_ledger_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["search", "report", "--ledger", str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_only_some_strategies_run_without_a_proposer(
    served: FakeEndpoint, data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(served, data, tmp_path / "l", "--no-proposer") == 1
    assert "autoprune needs a proposer" in capsys.readouterr().err
    alone = ("--no-proposer", "--strategy", "autoprune+", "--dry-run", "--json")
    assert run_command(served, data, tmp_path / "l", *alone) == 0
    assert json.loads(capsys.readouterr().out)["calls"] == 0
