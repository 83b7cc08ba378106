"""Pruning after replays of the tower's CUDA graphs, for which the tower itself stands in.

Packing, choice of graphs and distribution of outputs are vLLM's own. Attention on a CPU takes no
padded batch, so what a captured graph computes needs a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner

from tests.hostile.worker import CONTEXT, Worker, distributed
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.serving.models.model_state import BoundedEncoder

HOST = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.compat
@pytest.mark.parametrize(
    "backbone", [row.name for row in BACKBONES.values() if row.graphs]
)
def test_rows_of_a_replayed_tower_are_those_of_the_tower(
    backbone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of single images and of several; an image beyond the largest graph is encoded without."""

    def replay(
        manager: EncoderCudaGraphManager, inputs: Any, budget: int, **named: Any
    ) -> Tensor:
        replays.append(budget)
        output: Tensor = model.encoder_eager_forward(inputs, path=named["path"])
        return output

    replays: list[int] = []
    capture = "_capture_budget_graph"
    monkeypatch.setattr(EncoderCudaGraphManager, capture, lambda *_, **named: None)
    monkeypatch.setattr(EncoderCudaGraphManager, "_run_budget_graph", replay)
    with distributed(tmp_path):
        worker = Worker(backbone, tmp_path / "model")
        model = worker.model
        options = EngineArgs(str(tmp_path / "model"), max_model_len=CONTEXT)
        config = options.create_engine_config()
        config.compilation_config.encoder_cudagraph_token_budgets = [16, 64]
        config.compilation_config.encoder_cudagraph_max_vision_items_per_batch = 2
        dtype = torch.float32
        manager = EncoderCudaGraphManager(config, HOST, dtype, model)
        cache = EncoderCache()
        stock = EncoderRunner(model, 8, 8, cache, dtype, HOST, manager)
        encoder: Any = BoundedEncoder(stock)
        images = [
            ("image", feature.data)
            for request in worker.requests
            for feature in request.features
            if feature.modality == "image"
        ]

        def encode(items: Sequence[Any]) -> list[Tensor]:
            model.autoprune.clear()
            rows: list[Tensor] = encoder.execute_mm_encoder([*items])
            return rows

        expected = [row for image in images for row in encode([image])]
        encoder.cudagraph_manager.capture(object())
        replayed = [row for image in images for row in encode([image])]
        together = encode(images)
    assert {16, 64} <= {*replays}
    for rows in (replayed, together):
        for row, other in zip(rows, expected, strict=True):
            torch.testing.assert_close(row, other, atol=1e-4, rtol=1e-4)
