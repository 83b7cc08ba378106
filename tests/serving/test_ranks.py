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
from typing import Any

import pytest

from tests.serving.engine import (
    CLIP,
    LLAVA,
    STATE,
    Answer,
    Engine,
    Request,
    alone,
    built,
    examples,
    page,
    prompt,
    render_prompt,
    start,
    stop_all,
    turn,
    watch,
)
from tests.serving.runners import Result, Runner, in_engine
from vllm_autoprune.selftest.questions import picture
from vllm_autoprune.tpdsl.loading import load_state

pytestmark = pytest.mark.engine

POLICIES = ("visionzip", "prumerge_plus", "fastv")
"""They read the vision tower, its next layer, and the language model's first layers."""

PARTS: Sequence[Request] = (
    (0, 64, "cdpruner with a core", 0, 0),
    (1, 64, "cdpruner with a core", 0, 0),
    (3, 64, "cdpruner with a core", 1, 8),
    (0, 64, "autoprune with a core", 2, 8),
    (2, 32, None, 2, 3),
)
"""Requests whose images are split into core and delta, or recalled by later turns."""

Ranked = dict[str, Any]
"""``answers``, and what each rank ``kept`` before the broadcast, batch by batch."""

_WATCHED: list[Any] = []


def begin_watching(worker: object) -> None:
    """Runs in every worker: start recording selections."""
    _WATCHED.append(watch())


def take_selections(worker: object) -> list[list[list[int]]]:
    """Runs in every worker: the selected indices, before the broadcast."""
    return _WATCHED[-1].before_broadcast


def find_actor(worker: object) -> str:
    """Runs in every worker: the Ray actor that it is, or nothing."""
    ray = sys.modules.get("ray")
    return (
        str(ray.get_runtime_context().get_actor_id() or "") if ray is not None else ""
    )


def _watched(engine: Engine, answer: Callable[[], list[Answer]]) -> Ranked:
    engine.llm.collective_rpc(begin_watching)
    return {"answers": answer(), "kept": engine.llm.collective_rpc(take_selections)}


