"""Every example is run, or checked as far as a machine without a cluster and a GPU can."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]
from PIL import Image

from benchmarks.common.fake_server import Body, Reply, fake_server
from benchmarks.load.__main__ import parse_arguments
from benchmarks.load.settings import PairedOptions
from benchmarks.yardsticks.examples import as_picture, draw_examples
from tests.serving.unit.samples import vllm_config
from vllm_autoprune.cli.main import main
from vllm_autoprune.evaluation.questions import read_questions
from vllm_autoprune.serving.startup import _resolve_settings

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def flags_of(words: list[str]) -> dict[str, object]:
    """Settings of the plugin among the words of a command line."""
    pairs = re.findall(r"--autoprune-([a-z-]+)[= ](\S+)", " ".join(words))
    return {name.replace("-", "_"): value for name, value in pairs}


def require_valid(words: list[str]) -> None:
    """Resolve the settings as a server does at start-up, but for the text tower's download."""
    settings = flags_of(words)
    assert str(settings.pop("text_tower", "openai/")).startswith("openai/")
    assert _resolve_settings(settings, vllm_config()) is not None


def read(name: str) -> Any:
    return yaml.safe_load((EXAMPLES / name).read_text())


def test_every_example_is_listed() -> None:
    listed = set(re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text()))
    files = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*") if path.is_file()}
    mounted = {name for name in files if name.startswith("compose/")} - {"compose/compose.yaml"}
    assert listed == files - mounted - {"README.md"}


@pytest.mark.parametrize("name", ["serve_llava.sh", "serve_qwen.sh"])
def test_the_flags_of_the_scripts_start_a_server(name: str) -> None:
    script = (EXAMPLES / name).read_text()
    assert script.startswith("#!/usr/bin/env bash") and (EXAMPLES / name).stat().st_mode & 0o100
    words = shlex.split(script.partition("exec ")[2].replace("\\\n", " "))
    assert words[:2] == ["vllm", "serve"] and words[-1] == "$@"
    require_valid(words)


def test_the_own_state_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(EXAMPLES / "own_state.json")]) == 0
    assert "valid, K = 64" in capsys.readouterr().out


def test_the_picture_and_its_questions_are_those_of_a_scene_of_the_test_split() -> None:
    scene = [example for example in draw_examples("test", 5) if example.image_id == 4]
    path = EXAMPLES / "questions.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {(line["question"], line["answer"]) for line in lines} == {
        (example.question, example.answer) for example in scene
    }
    assert len(read_questions(path)) == len(scene)
    with Image.open(EXAMPLES / "scene.jpg") as picture:
        assert picture.size == (672, 672)
        shrunk = np.asarray(picture.resize((168, 168), Image.Resampling.BICUBIC), dtype=float)
    assert np.abs(shrunk - np.asarray(as_picture(scene[0].image), dtype=float)).mean() < 3
    assert (EXAMPLES / "scene.jpg").stat().st_size < 60_000


def test_the_client_asks_at_every_budget(capsys: pytest.CaptureFixture[str]) -> None:
    def reply(body: Body) -> Reply:
        return Reply(("a cup",), usage={"prompt_tokens": 80})

    ask = runpy.run_path(str(EXAMPLES / "client.py"))["main"]
    with fake_server(reply) as server:
        assert ask(["--url", f"{server.url}/v1", "--budgets", "64", "16"]) == 0
    image, question = server.requests[0]["messages"][0]["content"]
    assert image["image_url"]["url"].startswith("data:image/jpeg;base64,")
    assert question["text"] in (EXAMPLES / "questions.jsonl").read_text().partition("\n")[0]
    sent = [body["mm_processor_kwargs"]["autoprune"] for body in server.requests]
    assert sent == [{"enabled": False}, {"budget": 64}, {"budget": 16}]
    assert "K = 64:    80 prompt tokens: a cup" in capsys.readouterr().out


def test_the_job_names_a_load_test_that_its_image_holds() -> None:
    job = read("kubernetes/load-test-job.yaml")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    command = shlex.split(container["args"][0].partition(";")[0])
    assert command[:3] == ["python", "-m", "benchmarks.load"]
    assert isinstance(parse_arguments(command[3:]), PairedOptions)
    stage = DOCKERFILE.partition(" AS load\n")[2].partition("\nFROM ")[0]
    assert "COPY benchmarks ./benchmarks" in stage and "--no-deps /dist/*.whl" in stage
    assert re.search(r"^RUN pip install .* locust .* httpx ", stage, re.MULTILINE)


def test_the_compose_file_serves_scrapes_and_shows() -> None:
    services, folder = read("compose/compose.yaml")["services"], EXAMPLES / "compose"
    require_valid(services["vllm"]["command"])
    script = flags_of((EXAMPLES / "serve_llava.sh").read_text().split())
    assert flags_of(services["vllm"]["command"]) == script
    assert (folder / services["vllm"]["build"] / "Dockerfile").resolve().is_file()
    volumes = [volume for service in services.values() for volume in service.get("volumes", ())]
    sources = [volume.partition(":")[0] for volume in volumes]
    assert [s for s in sources if not s.startswith("~") and not (folder / s).exists()] == []
    (job,) = read("compose/prometheus.yml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["vllm:8000"]}]
    (source,) = read("compose/grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (provider,) = read("compose/grafana/provisioning/dashboards/autoprune.yaml")["providers"]
    mounted = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]
    assert any(path.startswith(provider["options"]["path"]) for path in mounted)


def test_the_dockerfile_copies_what_the_wheel_is_built_from() -> None:
    lines = re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
    copied = {name for line in lines for name in line.split()[:-1]}
    ignored = (ROOT / ".dockerignore").read_text()
    assert copied == set(re.findall(r"^!(.+)$", ignored, re.MULTILINE))
    assert copied >= {"pyproject.toml", "vllm_autoprune", "offline_search", "policies"}
    assert all((ROOT / name).exists() for name in copied)
    assert "pip wheel --no-cache-dir --no-deps" in DOCKERFILE
