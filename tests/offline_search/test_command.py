"""The command `vllm-autoprune search` as a user meets it, on a fake server."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from offline_search.dataset import SPLITS, Dataset
from offline_search.ledger import (
    ReplyRecord,
    SettingsRecord,
    WinnerRecord,
    read_ledger,
    select_records,
)
from offline_search.report import ProgressLog
from tests.fake_server import Answer, Body, FakeServer
from tests.offline_search.synthetic import (
    IMAGE_TOKENS,
    SIZE,
    answer_search,
    completion,
    endpoint,
    error,
    list_reply,
)
from tests.tables import parametrize_from_file
from vllm_autoprune import load_state
from vllm_autoprune.cli.main import main

Printed = pytest.CaptureFixture[str]


@pytest.fixture
def served() -> Iterator[FakeServer]:
    with endpoint(answer_search) as server:
        yield server


Run = Callable[..., int]


@pytest.fixture
def run_command(served: FakeServer, data: Dataset, tmp_path: Path) -> Run:
    """Run a search of two rounds, with more flags."""
    return lambda *more: main(
        [
            "search",
            "--data",
            str(data.folder),
            "--ledger",
            str(tmp_path / "l.jsonl"),
            "--server-url",
            served.url,
            "--proposer-url",
            f"{served.url}/v1",
            "--proposer-model",
            "m",
            "--budget",
            "8",
            "--rounds",
            "2",
            "--per-round",
            "2",
            "--strategy",
            "autoprune",
            *more,
        ]
    )


FLAGS = ("--images", "6", "--seed", "1")


def test_the_command_writes_the_winner_and_a_report(
    run_command: Run, tmp_path: Path, capsys: Printed
) -> None:
    state = tmp_path / "s.json"
    page = tmp_path / "p.html"
    assert run_command(*FLAGS, "-o", str(state)) == 0
    output = capsys.readouterr()
    assert "| winner |" in output.out
    assert "round 2" in output.err and "left" in output.err
    winner = load_state(state)
    assert winner.provenance.scores and "autoprune" in winner.provenance.found_by
    assert main(["validate", str(state)]) == 0
    ledger = str(tmp_path / "l.jsonl")
    assert main(["search", "report", "--ledger", ledger, "-o", str(page)]) == 0
    assert page.read_text().startswith("<!doctype html>")


def test_an_evaluation_leaves_out_what_chose_the_state_unless_told_to_keep_it(
    run_command: Run, data: Dataset, tmp_path: Path, capsys: Printed
) -> None:
    """Also where the questions stand in another order, and beside new ones."""
    assert run_command("-o", str(tmp_path / "s.json")) == 0
    written = tmp_path / "s.test.jsonl"
    assert f"{written}: the test questions, for eval --data" in capsys.readouterr().err
    texts = {name: (data.folder / f"{name}.jsonl").read_text() for name in SPLITS}
    everything = data.folder / "all.jsonl"
    everything.write_text("".join(sorted("".join(texts.values()).splitlines(True))))

    def preview(*words: str) -> dict[str, Any]:
        state = ["--state", str(tmp_path / "s.json"), "--budgets", "8", "--json"]
        main(["eval", "--dry-run", *state, *words])
        record: dict[str, Any] = json.loads(capsys.readouterr().out)
        return record

    def count(*words: str) -> tuple[int, int]:
        record = preview(*words)
        return record["questions"], record["left_out"]

    assert count("--data", str(written)) == (SIZE, 0)
    assert count("--data", str(everything)) == (SIZE, 2 * SIZE)
    assert count("--data", str(everything), "--all-questions") == (3 * SIZE, 0)
    (problem,) = preview("--data", str(data.folder / "search.jsonl"))["problems"]
    assert problem["fix"].startswith("give the .test.jsonl beside the state")


def test_a_search_goes_on_with_its_own_settings_where_it_is_told_to(
    run_command: Run, served: FakeServer, capsys: Printed
) -> None:
    assert run_command(*FLAGS) == 0
    sent = len(served.requests)
    capsys.readouterr()
    assert run_command(*FLAGS) == 1 and "--resume" in capsys.readouterr().err
    assert run_command(*FLAGS, "--resume") == 0
    # Server and proposer are checked before a search resumes; nothing else is sent again.
    assert len(served.requests) - sent <= 3
    capsys.readouterr()
    assert run_command("--resume", "--seed", "5", "--images", "6", "--core") == 1
    differences = "another search (seed is 5, was 1; core is True, was False"
    assert differences in capsys.readouterr().err


@pytest.fixture
def replay_command(
    run_command: Run, data: Dataset, tmp_path: Path, capsys: Printed
) -> Run:
    """Replay a recorded search of six images, or another file."""
    assert run_command(*FLAGS) == 0
    capsys.readouterr()
    ledger = str(tmp_path / "again.jsonl")
    flags = ["--data", str(data.folder), "--ledger", ledger, "--json", "--replay"]
    return lambda *more: main(["search", *flags, *more])


def test_a_replay_has_the_same_records_and_sends_no_request(
    replay_command: Run, served: FakeServer, tmp_path: Path, capsys: Printed
) -> None:
    sent = len(served.requests)
    recording = tmp_path / "l.jsonl"
    assert replay_command(str(recording), "--images", "6") == 0
    output = capsys.readouterr()
    original, replayed = (line.split()[1] for line in output.err.splitlines())
    assert original == replayed and len(served.requests) == sent
    (winner,) = select_records(read_ledger(recording), WinnerRecord)
    assert json.loads(output.out)["digest"] == winner.digest


def test_a_replay_of_other_questions_or_of_no_search_is_refused(
    replay_command: Run, tmp_path: Path, capsys: Printed
) -> None:
    for recording, images, message in (
        (
            tmp_path / "l.jsonl",
            "3",
            "-> give the data folder and the --images of the recorded search",
        ),
        (
            tmp_path / "folder" / "typo.jsonl",
            "6",
            "name the ledger of a search that has begun",
        ),
    ):
        assert replay_command(str(recording), "--images", images) == 1
        assert message in capsys.readouterr().out
    assert not (tmp_path / "folder").exists()
    assert not (tmp_path / "again.jsonl").exists()


@pytest.mark.parametrize(
    ("more", "length", "ranges"),
    [
        ([], 5, {"candidates 1.0 to 1.4", "candidate 1.5"}),
        (["--strategy", "evoprompting"], 1, set()),
        (
            ["--proposals-per-reply", "3"],
            3,
            {"candidates 1.0 to 1.2", "candidates 1.3 to 1.5"},
        ),
    ],
)
def test_a_model_behind_an_endpoint_is_asked_for_lists(
    more: list[str],
    length: int,
    ranges: set[str],
    run_command: Run,
    served: FakeServer,
    tmp_path: Path,
) -> None:
    assert run_command("--per-round", "6", "--rounds", "1", *more) == 0
    requests = [body for body in served.requests if "response_format" in body]
    assert {body["max_tokens"] for body in requests} == {1024 * length}
    texts = {body["messages"][1]["content"].splitlines()[-1] for body in requests}
    if ranges:
        assert {
            text.partition("Propose ")[2].partition(",")[0] for text in texts
        } == ranges
    (opened,) = select_records(read_ledger(tmp_path / "l.jsonl"), SettingsRecord)
    assert opened.settings.proposals_per_reply == length


@pytest.fixture
def dry_run(run_command: Run, capsys: Printed) -> Callable[..., str]:
    """What a dry run prints."""

    def run(*more: str) -> str:
        assert run_command("--dry-run", *more) == 0
        return capsys.readouterr().out

    return run


def test_a_dry_run_estimates_what_a_search_takes_and_asks_no_proposer(
    dry_run: Callable[..., str], served: FakeServer
) -> None:
    estimate: dict[str, Any] = json.loads(dry_run("--price", "1", "2", "--json"))
    assert estimate["calls"] == 2 and estimate["seconds"] > 0
    assert estimate["money"] > 0 and estimate["prompt_tokens"] > 1000
    assert estimate["answers"] == {
        "search": SIZE * (1 + 1 + 4),
        "validation": SIZE * (1 + 1 + 5),
        "test": SIZE * (1 + 1 + 2),
    }
    text = dry_run("--proposals-per-reply", "1")
    assert "At most 4 requests to the proposer, each for one proposal: about" in text
    assert re.search(r"The\ssearch\stakes\sabout\s\d+\ss", text)
    assert all("mm_processor_kwargs" in body for body in served.requests)


def test_a_dry_run_prints_the_prompt_of_its_space(dry_run: Callable[..., str]) -> None:
    messages = json.loads(dry_run("--json"))["messages"]
    language, request = (message["content"] for message in messages)
    assert "Propose candidates 1.0 to 1.1, each" in request
    assert "quality_topk_selector" in language
    messages = json.loads(dry_run("--space", "numbers", "--json"))["messages"]
    numbers = messages[0]["content"]
    assert "lam 0.04 to 0.22" in numbers and "quality_topk_selector" not in numbers


def test_a_dry_run_refuses_budgets_and_knows_no_time_without_a_server(
    run_command: Run, served: FakeServer, data: Dataset, tmp_path: Path, capsys: Printed
) -> None:
    assert run_command("--dry-run", "--budget", str(IMAGE_TOKENS)) == 1
    assert "keeps all tokens" in capsys.readouterr().err
    sent = len(served.requests)
    flags = ["--data", str(data.folder), "--strategy", "tpe"]
    assert main(["search", *flags, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] is None
    assert len(served.requests) == sent and not (tmp_path / "l.jsonl").exists()


def test_one_file_of_questions_is_searched_on_and_said_how_it_is_split(
    run_command: Run, data: Dataset, tmp_path: Path, capsys: Printed
) -> None:
    lines = [(data.folder / f"{split}.jsonl").read_text() for split in SPLITS]
    path = data.folder / "questions.jsonl"
    again = tmp_path / "again.jsonl"
    path.write_text("".join(lines))
    for split in SPLITS:
        (data.folder / f"{split}.jsonl").unlink()
    assert run_command("--data", str(path), "--rounds", "1", "--seed", "5") == 0
    said = f"{path} is split by image, with seed 5: 36 questions about 18 images for search, 14 "
    assert said in capsys.readouterr().err
    flags = [
        "--data",
        str(path),
        "--replay",
        str(tmp_path / "l.jsonl"),
        "--ledger",
        str(again),
    ]
    assert main(["search", *flags]) == 0


def test_a_server_that_prunes_nothing_is_named_before_the_search(
    run_command: Run, served: FakeServer, tmp_path: Path, capsys: Printed
) -> None:
    def ignore_budgets(body: Body) -> Answer:
        if "mm_processor_kwargs" in body:
            body = {**body, "mm_processor_kwargs": {"autoprune": {}}}
        return answer_search(body, 0)

    served.respond = ignore_budgets
    assert run_command() == 1
    assert (
        f"{served.url}: prunes nothing: with K = 1 a prompt is"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "l.jsonl").exists()


def test_a_search_whose_proposer_is_lost_stops_and_goes_on_later(
    run_command: Run, served: FakeServer, tmp_path: Path, capsys: Printed
) -> None:
    """The endpoint answers the check and three requests, then its account is empty."""
    paid = iter(range(4))

    def respond(body: Body) -> Answer:
        is_paid = "mm_processor_kwargs" in body or next(paid, None) is not None
        return answer_search(body, 0) if is_paid else error(402, "pay")

    flags = ("--proposals-per-reply", "1", "--rounds", "4")
    served.respond = respond
    assert run_command(*flags) == 1
    told = capsys.readouterr().err
    assert told.count("status 402") == 1 and "then --resume, which goes on" in told
    replies = select_records(read_ledger(tmp_path / "l.jsonl"), ReplyRecord)
    assert [reply.failure for reply in replies] == [""] * 3
    served.respond = lambda body: answer_search(body, 0)
    assert run_command(*flags, "--resume") == 0


def test_a_reply_that_was_cut_names_the_flag_that_gives_it_room(
    run_command: Run, served: FakeServer, tmp_path: Path, capsys: Printed
) -> None:
    def respond(body: Body) -> Answer:
        if "mm_processor_kwargs" in body:
            return answer_search(body, 0)
        thinks = (
            body["messages"][0]["content"] == "Say yes." or body["max_tokens"] < 2000
        )
        text = "<think>Well," if thinks else f"<think>Well,</think>{list_reply(1, 2)}"
        choice = {"message": {"content": text}, "finish_reason": "length"}
        return completion("", choices=[choice])

    served.respond = respond
    more = ["--strategy", "autoprune+", "--rounds", "1", "--per-round", "3"]
    assert run_command(*more, "--reply-tokens", "100") == 0
    printed = (
        "the reply was cut off after 500 tokens -> write less, or raise --reply-tokens"
    )
    assert printed in capsys.readouterr().err.replace("invalid: /: ", "")
    path = tmp_path / "enough.jsonl"
    assert run_command(*more, "--reply-tokens", "400", "--ledger", str(path)) == 0
    assert "cut off" not in capsys.readouterr().err
    replies = select_records(read_ledger(path), ReplyRecord)
    texts = [record.text for record in replies]
    assert texts == [list_reply(1, 2)], "without thoughts"


OBJECT = '{"reasoning_effort": "high", "top_p": 0.9}'


@pytest.mark.parametrize("is_file", [False, True])
def test_options_and_refused_fields_are_recorded_with_the_settings(
    is_file: bool, run_command: Run, served: FakeServer, tmp_path: Path
) -> None:
    def respond(body: Body) -> Answer:
        names = () if "mm_processor_kwargs" in body else ("temperature", "seed")
        refused = [name for name in names if name in body]
        return error(400, f"no {refused[0]}") if refused else answer_search(body, 0)

    served.respond = respond
    file = tmp_path / "options.json"
    file.write_text(f"\ufeff{OBJECT}", encoding="utf-8")
    flags = ["--rounds", "1", "--proposer-options", str(file) if is_file else OBJECT]
    assert run_command(*flags) == 0
    requests = [body for body in served.requests if "mm_processor_kwargs" not in body]
    later = requests[3:]
    assert later and all(json.loads(OBJECT).items() <= body.items() for body in later)
    assert not any({"temperature", "seed"} & body.keys() for body in later)
    (opened,) = select_records(read_ledger(tmp_path / "l.jsonl"), SettingsRecord)
    assert json.loads(opened.settings.proposer_options) == json.loads(OBJECT)
    assert opened.settings.unsent == ("seed", "temperature")


@pytest.mark.parametrize(
    ("budget", "status"), [(IMAGE_TOKENS - 1, 0), (IMAGE_TOKENS, 1), (500, 1)]
)
def test_a_budget_that_keeps_every_token_is_refused_before_the_search(
    budget: int, status: int, run_command: Run, served: FakeServer, capsys: Printed
) -> None:
    assert run_command("--budget", "8", str(budget), "--rounds", "1") == status
    message = (
        f"--budget: {budget} keeps all tokens: an image has 64 -> give less than 64"
    )
    assert (message in capsys.readouterr().err) == bool(status)
    assert len(served.requests) < 40 or not status


def test_an_interrupted_search_says_how_to_go_on(
    run_command: Run,
    served: FakeServer,
    tmp_path: Path,
    capsys: Printed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*values: object) -> None:
        raise KeyboardInterrupt

    for more in (["--api-key", "k1"], ["--api-key", "k1", "--resume"]):
        with monkeypatch.context() as patch:
            patch.setattr(ProgressLog, "on_round", interrupt)
            assert run_command(*more) == 130
        line = f"stopped; {tmp_path / 'l.jsonl'} keeps what was measured, --resume goes on from it"
        said, command = capsys.readouterr().err.splitlines()[-2:]
        assert line in said and "k1" not in command and command.count("--resume") == 1
    words = shlex.split(command)
    assert words[0] == "vllm-autoprune" and words.count("...") == 1
    assert main(words[1:]) == 0


def test_the_command_that_resumes_shows_no_secret(
    run_command: Run,
    served: FakeServer,
    capsys: Printed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*values: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ProgressLog, "on_round", interrupt)
    url = served.url.replace("//", "//me:secret1@")
    headers = ("--header", "X-A=secret2", "--proposer-header=X-B=secret3")
    assert run_command("--server-url", url, *headers) == 130
    command = capsys.readouterr().err.splitlines()[-1]
    assert "secret" not in command and "//...@" in command


def test_an_output_that_is_a_folder_is_refused_before_the_search(
    run_command: Run, served: FakeServer, tmp_path: Path, capsys: Printed
) -> None:
    assert run_command("-o", str(tmp_path)) == 1
    assert f"{tmp_path}: is a folder -> name a file in it" in capsys.readouterr().err
    assert not served.requests


@parametrize_from_file("more", "message")
def test_wrong_options_give_one_error_with_a_fix(
    more: list[str], message: str, run_command: Run, served: FakeServer, capsys: Printed
) -> None:
    assert run_command(*more) == 1
    errors = capsys.readouterr().err
    assert message in errors and "->" in errors and "Traceback" not in errors
    assert "Value error" not in errors and "at least 1 item" not in errors
    assert not served.requests


def test_every_wrong_option_is_reported(run_command: Run, capsys: Printed) -> None:
    wrong = [
        "--rounds",
        "0",
        "--images",
        "0",
        "--most-money",
        "x",
        "--budget",
        "0",
        "--json",
    ]
    assert run_command(*wrong) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    where = [problem["where"] for problem in problems]
    assert where == ["--rounds", "--budget", "--images", "--most-money"]
    assert all(problem["fix"] for problem in problems)


@parametrize_from_file("more", "message")
def test_a_language_model_takes_part_only_where_it_is_named(
    more: list[str], message: str, data: Dataset, tmp_path: Path, capsys: Printed
) -> None:
    folder = str(data.folder)
    ledger = str(tmp_path / "l")
    command = [
        "search",
        "--data",
        folder,
        "--ledger",
        ledger,
        "--dry-run",
        "--json",
        *more,
    ]
    assert main(command) == bool(more)
    printed = capsys.readouterr().out
    assert message in printed and (
        not more or re.search(r"give --proposer-url", printed)
    )


def test_server_and_proposer_get_the_key_and_the_headers_that_are_theirs(
    run_command: Run, served: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROPOSER_KEY", "p")
    flags = [
        "--api-key",
        "k",
        "--header",
        "X-Who=server",
        "--proposer-key-env",
        "PROPOSER_KEY",
    ]
    assert run_command(*flags, "--proposer-header", "X-Who=proposer") == 0
    sent = {(headers["Authorization"], headers["X-Who"]) for headers in served.headers}
    assert sent == {("Bearer k", "server"), ("Bearer p", "proposer")}
