"""Every backbone on both model runners: selftest, encoder graphs, the resize control."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import pytest
from _pytest.mark import ParameterSet
from PIL import Image

from tests.serving.engine import (
    alone,
    chat,
    forget,
    generate,
    model_of,
    release,
    start,
    turn,
    watch,
)
from tests.serving.scenarios import Report, Runner, scenario
from vllm_autoprune.selftest.backbones import BUILDERS, build
from vllm_autoprune.selftest.checks import CHECKS, runners_agree
from vllm_autoprune.selftest.run import Report as SelftestReport
from vllm_autoprune.selftest.tiny_engine import picture
from vllm_autoprune.serving.models import BACKBONES

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


LIKE_ANOTHER = ("qwen3_vl_moe", "qwen3_5_moe", "glm4v", "glm4v_moe", "smolvlm")
"""Share the code that prunes with another backbone: left to `make test-all`."""
ON_BOTH_RUNNERS = ("llava", "llava_onevision", "qwen2_5_vl", "qwen3_vl")
"""Tiles, M-RoPE and deepstack, which the model runners handle each in its own way; `make test`
serves the other backbones by V1."""

WITHOUT_VIDEO = ("llava", "llava_next", "idefics3", "smolvlm", "gemma3")
"""Their models, or vLLM's classes for them, take no videos."""

NAMES = ["llava", *BUILDERS]
"""LLaVA is the trained mini-LLaVA, the others are tiny random models."""


def names(quick: Collection[str]) -> list[ParameterSet]:
    """All backbones as parameters, exhaustive but for the quick ones."""
    marks = {name: () if name in quick else (pytest.mark.exhaustive,) for name in NAMES}
    return [pytest.param(name, marks=marks[name]) for name in NAMES]


@pytest.mark.parametrize("runner", ["v1"], indirect=True)
@pytest.mark.parametrize("name", names({*NAMES} - {*LIKE_ANOTHER}))
def test_selftest_checks_pass(runner: Runner, name: str) -> None:
    if name.startswith("qwen3_5") and os.getenv("ONEDNN_MAX_CPU_ISA"):
        pytest.skip("vLLM's linear attention asks the CPU itself, and oneDNN then refuses")
    assert_checks_pass(runner.examine(name), name)


@pytest.mark.parametrize("runner", ["v2"], indirect=True)
@pytest.mark.parametrize("name", names(ON_BOTH_RUNNERS))
def test_selftest_checks_pass_on_both_model_runners(runner: Runner, name: str) -> None:
    """Both keep the same rows and positions, and give the same answers."""
    report = runner.examine(name)
    assert_checks_pass(report, name)
    assert report.runner == runner.name
    assert runners_agree(Runner("v1").examine(name), report) == ""


def assert_checks_pass(report: SelftestReport, name: str) -> None:
    assert {check: CHECKS[check](report) for check in CHECKS} == dict.fromkeys(CHECKS, "")
    (backbone,) = (backbone for backbone in BACKBONES.values() if backbone.name == name)
    axes = {len(completion.positions) for completion in report["stock"].values()}
    assert axes == {3 if backbone.mrope else 1}
    assert ("video" in report["stock others"]) == (name not in WITHOUT_VIDEO)


GRAPHED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3")
"""Backbones whose encoder vLLM runs by graphs."""

WORDS = ("what colour is the cat", "how many")


@scenario
def encoder_graphs() -> Report:
    """By backbone, answers and kept tokens ``eager`` and by ``graphs``, and how many were used.

    ``used``: batches that went through graphs; ``used_again``: after one more question.
    """
    return {name: _compare(name) for name in GRAPHED}


