"""docs/mistakes.md: mistakes that users make, each answered in one line that says what to do."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest

from tests.serving.unit.samples import refusal, served
from tests.test_examples import flags_of
from vllm_autoprune.cli.main import main
from vllm_autoprune.errors import ProblemsError
from vllm_autoprune.serving.api.choices import resolve_plans
from vllm_autoprune.serving.api.layout import TokenCount
from vllm_autoprune.serving.api.request import parse_request, refuse_misplaced
from vllm_autoprune.serving.settings import RequestRules

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "mistakes.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`.+?) \| (.+) \|$", PAGE, flags=re.MULTILINE)


def send(text: str, level: str) -> None:
    """Resolve a field of a request, as JSON, about an image of 576 tokens."""
    if text.startswith("extra_body="):
        refuse_misplaced(json.loads(text.removeprefix("extra_body=")), {})
    ((name, fields),) = json.loads(f"{{{text}}}").items()
    if name == "mm_processor_kwargs":
        refuse_misplaced({}, fields)
    rules = RequestRules("budget" if "`budget`" in level else "states")
    server = dataclasses.replace(served(), rules=rules)
    resolve_plans(server, parse_request(fields), [TokenCount(576)])


def answer_to(mistake: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command prints to stderr, or the problem that a server has with flags or fields."""
    text, _, level = mistake.removeprefix("`").partition("`")
    if text.startswith("vllm-autoprune "):
        try:
            status: object = main(shlex.split(text)[1:])
        except SystemExit as ended:
            status = ended.code
        answer = capsys.readouterr().err.strip()
        assert status == (2 if re.search("no command|--help$", answer) else 1)
        return answer
    if text.startswith("vllm serve "):
        (problem,) = refusal(flags_of(text.split()))
        return str(problem)
    with pytest.raises(ProblemsError) as caught:
        send(text, level)
    (problem,) = caught.value.problems
    return str(problem)


def test_the_page_has_commands_flags_and_fields() -> None:
    assert len(ROWS) >= 20
    for prefix in ("`vllm-autoprune ", "`vllm serve ", '`"autoprune"'):
        assert any(mistake.startswith(prefix) for mistake, _ in ROWS)


@pytest.mark.parametrize(("mistake", "answer"), ROWS)
def test_each_is_answered_in_one_line_that_says_what_to_do(
    mistake: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer_to(mistake, capsys) == answer
    assert any(word in answer for word in (" -> ", "did you mean", "--help"))
