"""lmms-eval: tasks and sets, its output as 0.7.3 writes it, our plugin, runs of a fake program."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from openai import OpenAI
from PIL import Image

from tests.evaluation.lmms_output import write_output
from tests.fake_server import FakeServer
from tests.offline_search.synthetic import MODELS, completion, endpoint, error
from tests.tables import parametrize_from_file
from vllm_autoprune.cli.main import main
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation import lmms
from vllm_autoprune.evaluation.journal import MME, EvaluationError, Question, Total
from vllm_autoprune.evaluation.journal import Answer as Scored
from vllm_autoprune.evaluation.lmms_benchmarks import (
    BENCHMARKS,
    COLUMN_SETS,
    PINNED,
    Benchmark,
    select_benchmarks,
)
from vllm_autoprune.evaluation.lmms_output import compute_iou, read_output

FILES = Path(__file__).with_name("lmms_files")
"""What 0.7.3 wrote about four questions to a real server; in ``failed`` one answered 400."""
PLUGIN = Path(lmms.__file__).with_name("lmms_plugin")
OWN = Benchmark("minillava", "minillava")

Captured = pytest.CaptureFixture[str]


def test_columns_tasks_and_sets_may_be_mixed() -> None:
    assert len(BENCHMARKS) == 14 and len(COLUMN_SETS["paper-llava"]) == 10
    qwen = ["GQA", "TextVQA", MME, "MMB-EN", "MMB-CN", "ChartQA", "AI2D", "HallBench"]
    for names, selected in (
        ("paper-qwen,gqa", qwen),
        ("mine,POPE,gqa", ["GQA", "POPE", "mine"]),
    ):
        rows = select_benchmarks(names, cognition=True, with_tasks=True)
        assert [row.name for row in rows] == selected
    (mme,) = select_benchmarks("mme", cognition=False, with_tasks=False)
    assert mme.metrics == ("mme_perception_score",)
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    assert extras["lmms"] == [f"lmms-eval=={PINNED}"]


def records_of(
    folder: Path, benchmark: Benchmark = OWN
) -> tuple[list[Scored], Total | None]:
    """Answers and total of a run."""
    records = read_output(folder, benchmark, "full")
    totals = [record for record in records if isinstance(record, Total)]
    return [r for r in records if isinstance(r, Scored)], totals[0] if totals else None


def test_real_files_are_parsed() -> None:
    answers, total = records_of(FILES / "answered")
    assert [(answer.text, answer.prompt_tokens) for answer in answers] == [
        ("5", 157), ("blue", 158), ("cross", 162), ("1247", 161),
    ]  # fmt: skip
    assert all(answer.score == 1.0 and answer.failure is None for answer in answers)
    assert total == Total(
        case="full",
        benchmark="minillava",
        metric="minillava_accuracy",
        value=100.0,
        count=4,
    )
    records = read_output(FILES / "answered", OWN, "full")
    # The document, and its image with it, is not among what is logged.
    images = {record.image for record in records if isinstance(record, Question)}
    assert images == {"minillava/264b78d7448f204c"}
    answers, total = records_of(FILES / "failed")
    (failed,) = (answer for answer in answers if answer.failure is not None)
    assert total is None and (failed.question, failed.score) == ("minillava/1", None)
    assert str(failed.failure).endswith(
        "3 retries] Error code: 400 - the engine is gone"
    )


@parametrize_from_file("pattern", "change", "message")
def test_a_failed_request_leaves_no_total_and_incomplete_output_is_refused(
    tmp_path: Path, pattern: str, change: dict[str, Any] | str | None, message: str
) -> None:
    output = shutil.copytree(FILES / "answered", tmp_path / "run")
    (path,) = output.rglob(pattern)
    if isinstance(change, dict):
        samples = list(map(json.loads, path.read_text().splitlines()))
        samples[1] |= change
        path.write_text("\n".join(map(json.dumps, samples)))
        answers, total = records_of(output)
        assert total is None and answers[1].failure and answers[1].score is None
        assert [answer.failure for answer in answers if answer is not answers[1]] == [
            None
        ] * 3
        return
    path.unlink() if change is None else path.write_text(change)
    with pytest.raises(EvaluationError, match=message):
        records_of(output)


def test_boxes_are_right_from_half_an_overlap_on_as_lmms_eval_counts_them(
    tmp_path: Path,
) -> None:
    tasks = "refcoco_bbox_rec_val,refcoco+_bbox_rec_testA,refcocog_grounding_test"
    rows = select_benchmarks(tasks, cognition=False, with_tasks=False)
    assert [row.task for row in rows] == tasks.split(",")
    assert {row.metrics[0] for row in rows} == {
        "refcoco_ACC@0.5",
        "refcoco_grounding_ACC@0.5",
    }
    with pytest.raises(ConfigError, match="does not know refcoco_bbox_val"):  # captions
        select_benchmarks("refcoco_bbox_val", cognition=False, with_tasks=False)
    write_output(
        tmp_path, rows[0], [("[0.1, 0.1, 0.5, 0.5]", True, 84), ("none", False, 84)]
    )
    answers, total = records_of(tmp_path, rows[0])
    assert [answer.score for answer in answers] == [1.0, 0.0]
    assert total is not None and total.value == 50.0
    truth = (0.0, 0.0, 2.0, 2.0)
    for other, expected in (
        (truth, 1.0),
        ((0.0, 0.0, 2.0, 1.0), 0.5),
        ((1.0, 1.0, 3.0, 3.0), 1 / 7),
        ((0.0, 0.0, 0.0, 0.0), 0.0),
        ((2.0, 2.0, 0.0, 0.0), 0.0),
    ):
        assert compute_iou(truth, other) == pytest.approx(expected)
    results = tmp_path / "now_results.json"
    results.write_text(results.read_text().replace("0.5}", "0.75}"))
    with pytest.raises(
        EvaluationError, match=r"is 0\.7500, but 0\.5000 of the boxes are right"
    ):
        records_of(tmp_path, rows[0])


class Model:
    """Replaces the parent class of the plugin's model: builds the messages of every request."""

    def __init__(self) -> None:
        self.client = OpenAI(api_key="none", base_url="http://h:1/v1")

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
    pruning = {"budget": 8, "state": "visionzip"}
    images = tmp_path / "images.jsonl"
    run = {
        "pruning": pruning,
        "headers": {"X-Team": "t"},
        "insecure": True,
        "images": str(images),
    }
    monkeypatch.setenv("AUTOPRUNE_RUN", json.dumps(run))
    with endpoint(lambda body, number: completion("yes")) as server:
        model = plugin.OpenAIWithImages()
        model.client.base_url = f"{server.url}/v1"
        model.client.chat.completions.create(model="m", messages=[])
        assert server.requests[0]["mm_processor_kwargs"] == {"autoprune": pruning}
        assert server.headers[-1]["X-Team"] == "t"
        assert not model.client._client._transport._pool._ssl_context.check_hostname

    def build(number: int) -> list[dict[str, object]]:
        image = Image.new("RGB", (2, 2), ("red", "red", "blue", "blue")[number])
        content = [
            {"type": "image", "url": image},
            {"type": "text", "text": f"{number}?"},
        ]
        return [{"role": "user", "content": content[number == 3 :]}]

    def ask(model: Any) -> list[str]:
        requests = [
            SimpleNamespace(arguments=("c", build, {}, n, "t", "test"))
            for n in range(4)
        ]
        return [text.partition("<PIL")[0] for text in model.generate_until(requests)]

    assert ask(model) == ask(Model())
    lines = list(map(json.loads, images.read_text().splitlines()))
    assert [line["doc_id"] for line in lines] == [0, 1, 2, 3]
    red, again, blue, none = (line["image"] for line in lines)
    assert red == again != blue and none == ""


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A fake lmms-eval writes the real files, shorter prompts where K is sent; options of runs."""
    runs: list[dict[str, Any]] = []

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        if command[-1] == "version":
            return SimpleNamespace(stdout=f"lmms-eval {PINNED}\nPython     3.11")
        words = dict(zip(command[1::2], command[2::2], strict=False))
        run = json.loads(options["env"]["AUTOPRUNE_RUN"])
        task = words["--tasks"]
        runs.append({**options["env"], **words, **run})
        benchmark = next(row for row in BENCHMARKS if row.task == task)
        if benchmark.judge_path is not None and "OPENAI_API_URL" not in options["env"]:
            options["stdout"].write(b"failed to get a score")
        for path in (FILES / "answered").rglob("*.json*"):
            text = path.read_text().replace("minillava_accuracy", benchmark.metrics[0])
            if task == "mme":
                text = text.replace('"pair": null', '"question_id": "a.png"')
            if (
                task == "mme" and "samples" in path.name
            ):  # the first is of its other half
                text = text.replace("mme_perception", "mme_cognition", 1)
            if "budget" in run["pruning"]:
                text = text.replace('"input_tokens": 1', '"input_tokens": ')
            target = Path(words["--output_path"], path.name.replace("minillava", task))
            target.write_text(text.replace('"minillava"', f'"{task}"'))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    return runs


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A server that refuses the state `trim`."""
    with endpoint(
        lambda body, number: (
            error(400, "not on this server")
            if '"name": "trim"' in json.dumps(body)
            else completion("?")
        )
    ) as server:
        yield server


