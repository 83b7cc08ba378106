"""Every backbone on both model runners: selftest, encoder graphs, the resize control."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy
import pytest
from _pytest.mark import ParameterSet
from PIL import Image

from tests.serving.engine import (
    Answer,
    alone,
    built,
    chat,
    forget,
    generate,
    model_of,
    raw_prompt,
    release,
    runner_of,
    start,
    turn,
    watch,
)
from tests.serving.scenarios import Report, Runner, scenario
from vllm_autoprune.selftest.backbones import BUILDERS
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
    report = {}
    pictures = [picture(112, 112, 0), picture(200, 112, 1), picture(96, 208, 2)]
    talks = [[turn(WORDS[0], image)] for image in pictures] + [[turn(WORDS[0], *pictures[:2])]]
    for name in GRAPHED:
        llm = start(
            {"state": alone("cdpruner"), "budget": 8},
            model=str(built(name)),
            dtype="float32",
            limit_mm_per_prompt={"image": 2},
        )
        seen = watch()
        row: dict[str, Any] = {"eager": chat(llm, talks), "kept_eager": [*seen.take().values()]}
        manager = _install(llm)
        forget(llm)
        row |= {"graphs": chat(llm, talks), "kept_graphs": [*seen.take().values()]}
        row["used"] = manager.replays
        chat(llm, [[turn(WORDS[1], pictures[0])]])
        report[name] = {**row, "used_again": manager.replays}
        release(llm)
    return report


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

    runner = runner_of(llm)
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
    assert report["used_again"] == report["used"], "further questions replay no graph"
    assert report["kept_graphs"] == report["kept_eager"]
    assert_same(report["graphs"], report["eager"])


def assert_same(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """Equal answers, their log-probabilities up to float32 rounding."""
    for answer, known in zip(answers, expected, strict=True):
        assert answer["prompt_tokens"] == known["prompt_tokens"]
        assert answer["text"] == known["text"]
        assert answer["logprob"] == pytest.approx(known["logprob"], abs=1e-3)


RESIZED = ("qwen2_5_vl", "qwen3_vl")
BUDGETS = (9, 20, 30)
_PROMPT = "user <|vision_start|><|image_pad|><|vision_end|> what"


@scenario
def resized_images() -> Report:
    """By backbone: answers to a ``resized`` image, and to it ``shrunk`` by the client."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    noise = numpy.random.default_rng(0).integers(0, 255, (224, 168, 3), dtype=numpy.uint8)
    image, report = Image.fromarray(noise), {}
    for backbone in RESIZED:
        llm = start(
            {"state": "divprune", "budget": 8, "requests": "states"},
            model=str(built(backbone)),
            dtype="float32",
            max_model_len=1024,
        )
        vision = llm.llm_engine.model_config.hf_config.vision_config
        unit = vision.patch_size * vision.spatial_merge_size
        shrunk = []
        for k in BUDGETS:
            limits = {"min_pixels": unit**2, "max_pixels": k * unit**2}
            height, width = smart_resize(image.height, image.width, factor=unit, **limits)
            small = image.resize((width, height), Image.Resampling.BICUBIC)
            shrunk.append(raw_prompt(_PROMPT, small, enabled=False))
        resized = [raw_prompt(_PROMPT, image, budget=k, keep="resized") for k in BUDGETS]
        report[backbone] = {"resized": generate(llm, resized), "shrunk": generate(llm, shrunk)}
        release(llm)
    return report


@pytest.mark.parametrize("backbone", RESIZED)
def test_a_resized_image_is_answered_as_one_that_the_client_has_shrunk(
    runner: Runner, backbone: str
) -> None:
    report = runner.run("resized_images")[backbone]
    assert len({answer["text"] for answer in report["resized"]}) > 1, "sizes should matter"
    assert_same(report["resized"], report["shrunk"])


SCENARIOS = ("plain", "caches", "every_kind", "hostile")
ALIKE = ("instruction_left_out", "blind_state", "request_states", "base_policies")
"""Differ from the scenarios above in what the API server and the selection do, the same code for
both model runners."""

CLOSE = 3e-2
"""Tolerance between sums of log-probabilities, which the runners add in different orders."""


def apart(report: Any, other: Any, where: str = "") -> Iterator[str]:
    """Paths at which two reports differ."""
    match report, other:
        case (float(), float()) if abs(report - other) <= CLOSE:
            return
        case (dict(), dict()) if report.keys() == other.keys():
            for key in report:
                yield from apart(report[key], other[key], f"{where}/{key}")
            return
        case (list(), list()) if len(report) == len(other):
            for i, pair in enumerate(zip(report, other, strict=True)):
                yield from apart(*pair, f"{where}/{i}")
            return
    if report != other:
        yield f"{where}: {report} and {other}"


@pytest.mark.parametrize(
    "name",
    [*SCENARIOS, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ALIKE)],
)
@pytest.mark.parametrize("runner", ["v2"], indirect=True)
def test_reports_of_both_runners_are_equal(runner: Runner, name: str) -> None:
    assert list(apart(Runner("v1").run(name), runner.run(name))) == []


def test_differences_are_detected() -> None:
    report = {"kept": [[1, 2], [3]], "logprob": -1.0, "text": "red"}
    same = {**report, "logprob": -1.02}
    assert list(apart(report, same)) == []
    for change in ({"kept": [[1, 2], [4]]}, {"kept": [[1, 2]]}, {"logprob": -1.1}, {"text": "a"}):
        assert len(list(apart(report, {**same, **change}))) == 1
    assert len(list(apart(report, {**same, "more": 1}))) == 1