def answer_on_ranks(
    ranks: int, policies: Sequence[str] = (), **options: object
) -> dict[str, Any]:
    """``whole`` images, ``parts``, and ``policies`` that read tensors sharded over the ranks.

    ``actors``: the Ray actor of each worker, if it is one. vLLM gives each rank whole heads, so
    mini-LLaVA and its text tower get a vision tower of four heads in place of five. The shapes of
    the weights do not depend on it; answers are meaningless, but must be equal on one rank and two.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source in (LLAVA, CLIP):
            shutil.copytree(source, folder / source.name)
            path = folder / source.name / "config.json"
            config = json.loads(path.read_text())
            config["vision_config"]["num_attention_heads"] = 4
            path.write_text(json.dumps(config))
        # float32, so that sums over two ranks round to the result of one.
        engine = start(
            {**STATE, "text_tower": str(folder / CLIP.name), "requests": "states"},
            model=folder / LLAVA.name,
            tensor_parallel_size=ranks,
            dtype="float32",
            **options,
        )
        prompts_by_name = {
            "parts": [render_prompt(*request) for request in PARTS],
            **{
                policy: [prompt(e, state=alone(policy), budget=16) for e in examples(2)]
                for policy in policies
            },
        }
        of_images = _watched(
            engine, lambda: [engine.ask(example) for example in examples(4)]
        )
        return {
            "whole": of_images,
            "actors": engine.llm.collective_rpc(find_actor),
            **{
                name: _watched(engine, partial(engine.generate_each, prompts))
                for name, prompts in prompts_by_name.items()
            },
        }


def answer_on_two_ranks() -> Result:
    """Processed images reach both ranks through shared memory."""
    return answer_on_ranks(2, POLICIES, mm_processor_cache_type="shm")


def answer_on_two_ray_workers() -> Result:
    """Without policies; needs the environment of the test that reads it."""
    import ray  # type: ignore[import-not-found]  # the test that reads it installs it

    ray.init(
        num_cpus=2, num_gpus=2, include_dashboard=False, object_store_memory=80 << 20
    )
    try:
        return answer_on_ranks(2, distributed_executor_backend="ray")
    finally:
        stop_all()
        ray.shutdown()


def assert_equal_selections(report: Ranked) -> list[list[list[int]]]:
    """Batches of kept tokens of one rank, which the other has chosen too."""
    selections: list[list[list[int]]]
    selections, other = report["kept"]
    assert selections and selections == other
    return selections


def count_other_texts(report: Ranked, other: Ranked) -> int:
    """Answers that differ: sharded sums round differently, so a near tie may flip."""
    pairs = zip(report["answers"], other["answers"], strict=True)
    return sum(answer["text"] != expected["text"] for answer, expected in pairs)


@pytest.mark.reads.with_args(answer_on_two_ranks)
def test_ranks_choose_the_same_tokens_and_answer_like_one(runner: Runner) -> None:
    """Heads of the vision tower and of the language model are spread over the ranks."""
    single = runner.run(answer_on_ranks, ranks=1)
    two = runner.run(answer_on_two_ranks)
    assert_equal_selections(two["whole"])
    assert count_other_texts(single["whole"], two["whole"]) <= 0.1 * len(
        two["whole"]["answers"]
    )

    batches = assert_equal_selections(two["parts"])
    assert {8, 3} <= {len(indices) for batch in batches for indices in batch}, (
        "recalled"
    )
    assert len(batches) > len(PARTS) + 4, "cores and deltas are selected one by one"
    assert count_other_texts(single["parts"], two["parts"]) <= 1

    for policy in POLICIES:
        batches = assert_equal_selections(two[policy])
        assert all(
            len(indices) in (15, 16) for batch in batches for indices in batch
        ), policy
        assert all(answer["text"] for answer in two[policy]["answers"]), policy


def _answer_by_qwen(
    settings: Mapping[str, object],
    ranks: int,
    backbone: str = "qwen2_5_vl",
    **options: object,
) -> Ranked:
    sizes = ((112, 112), (200, 112), (96, 208))
    draw = page if "cells" in settings else picture
    talks = [
        [turn("what colour is the cat", draw(*size, number))]
        for number, size in enumerate(sizes)
    ]
    options = {
        "limit_mm_per_prompt": {"image": 2},
        "tensor_parallel_size": ranks,
        **options,
    }
    engine = start(settings, built(backbone), **options)
    report = _watched(engine, lambda: [engine.chat(talk)[0] for talk in talks])
    engine.stop()
    return report


@pytest.mark.only("v1")
@in_engine
def test_ranks_agree_with_m_rope() -> None:
    """Ranking before the merger, with relevance by input embeddings.

    With V1 only: ranks agree within the model, which both runners call alike.
    """
    state = {**load_state("autoprune").model_dump(mode="json"), "rank_at": "merger_in"}
    batches = assert_equal_selections(
        _answer_by_qwen({"state": state, "budget": 8}, ranks=2)
    )
    assert [len(indices) for batch in batches for indices in batch] == [8, 8, 8]
    assert len({str(batch) for batch in batches}) == 3


@pytest.mark.exhaustive
@pytest.mark.only("v1")
@in_engine
def test_ranks_agree_on_the_cells_that_leave_a_tower() -> None:
    settings = {"state": alone("cdpruner"), "budget": 4, "tower": "1/2@1/2"}
    options: Any = {"backbone": "qwen3_vl", "dtype": "float32"}
    two = _answer_by_qwen(settings, ranks=2, **options)
    single = _answer_by_qwen(settings, ranks=1, **options)
    assert [assert_equal_selections(two)] == single["kept"]
    assert count_other_texts(single, two) == 0


@pytest.mark.exhaustive
@pytest.mark.only("v1")
@pytest.mark.parametrize("cells", ["none", "flat"])
@in_engine
def test_ranks_agree_with_a_data_parallel_tower(cells: str) -> None:
    """Each rank encodes some of the images; all features are gathered before the selection.

    With one image at a time, the other rank has none.
    """
    settings = {"state": alone("cdpruner"), "budget": 8, "cells": cells}
    two = _answer_by_qwen(settings, ranks=2, mm_encoder_tp_mode="data", dtype="float32")
    single = _answer_by_qwen(settings, ranks=1, dtype="float32")
    assert [assert_equal_selections(two)] == single["kept"]
    assert count_other_texts(single, two) == 0


@pytest.mark.exhaustive
def test_workers_in_a_ray_cluster_select_as_processes_do(
    runner: Runner, tmp_path: Path
) -> None:
    """Ray and a platform plugin, by whose devices it places workers, are on ``PYTHONPATH``."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*pip, tmp_path, "ray==2.60.0"], check=True, timeout=600)
    inherited = runner.environment.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    plugin = str(Path(__file__).with_name("ray_on_cpu"))
    path = os.pathsep.join(filter(None, [inherited, plugin, str(tmp_path)]))
    environment = {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}
    report = runner.run(answer_on_two_ray_workers, environment)
    assert len(set(report["actors"])) == 2 and all(report["actors"])
    expected = runner.run(answer_on_two_ranks)
    assert expected["actors"] == ["", ""]
    assert (report["whole"], report["parts"]) == (expected["whole"], expected["parts"])
