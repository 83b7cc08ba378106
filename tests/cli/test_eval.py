"""eval: its cases, and runs on a fake server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.common.fake_server import Answer, Body
from tests.benchmarks.accuracy.minillava_server import answering
from tests.offline_search.endpoint import endpoint, error
from vllm_autoprune import load_state
from vllm_autoprune.cli.main import main
from vllm_autoprune.evaluation.run import build_cases
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

Captured = pytest.CaptureFixture[str]
Answering = Callable[[Body, int], Answer]
LMMS = "--suite lmms:mme --served-name m"


def test_each_state_is_compared_with_its_base_policy() -> None:
    states = ["autoprune", "ablation-quota-4", "visionzip"]
    cases = {case.name: case for case in build_cases(states, [8, 16])}
    per_budget = ("random", "resized", "cdpruner", *states)
    assert set(cases) == {"full", *(f"{name}@{k}" for name in per_budget for k in (8, 16))}
    assert cases["autoprune@8"].base == cases["ablation-quota-4@8"].base == "cdpruner@8"
    assert cases["visionzip@8"].base == "" and cases["visionzip@8"].arm == "base"
    assert cases["cdpruner@8"].quota == 0 and cases["autoprune@8"].quota == 2
    assert not any(case.refused for case in cases.values())


def test_the_base_policy_alone_has_the_parameters_of_the_state(tmp_path: Path) -> None:
    data = load_state("autoprune").model_dump(mode="json")
    data["base_policy"] = {"name": "fastv", "params": {"layer": 3}}
    data["budget"] |= {"limit": 64}
    (tmp_path / "state.json").write_text(json.dumps(data))
    cases = {case.name: case for case in build_cases([str(tmp_path / "state.json")], [8, 128])}
    state = cases["fastv@8"].pruning["state"]
    assert isinstance(state, dict)
    assert state["base_policy"] == {"name": "fastv", "params": {"layer": 3}}
    # A budget that a state forbids is a refused case.
    assert "limit" in cases["autoprune@128"].refused and not cases["fastv@128"].refused


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A file of questions about two images."""
    for name, colour in (("a.png", "red"), ("b.png", "blue")):
        Image.new("RGB", (8, 8), colour).save(tmp_path / name)
    lines = [
        {"image": "a.png", "question": "Which colour?", "answer": "red", "category": "colour"},
        {"image": "b.png", "question": "Is it red?", "answer": "no", "pair": 1},
        {"image": "a.png", "question": "Which shape?", "answer": "square", "category": "shape"},
        {"image": "b.png", "question": "Is it blue?", "answer": "yes", "pair": 1},
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_own_questions_are_measured_in_every_case(
    data: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "out"
    with endpoint(answering) as server:
        call = ["eval", "--data", str(data), "--server-url", server.url, "--out", str(out)]
        call += ["--budgets", "8", "--state", "autoprune", "--state", "visionzip"]
        assert main(call) == 0
        captured = capsys.readouterr()
        # full, random, resized, cdpruner, autoprune, visionzip (which exchanges nothing): six.
        assert len(server.requests) == 6 * 4
        images = [body["messages"][0]["content"][0]["image_url"]["url"] for body in server.requests]
        assert len(set(images)) == 2
        assert main([*call, "--resume", "--json"]) == 0
        assert len(server.requests) == 6 * 4
    assert "### K = 8" in captured.out and "trial run" in captured.out
    assert "- autoprune, K = 8: 2 images are too few to decide (at least 6)" in captured.out
    report = json.loads(capsys.readouterr().out)
    assert {row["case"]["name"] for row in report["rows"]} == {
        "full", "random@8", "resized@8", "cdpruner@8", "autoprune@8", "visionzip@8",
    }  # fmt: skip
    benchmarks = next(row["benchmarks"] for row in report["rows"] if row["case"]["name"] == "full")
    assert benchmarks == {"colour": 100.0, "shape": 100.0, "MME": 200.0}
    files = {path.name for path in out.iterdir()}
    assert files == {"report.html", "report.json", "report.md", "samples.jsonl"}


def one_failure(body: Body, number: int) -> Answer:
    return error(400, "no") if number == 3 else answering(body, number)


@pytest.mark.parametrize(
    ("answer", "budget", "reason"),
    [(one_failure, "64", "1 of 4 requests failed"), (answering, "144", "K keeps every token")],
)
def test_an_invalid_report_exits_with_1(
    data: Path, tmp_path: Path, capsys: Captured, answer: Answering, budget: str, reason: str
) -> None:
    with endpoint(answer) as server:
        call = ["eval", "--suite", f"data:{data}", "--server-url", server.url, "--budgets", budget]
        assert main([*call, "--out", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr().out
    assert "Not valid: " in printed and reason in printed


def test_a_dry_run_starts_nothing(data: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "out"
    call = ["eval", "--suite", f"data:{data}", "--server-url", "http://h:1", "--out", str(out)]
    assert main([*call, "--dry-run"]) == 0
    assert "5 cases x 4 questions: 20 requests" in capsys.readouterr().out and not out.exists()
    assert main(["eval", *LMMS.split(), "--arm", "full=http://h:1", "--dry-run"]) == 0
    assert "--tasks mme" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("--suite imagenet", "is not a suite"),
        ("--suite data:x.jsonl", "--server-url: is missing"),
        ("--data x.jsonl", "--server-url: is missing"),
        ("--suite data:/nowhere.jsonl --server-url http://h", "cannot be read"),
        ("--suite data:x --server-url u --budgets 0", "--budgets 0: are below 1"),
        ("--suite lmms:mme --arm full=http://h", "--served-name: is missing"),
        (LMMS, "--arm: is missing -> give --server-url"),
        (f"{LMMS} --include-path /nowhere", "--include-path /nowhere: declares no task"),
        (f"{LMMS} --backbone x", "--backbone x: is in no table"),
    ],
)
def test_a_run_that_cannot_start_says_why(call: str, message: str, capsys: Captured) -> None:
    assert main(["eval", *call.split()]) == 1
    assert message in capsys.readouterr().err


def refusing(policies: set[str]) -> Answering:
    """A server that refuses the states upon some base policies."""

    def answer(body: Body, number: int) -> Answer:
        state = body["mm_processor_kwargs"]["autoprune"].get("state")
        if state is not None and state["base_policy"]["name"] in policies:
            return error(400, "needs inputs that this model has not")
        return answering(body, number)

    return answer


def test_every_base_policy_is_measured_on_any_server(
    data: Path, tmp_path: Path, capsys: Captured
) -> None:
    call = ["eval", "--data", str(data), "--state", "all", "--budgets", "8", "16"]
    call += ["--out", str(tmp_path / "out")]
    with endpoint(refusing({"fastv"})) as server:
        assert main([*call, "--server-url", server.url]) == 0
    page = capsys.readouterr().out
    assert "| fastv | 8 | status 400: needs inputs that this model has not |" in page
    for policy in BASE_POLICIES.keys() - {"fastv"}:
        state = "autoprune" if policy == "cdpruner" else f"autoprune-on-{policy}"
        assert f"| {policy} | 100.0 |" in page and f"| {state} | 100.0 |" in page


def test_a_server_that_cannot_be_measured_leaves_nothing_to_resume(
    data: Path, tmp_path: Path, capsys: Captured
) -> None:
    call = ["eval", "--data", str(data), "--out", str(tmp_path / "out"), "--server-url"]
    assert main([*call, "http://127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().err
    with endpoint(refusing({"cdpruner"})) as server:
        assert main([*call, server.url]) == 1
    message = capsys.readouterr().err
    assert "refuses every state: status 400: needs inputs that this model has not -> " in message
    assert "--autoprune-requests states" in message
    with endpoint(answering) as server:
        assert main([*call, server.url]) == 0