@pytest.fixture
def call(tmp_path: Path, server: FakeServer) -> Callable[..., int]:
    common = ["--served-name", "m", "--server-url", server.url, "--budgets", "8"]
    common += ["-o", str(tmp_path)]
    return lambda tasks, *words: main(
        ["eval", "--suite", f"lmms:{tasks}", *common, *words]
    )


ONE_STATE = ("--state", "visionzip")
TWO_STATES = ("--state", "visionzip", "--state", "trim")


def test_every_state_is_measured_on_one_server(
    call: Callable[..., int], runs: list[dict[str, Any]], capsys: Captured
) -> None:
    words = (*TWO_STATES, "--insecure", "--header", "X-Team=t")
    assert call("mme,gqa", *words, "--dry-run") == 0 and not runs
    assert "6 cases x 2 tasks: 12 runs" in capsys.readouterr().out
    assert call("mme,gqa", *words) == 0
    assert [run["--tasks"] for run in runs] == ["gqa", "mme"] * 5
    assert runs[0]["pruning"] == {"enabled": False} and runs[0]["insecure"]
    assert runs[0]["headers"]["X-Team"] == "t" and runs[-1]["pruning"]["budget"] == 8
    assert call("mme,gqa", *words, "--resume") == 0
    assert len(runs) == 10, "complete tasks are not repeated"


