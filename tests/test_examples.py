"""Every example is run, or checked as far as a machine without a cluster and a GPU can."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from PIL import Image

from benchmarks.load.__main__ import parse_arguments
from benchmarks.load.settings import PairedOptions
from benchmarks.yardsticks import open_yardstick
from benchmarks.yardsticks.examples import as_picture, draw_examples
from benchmarks.yardsticks.yardstick import ALL_TOKENS, Case
from tests.example_commands import flags_of, require_valid
from tests.fake_server import Body, Reply, fake_server
from tests.serving.rollout import Timings
from vllm_autoprune.cli.main import main
from vllm_autoprune.evaluation.questions import read_questions
from vllm_autoprune.serving.api.endpoint import NAME

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
KUBERNETES = EXAMPLES / "kubernetes"


def read(name: str) -> Any:
    return yaml.safe_load((EXAMPLES / name).read_text())


def test_every_example_is_listed() -> None:
    listed = set(re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text()))
    files = {
        str(path.relative_to(EXAMPLES))
        for path in EXAMPLES.rglob("*")
        if path.is_file()
    }
    mounted = {name for name in files if name.startswith("compose/")} - {
        "compose/compose.yaml"
    }
    assert listed == files - mounted - {"README.md"}


@pytest.mark.parametrize("name", ["serve_llava.sh", "serve_qwen.sh"])
def test_the_flags_of_the_scripts_start_a_server(name: str) -> None:
    script = (EXAMPLES / name).read_text()
    assert (
        script.startswith("#!/usr/bin/env bash")
        and (EXAMPLES / name).stat().st_mode & 0o100
    )
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
        shrunk = np.asarray(
            picture.resize((168, 168), Image.Resampling.BICUBIC), dtype=float
        )
    assert (
        np.abs(shrunk - np.asarray(as_picture(scene[0].image), dtype=float)).mean() < 3
    )
    assert (EXAMPLES / "scene.jpg").stat().st_size < 60_000


def test_mini_qwen_answers_the_questions_about_the_small_picture() -> None:
    picture = [e for e in draw_examples("test", 7, "miniqwen") if e.image_id == 6]
    path = EXAMPLES / "small.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    asked = [(example.question, example.answer) for example in picture]
    assert [(line["question"], line["answer"]) for line in lines] == asked
    with Image.open(EXAMPLES / "small.png") as image:
        assert image.tobytes() == as_picture(picture[0].image).tobytes()
    yardstick = open_yardstick("miniqwen")
    (batch,) = yardstick.batches(picture)
    scores = yardstick.encode(batch).score(Case("full", ALL_TOKENS))
    right = int(scores.correct.sum())
    readme = (EXAMPLES / "README.md").read_text()
    assert right == len(picture) and f"all {right} are right with all tokens" in readme


def test_the_client_asks_at_every_budget(capsys: pytest.CaptureFixture[str]) -> None:
    def reply(body: Body) -> Reply:
        return Reply(("a cup",), usage={"prompt_tokens": 80})

    ask = runpy.run_path(str(EXAMPLES / "client.py"))["main"]
    with fake_server(reply) as server:
        assert ask(["--url", f"{server.url}/v1", "--budgets", "64", "1/8"]) == 0
    image, question = server.requests[0]["messages"][0]["content"]
    assert image["image_url"]["url"].startswith("data:image/jpeg;base64,")
    assert (
        question["text"]
        in (EXAMPLES / "questions.jsonl").read_text().partition("\n")[0]
    )
    sent = [body["mm_processor_kwargs"]["autoprune"] for body in server.requests]
    assert sent == [{"enabled": False}, {"budget": "64"}, {"budget": "1/8"}]
    assert "K = 64:    80 prompt tokens: a cup" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["serving.yaml", "serving-qwen.yaml"])
def test_the_manifests_serve_a_state_probe_and_scrape_one_named_port(name: str) -> None:
    manifest = yaml.safe_load_all((KUBERNETES / name).read_text())
    deployment, disruption, service = manifest
    monitor, _ = yaml.safe_load_all((KUBERNETES / "monitoring.yaml").read_text())
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for selector in (
        deployment["spec"]["selector"]["matchLabels"],
        disruption["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
    ):
        assert selector == labels
    (chosen,) = monitor["spec"]["selector"]["matchExpressions"]
    assert labels[chosen["key"]] in chosen["values"]
    container = require_pod(deployment["spec"]["template"]["spec"])
    (port,) = container["ports"]
    probes = [
        container[f"{kind}Probe"]["httpGet"]
        for kind in ("startup", "readiness", "liveness")
    ]
    assert probes == [{"path": "/health", "port": port["name"]}] * 3
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] == port["name"]
    require_valid(container["args"])
    # Clients may set nothing, as docs/index.md says of a server in production.
    assert "requests" not in flags_of(container["args"])
    assert {"name": "VLLM_PLUGINS", "value": f"autoprune,{NAME}"} in container["env"]


def test_the_policy_of_the_network_closes_what_is_scraped_to_all_others() -> None:
    """To the pods that the monitor scrapes, the load test among those who may come in."""
    policy = read("kubernetes/network.yaml")["spec"]
    monitor, _ = yaml.safe_load_all((KUBERNETES / "monitoring.yaml").read_text())
    assert policy["podSelector"] == monitor["spec"]["selector"]
    (rule,) = policy["ingress"]
    assert rule["ports"] == [
        {"port": monitor["spec"]["podMetricsEndpoints"][0]["port"]}
    ]
    labels = [place[kind]["matchLabels"] for place in rule["from"] for kind in place]
    job = read("kubernetes/load-test-job.yaml")["metadata"]["name"]
    assert {"batch.kubernetes.io/job-name": job} in labels and all(labels)


@pytest.mark.parametrize("name", ["serving.yaml", "serving-qwen.yaml"])
def test_a_replica_ends_in_order_and_one_always_serves(name: str) -> None:
    """The hook, running requests, and the processes, within the grace period."""
    deployment, disruption, _ = yaml.safe_load_all((KUBERNETES / name).read_text())
    pod = deployment["spec"]["template"]["spec"]
    container = require_pod(pod)
    timings = Timings.read(KUBERNETES / name)
    (drain,) = [
        int(arg.partition("=")[2]) for arg in container["args"] if "shutdown" in arg
    ]
    assert timings.pre_stop > 2 * timings.lag
    assert timings.pre_stop + drain + 20 < timings.grace
    assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert disruption["spec"]["minAvailable"] < deployment["spec"]["replicas"]


def test_the_manifests_differ_in_names_model_and_flags() -> None:
    llava, qwen = (
        (KUBERNETES / name).read_text().splitlines()
        for name in ("serving.yaml", "serving-qwen.yaml")
    )
    renamed = [line.replace("llava", "qwen") for line in llava]
    differing = [
        line for line in [*renamed, *qwen] if (line in renamed) != (line in qwen)
    ]
    assert 0 < len(differing) <= 5
    assert all(
        line.strip().startswith(("- --", "- qwen-hf/", "- Qwen/")) for line in differing
    )


def test_every_platform_serves_what_the_manifest_serves() -> None:
    """The same image and state; as the plugin's flags, or as the settings that they become."""
    deployment, *_ = yaml.safe_load_all((KUBERNETES / "serving-qwen.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    container = require_pod(pod)
    served = flags_of(container["args"])

    stack = read("kubernetes/production-stack.yaml")["servingEngineSpec"]["modelSpec"]
    (engine,) = stack
    assert flags_of(engine["vllmConfig"]["extraArgs"]) == served
    assert f"{engine['repository']}:{engine['tag']}" == container["image"]
    assert engine["vllmConfig"]["enablePrefixCaching"] is True

    decode = read("kubernetes/llm-d.yaml")["decode"]
    (server,) = decode["containers"]
    assert flags_of(server["args"]) == served
    assert server["image"] == container["image"]
    assert server["extraConfig"].items() <= container.items()
    grace = "terminationGracePeriodSeconds"
    assert decode[grace] == pod[grace]


def test_ray_serves_what_the_manifest_serves() -> None:
    """Ray has no flags of plugins; head and workers have one image."""
    deployment, *_ = yaml.safe_load_all((KUBERNETES / "serving-qwen.yaml").read_text())
    container = require_pod(deployment["spec"]["template"]["spec"])
    spec = read("kubernetes/ray-serve-llm.yaml")["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    (model,) = application["args"]["llm_configs"]
    assert model["model_loading_config"]["model_id"] == container["args"][0]
    settings = model["engine_kwargs"]["additional_config"]["autoprune"]
    assert settings == flags_of(container["args"])
    cluster = spec["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    images = [group["template"]["spec"]["containers"][0]["image"] for group in groups]
    assert len(set(images)) == 1


def require_pod(pod: Any) -> Any:
    """The container of a pod, which mounts its volumes and no others."""
    (container,) = pod["containers"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    return container


def copy_stage(stage: str, folder: Path) -> None:
    """Copy what a stage of the Dockerfile copies of the repository, less what Docker ignores."""
    patterns = (ROOT / ".dockerignore").read_text().split()

    def ignored(
        path: Path,
    ) -> bool:  # as the last pattern says that matches it or a parent
        places = [str(path), *map(str, path.parents)]
        matching = [
            p for p in patterns if any(fnmatch(x, p.removeprefix("!")) for x in places)
        ]
        return bool(matching) and matching[-1][0] != "!"

    for line in re.findall(r"^COPY (?!--from)(.+)$", stage, re.MULTILINE):
        *names, target = line.split()
        for name in names:
            assert target in ("./", f"./{name}")
            files = [
                p for p in ((ROOT / name), *(ROOT / name).rglob("*")) if p.is_file()
            ]
            places = [path.relative_to(ROOT) for path in files]
            places = [path for path in places if not ignored(path)]
            assert places, f"{name}: nothing is copied"
            for place in places:
                (folder / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / place, folder / place)


ONLY_OF_THE_IMAGE = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"{name}: not in the image", name=name)
sys.meta_path.insert(0, Absent())
"""


@pytest.mark.slow
def test_the_job_runs_with_what_its_image_holds(tmp_path: Path) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()

    def list_modules(stage: str) -> set[str]:
        """Modules of the distributions that a stage installs, and of those which they require."""
        words = shlex.split(
            " ".join(re.findall(r"^RUN pip install (.+)", stage, re.MULTILINE))
        )
        waiting = [
            Requirement(word)
            for word in words
            if re.match(r"[a-z][a-z-]+([<>]|$)", word)
        ]
        names = {"setuptools"}
        for requirement in waiting:  # which grows
            if (name := canonicalize_name(requirement.name)) not in names:
                names.add(name)
                with contextlib.suppress(PackageNotFoundError):  # of another platform
                    needs = map(Requirement, requires(name) or ())
                    waiting += [
                        n
                        for n in needs
                        if n.marker is None or n.marker.evaluate({"extra": ""})
                    ]
        modules = packages_distributions().items()
        return {
            module
            for module, of in modules
            if names & {canonicalize_name(name) for name in of}
        }

    job = read("kubernetes/load-test-job.yaml")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    container = require_pod(job["spec"]["template"]["spec"])
    command = shlex.split(container["args"][0].partition(";")[0])
    assert command[:3] == ["python", "-m", "benchmarks.load"]
    assert isinstance(parse_arguments(command[3:]), PairedOptions)
    *_, service = yaml.safe_load_all((KUBERNETES / "serving.yaml").read_text())
    assert f"=http://{service['metadata']['name']}:80" in " ".join(command)

    text = dockerfile.replace("\\\n", " ")
    build, load, serve = (
        stage.partition("\n")[2] for stage in text.split("\nFROM ")[1:]
    )
    copy_stage(build, tmp_path / "build")
    (wheel,) = WheelBuilder(str(tmp_path / "build")).build(
        directory=str(tmp_path / "dist")
    )
    assert all("--no-deps /dist/*.whl" in stage for stage in (load, serve))
    shutil.unpack_archive(wheel, tmp_path / "src", "zip")
    copy_stage(load, tmp_path / "src")
    absent = packages_distributions().keys() - list_modules(load) - {"vllm_autoprune"}
    code = f"absent = {absent!r}\n{ONLY_OF_THE_IMAGE}"
    (tmp_path / "src/sitecustomize.py").write_text(code)
    less = "--users 1 --rates 50 --requests 3 --warm-up 1 --passes 1 --out"
    with fake_server(Reply(ttft=0.0, gaps=(0.0,)), model=None) as server:
        words = [re.sub(r"http://[\w-]+:80", server.url, word) for word in command[1:]]
        done = subprocess.run(
            [sys.executable, *words, *less.split(), str(tmp_path / "out")],
            cwd=tmp_path / "src",
            env={"PATH": os.environ["PATH"], "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    output = done.stdout + done.stderr
    assert done.returncode in (0, 1), output[-4000:]  # 1: the machine was too busy
    assert "in the image" not in output and (tmp_path / "out/report.html").is_file(), (
        output
    )


def test_the_compose_file_serves_scrapes_and_shows() -> None:
    services = read("compose/compose.yaml")["services"]
    folder = EXAMPLES / "compose"
    require_valid(services["vllm"]["command"])
    script = flags_of((EXAMPLES / "serve_llava.sh").read_text().split())
    assert flags_of(services["vllm"]["command"]) == script
    assert (folder / services["vllm"]["build"] / "Dockerfile").resolve().is_file()
    volumes = [
        volume for service in services.values() for volume in service.get("volumes", ())
    ]
    sources = [volume.partition(":")[0] for volume in volumes]
    assert [
        s for s in sources if not s.startswith("~") and not (folder / s).exists()
    ] == []
    (job,) = read("compose/prometheus.yml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["vllm:8000"]}]
    (source,) = read("compose/grafana/provisioning/datasources/prometheus.yaml")[
        "datasources"
    ]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (provider,) = read("compose/grafana/provisioning/dashboards/autoprune.yaml")[
        "providers"
    ]
    mounted = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]
    assert any(path.startswith(provider["options"]["path"]) for path in mounted)
