"""Commands of README.md and docs/ are typed as they stand; mistakes have the page's answers."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.benchmarks.serve import add_cli_args, main_async
from vllm.renderers import chat_utils
from vllm.utils.argparse_utils import FlexibleArgumentParser

import vllm_autoprune_command
from benchmarks.accuracy import positions
from benchmarks.load.__main__ import parse_arguments
from tests.docs.commands import ROOT, Command, prepare_folder, read_commands, type_page
from tests.example_commands import flags_of, require_valid
from tests.fake_server import Reply, fake_server
from tests.serving.unit.bounded_server import resolve, server
from tests.serving.unit.configurations import refusal
from tests.tables import parametrize_from_file
from vllm_autoprune.cli.main import main, parser
from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.serving.api.request import PruningRequest
from vllm_autoprune.serving.api.request_checks import refuse_misplaced

COMMANDS = read_commands()
LONG = [c for c in COMMANDS if c.kind == "long"]
QUICK = list({c.text: c for c in COMMANDS if c.kind == "quick"}.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("commands")
    prepare_folder(path)
    return path


def test_every_command_is_typed_or_says_why_not() -> None:
    assert len(COMMANDS) > 60 and len(QUICK) >= 8 and len(LONG) >= 30
    calls = [c.text for c in COMMANDS if re.match("vllm-autoprune [a-z]", c.text)]
    assert len(calls) > 20
    for call in calls:
        parser().parse_args(shlex.split(call)[1:])
    with pytest.raises(ValueError, match="nothing says how to type"):
        _ = Command("docs/new.md", "frobnicate --now").kind


def test_commands_that_are_not_typed_are_valid() -> None:
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]

    def validate(command: Command) -> None:
        """Raise an AssertionError where a command that is not typed cannot be right."""
        words = shlex.split(re.sub(r"^(\w+=\S+ )+", "", command.text))
        if "--autoprune-state" in words:
            require_valid(
                [
                    word.replace("/etc/autoprune/state.json", "cdpruner")
                    for word in words
                ]
            )
        elif words[0].endswith("pip"):
            extras = re.findall(r"\w+", words[-1].partition("[")[2])
            assert {*extras} <= optional.keys() and (
                words[-1][0] == "." or words[-1] in optional["lmms"]
            )
        elif words[:3] == ["python", "-m", "benchmarks.load"]:
            parse_arguments(words[3:])
        elif words[:3] == ["python", "-m", "benchmarks.accuracy.positions"]:
            positions.parse_arguments(words[3:])
        elif words[0] == "make":
            assert f"\n{words[1]}: " in (ROOT / "Makefile").read_text()
        else:  # those of the plugin, and GuideLLM's body, are read in other tests
            programs = ("vllm-autoprune", "vllm", "docker", "guidellm")
            is_script = os.access(ROOT / words[0], os.X_OK)
            assert words[0] in programs or "venv" in words or is_script

    for command in COMMANDS:
        if command.kind == "not typed":
            validate(command)
    for wrong in (
        "vllm serve x/y --autoprune-state divprun",
        "pip install '.[serch]'",
        "make tset",
        "python -m benchmarks.load paired --usr 1",
        "kubectl apply",
    ):
        with pytest.raises((AssertionError, SystemExit, AutopruneError)):
            validate(Command("docs/new.md", wrong))


@pytest.mark.parametrize("command", QUICK, ids=lambda command: command.text[:60])
def test_quick_commands_succeed(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", shlex.split(command.text))
    assert vllm_autoprune_command.main() == 0


@pytest.mark.engine
@pytest.mark.exhaustive
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("page", list(dict.fromkeys(c.page for c in LONG)))
def test_long_commands_of_a_page_succeed_in_order(page: str, folder: Path) -> None:
    commands = [command for command in LONG if command.page == page]
    assert list(type_page(commands, folder)) == []


# ---- docs/faq.md: each mistake is answered in one line that says what to do ----


@parametrize_from_file("mistake", "answer", "allowed")
def test_each_mistake_is_answered_in_one_line_that_says_what_to_do(
    mistake: str, answer: str, allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:

    def answer_to(mistake: str) -> str:
        """What the command prints to stderr, or a server's problem with flags or fields."""
        if mistake.startswith("vllm-autoprune "):
            try:
                status: object = main(shlex.split(mistake)[1:])
            except SystemExit as ended:
                status = ended.code
            answer = capsys.readouterr().err.strip()
            assert status == (2 if re.search("no command|--help$", answer) else 1)
            return answer
        if mistake.startswith("vllm serve "):
            (problem,) = refusal(flags_of(mistake.split()))
            return str(problem)
        with pytest.raises(AutopruneError) as caught:
            send(mistake)
        (problem,) = caught.value.problems
        return str(problem)

    def send(text: str) -> None:
        """Resolve a field of a request, as JSON, about an image of 576 tokens."""
        if text.startswith("extra_body="):
            refuse_misplaced(json.loads(text.removeprefix("extra_body=")), {})
        ((name, fields),) = json.loads(f"{{{text}}}").items()
        if name == "mm_processor_kwargs":
            refuse_misplaced({}, fields)
        resolve(fields, 576, on=server(allowed))

    assert answer_to(mistake) == answer
    assert any(word in answer for word in (" -> ", "did you mean", "--help"))


