"""A server with vLLM's defaults, as users start it: on a GPU, CUDA graphs and runner V2."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from benchmarks.server import default_flags, serve
from tests.serving.conftest import PRUNED
from tests.serving.engine import LLAVA, TOKENS, examples
from tests.serving.http import ask, entry, prompt_tokens, samples, text_of

ON_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)
ON_CPU = (pytest.mark.engine, pytest.mark.exhaustive)


@pytest.mark.parametrize(
    "device", [pytest.param("cuda", marks=ON_GPU), pytest.param("cpu", marks=ON_CPU)]
)
def test_a_server_with_defaults_prunes(device: str) -> None:
    flags = (*PRUNED, "--max-model-len", "2048", "--autoprune-requests", "states")
    asked = examples(1)[:8]
    with serve(LLAVA, *flags, *default_flags()) as server:
        stock = [ask(server, example, **entry(enabled=False)) for example in asked]
        unpruned = [ask(server, example, **entry(budget=TOKENS)) for example in asked]
        with ThreadPoolExecutor(len(asked)) as pool:
            pruned = list(pool.map(lambda example: ask(server, example), asked))
        metrics = samples(server)
        log = server.logged()
    assert [text_of(answer) for answer in unpruned] == [
        text_of(answer) for answer in stock
    ]
    for before, after in zip(stock, pruned, strict=True):
        assert prompt_tokens(before) - prompt_tokens(after) == TOKENS - 32
    assert sum(n for name, n in metrics.items() if name.startswith("fallbacks")) == 0
    assert metrics["selection_seconds_count"] >= 1
    if device == "cuda":
        assert "Capturing CUDA graphs" in log or "Graph capturing" in log
