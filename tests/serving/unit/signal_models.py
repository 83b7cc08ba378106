"""Small models with known attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

VISION_WIDTH = 160


class Attention(nn.Module):
    """Attention with the call signature of vLLM's ``MMEncoderAttention``."""

    def __init__(self, heads: int = 2, scale: float = 0.5) -> None:
        super().__init__()
        self.num_heads = heads
        self.scale = scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return value


START = 1
LAYERS = 3
HIDDEN = 24
HEADS = 4
KEY_HEADS = 2
HEAD = 6


def served_model(llama: Any) -> Any:
    """The same weights with the names and shapes of vLLM's ``LlamaModel``."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    def rotary(positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = llama.rotary_emb(query[None], positions[None])
        heads = [
            part.unflatten(-1, (-1, HEAD)).transpose(0, 1)[None]
            for part in (query, key)
        ]
        query, key = apply_rotary_pos_emb(*heads, cos, sin)
        return query[0].transpose(0, 1).flatten(1), key[0].transpose(0, 1).flatten(1)

    def serve(layer: Any) -> Any:
        heads = layer.self_attn
        projections = heads.q_proj, heads.k_proj, heads.v_proj
        attention = SimpleNamespace(
            qkv_proj=lambda rows: (torch.cat([f(rows) for f in projections], -1), None),
            rotary_emb=rotary,
            o_proj=lambda mixed: (heads.o_proj(mixed), None),
            q_size=HEADS * HEAD,
            kv_size=KEY_HEADS * HEAD,
            head_dim=HEAD,
            total_num_kv_heads=KEY_HEADS,
        )
        norms = layer.input_layernorm, layer.post_attention_layernorm
        names = "self_attn", "mlp", "input_layernorm", "post_attention_layernorm"
        return SimpleNamespace(
            **dict(zip(names, (attention, layer.mlp, *norms), strict=True))
        )

    layers = [serve(layer) for layer in llama.layers]
    return SimpleNamespace(
        embed_tokens=llama.embed_tokens, norm=llama.norm, layers=layers
    )
