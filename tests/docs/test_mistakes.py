"""docs/mistakes.md: mistakes that users make, each answered in one line that says what to do."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serving.unit.samples import refusal, served
from vllm_autoprune.cli.main import main
from vllm_autoprune.errors import AutopruneError, ProblemsError, RequestError
from vllm_autoprune.serving.api.choices import TokenCount, resolve_choices
from vllm_autoprune.serving.api.request import parse_request, refuse_misplaced
from vllm_autoprune.serving.settings import RequestRules

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "mistakes.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`.+) \| .+ \|$", PAGE, flags=re.MULTILINE)

Answer = Callable[[], str]


def typed(*arguments: str) -> Answer:
    """What the command prints to stderr; it must fail."""

    def answer() -> str:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status: object = main(arguments)
            except SystemExit as ended:
                status = ended.code
        assert status in (1, 2)
        return err.getvalue()

    return answer


def served_with(**settings: object) -> Answer:
    """The problem that ends `vllm serve` at start-up, of settings as flags give them."""

    def answer() -> str:
        (problem,) = refusal(settings)
        return str(problem)

    return answer


def sent(fields: dict[str, object], level: str = "states") -> Answer:
    """The body of HTTP 400 for these fields of a request about one image of 576 tokens."""

    def answer() -> str:
        rules = RequestRules(level)  # type: ignore[arg-type]
        server = dataclasses.replace(served(), rules=rules)
        with pytest.raises(AutopruneError) as caught:
            resolve_choices(server, parse_request(fields), [TokenCount(576)])
        assert isinstance(caught.value, ProblemsError)
        (problem,) = caught.value.problems
        return str(problem)

    return answer


def misplaced(extra: dict[str, object], kwargs: dict[str, object]) -> Answer:
    def answer() -> str:
        with pytest.raises(RequestError) as caught:
            refuse_misplaced(extra, kwargs)
        return str(caught.value.problems[0])

    return answer


MISTAKES: dict[str, Answer] = {
    "`vllm-autoprune valdate my.json`": typed("valdate", "my.json"),
    "`vllm-autoprune show visionzipp`": typed("show", "visionzipp"),
    "`vllm-autoprune cost --backbone qwen2.5vl-7b`": typed("cost", "--backbone", "qwen2.5vl-7b"),
    "`vllm-autoprune cost --backbone llava-1.5-7b --tokens 0`": typed(
        "cost", "--backbone", "llava-1.5-7b", "--tokens", "0"
    ),
    "`vllm-autoprune cost --backbone llava-1.5-7b --tokens many`": typed(
        "cost", "--backbone", "llava-1.5-7b", "--tokens", "many"
    ),
    "`vllm-autoprune materialize cdpruner --budget 0`": typed(
        "materialize", "cdpruner", "--budget", "0"
    ),
    '`vllm-autoprune explain missing.jpg "?" --checkpoint DIR`': typed(
        "explain", "missing.jpg", "?", "--checkpoint", "DIR"
    ),
    '`vllm-autoprune explain photo.jpg "?" --checkpoint DIR -o why.jpg`': typed(
        "explain", "photo.jpg", "?", "--checkpoint", "DIR", "-o", "why.jpg"
    ),
    "`vllm-autoprune eval --data missing.jsonl --server-url http://localhost:8000`": typed(
        "eval", "--data", "missing.jsonl", "--server-url", "http://localhost:8000"
    ),
    "`vllm-autoprune advise --probe 640x480`": typed("advise", "--probe", "640x480"),
    "`vllm-autoprune advise --probe 640`": typed("advise", "--probe", "640"),
    "`vllm serve ... --autoprune-budget 64`": served_with(budget="64"),
    "`vllm serve ... --autoprune-state cdprunner`": served_with(state="cdprunner"),
    "`vllm serve ... --autoprune-state cdpruner --autoprune-budget many`": served_with(
        state="cdpruner", budget="many"
    ),
    "`vllm serve ... --autoprune-state cdpruner --autoprune-requests bugdet`": served_with(
        state="cdpruner", requests="bugdet"
    ),
    "`vllm serve ... --autoprune-state cdpruner --autoprune-detail lo=64`": served_with(
        state="cdpruner", detail="lo=64"
    ),
    '`extra_body={"autoprune": {"budget": 64}}`': misplaced({"autoprune": {"budget": 64}}, {}),
    '`"mm_processor_kwargs": {"budget": 64}`': misplaced({}, {"budget": 64}),
    '`"autoprune": {"buget": 64}`': sent({"buget": 64}),
    '`"autoprune": {"budget": 0}`': sent({"budget": 0}),
    '`"autoprune": {"budget": "64"}`': sent({"budget": "64"}),
    '`"autoprune": {"state": "visionzi"}`': sent({"state": "visionzi"}),
    '`"autoprune": {"enabled": false, "budget": 64}`': sent({"enabled": False, "budget": 64}),
    '`"autoprune": {"state": "trim"}` where `budget` is allowed': sent({"state": "trim"}, "budget"),
}


def test_the_page_lists_the_mistakes_that_are_tested() -> None:
    assert list(MISTAKES) == ROWS
    assert len(ROWS) >= 20


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_is_answered_in_one_line_that_says_what_to_do(mistake: str) -> None:
    answer = MISTAKES[mistake]().strip()
    assert "\n" not in answer
    assert any(word in answer for word in (" -> ", "did you mean", "--help"))
    row = f"| {mistake} | {answer} |"
    assert row in PAGE, row
