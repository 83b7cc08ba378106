"""lmms-eval: tasks and arms, its output as 0.7.3 writes it, our plugin, runs of a fake program."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import shutil
import sys
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from benchmarks.common.fake_server import Answer, Body
from tests.evaluation.fake_lmms_eval import GOLD
from tests.offline_search.synthetic import MODELS, completion, endpoint, error
from vllm_autoprune.cli.main import main
from vllm_autoprune.evaluation import lmms
from vllm_autoprune.evaluation.journal import MME, EvaluationError, Total
from vllm_autoprune.evaluation.journal import Answer as Scored
from vllm_autoprune.evaluation.lmms import (
    BENCHMARKS,
    COLUMN_SETS,
    PINNED,
    _Benchmark,
    _read_output,
    select_benchmarks,
)

FILES = Path(__file__).with_name("lmms_files")
"""What 0.7.3 wrote about four questions to a real server; in ``failed`` one answered 400."""
PLUGIN = Path(lmms.__file__).with_name("lmms_plugin")
FAKE = f"{sys.executable} {Path(__file__).with_name('fake_lmms_eval.py')}"
OWN = _Benchmark("minillava", "minillava")

Captured = pytest.CaptureFixture[str]


def test_columns_tasks_and_sets_may_be_mixed() -> None:
    assert len(BENCHMARKS) == 14 and len(COLUMN_SETS["paper-llava"]) == 10
    for names, selected in (
        ("POPE,gqa,mme", ["GQA", "POPE", MME]),
        ("paper-qwen,gqa", ["GQA", "TextVQA", MME, "MMB-EN", "MMB-CN", "ChartQA", "AI2D",
                            "HallBench"]),
        ("mine,gqa", ["GQA", "mine"]),
    ):  # fmt: skip
        rows = select_benchmarks(names, cognition=True, with_tasks=True)
        assert [row.name for row in rows] == selected
    (mme,) = select_benchmarks("mme", cognition=False, with_tasks=False)
    assert mme.metrics == ("mme_perception_score",)
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    assert extras["lmms"] == [f"lmms-eval=={PINNED}"]


def test_one_address_of_a_judge_serves_every_task() -> None:
    for url in ("http://j", "http://j/v1/", "http://j/v1/chat/completions"):
        by_kind = {row.judge: row.judge_address(url) for row in BENCHMARKS}
        assert by_kind["base"] == "http://j/v1"
        assert by_kind["path"] == "http://j/v1/chat/completions"


def answers_of(folder: Path, benchmark: _Benchmark) -> tuple[list[Scored], Total | None]:
    records = list(_read_output(folder, benchmark, "full"))
    totals = [record for record in records if isinstance(record, Total)]
    return [r for r in records if isinstance(r, Scored)], totals[0] if totals else None


def test_real_files_are_parsed() -> None:
    answers, total = answers_of(FILES / "answered", OWN)
    assert [(answer.text, answer.prompt_tokens) for answer in answers] == [
        ("5", 157), ("blue", 158), ("cross", 162), ("1247", 161),
    ]  # fmt: skip
    assert all(answer.score == 1.0 and answer.failure is None for answer in answers)
    assert total == Total(
        case="full", benchmark="minillava", metric="minillava_accuracy", value=100.0, count=4
    )
    questions = list(_read_output(FILES / "answered", OWN, "full"))[:4]
    # The document, and its image with it, is not among what is logged.
    assert {vars(question)["image"] for question in questions} == {"minillava/264b78d7448f204c"}
    answers, total = answers_of(FILES / "failed", OWN)
    (failed,) = (answer for answer in answers if answer.failure is not None)
    assert total is None and (failed.question, failed.score) == ("minillava/1", None)
    assert "400 - the engine is gone" in str(failed.failure)


@pytest.mark.parametrize(
    ("pattern", "change", "message"),
    [
        # A task's filter may have made an answer of the words of the failure.
        ("*_samples_*", {"filtered_resps": "A", "resps": [["[LMMS_EVAL_BUDGET_EXCEEDED]"]]}, ""),
        ("*_samples_*", {"token_counts": [{"input_tokens": 0, "output_tokens": 0}]}, ""),
        ("*_samples_*", {"token_counts": [None]}, ""),
        ("*_samples_*", {"filtered_resps": [], "resps": []}, ""),
        ("*_samples_*", None, "its output is incomplete"),
        ("images.jsonl", None, "its output is incomplete .*images.jsonl"),
        ("*_samples_*", '{"doc_id": 0}\n', "1 samples, but lmms-eval reports 4"),
        ("*_results.json", '{"results": {"minillava": {}}}', "its output is incomplete"),
    ],
)
def test_a_failed_request_leaves_no_total_and_incomplete_output_is_refused(
    tmp_path: Path, pattern: str, change: dict[str, Any] | str | None, message: str
) -> None:
    output = shutil.copytree(FILES / "answered", tmp_path / "run")
    (path,) = output.rglob(pattern)
    if isinstance(change, dict):
        lines = list(map(json.loads, path.read_text().splitlines()))
        lines[1] |= change
        path.write_text("\n".join(map(json.dumps, lines)))
        answers, total = answers_of(output, OWN)
        assert total is None and answers[1].failure and answers[1].score is None
        assert [answer.failure for answer in answers if answer is not answers[1]] == [None] * 3
        return
    path.unlink() if change is None else path.write_text(change)
    with pytest.raises(EvaluationError, match=message):
        answers_of(output, OWN)


class Model:
    """Replaces the parent class of the plugin's model: builds the messages of every request."""

    def __init__(self) -> None:
        completions = SimpleNamespace(create=partial(dict[str, object], model="m"))
        self.client = SimpleNamespace(chat=SimpleNamespace(completions=completions))
        self.client.with_options = lambda default_headers: SimpleNamespace(
            **vars(self.client), headers=default_headers
        )

    def generate_until(self, requests: Sequence[SimpleNamespace]) -> list[str]:
        return [str(request.arguments[1](request.arguments[3])) for request in requests]


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The plugin's module, imported with replacements for the modules of lmms-eval."""
    replacements: dict[str, dict[str, object]] = {
        **{name: {} for name in ("", ".models", ".models.chat", ".api")},
        ".models.registry_v2": {"ModelManifest": lambda name, **more: (name, more)},
        ".models.chat.openai": {"OpenAICompatible": Model},
        ".api.instance": {"GenerationResult": str, "Instance": SimpleNamespace},
    }
    for name, contents in replacements.items():
        module = ModuleType(f"lmms_eval{name}")
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("autoprune_lmms", "autoprune_lmms.model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(PLUGIN))
    return importlib.import_module("autoprune_lmms.model")


def test_the_plugin_sends_the_options_of_its_case_and_records_images(
    plugin: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (distribution,) = importlib.metadata.distributions(path=[str(PLUGIN)])
    (entry,) = distribution.entry_points
    assert (entry.group, entry.name) == ("lmms_eval.models", "openai")
    name = "autoprune_lmms.model.OpenAIWithImages"
    assert entry.load()() == ("openai", {"chat_class_path": name})
    monkeypatch.setenv(plugin.FILE, str(tmp_path / "images.jsonl"))
    headers = {"Authorization": "Bearer k"}
    monkeypatch.setenv(plugin.HEADERS, json.dumps(headers))
    for pruning in ({"budget": 8, "state": "visionzip"}, {}):
        monkeypatch.setenv(plugin.PRUNING, json.dumps(pruning))
        client = plugin.OpenAIWithImages().client
        assert client.headers == headers
        request = client.chat.completions.create(temperature=0)
        extra = {"extra_body": {"mm_processor_kwargs": {"autoprune": pruning}}} if pruning else {}
        assert request == {"model": "m", "temperature": 0, **extra}

    def build(number: int) -> list[dict[str, object]]:
        image = Image.new("RGB", (2, 2), ("red", "red", "blue", "blue")[number])
        content = [{"type": "image", "url": image}, {"type": "text", "text": f"{number}?"}]
        return [{"role": "user", "content": content[number == 3 :]}]

    def ask(model: type[Model]) -> list[str]:
        requests = [SimpleNamespace(arguments=("c", build, {}, n, "t", "test")) for n in range(4)]
        return [text.partition("<PIL")[0] for text in model().generate_until(requests)]

    assert ask(plugin.OpenAIWithImages) == ask(Model)
    lines = [json.loads(line) for line in (tmp_path / "images.jsonl").read_text().splitlines()]
    assert [(line["task"], line["doc_id"]) for line in lines] == [("t", n) for n in range(4)]
    red, again, blue, none = (line["image"] for line in lines)
    assert red == again != blue and none == ""


def answer(body: Body, number: int) -> Answer:
    """The reference answer with all tokens, "yes" to a shorter prompt with a state; no `trim`."""
    pruning = body["mm_processor_kwargs"]["autoprune"]
    content = body["messages"][0]["content"]
    if pruning.get("state", {}).get("base_policy", {}).get("name") == "trim":
        return error(400, "not on this server")
    if isinstance(content, list):
        return completion("?")  # the request about a plain image
    if "budget" not in pruning:
        return completion(GOLD[int(str(content).split()[1].rstrip("?"))])
    status, text, headers = completion("yes")
    return status, text.replace(b'"prompt_tokens": 10', b'"prompt_tokens": 4'), headers


@pytest.fixture
def call(tmp_path: Path) -> Callable[..., int]:
    def call(url: str, *words: str, tasks: str = "gqa") -> int:
        common = ["--served-name", "m", "--lmms-eval", FAKE, "--out", str(tmp_path)]
        common += ["--server-url", url, "--budgets", "8"]
        return main(["eval", "--suite", f"lmms:{tasks}", *common, *words])

    return call


def rows_in(folder: Path) -> dict[str, Any]:
    report = json.loads((folder / "report.json").read_text())
    return {row["case"]["name"]: row for row in report["rows"]}


def test_every_state_is_measured_on_one_server(
    tmp_path: Path, call: Callable[..., int], capsys: Captured
) -> None:
    with endpoint(answer) as server:
        words = ["--state", "visionzip", "--state", "trim"]
        assert call(server.url, *words, tasks="mme,gqa") == 0
        assert "| trim | 8 | status 400: not on this server |" in capsys.readouterr().out
        asked = len(server.requests)
        assert asked == 5 + 4 * 8
        assert call(server.url, *words, "--resume", tasks="mme,gqa") == 0
        assert len(server.requests) == asked + 5, "complete tasks are not repeated"
    rows = rows_in(tmp_path)
    assert set(rows) == {"full", "random@8", "resized@8", "visionzip@8"}
    row = rows["visionzip@8"]
    # Of MME's two pairs only the one of perception counts on LLaVA: one of two right, no pair.
    assert row["benchmarks"] == {"GQA": 50.0, MME: 50.0} and row["prompt_tokens"] == 4.0
    assert row["all"]["acc"] == (50 + 2.5) / 2 and row["to_full"]["mme"]["value"] == -150.0
    text = (tmp_path / "samples.jsonl").read_text()
    questions = [line for line in map(json.loads, text.splitlines()) if line["kind"] == "question"]
    assert {line["image"] for line in questions} == {"gqa/i0", "gqa/i1", "mme/i0"}


def test_a_failed_request_is_asked_again(call: Callable[..., int], capsys: Captured) -> None:
    # lmms-eval would score its own failure text as a wrong answer and end with 0.
    with endpoint(lambda body, n: error(500) if n == 7 else answer(body, n)) as server:
        assert call(server.url) == 1
        assert "1 of 4 requests failed: [LMMS_EVAL_REQUEST_FAILED" in capsys.readouterr().out
        assert call(server.url, "--resume") == 0


def test_a_judge_is_asked_and_without_one_the_report_is_not_valid(
    tmp_path: Path, call: Callable[..., int], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_URL", raising=False)
    with endpoint(answer) as server:
        assert call(server.url, tasks="mmvet") == 1
        assert "MM-Vet: the judge gave no usable answer (4 times)" in capsys.readouterr().out
        words = ["--resume", "--judge-url", "http://judge:1"]
        assert call(server.url, *words, tasks="mmvet") == 0
    assert rows_in(tmp_path)["full"]["benchmarks"] == {"MM-Vet": 80.0}


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("FAKE_ERROR", "1", "lmms-eval ended with 0 and no samples of gqa -> see "),
        ("FAKE_VERSION", "0.9.0", "is version 0.9.0; only the output files of 0.7.3"),
    ],
)
def test_a_program_that_fails_is_reported(
    call: Callable[..., int], capsys: Captured, monkeypatch: pytest.MonkeyPatch,
    variable: str, value: str, message: str,
) -> None:  # fmt: skip
    monkeypatch.setenv(variable, value)
    with endpoint(answer) as server:
        assert call(server.url) == 1
    captured = capsys.readouterr()
    assert message in captured.out + captured.err


def test_a_server_that_dies_stops_the_run_and_the_plan_is_the_command_lines(
    call: Callable[..., int], capsys: Captured, tmp_path: Path
) -> None:
    def dying(body: Body, number: int) -> Answer:
        if number < 5:
            return answer(body, number)
        server.pages[MODELS] = error(503, "down")
        return error(503)

    with endpoint(dying) as server:
        words = ["--include-path", "tasks", "--dry-run"]
        assert call(server.url, *words, tasks="mme,gqa,own") == 0
        lines = capsys.readouterr().out.splitlines()
        tasks = [line.partition("--tasks ")[2].partition(" ")[0] for line in lines]
        assert tasks == ["gqa", "mme", "own"] * 5
        assert f"base_url={server.url}/v1," in lines[0] and not server.requests
        assert f"--output_path {tmp_path}/lmms-eval/full/gqa/1 " in lines[0]
        assert call(server.url, tasks="gqa,mme") == 1
        assert len(server.requests) == 5 + 4 and "status 503: down" in capsys.readouterr().err