def test_the_mistake_on_the_page_has_its_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["show", "visionzipp"]) == 1
    page = (ROOT / "docs/faq.md").read_text(encoding="utf-8")
    assert f"> {capsys.readouterr().err.strip()}\n" in page


def test_messages_among_the_symptoms_are_what_programs_print() -> None:
    printed_by = (argparse.__file__, chat_utils.__file__)
    files = [*(ROOT / "vllm_autoprune").rglob("*.py"), *map(Path, printed_by)]
    sources = "".join(path.read_text(encoding="utf-8") for path in files)
    page = (ROOT / "docs/faq.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)[2:]
    assert len(rows) > 20
    said = [
        text
        for seen, _, _ in rows
        for text in re.findall(r"`([^`/\"]* [^`/\"]*)`", seen)
    ]
    assert len(said) > 3
    for message in said:
        assert message.partition(": --")[0] in sources, message


# ---- docs/clients.md: every client sends the budget to where it is read ----


def test_clients_send_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = list[dict[str, Any]]()

    class ChatOpenAI:  # as LangChain documents it
        def __init__(
            self, *, model: str, base_url: str, api_key: str, **named: Any
        ) -> None:
            self.fields = named["extra_body"]

        def invoke(self, messages: object) -> None:
            bodies.append({"messages": messages, **self.fields})

    def completion(
        *, model: str, api_base: str, messages: object, **named: Any
    ) -> None:
        assert model.startswith("hosted_vllm/")
        bodies.append({"messages": messages, **named["extra_body"]})

    for name, member in (("langchain_openai", ChatOpenAI), ("litellm", completion)):
        monkeypatch.setitem(
            sys.modules, name, SimpleNamespace(**{member.__name__: member})
        )
    page = (ROOT / "docs/clients.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    curl, load, guidellm = [c.text for c in COMMANDS if c.page == "docs/clients.md"]
    with fake_server(Reply(ttft=0.0, gaps=(0.0,)), model=None) as fake:
        local = code.replace("http://localhost:8000", fake.url)
        exec(local, {"model": "m", "messages": [{"role": "user", "content": "?"}]})
        here = curl.replace("localhost:8000", fake.url)
        subprocess.run(["bash", "-c", here], cwd=ROOT, check=True, capture_output=True)
        assert fake.headers[-1]["x-autoprune-budget"] == "64"
        assert json.dumps(fake.requests.pop()).count("data:image/jpeg;base64,/9j/") == 1
        parser = FlexibleArgumentParser()
        add_cli_args(parser)
        words = shlex.split(load.replace("http://localhost:8000", fake.url))[3:]
        model = str(ROOT / "benchmarks/yardsticks/weights/minillava/llava")
        asyncio.run(
            main_async(
                parser.parse_args([*words, "--model", model, "--num-prompts", "2"])
            )
        )
    extras = json.loads(shlex.split(guidellm)[-1])["extras"]
    bodies += [*fake.requests, extras["body"]]
    assert len(bodies) == 2 + 1 + 2 + 1
    for body in bodies:
        refuse_misplaced(body, body["mm_processor_kwargs"])
        fields = body["mm_processor_kwargs"]["autoprune"]
        (plan,) = resolve(fields, 576, on=server("budget"))
        assert plan.budget == 64
    (video,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    kwargs = json.loads(video)["mm_processor_kwargs"]
    refuse_misplaced(json.loads(video), kwargs)
    requested = PruningRequest.parse(kwargs["autoprune"]).video_budget
    assert requested is not None and requested.rule() == "1/4"
