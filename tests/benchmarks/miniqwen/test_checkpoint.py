"""The committed checkpoint: size, names, answers."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from benchmarks.minillava.split import CHECKPOINT as MINILLAVA
from benchmarks.miniqwen.evaluate import FULL, RANDOM, RESIZED, evaluate
from benchmarks.miniqwen.reader import Reader
from benchmarks.miniqwen.split import CHECKPOINT, draw_examples


def test_both_committed_models_stay_below_25_megabytes() -> None:
    files = [path for folder in (CHECKPOINT, MINILLAVA) for path in folder.rglob("*")]
    assert sum(path.stat().st_size for path in files if path.is_file()) < 25e6


def test_weights_are_bfloat16_under_the_names_of_qwen3_vl() -> None:
    tensors = load_file(CHECKPOINT / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "model.visual.deepstack_merger_list.1.linear_fc2.weight" in tensors
    assert "model.language_model.layers.0.self_attn.q_norm.weight" in tensors
    config = AutoConfig.from_pretrained(CHECKPOINT)
    assert config.architectures == ["Qwen3VLForConditionalGeneration"]
    assert config.tie_word_embeddings and "lm_head.weight" not in tensors


@pytest.mark.timeout(300)
def test_resizing_and_dropping_tokens_cost_accuracy() -> None:
    examples = draw_examples("test", 16)
    results = evaluate(Reader(CHECKPOINT), examples, divisors=(2, 8))
    share = {label: sum(result.right) / len(examples) for label, result in results.items()}
    assert share[FULL] > 0.8
    assert share[f"{RESIZED} 2"] > share[f"{RANDOM} 8"]
    assert share[f"{RESIZED} 8"] < share[FULL] - 0.2
    assert share[f"{RANDOM} 8"] < share[FULL] - 0.2
