"""Invariant 1 across tensor-parallel ranks: equal selections before the broadcast."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.serving.engine import (
    CLIP,
    LLAVA,
    STATE,
    Answer,
    alone,
    ask,
    built,
    chat,
    examples,
    generate_each,
    prompt,
    release_all,
    start,
    turn,
    watch,
)
from tests.serving.interleave import render_prompt
from tests.serving.scenarios import Report, Runner, scenario
from vllm_autoprune.selftest.tiny_engine import picture as draw
from vllm_autoprune.tpdsl.loading import load_state

if TYPE_CHECKING:
    from vllm import LLM

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
    sizes = ((112, 112), (200, 112), (96, 208))
    talks = [[turn("what colour is the cat", draw(*size, at))] for at, size in enumerate(sizes)]
    llm = start(
        settings,
        model=str(built("qwen2_5_vl")),
        limit_mm_per_prompt={"image": 2},
        **{"tensor_parallel_size": 2, **options},
    )
    return _watched(llm, lambda: [chat(llm, [talk])[0] for talk in talks])


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
        report = _watched(llm, lambda: [ask(llm, example) for example in examples(4)])
        report["actors"] = llm.collective_rpc(find_actor)
        parts = [render_prompt(examples(6), *key) for key in PARTS]
        report["parts"] = _watched(llm, lambda: generate_each(llm, parts))
        report["policies"] = {}
        for name in policies:
            raw = [prompt(e, state=alone(name), budget=16) for e in examples(2)]
            report["policies"][name] = _watched(llm, partial(generate_each, llm, raw))
        return report


def _watched(llm: LLM, answer: Callable[[], list[Answer]]) -> dict[str, Any]:
    """Answers, and each rank's selections before the broadcast."""
    llm.collective_rpc(begin_watching)
    return {"answers": answer(), "kept": llm.collective_rpc(seen_here)}


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


def assert_equal_selections(report: Report) -> list[list[list[int]]]:
    """Batches of kept tokens of one rank, which the other has chosen too."""
    kept: list[list[list[int]]]
    kept, other = report["kept"]
    assert kept and kept == other
    return kept


def count_other_texts(report: Report, other: Report) -> int:
    """Answers that differ: sharded sums round differently, so a near tie may flip."""
    return sum(
        a["text"] != b["text"] for a, b in zip(report["answers"], other["answers"], strict=True)
    )


def test_ranks_choose_the_same_tokens_and_answer_like_one(runner: Runner) -> None:
    single, two = runner.run("one_rank"), runner.run("two_ranks")
    assert_equal_selections(two)
    assert count_other_texts(single, two) <= 0.1 * len(two["answers"])


def test_ranks_agree_on_cores_deltas_and_recalls(runner: Runner) -> None:
    single, two = (runner.run(name)["parts"] for name in ("one_rank", "two_ranks"))
    batches = assert_equal_selections(two)
    assert {8, 3} <= {len(kept) for batch in batches for kept in batch}, "recalled"
    assert len(batches) > len(PARTS) + 4, "cores and deltas are selected one by one"
    assert count_other_texts(single, two) <= 1


@pytest.mark.parametrize("name", POLICIES)
def test_ranks_agree_on_inputs_sharded_by_heads(runner: Runner, name: str) -> None:
    """Heads of the vision tower and of the language model are spread over the ranks."""
    report = runner.run("two_ranks")["policies"][name]
    batches = assert_equal_selections(report)
    assert all(len(kept) in (15, 16) for batch in batches for kept in batch)
    assert all(answer["text"] for answer in report["answers"])


def test_ranks_agree_with_m_rope() -> None:
    """With V1 only: ranks agree within the model, which both runners call alike."""
    batches = assert_equal_selections(Runner("v1").run("two_ranks_qwen2_5_vl"))
    assert [len(kept) for batch in batches for kept in batch] == [8, 8, 8]
    assert len({str(batch) for batch in batches}) == 3


@pytest.mark.exhaustive
def test_ranks_agree_with_a_data_parallel_tower() -> None:
    """Each rank encodes some of the images; all features are gathered before the selection."""
    report = Runner("v1").run("data_parallel_tower")
    assert [assert_equal_selections(report["two"])] == report["one"]["kept"]
    assert count_other_texts(report["one"], report["two"]) == 0


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
