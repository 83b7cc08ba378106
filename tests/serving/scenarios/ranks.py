"""Tensor-parallel ranks: the selection of each rank before the broadcast."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.serving.engine import (
    STATE,
    alone,
    chat,
    examples,
    generate,
    prompt,
    release_all,
    start,
    turn,
)
from tests.serving.interleave import render_prompt
from tests.serving.paths import CLIP, LLAVA
from tests.serving.scenarios import Report, scenario
from tests.serving.selection_recorder import watch
from vllm_autoprune.selftest.backbones import build
from vllm_autoprune.selftest.tiny_engine import picture
from vllm_autoprune.tpdsl.loading import load_state

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

    Needs the environment of ``test_ray.py``.
    """
    import ray  # type: ignore[import-not-found]  # test_ray.py installs it

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
