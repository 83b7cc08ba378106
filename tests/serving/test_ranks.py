"""Invariant 1 across tensor-parallel ranks: equal selections before the broadcast."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.serving.engine import (
    CLIP,
    LLAVA,
    STATE,
    alone,
    chat,
    examples,
    generate,
    prompt,
    release_all,
    start,
    turn,
    watch,
)
from tests.serving.interleave import render_prompt
from tests.serving.scenarios import Report, Runner, scenario
from vllm_autoprune.selftest.backbones import build
from vllm_autoprune.selftest.tiny_engine import picture
from vllm_autoprune.tpdsl.loading import load_state

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]


POLICIES = ("visionzip", "prumerge_plus", "fastv")
"""They read the vision tower, its next layer, and the language model's first layers."""

PARTS = (
    (0, 64, "cdpruner with a core", 0, 0),
    (1, 64, "cdpruner with a core", 0, 0),
    (3, 64, "cdpruner with a core", 1, 8),
    (0, 64, "autoprune with a core", 2, 8),
    (2, 32, None, 2, 3),
)
"""Requests whose images are split into core and delta, or recalled by later turns."""


@scenario
def one_rank() -> Report:
    """Answers and kept tokens on one rank, to compare with :func:`two_ranks`."""
    return _ranked(1)


@scenario
def two_ranks() -> Report:
    """Answers at TP = 2, and each rank's selection before the broadcast.

    ``actors``: the Ray actor of each worker, if it is one.

    ``parts`` has the same for cores, deltas and recalls, ``policies`` for requests with policies
    that read tensors sharded over ranks. Processed images reach both ranks through shared memory.
    """
    return _ranked(2, POLICIES, mm_processor_cache_type="shm")


@scenario
def two_ray_workers() -> Report:
    """:func:`two_ranks` without policies, its workers actors of a local Ray cluster.

    Needs the environment of the test that reads it.
    """
    import ray  # type: ignore[import-not-found]  # the test that reads it installs it

    ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, object_store_memory=80 << 20)
    try:
        return _ranked(2, distributed_executor_backend="ray")
    finally:
        release_all()
        ray.shutdown()


@scenario
def two_ranks_qwen2_5_vl() -> Report:
    """Two ranks of a tiny model with M-RoPE, ranking before its merger.

    Relevance is measured by its input embeddings.
    """
    state = {**load_state("autoprune").model_dump(mode="json"), "rank_at": "merger_in"}
    return _ranked_qwen({"state": state, "budget": 8})


@scenario
def data_parallel_tower() -> Report:
    """Two ranks that each encode some of the images, and one rank that encodes them all."""
    settings = {"state": alone("cdpruner"), "budget": 8}
    two = _ranked_qwen(settings, mm_encoder_tp_mode="data", dtype="float32")
    release_all()
    return {"two": two, "one": _ranked_qwen(settings, tensor_parallel_size=1, dtype="float32")}


def _ranked_qwen(settings: Mapping[str, object], **options: object) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        llm = start(
            settings,
            model=str(build("qwen2_5_vl", Path(folder))),
            limit_mm_per_prompt={"image": 2},
            **{"tensor_parallel_size": 2, **options},
        )
        llm.collective_rpc(begin_watching)
        pictures = [picture(112, 112, 0), picture(200, 112, 1), picture(96, 208, 2)]
        answers = [chat(llm, [[turn("what colour is the cat", i)]])[0].plain() for i in pictures]
        return {"answers": answers, "kept": llm.collective_rpc(seen_here)}


def _ranked(ranks: int, policies: Sequence[str] = (), **options: object) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        llava, clip = _with_heads_for_two(Path(folder))
        # float32, so that sums over two ranks round to the result of one.
        llm = start(
            {**STATE, "text_tower": str(clip), "requests": "states"},
            model=str(llava),
            tensor_parallel_size=ranks,
            dtype="float32",
            **options,
        )
        llm.collective_rpc(begin_watching)
        questions = examples(4)
        answers = [chat(llm, [[turn(e.question, e.image)]])[0].plain() for e in questions]
        report = {"answers": answers, "kept": llm.collective_rpc(seen_here), "policies": {}}
        report["actors"] = llm.collective_rpc(find_actor)
        llm.collective_rpc(begin_watching)
        parts = [render_prompt(examples(6), *key) for key in PARTS]
        answers = [generate(llm, [each])[0].plain() for each in parts]
        report["parts"] = {"answers": answers, "kept": llm.collective_rpc(seen_here)}
        for name in policies:
            llm.collective_rpc(begin_watching)
            entry = {"autoprune": {"state": alone(name), "budget": 16}}
            raw = [{**prompt(e), "mm_processor_kwargs": entry} for e in examples(2)]
            answers = [generate(llm, [each])[0].plain() for each in raw]
            kept = llm.collective_rpc(seen_here)
            report["policies"][name] = {"answers": answers, "kept": kept}
        return report


