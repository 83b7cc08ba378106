"""Bytes of KV cache that a prompt token takes, from a checkpoint's config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_autoprune.ops.dtype import choose_dtype

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The sizes that determine the bytes of a token: a key and a value in every layer."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int

    @property
    def bytes_per_token(self) -> int:
        """2 x layers x KV heads x head dimension x bytes of the dtype."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def formula(self) -> str:
        """The computation in words and numbers."""
        return (
            "prompt tokens x 2 (key, value) "
            f"x {self.layers} layers x {self.kv_heads} KV heads x {self.head_dim} head dimension "
            f"x {self.dtype_bytes} bytes = prompt tokens x {self.bytes_per_token}"
        )


def read_kv_layout(checkpoint: Path, dtype: str | None = None) -> KvLayout:
    """The layout of a checkpoint's language model, served in ``dtype``, or this machine's."""
    config = json.loads((checkpoint / "config.json").read_text())
    text = config.get("text_config", config)
    heads = _size(text, "num_attention_heads")
    return KvLayout(
        layers=_size(text, "num_hidden_layers"),
        kv_heads=_size(text, "num_key_value_heads", heads),
        head_dim=_size(text, "head_dim")
        if "head_dim" in text
        else _size(text, "hidden_size") // heads,
        dtype_bytes=_DTYPE_BYTES[dtype or choose_dtype()],
    )


def count_visual_tokens(checkpoint: Path) -> int:
    """Visual tokens of one image before pruning, N."""
    vision = json.loads((checkpoint / "config.json").read_text())["vision_config"]
    return (_size(vision, "image_size") // _size(vision, "patch_size")) ** 2


def _size(config: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if not isinstance(value, int):
        raise ValueError(f"config.json says {key} = {value!r}, expected a whole number")
    return value
