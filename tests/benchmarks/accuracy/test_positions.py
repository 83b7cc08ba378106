"""Packed against true positions: a fake lmms-eval asks a fake server, which reads every request."""

from __future__ import annotations

import csv
import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from benchmarks.accuracy import positions
from tests.benchmarks.accuracy.published import PUBLISHED
from tests.evaluation.lmms_output import write_output
from tests.fake_server import Answer, Body, FakeServer
from tests.offline_search.synthetic import (
    MODELS,
    completion,
    endpoint,
    error,
    model_list,
)
from tests.tables import parametrize_from_file
from vllm_autoprune.evaluation.lmms_benchmarks import PINNED, select_benchmarks

Call = Callable[..., tuple[int, str]]

QUESTIONS = 8
"""Of each task, every one about an image of its own."""
RIGHT = {"full": 8, "true@64": 7, "true@32": 6, "packed@64": 2, "packed@32": 1}
"""Questions that the server answers right, the first ones: no two cases alike."""


def case_of(body: Body) -> str:
    """The case that a request asks for, by all that it says of positions."""
    pruning = body["mm_processor_kwargs"]["autoprune"]
    if pruning == {"enabled": False}:
        return "full"
    place = pruning["positions"]
    assert pruning["state"].get("positions", "packed") == place
    assert pruning["state"]["name"] == "divprune"
    budget = {"1/9": 64, "1/18": 32}.get(pruning["budget"], pruning["budget"])
    return f"{place}@{budget}"


def answer(body: Body, number: int) -> Answer:
    """A right answer or the case's name; prompts of K tokens and 20 of text."""
    case = case_of(body)
    question = body["messages"][-1]["content"]
    if not isinstance(question, str):  # what the server serves is asked with an image
        return completion("?")
    right = int(question) < RIGHT[case]
    tokens = 576 if case == "full" else int(case.partition("@")[2])
    return completion("right" if right else case, usage={"prompt_tokens": 20 + tokens})


def run_task(command: list[str], **options: Any) -> SimpleNamespace:
    """lmms-eval 0.7.3 with our plugin: one task, whose files have what the server answered."""
    if command[-1] == "version":
        return SimpleNamespace(stdout=f"lmms-eval {PINNED}\n")
    words = dict(zip(command[1::2], command[2::2], strict=False))
    run = json.loads(options["env"]["AUTOPRUNE_RUN"])
    task = words["--tasks"]
    settings = dict(pair.split("=", 1) for pair in words["--model_args"].split(","))
    samples = []
    with httpx.Client(verify=False, base_url=settings["base_url"]) as client:
        for number in range(int(words.get("--limit", QUESTIONS))):
            body = {
                "model": settings["model_version"],
                "messages": [{"role": "user", "content": str(number)}],
                "mm_processor_kwargs": {"autoprune": run["pruning"]},
            }
            reply = client.post("/chat/completions", json=body).json()
            text = reply["choices"][0]["message"]["content"]
            samples.append((text, text == "right", reply["usage"]["prompt_tokens"]))
    (benchmark,) = select_benchmarks(task, cognition=False, with_tasks=False)
    write_output(Path(words["--output_path"]), benchmark, samples)
    return SimpleNamespace(returncode=0)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(subprocess, "run", run_task)
    with endpoint(answer) as server:
        yield server


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    """Runs the command in one folder; its status, and what it printed."""

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["positions", "--out", str(tmp_path), *words])
        status = positions.main()
        captured = capsys.readouterr()
        return status, captured.out if status == 0 else captured.out + captured.err

    return run


def asked(server: FakeServer) -> Counter[str]:
    """How often every case was asked a question."""
    bodies = [
        body
        for body in server.requests
        if isinstance(body["messages"][-1]["content"], str)
    ]
    return Counter(map(case_of, bodies))