def _with_heads_for_two(folder: Path) -> tuple[Path, Path]:
    """mini-LLaVA and its text tower with a vision tower of four heads in place of five.

    vLLM gives each rank whole heads. The shapes of the weights do not depend on the number of
    heads; with four the answers are meaningless, but must be equal on one rank and on two.
    """
    for source in (LLAVA, CLIP):
        shutil.copytree(source, folder / source.name)
        path = folder / source.name / "config.json"
        config = json.loads(path.read_text())
        config["vision_config"]["num_attention_heads"] = 4
        path.write_text(json.dumps(config))
    return folder / LLAVA.name, folder / CLIP.name


def begin_watching(worker: object) -> None:
    """Runs in every worker: start recording selections."""
    _WATCHED.append(watch())


def seen_here(worker: object) -> list[list[list[int]]]:
    """Runs in every worker: the selected indices, before the broadcast."""
    return _WATCHED[-1].before_broadcast


def find_actor(worker: object) -> str:
    """Runs in every worker: the Ray actor that it is, or nothing."""
    ray = sys.modules.get("ray")
    return str(ray.get_runtime_context().get_actor_id() or "") if ray is not None else ""


_WATCHED: list[Any] = []


def test_ranks_choose_the_same_tokens_and_answer_like_one(runner: Runner) -> None:
    one, two = runner.run("one_rank"), runner.run("two_ranks")
    first, second = two["kept"]
    assert len(first) > 0
    assert first == second
    same = [a["text"] == b["text"] for a, b in zip(one["answers"], two["answers"], strict=True)]
    # Sharded sums round differently, so a near tie may flip; most answers cannot.
    assert sum(same) >= 0.9 * len(same)


def test_ranks_agree_on_cores_deltas_and_recalls(runner: Runner) -> None:
    one, two = (runner.run(name)["parts"] for name in ("one_rank", "two_ranks"))
    first, second = two["kept"]
    assert first == second
    sizes = {len(kept) for batch in first for kept in batch}
    assert 8 in sizes and 3 in sizes, "recalled"
    assert len(first) > len(PARTS) + 4, "cores and deltas are selected one by one"
    same = [a["text"] == b["text"] for a, b in zip(one["answers"], two["answers"], strict=True)]
    # Sharded sums round differently, so a near tie may flip.
    assert sum(same) >= len(same) - 1


@pytest.mark.parametrize("name", POLICIES)
def test_ranks_agree_on_inputs_sharded_by_heads(runner: Runner, name: str) -> None:
    """Heads of the vision tower and of the language model are spread over the ranks."""
    report = runner.run("two_ranks")["policies"][name]
    first, second = report["kept"]
    assert len(first) > 0
    assert first == second
    assert all(len(kept) in (15, 16) for batch in first for kept in batch)
    assert all(answer["text"] for answer in report["answers"])


def test_ranks_agree_with_m_rope() -> None:
    """With V1 only: ranks agree within the model, which both runners call alike."""
    report = Runner("v1").run("two_ranks_qwen2_5_vl")
    first, second = report["kept"]
    assert first == second
    assert [len(kept) for batch in first for kept in batch] == [8, 8, 8]
    assert len({str(batch) for batch in first}) == 3


@pytest.mark.exhaustive
def test_ranks_agree_with_a_data_parallel_tower() -> None:
    """Each rank encodes some of the images; all features are gathered before the selection."""
    report = Runner("v1").run("data_parallel_tower")
    first, second = report["two"]["kept"]
    (alone,) = report["one"]["kept"]
    assert first == second == alone
    two, one = ([answer["text"] for answer in report[name]["answers"]] for name in ("two", "one"))
    assert two == one


RAY = "ray==2.60.0"
PLATFORM = Path(__file__).with_name("ray_on_cpu")


@pytest.fixture(scope="module")
def environment(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Ray and the platform plugin on ``PYTHONPATH``."""
    folder = tmp_path_factory.mktemp("ray")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*pip, folder, RAY], check=True, timeout=600)
    before = runner.environment.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    path = os.pathsep.join(filter(None, [before, str(PLATFORM), str(folder)]))
    return {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.mark.exhaustive
def test_workers_in_a_ray_cluster_select_as_processes_do(
    runner: Runner, environment: Mapping[str, str]
) -> None:
    report = runner.run("two_ray_workers", environment, patience=900)
    assert len(set(report["actors"])) == 2 and all(report["actors"])
    expected = runner.run("two_ranks")
    assert expected["actors"] == ["", ""]
    assert report["kept"] == expected["kept"]
    assert report["answers"] == expected["answers"]
    assert report["parts"] == expected["parts"]
