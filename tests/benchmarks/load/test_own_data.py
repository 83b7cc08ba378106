"""Load tests with questions of one's own: which are sent, and which files are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import BenchmarkError
from benchmarks.load.paired import _Session
from benchmarks.load.settings import Load, PairedOptions, Workload
from benchmarks.load.workload import Prepared, prepare
from tests.evaluation.question_files import draw
from vllm_autoprune.errors import ConfigError

FORMS: dict[str, list[dict[str, Any]]] = {
    "vLLM's custom_image": [
        {"prompt": "{}?", "image_files": ["{}.png"]},
        {
            "content": [
                {"type": "text", "text": "{}?"},
                {"type": "image", "image": "{}.png"},
            ]
        },
    ],
    "AIPerf and GenAI-Perf": [
        {"text": "{}?", "image": "{}.png", "output_length": 9},
        {"texts": ["{}?"], "images": ["{}.png"]},
        {"text": "{}?", "images": ["{}.png"]},
    ],
    "questions as for eval": [{"image": "{}.png", "question": "{}?", "answer": "x"}],
}
PICTURES = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of pictures that are all different."""
    folder = tmp_path_factory.mktemp("data")
    for number in range(PICTURES):
        draw().crop((0, 0, 24 - number, 16)).save(folder / f"{number}.png")
    return folder


def write(folder: Path, lines: list[dict[str, Any]]) -> Path:
    """Each picture once, by these forms in turn, and then the first again."""
    path = folder / "requests.jsonl"
    texts = [json.dumps(lines[n % len(lines)]) for n in range(PICTURES)]
    written = [text.replace("{}", str(n)) for n, text in enumerate(texts)]
    path.write_text(
        "\n".join([*written, texts[0].replace("{}", "0", 1).replace("{}", "0")])
    )
    return path


def list_questions(bodies: Any) -> list[str]:
    messages = [json.loads(body)["messages"] for body in bodies]
    return [
        part["text"]
        for (turn,) in messages
        for part in turn["content"]
        if "text" in part
    ]


@pytest.mark.parametrize("name", FORMS)
def test_own_requests_are_sent_once_a_picture(
    folder: Path, tmp_path: Path, name: str
) -> None:
    path = write(folder, FORMS[name])
    workload = Workload(model="m", data=path, requests=4, warm_up=2, output_tokens=5)
    prepared = prepare(workload, tmp_path)
    assert list_questions(prepared.measured) == ["0?", "1?", "2?", "3?"]
    assert list_questions(prepared.warm_up) == ["4?", "5?"]
    body = json.loads(prepared.measured[1])
    assert "data:image/png;base64," in json.dumps(body["messages"])
    assert (body["max_tokens"], body["ignore_eos"]) == (5, True)
    second = prepare(workload.model_copy(update={"part": 1}), tmp_path)
    assert list_questions(second.measured) == ["6?", "7?", "8?", "9?"]


def test_loads_of_one_experiment_share_no_picture(folder: Path, tmp_path: Path) -> None:
    options = PairedOptions(
        data=write(folder, FORMS["questions as for eval"]),
        requests=3,
        warm_up=1,
        out=tmp_path,
    )
    session = _Session(options, arm_count=1)
    for load in (Load(users=1), Load(rate=2.0)):
        session.folders[load] = session.prepare(load)
    sent = [
        list_questions(Prepared.read(path).measured)
        for path in session.folders.values()
    ]
    assert sent == [["0?", "1?", "2?"], ["4?", "5?", "6?"]]


def test_repeated_requests_are_of_the_pool_and_too_few_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    path = write(folder, FORMS["AIPerf and GenAI-Perf"])
    workload = Workload(
        model="m", data=path, requests=40, warm_up=2, cache="repeat", pool=3
    )
    prepared = prepare(workload, tmp_path)
    assert set(list_questions(prepared.measured)) == {"0?", "1?", "2?"}
    assert list_questions(prepared.warm_up) == ["3?", "4?"]
    too_many = workload.model_copy(update={"cache": "unique"})
    with pytest.raises(BenchmarkError, match="has 12 questions that share no picture"):
        prepare(too_many, tmp_path)
    with pytest.raises(BenchmarkError, match="give --cache repeat"):
        prepare(workload.model_copy(update={"cache": "same-image"}), tmp_path)
    path.write_text('{"session_id": "1", "turns": [{"text": "?"}]}\n')
    with pytest.raises(ConfigError, match="contains no question about a picture"):
        prepare(workload, tmp_path)