def _compare(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        llm = start(
            {"state": alone("cdpruner"), "budget": 8},
            model=str(build(name, Path(folder))),
            dtype="float32",
            limit_mm_per_prompt={"image": 2},
        )
        seen = watch()
        report: dict[str, Any] = {"eager": _answers(llm)}
        report["kept_eager"] = list(seen.kept.values())
        seen.kept.clear()
        manager = _install(llm)
        report["graphs"] = _answers(llm)
        report["kept_graphs"] = list(seen.kept.values())
        report["used"] = manager.replays
        chat(llm, [[turn(WORDS[1], picture(112, 112, 0))]])
        report["used_again"] = manager.replays
        release(llm)
        return report


def _answers(llm: LLM) -> list[dict[str, object]]:
    forget(llm)
    pictures = [picture(112, 112, 0), picture(200, 112, 1), picture(96, 208, 2)]
    conversations = [[turn(WORDS[0], image)] for image in pictures]
    both = [turn(WORDS[0], *pictures[:2])]
    return [answer.plain() for answer in chat(llm, [*conversations, both])]


def _install(llm: LLM) -> Any:
    import torch
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    class StandIn(EncoderCudaGraphManager):
        """Runs at once what a graph would replay."""

        replays = 0
        graph_pool = object()

        def _run_budget_graph(
            self,
            mm_kwargs: dict[str, Any],
            token_budget: int,
            path: str = "default",
            axis_keys: tuple[object, ...] = (),
        ) -> torch.Tensor:
            buffers = self.model.prepare_encoder_cudagraph_replay_buffers(
                mm_kwargs, self.max_batch_size, self.max_frames_per_batch, path
            )
            self.replays += 1
            with torch.inference_mode():
                rows: torch.Tensor = self.model.encoder_cudagraph_forward(
                    dict(buffers.values), path=path
                )
            return rows

    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    manager = StandIn(
        vllm_config=llm.llm_engine.vllm_config,
        device=torch.device("cpu"),
        dtype=torch.float32,
        model=model_of(llm),
    )
    manager.graph_pool = object()
    if hasattr(runner, "encoder_cudagraph_manager"):
        runner.encoder_cudagraph_manager = manager
    else:
        runner.model_state.encoder_runner.cudagraph_manager = manager
    return manager


@pytest.mark.parametrize("name", GRAPHED)
def test_tokens_are_selected_after_encoder_graphs(runner: Runner, name: str) -> None:
    report = runner.run("encoder_graphs")[name]
    assert report["used"] > 0
    assert report["kept_graphs"] == report["kept_eager"]
    for graphs, eager in zip(report["graphs"], report["eager"], strict=True):
        assert graphs["prompt_tokens"] == eager["prompt_tokens"]
        assert graphs["text"] == eager["text"]
        assert graphs["logprob"] == pytest.approx(eager["logprob"], abs=1e-3)


@pytest.mark.parametrize("name", GRAPHED)
def test_further_questions_replay_no_graph(runner: Runner, name: str) -> None:
    report = runner.run("encoder_graphs")[name]
    assert report["used_again"] == report["used"]


RESIZED = ("qwen2_5_vl", "qwen3_vl")
BUDGETS = (9, 20, 30)
_PROMPT = "user <|vision_start|><|image_pad|><|vision_end|> what"


@scenario
def resized_images() -> Report:
    """By backbone: answers to a resized image, and to the same image shrunk by the client."""
    return {name: _ask_both(name) for name in RESIZED}


def _ask_both(backbone: str) -> Report:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    noise = numpy.random.default_rng(0).integers(0, 255, (224, 168, 3), dtype=numpy.uint8)
    image = Image.fromarray(noise)
    with tempfile.TemporaryDirectory() as folder:
        llm = start(
            {"state": "divprune", "budget": 8, "requests": "states"},
            model=str(build(backbone, Path(folder))),
            dtype="float32",
            max_model_len=1024,
        )
        vision = llm.llm_engine.model_config.hf_config.vision_config
        unit = vision.patch_size * vision.spatial_merge_size
        sizes = [
            smart_resize(
                image.height, image.width, factor=unit, min_pixels=unit**2, max_pixels=k * unit**2
            )
            for k in BUDGETS
        ]
        shrunk = [
            image.resize((width, height), Image.Resampling.BICUBIC) for height, width in sizes
        ]
        control: list[dict[str, object]] = [{"budget": k, "keep": "resized"} for k in BUDGETS]
        off: list[dict[str, object]] = [{"enabled": False}] * len(BUDGETS)
        answers = {
            "resized": generate(llm, _prompts([image] * len(BUDGETS), control)),
            "shrunk": generate(llm, _prompts(shrunk, off)),
        }
        release(llm)
    return {name: [answer.plain() for answer in each] for name, each in answers.items()}


def _prompts(
    images: Sequence[Image.Image], entries: Sequence[dict[str, object]]
) -> list[dict[str, object]]:
    return [
        {
            "prompt": _PROMPT,
            "multi_modal_data": {"image": image},
            "mm_processor_kwargs": {"autoprune": entry},
        }
        for image, entry in zip(images, entries, strict=True)
    ]


@pytest.mark.parametrize("backbone", RESIZED)
def test_a_resized_image_is_answered_as_one_that_the_client_has_shrunk(
    runner: Runner, backbone: str
) -> None:
    report = runner.run("resized_images")[backbone]
    assert len({answer["text"] for answer in report["resized"]}) > 1, "sizes should matter"
    for resized, shrunk in zip(report["resized"], report["shrunk"], strict=True):
        assert resized["prompt_tokens"] == shrunk["prompt_tokens"]
        assert resized["text"] == shrunk["text"]
        assert resized["logprob"] == pytest.approx(shrunk["logprob"], abs=1e-3)


SCENARIOS = (*("plain", "with_caches", "no_caches", "batches", "every_kind", "hostile"),)
ALIKE = (
    *("instruction_left_out", "blind_state", "request_states"),
    "base_policies",
)
"""Differ from the scenarios above in what the API server and the selection do, the same code for
both model runners."""
TIMED = frozenset({"exported"})
"""Scenarios whose reports contain times, which differ between runs."""

CLOSE = 3e-2
"""Tolerance between sums of log-probabilities, which the runners add in different orders."""


def apart(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Paths at which two reports differ."""
    if isinstance(one, float) and isinstance(other, float):
        if abs(one - other) > CLOSE:
            yield f"{where}: {one} and {other}"
    elif isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one.keys() - TIMED:
            yield from apart(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for i, pair in enumerate(zip(one, other, strict=True)):
            yield from apart(*pair, f"{where}/{i}")
    elif one != other:
        yield f"{where}: {one} and {other}"


@pytest.mark.parametrize(
    "name",
    [*SCENARIOS, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ALIKE)],
)
@pytest.mark.parametrize("runner", ["v2"], indirect=True)
def test_reports_of_both_runners_are_equal(runner: Runner, name: str) -> None:
    assert list(apart(Runner("v1").run(name), runner.run(name))) == []


def test_differences_are_detected() -> None:
    report = {"kept": [[1, 2], [3]], "logprob": -1.0, "exported": "1 s", "text": "red"}
    same = {**report, "logprob": -1.02, "exported": "2 s"}
    assert list(apart(report, same)) == []
    for change in ({"kept": [[1, 2], [4]]}, {"kept": [[1, 2]]}, {"logprob": -1.1}, {"text": "a"}):
        assert len(list(apart(report, {**same, **change}))) == 1
    assert len(list(apart(report, {**same, "more": 1}))) == 1