def test_both_models_are_asked_for_the_same_tokens_at_two_positions(
    server: FakeServer, call: Call
) -> None:
    words = ("--llava", server.url, "--internvl", server.url, "--json")
    status, printed = call(*words)
    assert status == 0 and asked(server) == dict.fromkeys(RIGHT, 2 * 3 * QUESTIONS)
    llava, internvl = json.loads(printed)["results"]
    tasks = [
        {row["benchmark"] for row in result["rows"]} for result in (llava, internvl)
    ]
    assert tasks[0] - tasks[1] == {"refcoco_bbox_rec_val"}
    assert tasks[1] - tasks[0] == {"refcoco_grounding_testA"}
    for result, budgets in (
        (llava, {64: 64, 32: 32}),
        (internvl, {"1/9": 64, "1/18": 32}),
    ):
        assert len(result["rows"]) == 3 * 5
        for row in result["rows"]:
            place, _, said = row["case"].partition("@")
            (tokens,) = [n for budget, n in budgets.items() if str(budget) == said] or [
                576
            ]
            right = 12.5 * RIGHT[f"{place}@{tokens}" if said else "full"]
            packed = 12.5 * RIGHT.get(f"packed@{tokens}", 0)
            less = {"full": right - 100, f"packed@{said}": right - packed}
            names = {"true": less.keys(), "packed": {"full"}, "full": set()}[place]
            assert row["right"]["value"] == right and row["less"].keys() == names
            assert all(row["less"][name]["value"] == less[name] for name in names)
    again = json.loads(call(*words, "--resume")[1])
    assert again["results"] == [llava, internvl] and asked(server).total() == 240
    status, printed = call(*words)
    assert status == 1 and "already contains an evaluation -> add --resume" in printed


def test_spread_is_a_third_case_and_tables_have_what_was_published(
    server: FakeServer, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    for budget, right in ((64, 5), (32, 4)):
        monkeypatch.setitem(RIGHT, f"spread@{budget}", right)
    status, printed = call(
        "--llava", server.url, "--spread", "--grounding", "refcocog_bbox_rec_val"
    )
    assert status == 0 and len(asked(server)) == 7
    assert re.search(
        r"\| refcocog_bbox_rec_val \| packed@64 \| 25.0 \(.*\| -75.0 \(.* \|  \| 8 \|",
        printed,
    )
    assert re.search(
        r"\| GQA \| spread@64 \| 62.5 \(.*\| -37.5 \(.*\| 37.5 \(", printed
    )
    assert "arXiv 2506.21873" in printed
    (table,) = (t for t in PUBLISHED if t["table"] == "supplement, LLaVA-1.5")
    for figure in csv.DictReader(positions._PUBLISHED.read_text().splitlines()):
        if figure["source"].startswith("AutoPrune"):
            column = table["benchmarks"].index(figure["benchmark"])
            scores = {
                str(row["tokens"]): str(row["scores"][column])
                for row in table["rows"]
                if row["method"] in ("full", "DivPrune")
            }
            assert (figure["all tokens"], figure["packed"]) == (
                scores["576"],
                scores[figure["K"]],
            )


def test_a_resumed_run_asks_what_is_missing_and_mixes_nothing(
    server: FakeServer, call: Call
) -> None:
    def fail(body: Body, number: int) -> Answer:
        if case_of(body) == "true@32" and body["messages"][-1]["content"] == "3":
            return completion(
                "[LMMS_EVAL_REQUEST_FAILED after 3 retries]", usage={"prompt_tokens": 0}
            )
        return answer(body, number)

    with endpoint(fail) as failing:
        status, printed = call("--llava", failing.url)
    assert status == 1 and "true@32: 3 of 24 requests failed" in printed
    assert "| GQA | packed@32 |" in printed and "| GQA | true@32 |" not in printed
    words = ("--llava", server.url, "--resume")
    status, printed = call(*words)
    assert status == 0 and asked(server) == {"true@32": 3 * QUESTIONS}
    assert "| GQA | true@32 | 75.0 (" in printed
    for more in (
        ("--state", "norm"),
        ("--limit", "4"),
        ("--grounding", "refcocog_bbox_rec_val"),
    ):
        status, printed = call(*words, *more)
        assert status == 1 and "contains another evaluation (" in printed
    with endpoint(answer) as other:
        other.pages[MODELS] = model_list("n")
        status, printed = call("--llava", other.url, "--resume")
    assert status == 1 and "(setup : model differ)" in printed


@parametrize_from_file("ignored", "message")
def test_a_server_that_does_not_serve_what_is_asked_gives_no_valid_result(
    call: Call, monkeypatch: pytest.MonkeyPatch, ignored: str, message: str
) -> None:
    monkeypatch.setattr(subprocess, "run", run_task)

    def misread(body: Body, number: int) -> Answer:
        pruning = body["mm_processor_kwargs"]["autoprune"]
        if pruning.get("positions") == "true":
            if ignored == "refused":
                return error(400, "positions is unknown")
            if ignored == "positions":
                pruning |= {"positions": "packed"}
                pruning["state"].pop("positions")
            elif isinstance(body["messages"][-1]["content"], str):
                return completion("right", usage={"prompt_tokens": 300})
        return answer(body, number)

    with endpoint(misread) as server:
        status, printed = call("--llava", server.url)
    assert status == 1 and message in printed
    assert call()[0] == 1 and "--llava or --internvl: is missing" in call()[1]
