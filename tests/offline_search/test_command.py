from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offline_search.dataset import Dataset
from offline_search.ledger import SettingsRecord
from offline_search.proposer import Price
from offline_search.replay import estimate_cost
from offline_search.settings import Settings, Strategy
from tests.offline_search.endpoint import Answer, Body, FakeEndpoint, endpoint, error
from tests.offline_search.synthetic import answer_search, records_of_kind
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


@pytest.mark.parametrize(
    ("more", "length"),
    [
        ([], 5),
        (["--strategy", "autoprune+"], 5),
        (["--strategy", "evoprompting-states"], 1),
        (["--proposals-per-reply", "3"], 3),
        (["--proposals-per-reply", "1"], 1),
    ],
)
def test_a_model_behind_an_endpoint_is_asked_for_lists(
    more: list[str], length: int, served: FakeEndpoint, data: Dataset, tmp_path: Path
) -> None:
    assert (
        run_command(served, data, tmp_path / "l", "--per-round", "6", "--rounds", "1", *more) == 0
    )
    asked = [body for body in served.requests if "response_format" in body]
    tokens = {body["max_tokens"] for body in asked}
    assert tokens == {1024 * length}
    texts = {body["messages"][1]["content"].splitlines()[-1] for body in asked}
    if length > 1 and "autoprune+" not in more:
        ranges = [(1, 5), (6, 6)] if length == 5 else [(1, 3), (4, 6)]
        names = [f"candidates {a} to {b}" if a < b else f"candidate {a}" for a, b in ranges]
        assert {text.partition(" of ")[0] for text in texts} == {f"Propose {one}" for one in names}
    settings = records_of_kind(tmp_path / "l", SettingsRecord)[0].settings
    assert settings.proposals_per_reply == length


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
    assert estimate["calls"] == 2 and estimate["money"] > 0 and estimate["prompt_tokens"] > 1000
    assert "Propose candidates 1 to 2 of 2" in estimate["messages"][1]["content"]
    assert estimate["answers"]["search"] == 24 * (1 + 1 + 4)
    assert "quality_topk_selector" in estimate["messages"][0]["content"]
    few = ("--dry-run", "--space", "numbers", "--json")
    assert run_command(served, data, tmp_path / "l", *few) == 0
    language = json.loads(capsys.readouterr().out)["messages"][0]["content"]
    assert "lam 0.04 to 0.22" in language and "quality_topk_selector" not in language
    assert not served.requests and not (tmp_path / "l").exists()
    assert run_command(served, data, tmp_path / "l", "--dry-run") == 0
    assert "--- system" in (text := capsys.readouterr().out)
    assert "At most 2 requests to the proposer, each for up to 5 proposals: about" in text
    one = ("--dry-run", "--proposals-per-reply", "1")
    assert run_command(served, data, tmp_path / "l", *one) == 0
    assert "At most 4 requests to the proposer, each for one proposal: about" in (
        capsys.readouterr().out
    )


