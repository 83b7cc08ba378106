"""The pages on serving and deployment: flags exist, manifests parse, metrics are those exported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
import yaml  # type: ignore[import-untyped]
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from vllm_autoprune.serving.api import engine_requests
from vllm_autoprune.serving.api.endpoint import NAME, PATH
from vllm_autoprune.serving.api.request import PruningRequest
from vllm_autoprune.serving.settings import LEVELS
from vllm_autoprune.serving.worker.features import FeatureCache
from vllm_autoprune.serving.worker.metrics import Stopwatch, WorkerMetrics
from vllm_autoprune.serving.worker.selection import FallbackMeter

DOCS = Path(__file__).resolve().parents[2] / "docs"
SERVING, DEPLOY = (
    (DOCS / name).read_text(encoding="utf-8") for name in ("serving.md", "deploy.md")
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Type of every metric of ours, as `/metrics` calls it: API servers' and workers'."""
    folder = tmp_path_factory.mktemp("metrics")
    meter = FallbackMeter()
    meter.errors["ValueError"] = 1
    meter.add(torch.zeros(1, dtype=torch.uint8))
    with closing(WorkerMetrics(str(folder))) as worker:
        worker.publish(Stopwatch(torch.device("cpu")), meter, FeatureCache(1), 0)
    workers = CollectorRegistry()
    MultiProcessCollector(workers, path=str(folder))  # type: ignore[no-untyped-call]
    assert engine_requests.__doc__  # its counters are in the registry by now
    return {
        family.name + "_total" * (family.type == "counter"): family.type
        for registry in (REGISTRY, workers)
        for family in registry.collect()
        if family.name.startswith("autoprune_")
    }


def test_the_page_lists_every_metric(exported: dict[str, str]) -> None:
    listed = re.findall(r"^\| `(autoprune_\w+)` \| (.*?) \|", SERVING, flags=re.MULTILINE)
    assert {name for name, _ in listed} == set(exported)
    assert len(listed) == len(exported)


def test_the_dashboard_shows_every_metric_and_no_other(exported: dict[str, str]) -> None:
    text = (DOCS / "grafana.json").read_text(encoding="utf-8")
    dashboard = json.loads(text)
    expressions = " ".join(re.findall(r'"(?:expr|query)": "(.*)"', text))
    used = set(re.findall(r"autoprune_\w+", expressions))
    parts = {"histogram": ("_bucket", "_sum", "_count")}
    assert used == {
        name + part for name, kind in exported.items() for part in parts.get(kind, ("",))
    }
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


@pytest.mark.compat
@pytest.mark.slow
def test_every_flag_on_the_pages_is_one_of_vllm_serve() -> None:
    vllm = Path(sys.executable).with_name("vllm")
    shown = subprocess.run(
        [vllm, "serve", "--help=all"], capture_output=True, text=True, check=True
    ).stdout
    known = set(re.findall(r"--[a-z][a-z-]+", shown))
    others = {"--gpus", "--ipc", "--system", "--no-deps"}  # of docker and pip
    others |= {"--count", "--minutes"}  # of our own commands
    flags = set(re.findall(r"--[a-z][a-z-]+", SERVING + DEPLOY)) - others
    assert flags - known == set()


def test_levels_and_fields_are_all_on_the_page() -> None:
    levels = re.findall(r"^\| `([\w-]+)` \| (?:nothing|a budget|also)", SERVING, flags=re.MULTILINE)
    assert tuple(levels) == LEVELS
    fields = set(re.findall(r'^\| `"(\w+)":', SERVING, flags=re.MULTILINE))
    of_messages = {"instructions", "details", "turns", "recall_turns"}
    assert fields == set(PruningRequest.model_fields) - of_messages
    assert PATH in SERVING and NAME in SERVING and NAME in DEPLOY


def test_the_manifest_is_yaml_that_mounts_what_it_names() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", DEPLOY, flags=re.DOTALL)
    state, deployment, service = yaml.safe_load_all(text)
    pod = deployment["spec"]["template"]
    assert pod["metadata"]["labels"] == service["spec"]["selector"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    (container,) = pod["spec"]["containers"]
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    assert volumes["state"]["configMap"]["name"] == state["metadata"]["name"]
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == "state"]
    (file,) = state["data"]
    assert f"--autoprune-state={mount['mountPath']}/{file}" in container["args"]
    (port,) = container["ports"]
    assert service["spec"]["ports"][0]["targetPort"] == port["containerPort"]
