"""Accuracy of mini-LLaVA: its cases, and runs on a fake server, from the command line."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import NoReturn

import pytest

from benchmarks.accuracy import minillava as module
from benchmarks.accuracy.minillava import BUDGETS, STATES, main
from benchmarks.common.fake_server import Answer, Body
from benchmarks.server import ServerDied
from benchmarks.yardsticks.minillava import MiniLlava
from tests.benchmarks.accuracy.minillava_server import answering, arm, asked, kept, reply
from tests.offline_search.synthetic import endpoint
from vllm_autoprune.evaluation.run import build_cases
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "evaluation.md").read_text()
SMALL = ("--scenes", "2", "--budgets", "8", "--state", "ablation-quota-4")


def test_the_paper_s_tables_by_default() -> None:
    cases = build_cases(STATES, BUDGETS)
    policies = len(BASE_POLICIES)
    assert Counter(case.arm for case in cases) == {
        "full": 1, "random": 5, "resized": 5, "base": 5 * policies, "autoprune": 5 * (policies + 1),
        "found": 5 * (2 + 6),
    }  # fmt: skip
    assert not any(case.refused for case in cases)
    swept = {case.quota for case in cases if case.name.startswith("ablation-quota")}
    assert swept == {0, 1, 2, 4, 8, 16, 32}
    assert {case.quota for case in cases if case.arm == "autoprune"} == {2}


def test_no_base_policy_keeps_the_tokens_of_another() -> None:
    yardstick, picks = MiniLlava(), {}
    tokens = yardstick.encode(yardstick.draw("test", 1)).tokens
    for name in BASE_POLICIES.keys() - set(yardstick.equal_policies):
        policy = BASE_POLICIES[name]
        picks[name] = policy.select(policy.default_params, tokens, 18).picks.sort(1).values.tolist()
    assert len(picks) > 10
    assert [pair for pair in combinations(picks, 2) if picks[pair[0]] == picks[pair[1]]] == []


@pytest.mark.parametrize("pruned", [True, False])
def test_every_case_is_asked_every_question_and_has_prompts_of_k(
    pruned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(body: Body, number: int) -> Answer:
        return answering(body, number) if pruned else reply(body, tokens=144 - (kept(body) == 8))

    with endpoint(answer) as server:
        call = ["--server-url", server.url, "--out", str(tmp_path), "--json", *SMALL]
        assert main(call) == (0 if pruned else 1)
    report = json.loads(capsys.readouterr().out)
    assert report["valid"] == pruned
    arms = ("full", "random", "resized", "cdpruner", "ablation-quota-4")
    assert Counter(map(arm, asked(server.requests))) == dict.fromkeys(arms, report["questions"])
    accuracy = {row["case"]["name"]: row["all"]["acc"] for row in report["rows"]}
    assert (accuracy["full"], accuracy["ablation-quota-4@8"]) == (100, 100)
    assert accuracy["random@8"] == (0 if pruned else 100)
    assert set(report["rows"][0]["benchmarks"]) == {
        "MME", "digit", "colour", "shape", "text", "count", "quarter", "relation",
    }  # fmt: skip
    reason = "random@8: a prompt has 163 tokens instead of 164 - 136: the case was not served"
    assert any(line.startswith(reason) for line in report["reasons"]) != pruned


def test_the_calls_in_the_docs_say_what_they_would_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = re.findall(r"^python -m benchmarks\.accuracy\.minillava(.*)", PAGE, re.MULTILINE)
    assert calls
    for call in (*map(shlex.split, calls), ["--server-url", "http://h"]):
        assert main([*call, "--dry-run", "--out", str(tmp_path / "out"), *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "--autoprune-requests states" in printed and "--autoprune-text-tower" in printed
    assert "http://h" in printed and "5 cases x " in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (["--model", "/nowhere"], "--model /nowhere: has no llava/config.json"),
        (["--budgets", "144", "8"], "--budgets 144: is not below 144"),
        (["--budgets", "0"], "--budgets 0: is below 1"),
    ],
)
def test_a_run_that_cannot_start_says_why(
    call: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(call) == 1
    assert message in capsys.readouterr().err


def test_a_server_that_does_not_start_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "server.log"

    def dead(*arguments: object, **more: object) -> NoReturn:
        raise ServerDied(log, "ended")

    monkeypatch.setattr(module, "serve", dead)
    assert main(["--out", str(tmp_path), "--json", *SMALL]) == 1
    (reason,) = (r for r in json.loads(capsys.readouterr().out)["reasons"] if "stopped" in r)
    died = f"the server did not start: ended (log: {log})"
    assert reason == f"stopped: {died} -> fix that and add --resume"
