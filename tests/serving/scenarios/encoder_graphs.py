"""Encoder CUDA graphs, by a stand-in that does what a graph replays, on a CPU.

The manager is vLLM's own, with its packing of images, buffers and post-processing. What is left out
is capture and replay: each batch runs the function that would be captured.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.serving.engine import alone, chat, forget, model_of, release, start, turn
from tests.serving.scenarios import Report, scenario
from tests.serving.selection_recorder import watch
from vllm_autoprune.selftest.backbones import build
from vllm_autoprune.selftest.tiny_engine import picture

if TYPE_CHECKING:
    from vllm import LLM

BACKBONES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3")
"""Backbones whose encoder vLLM runs by graphs."""

WORDS = ("what colour is the cat", "how many")


@scenario
def encoder_graphs() -> Report:
    """By backbone, answers and kept tokens ``eager`` and by ``graphs``, and how many were used.

    ``used``: batches that went through graphs; ``used_again``: after one more question.
    """
    return {name: _compare(name) for name in BACKBONES}


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
