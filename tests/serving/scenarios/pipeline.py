"""The requests of :mod:`modes` on two pipeline ranks."""

from __future__ import annotations

from typing import Any

from tests.serving.scenarios import Report, scenario
from tests.serving.scenarios.modes import answer_together_and_alone, start_mode


@scenario
def pipeline_mode() -> Report:
    """Answers ``together``, and each ``alone`` with empty caches; ``layers`` of each rank."""
    llm = start_mode(pipeline_parallel_size=2)
    llm.collective_rpc(allocate_intermediate_tensors)
    return {**answer_together_and_alone(llm), "layers": llm.collective_rpc(count_layers)}


def allocate_intermediate_tensors(worker: Any) -> None:
    """Runs in every worker: what vLLM's warm-up allocates on later ranks.

    vLLM 0.32's CPU worker leaves the warm-up out where nothing is compiled and the size of the KV
    cache is given, and a later rank then fails at its first step, with the plugin or without.
    """
    runner = worker.worker.model_runner
    if getattr(runner, "intermediate_tensors", None) is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def count_layers(worker: Any) -> int:
    """Runs in every worker: layers of the language model that it holds."""
    model = worker.worker.model_runner.model.get_language_model().model
    return int(model.end_layer - model.start_layer)
