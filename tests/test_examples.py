"""Every example is run, or checked as far as a machine without a cluster and a GPU can."""

from __future__ import annotations

import contextlib
import re
import runpy
import shlex
import shutil
import subprocess
import sysconfig
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from packaging.requirements import Requirement

from benchmarks.common.fake_server import Body, Reply, fake_server
from benchmarks.load.__main__ import parse_arguments
from tests.serving.unit.samples import vllm_config
from vllm_autoprune.cli.main import main
from vllm_autoprune.serving.startup import resolve_settings

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"


def flags_of(words: list[str]) -> dict[str, object]:
    """Settings of the plugin among the words of a command line."""
    pairs = re.findall(r"--autoprune-([a-z-]+)[= ](\S+)", " ".join(words))
    return {name.replace("-", "_"): value for name, value in pairs}


def require_valid(words: list[str]) -> None:
    """Resolve the settings as a server does at start-up, but for the text tower's download."""
    settings = flags_of(words)
    assert str(settings.pop("text_tower", "openai/")).startswith("openai/")
    assert resolve_settings(settings, vllm_config()) is not None


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


def test_the_client_asks_at_every_budget(capsys: pytest.CaptureFixture[str]) -> None:
    def reply(body: Body) -> Reply:
        return Reply(("a cup",), usage={"prompt_tokens": 80})

    ask = runpy.run_path(str(EXAMPLES / "client.py"))["main"]
    picture = ROOT / "docs/images/explain.png"
    with fake_server(reply) as server:
        call = [str(picture), "What?", "--url", f"{server.url}/v1", "--budgets", "64", "16"]
        assert ask(call) == 0
    sent = [body["mm_processor_kwargs"]["autoprune"] for body in server.requests]
    assert sent == [{"enabled": False}, {"budget": 64}, {"budget": 16}]
    assert "K = 64:    80 prompt tokens: a cup" in capsys.readouterr().out


def link_packages(names: Iterable[str], folder: Path) -> None:
    """Link the installed files of these packages, and of all that they need, into a folder."""
    shared, waiting, linked = Path(sysconfig.get_paths()["purelib"]), [*names], set[str]()
    while waiting:
        distribution = metadata.distribution(waiting.pop())
        if distribution.name in linked:
            continue
        linked.add(distribution.name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            with contextlib.suppress(FileExistsError):
                (folder / top).symlink_to(shared / top)
        needs = map(Requirement, distribution.requires or ())
        waiting += [r.name for r in needs if r.marker is None or r.marker.evaluate({"extra": ""})]


def test_the_job_s_image_runs_its_load_test(tmp_path: Path) -> None:
    """In an environment with what the image installs and copies, against a server that answers."""
    job = read("kubernetes/load-test-job.yaml")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    command = shlex.split(container["args"][0].partition(";")[0])
    assert command[:3] == ["python", "-m", "benchmarks.load"]
    assert parse_arguments(command[3:])[0] == "paired"
    stage = (ROOT / "Dockerfile").read_text().partition(" AS load\n")[2].partition("\nFROM ")[0]
    installed = re.findall(r"^RUN pip install --no-cache-dir (?!--no-deps)(.*)$", stage, re.M)
    names = [word for line in installed for word in line.split() if not re.search("[-:]+/?/", word)]
    venv.EnvBuilder(symlinks=True).create(tmp_path / "venv")
    packages = Path(sysconfig.get_paths(vars={"base": str(tmp_path / "venv")})["purelib"])
    link_packages((name for name in names if not name.startswith("-")), packages)
    source, without = tmp_path / "src", shutil.ignore_patterns("weights", "__pycache__")
    for name in ("vllm_autoprune", "policies", *re.findall(r"^COPY (?!--)(\S+)", stage, re.M)):
        shutil.copytree(ROOT / name, source / name, ignore=without)
    with fake_server(Reply(ttft=0.01, gaps=(0.001,)), model=None) as server:
        changes = {"--attach": [f"a={server.url}", f"b={server.url}"], "--out": [str(tmp_path)]}
        small = {"--users": ["1"], "--rates": ["50"], "--requests": ["4"], "--sides": ["32"]}
        words = [word for flag, values in {**small, **changes}.items() for word in (flag, *values)]
        ran = subprocess.run(
            [tmp_path / "venv/bin/python", *command[1:4], *words, "--shared"],
            cwd=source, env={}, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert ran.returncode == 0 and (tmp_path / "report.html").is_file(), ran.stderr[-2000:]


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
    """Its steps are run by tests/test_wheel.py, in a virtual environment."""
    text = (ROOT / "Dockerfile").read_text()
    lines = re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE)
    copied = {name for line in lines for name in line.split()[:-1]}
    ignored = (ROOT / ".dockerignore").read_text()
    assert copied == set(re.findall(r"^!(.+)$", ignored, re.MULTILINE))
    assert copied >= {"pyproject.toml", "vllm_autoprune", "offline_search", "policies"}
    assert all((ROOT / name).exists() for name in copied)
    assert "pip wheel --no-cache-dir --no-deps" in text and "--no-deps /dist/*.whl" in text
