"""Videos on real engines: all tokens are stock's, and EVS keeps what vLLM's own keeps.

Positions, empty caches, small steps and preemption: the selftest. That company changes nothing:
``test_equivalence.py``, whose requests have videos.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor
from vllm.model_executor.models import qwen2_5_vl
from vllm.multimodal.video_prune.evs import compute_retention_mask

from tests.serving.engine import Answer, Prompt, assert_same, built, start, watch
from tests.serving.runners import in_engine
from vllm_autoprune.selftest.questions import picture, video

pytestmark = pytest.mark.engine

PER_FRAME = 6
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "limit_mm_per_prompt": {"image": 1, "video": 2},
}


def ask(model: Any, text: str, videos: list[int], **entry: Any) -> Prompt:
    """A raw prompt about videos of so many temporal groups, each of two frames, and a picture."""
    data: dict[str, Any] = {"video": [video(2 * groups, groups) for groups in videos]}
    if "IMAGE" in text:
        data["image"] = [picture(112, 112, 0)]
    for modality in ("image", "video"):
        text = text.replace(modality.upper(), model.get_placeholder_str(modality, 1))
    kwargs = {"mm_processor_kwargs": {"autoprune": entry}} if entry else {}
    return {"prompt": text, "multi_modal_data": data, **kwargs}


def requests(model: Any, **entry: Any) -> list[Prompt]:
    """Videos of 1, 2, 3 and 7 groups; an image before and behind one; two of them."""
    prompts: list[tuple[str, list[int]]] = [
        *(("user VIDEO what is on the left", [groups]) for groups in (1, 2, 3, 7)),
        ("user IMAGE and VIDEO what", [3]),
        ("user VIDEO and IMAGE what", [3]),
        ("user VIDEOVIDEO which", [2, 3]),
    ]
    if "Glm" in type(model).__name__:  # of which vLLM takes one video in a prompt
        del prompts[-1]
    return [ask(model, *question, **entry) for question in prompts]


@pytest.mark.both
@pytest.mark.parametrize(
    "backbone",
    [
        "qwen2_5_vl",
        "qwen3_vl",
        "llava_onevision",
        "internvl",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("qwen2_vl", "glm4v", "internvl_chat")
        ),
    ],
)
@in_engine
def test_k_of_all_tokens_is_stock_and_counts_are_exact(backbone: str) -> None:
    """One by one and all at once, in steps that end within videos; another question shares them."""
    # Backbones whose frames are not joined two by two: tokens of one, rows behind the last.
    single = {"llava_onevision": (4, 1), "internvl": (4, 0), "internvl_chat": (4, 0)}
    model = built(backbone)
    groups = (1, 2, 3, 7, 3, 3, 5)
    engine = start(None, model, **OPTIONS)
    stock = engine.generate_each(requests(engine.model))
    engine.stop()
    settings = {"state": "vcast", "budget": "100%", "requests": "states"}
    engine = start(
        settings, model, max_num_batched_tokens=16, max_num_seqs=2, **OPTIONS
    )
    untouched: list[dict[str, Any]] = [{"video_budget": "100%"}, {"enabled": False}]
    for entry in untouched:
        prompts = requests(engine.model, **entry)
        assert_same(engine.generate_each(prompts), stock, tolerance=1e-4)
    few = requests(engine.model, video_budget="tokens_per_frame:2")
    answers = engine.generate_each(few)
    removed = [
        unpruned["prompt_tokens"] - few["prompt_tokens"]
        for unpruned, few in zip(stock, answers, strict=True)
    ]
    tokens, ends = single.get(backbone, (PER_FRAME, 0))
    frames = 2 if backbone in single else 1
    expected = [count * frames * (tokens - 2) + ends for count in groups[: len(few)]]
    if ends:  # of two videos
        expected[-1] += ends
    if backbone == "glm4v":
        expected[0] = 2 * PER_FRAME - 2  # the shortest is enlarged
    assert removed == expected
    assert_same(engine.generate(few), answers)
    runs = engine.runs
    question = "user VIDEO how many dog are there"
    engine.generate_each([ask(engine.model, question, [7], video_budget=20)])
    assert engine.runs == runs, "the tower sees a video once"


@in_engine
def test_evs_keeps_what_stock_vllm_keeps_at_its_rate() -> None:
    """Of one video: with a second image or video in the prompt stock ends (vllm#48833)."""
    model = built("qwen2_5_vl")
    record = watch()
    masks = list[Tensor]()
    # First, because on a CPU stock asks for positions only where the plugin has served a state.
    engine = start({"state": "evs", "budget": "100%"}, model, **OPTIONS)
    engine.generate_each(requests(engine.model, video_budget="1/2")[:4])
    engine.stop()
    engine = start(None, model, video_pruning_rate=0.5, **OPTIONS)

    def compute(*inputs: Any, **named: Any) -> Tensor:
        masks.append(compute_retention_mask(*inputs, **named))
        return masks[-1]

    with patch.object(qwen2_5_vl, "compute_retention_mask", compute):
        engine.generate_each(requests(engine.model)[:4])
    indices = [mask.nonzero()[:, 0].tolist() for mask in masks]
    assert indices[0] == [*range(PER_FRAME)]  # of one group all, which nothing selects
    assert indices[1:] == [*record.kept.values()]


@in_engine
def test_videos_in_shared_memory_are_answered_as_without() -> None:
    """Also the second time, when they are there."""
    model = built("qwen2_5_vl")
    settings = {"state": "vcast", "budget": 8, "requests": "budget"}
    answers: dict[str, list[Answer]] = {}
    for kind in ("lru", "shm"):
        engine = start(settings, model, mm_processor_cache_type=kind, **OPTIONS)
        prompts = [*requests(engine.model), *requests(engine.model, video_budget=5)]
        answers[kind] = engine.generate_each(prompts)
        engine.stop()
    assert_same(answers["shm"], answers["lru"])
