"""A Llama's first layers with transformers, for base policies that read the language model.

Knows nothing about images, beyond the place where their tokens stand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_autoprune.tpdsl.decoder_prefix import DecoderLayer, DecoderPrefix

if TYPE_CHECKING:
    from transformers import LlamaModel
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer


def llama_prefix(
    model: LlamaModel, start: tuple[int, ...], image: Tensor, words: tuple[int, ...]
) -> DecoderPrefix:
    """The sequence [start, image, words] of one image ``(N, D)``; no layer has run yet.

    Without words the start stands for them too, as on a server: policies ask for at least one.
    """
    words = words or start
    embedded = model.embed_tokens(torch.tensor([*start, *words]))
    before, after = embedded.split([len(start), len(words)])
    sequence = torch.cat([before, image.to(embedded.dtype), after])[None]
    layers = [_layer(model, block) for block in model.layers]
    text = torch.ones(1, len(words), dtype=torch.bool)
    return DecoderPrefix(layers, model.norm, sequence, len(start), text)


def _layer(model: LlamaModel, block: LlamaDecoderLayer) -> DecoderLayer:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    attention = block.self_attn

    def heads(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (
            project(rows).unflatten(-1, (-1, attention.head_dim)).transpose(0, 1)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        cosine, sine = model.rotary_emb(rows[None], torch.arange(len(rows))[None])
        query, key = apply_rotary_pos_emb(query[None], key[None], cosine, sine)
        return query[0], key[0], value

    return DecoderLayer(
        block.input_layernorm, heads, attention.o_proj, block.post_attention_layernorm, block.mlp
    )
