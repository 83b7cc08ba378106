"""First layers of the language model over prompt, image and question, for policies that need them.

Implements the protocol `vllm_autoprune.tpdsl.prefix.LanguagePrefix`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaModel
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb


class LlamaPrefix:
    """States of B sequences with text padded on the right; each layer is computed once."""

    def __init__(self, model: LlamaModel, embeds: Tensor, start: int, text: Tensor) -> None:
        """Embeds (B, L, D) are the input of layer 0; text (B, Lt) is false for padding."""
        self._model = model
        self._embeds = embeds
        self._start, self._text = start, text
        self._states: tuple[Tensor, ...] = ()

    @property
    def layers(self) -> int:
        """Number of layers of the language model."""
        return len(self._model.layers)

    @property
    def start(self) -> int:
        """Position of the first visual token."""
        return self._start

    @property
    def text(self) -> Tensor:
        """(B, Lt) bool, false for padding."""
        return self._text

    def embeddings(self) -> Tensor:
        """(B, L, D): the input of layer 0."""
        return self._embeds

    def states(self, layer: int) -> Tensor:
        """(B, L, D): the output of a layer, before any final norm."""
        return self._input(layer + 1)

    def normed(self, layer: int) -> Tensor:
        """(B, L, D): `states` after the model's final norm."""
        normed: Tensor = self._model.norm(self.states(layer))
        return normed

    def keys(self, layer: int) -> Tensor:
        """(B, H, L, d): a layer's keys, with rotary positions."""
        return self._rotated(layer)[1]

    @torch.no_grad()
    def attention(self, layer: int) -> Tensor:
        """(B, H, Lt, L) float32: attention probabilities of the text tokens' rows."""
        query, key = self._rotated(layer)
        rows, length = self._text.shape[1], self._embeds.shape[1]
        scores = query[:, :, -rows:].float() @ key.float().transpose(2, 3)
        scores = scores * query.shape[-1] ** -0.5
        future = torch.ones(rows, length, dtype=torch.bool).triu(length - rows + 1)
        return scores.masked_fill(future, float("-inf")).softmax(-1)

    @torch.no_grad()
    def _input(self, layer: int) -> Tensor:
        """(B, L, D): the input of a layer; computed once, together with all layers before it."""
        states = list(self._states) or [self._embeds]
        positions = torch.arange(self._embeds.shape[1])[None]
        cosines = self._model.rotary_emb(self._embeds, positions)
        length = self._embeds.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        mask = torch.zeros(1, 1, length, length, dtype=self._embeds.dtype)
        mask.masked_fill_(future, torch.finfo(mask.dtype).min)
        while len(states) <= layer:
            block = self._model.layers[len(states) - 1]
            states.append(
                block(
                    states[-1],
                    attention_mask=mask,
                    position_ids=positions,
                    position_embeddings=cosines,
                )
            )
        self._states = tuple(states)
        return states[layer]

    @torch.no_grad()
    def _rotated(self, layer: int) -> tuple[Tensor, Tensor]:
        """Queries and keys (B, H, L, d) of a layer after rotary embedding."""
        block = self._model.layers[layer]
        attention: LlamaAttention = block.self_attn
        normed = block.input_layernorm(self._input(layer))
        shape = (*normed.shape[:-1], -1, attention.head_dim)
        query = attention.q_proj(normed).view(shape).transpose(1, 2)
        key = attention.k_proj(normed).view(shape).transpose(1, 2)
        positions = torch.arange(normed.shape[1])[None]
        cosine, sine = self._model.rotary_emb(normed, positions)
        rotated: tuple[Tensor, Tensor] = apply_rotary_pos_emb(query, key, cosine, sine)
        return rotated