@pytest.mark.usefixtures("runs")
def test_the_report_of_lmms_has_scores_and_kinds_of_each_task(
    tmp_path: Path, call: Callable[..., int], capsys: Captured
) -> None:
    assert call("mme,gqa", *TWO_STATES) == 0
    page = capsys.readouterr().out
    assert "| trim | 8 | status 400: not on this server |" in page
    assert "| visionzip | GQA | too few images | 8 | 0.0 |" in page
    assert "| visionzip | attributes | " in page
    report = json.loads((tmp_path / "report.json").read_text())
    rows = {row["case"]["name"]: row for row in report["rows"]}
    assert set(rows) == {"full", "random@8", "resized@8", "norm@8", "visionzip@8"}
    assert rows["full"]["benchmarks"] == {"GQA": 100.0, "MME": 1.0}
    tokens = [rows[name]["prompt_tokens"] for name in ("full", "visionzip@8")]
    assert tokens == [159.86, 59.86]
    records = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    pairs = [record["pair"] for record in records if record["kind"] == "question"]
    assert sorted(pairs) == [""] * 4 + ["attributes/a.png"] * 2 + ["fine text/a.png"]


def test_a_judge_is_asked_as_its_task_asks_and_without_one_the_report_is_not_valid(
    call: Callable[..., int],
    runs: list[dict[str, Any]],
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPENAI_API_URL", raising=False)
    assert call("mmvet,mmbench_en_dev", *ONE_STATE) == 1
    assert "the judge gave no usable answer (1 times)" in capsys.readouterr().out
    runs.clear()
    judge = "http://judge:1/v1/chat/completions"
    assert (
        call("mmvet,mmbench_en_dev", *ONE_STATE, "--resume", "--judge-url", judge) == 0
    )
    urls = {run["--tasks"]: run["OPENAI_API_URL"] for run in runs}
    assert urls == {"mmbench_en_dev": judge, "mmvet": "http://judge:1/v1"}


def test_a_program_that_fails_after_it_wrote_samples_is_not_said_to_have_none(
    call: Callable[..., int],
    runs: list[dict[str, Any]],
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_samples = subprocess.run

    def run(command: Sequence[str], **options: Any) -> SimpleNamespace:
        result = write_samples(command, **options)
        return SimpleNamespace(**{"stdout": "", **vars(result), "returncode": 1})

    monkeypatch.setattr(subprocess, "run", run)
    assert call("gqa", *ONE_STATE) == 1
    assert len(runs) == 1
    captured = capsys.readouterr()
    assert "lmms-eval: ended with 1 -> see " in captured.out + captured.err


@parametrize_from_file("version", "message")
def test_a_program_that_fails_is_reported(
    call: Callable[..., int],
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    message: str,
) -> None:
    process = SimpleNamespace(returncode=0, stdout=version)
    monkeypatch.setattr(subprocess, "run", lambda *call, **options: process)
    assert call("gqa", *ONE_STATE) == 1
    captured = capsys.readouterr()
    assert message in captured.out + captured.err


def test_a_server_that_dies_stops_the_run(
    call: Callable[..., int],
    runs: list[dict[str, Any]],
    server: FakeServer,
    capsys: Captured,
) -> None:
    pages = iter([server.pages[MODELS]] * 2)
    server.pages[MODELS] = lambda: next(pages, error(503, "down"))  # type: ignore[assignment,return-value]
    assert call("gqa,pope", *ONE_STATE) == 1
    assert len(runs) == 1 and "status 503: down" in capsys.readouterr().err