def test_a_dry_run_counts_the_rounds_that_repeated_proposals_may_add(data: Dataset) -> None:
    cases: list[tuple[Strategy, bool, int, int]] = [
        ("autoprune", False, 50, 15_000), ("autoprune", True, 200, 60_000),
        ("autoprune+", False, 200, 60_000), ("random", True, 0, 0),
    ]  # fmt: skip
    for strategy, fixed, calls, tokens in cases:
        settings = Settings(strategy=strategy, equal_evaluations=fixed, proposer="scripted")
        for length in (1, 3, 5) if calls else (1,):
            lists = settings.model_copy(update={"proposals_per_reply": length})
            estimate = estimate_cost(lists, data, Price())
            assert estimate.calls == calls * {1: 5, 3: 2, 5: 1}[length] // 5
            assert estimate.completion_tokens == tokens


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--strategy", "magic"], "--strategy: 'magic' is refused -> give a value that is"),
        (["--strategy", "openevolve-code"], "writes programs, and a server measures states"),
        (["--base-policy", "none"], "--base-policy: 'none' is not known"),
        (["--rounds", "0"], "--rounds: '0' is refused -> give a value that is greater than"),
        (["--per-round", "0"], "--per-round: '0' is refused"),
        (["--budget", "0", "--dry-run"], "search: --budget: '0' is refused"),
        (["--budget", "8", "8"], "--budget: "),
        (["--temperature", "nan"], "--temperature: 'nan' is refused"),
        (
            ["--space", "none"],
            "--space: 'none' is refused -> give a value that is 'all', 'numbers'",
        ),
        (["--space", "numbers", "--library", "paper"], "--space, --library: the space numbers has"),
        (["--space", "without-anchoring", "--budget", "720"], "anchoring cannot be removed above"),
        (["--data", "/nowhere"], "search.jsonl"),
        (["--seed", "-1"], "--seed: '-1' is refused"),
        (["--rounds", "x"], "--rounds: 'x' is refused -> give a value that is a valid integer"),
        (["--objective", "speed"], "--objective: 'speed' is refused -> give a value that is"),
        (["--images", "0"], "--images: '0' is refused"),
        (["--at-once", "x"], "--at-once: 'x' is refused"),
        (["--most-tokens", "0"], "--most-tokens: '0' is refused"),
        (["--most-money", "-1"], "--most-money: '-1' is refused"),
        (["--price", "nan", "1"], "--price: 'nan' is refused"),
        (["--proposals-per-reply", "0"], "--proposals-per-reply: '0' is refused"),
        (
            ["--proposals-per-reply", "5", "--strategy", "tpe"],
            "search: --proposals-per-reply: only autoprune and autoprune+ ask for lists",
        ),
    ],
)
def test_wrong_options_give_one_error_with_a_fix(
    more: list[str], message: str, served: FakeEndpoint, data: Dataset, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert run_command(served, data, tmp_path / "l", *more) == 1
    errors = capsys.readouterr().err
    assert message in errors and "->" in errors and "Traceback" not in errors
    assert "Value error" not in errors and "at least 1 item" not in errors
    assert not served.requests


@pytest.mark.parametrize(
    "fields",
    [
        {"space": "numbers", "library": "paper"},
        {"space": "numbers", "strategy": "openevolve-code"},
        {"other_bases": ("dart",), "strategy": "evoprompting-code"},
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="leave others out"):
        Settings.model_validate({"proposer": "m", **fields})


def test_every_wrong_option_is_reported(
    served: FakeEndpoint, data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["--rounds", "0", "--images", "0", "--most-money", "x", "--budget", "0", "--json"]
    assert run_command(served, data, tmp_path / "l", *wrong) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    where = [problem["where"] for problem in problems]
    assert where == ["--rounds", "--budget", "--images", "--most-money"]
    assert all(problem["fix"] for problem in problems)


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
    message = "No such file or directory -> name the ledger of a search that has begun"
    assert message in capsys.readouterr().err


def test_a_replay_names_what_differs_from_its_recording(
    served: FakeEndpoint, data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger, again = tmp_path / "l.jsonl", str(tmp_path / "again.jsonl")
    assert run_command(served, data, ledger, "--images", "6", "--seed", "1") == 0
    replayed = ["search", "--data", str(data.folder), "--ledger", again, "--replay"]
    capsys.readouterr()
    assert main([*replayed, str(ledger), "--images", "3"]) == 1
    message = "-> give the data folder and the --images of the recorded search"
    assert message in capsys.readouterr().err
    assert main([*replayed, str(tmp_path / "folder" / "typo.jsonl")]) == 1
    assert "name the ledger of a search that has begun" in capsys.readouterr().err
    assert not (tmp_path / "folder").exists() and not Path(again).exists()
    assert main([*replayed, str(ledger), "--images", "6"]) == 0


def test_a_language_model_takes_part_only_where_it_is_given(
    data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def dry_run(*more: str) -> int:
        folder, ledger = str(data.folder), str(tmp_path / "l")
        return main(["search", "--data", folder, "--ledger", ledger, "--dry-run", "--json", *more])

    assert dry_run() == 0
    assert json.loads(capsys.readouterr().out)["calls"] == 0
    assert dry_run("--strategy", "autoprune") == 1
    assert "autoprune needs a language model -> give --proposer-url" in capsys.readouterr().err
    assert dry_run("--proposer-model", "m") == 1
    assert "--proposer-model: has no endpoint -> give --proposer-url" in capsys.readouterr().err
