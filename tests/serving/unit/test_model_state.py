"""The state for which vLLM's model runner V2 asks a pruned model, in place of patches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.worker.gpu.model_states import resolve_model_state_cls
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from vllm_autoprune.serving.models.model_state import KnownDeltas, PrunedState
from vllm_autoprune.serving.models.pruned_model import PrunedModel

pytestmark = pytest.mark.compat


@pytest.mark.parametrize(
    ("is_hybrid", "stock"),
    [(False, DefaultModelState), (True, MambaHybridModelState)],
)
@pytest.mark.parametrize("prunes", [False, True])
def test_the_state_is_vllms_own_for_the_language_model(
    is_hybrid: bool, stock: type[ModelState], prunes: bool
) -> None:
    """Without a vision side, as under ``--limit-mm-per-prompt``, it is left as it is."""
    config = VllmConfig()
    model_config: Any = SimpleNamespace(is_hybrid=is_hybrid, is_attention_free=False)
    object.__setattr__(config, "model_config", model_config)
    model: Any = PrunedModel.__new__(PrunedModel)
    vars(model).update(
        autoprune=object() if prunes else None, get_language_model=nn.Module
    )
    with set_current_vllm_config(config):
        state = resolve_model_state_cls(config, model)
    assert issubclass(state, stock) and issubclass(state, PrunedState) == prunes
    assert state.supports_prompt_embeds == stock.supports_prompt_embeds


def test_what_decoding_adds_to_a_prompt_stays_as_it_was_when_it_arrived() -> None:
    written: list[object] = []
    rope: Any = SimpleNamespace(
        prefill_delta=SimpleNamespace(np=numpy.array([3, -7])),
        update_prefill_positions=lambda *values: written.append(values),
    )
    positions = torch.zeros(3, 5)
    KnownDeltas(rope).update_prefill_positions(1, positions, delta=0)
    assert written == [(1, positions, -7)]
