"""mini-LLaVA with transformers: a fixed grid of 144 tokens, pruned before the language model.

It has the inputs of all policies; its resize control pools the tokens. No vLLM is involved: figures
measured with it check the model and the policies, not the plugin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property, partial
from typing import get_args

import torch
from torch import Tensor
from transformers import (
    LlamaModel,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerBase,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from benchmarks.yardsticks.examples import PROMPT, Example
from benchmarks.yardsticks.scenes import PATCHES, normalize_pixels
from benchmarks.yardsticks.yardstick import (
    Budget,
    EncodedBatch,
    Scores,
    Yardstick,
    place_on_line,
    record_outputs,
)
from vllm_autoprune.checkpoint import LlavaVision
from vllm_autoprune.tpdsl.prefix import LanguagePrefix, PrefixOutput, attention_rows
from vllm_autoprune.tpdsl.refine import pool_tokens
from vllm_autoprune.tpdsl.tokens import Need

_BEFORE_IMAGE, _, _BEHIND_IMAGE = PROMPT["minillava"]


class MiniLlava(Yardstick):
    """mini-LLaVA (folders ``llava`` and ``clip``); any rows can take the place of an image."""

    name = "mini-LLaVA"
    key = "minillava"
    search_result = "minillava"
    budgets = tuple(Budget(f"K = {k}", Fraction(k, PATCHES)) for k in (72, 36, 18, 9))
    usual_tokens = PATCHES
    available = frozenset(get_args(Need)) - {"merger_input"}
    # PyramidDrop first ranks after a quarter of the layers: of six, that is where FastV ranks too.
    equal_policies = ("pyramiddrop",)
    images_per_batch = 4
    has_one_axis = True

    @cached_property
    def _vision(self) -> LlavaVision:
        return LlavaVision(self._checkpoint / "llava", self._checkpoint / "clip")

    @property
    def network(self) -> LlavaForConditionalGeneration:
        """The transformers model, in bfloat16."""
        return self._vision.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the language model."""
        return self._vision.processor.tokenizer

    @torch.no_grad()
    def encode(self, batch: Sequence[Example]) -> EncodedBatch:
        """Encode M questions, with the inputs of all policies."""
        pixels = normalize_pixels(torch.stack([e.image for e in batch])).to(
            torch.bfloat16
        )
        tokens = self._vision.encode_pixels(pixels)
        questions = [example.question for example in batch]
        tails = [self.token_ids(_BEHIND_IMAGE.format(question=q)) for q in questions]
        ids, present = self.pad_ids(tails)
        embed = self.network.get_input_embeddings()
        lead = embed(torch.tensor(self.token_ids(_BEFORE_IMAGE)))
        embeds = (lead.expand(len(batch), -1, -1), tokens.features, embed(ids))
        model = self.network.model.language_model
        tokens = replace(
            tokens,
            instruction=self._vision.embed_instructions(tokens, questions),
            words=self.embed_content_words(batch),
            language=_LlamaPrefix(model, torch.cat(embeds, 1), len(lead), present),
        )

        def score(rows: Tensor, places: Tensor | None) -> Scores:
            if places is None:
                return self.score_rows(batch, rows)
            return self.score_rows(batch, rows, partial(place_on_line, places, PATCHES))

        def score_resized(budget: int) -> Scores:
            pooled = pool_tokens(budget, tokens)
            # Resizing is most accurate with pooled tokens at their places in the whole image.
            return score(pooled.features, pooled.places(PATCHES))

        return EncodedBatch(
            batch,
            tokens,
            lambda selection, rows, places: score(rows, places),
            score_resized,
        )


class _LlamaPrefix(LanguagePrefix):
    """Language model layers over prompt, image and question, which are computed at first use.

    There are B sequences with text padded on the right. A server runs each sequence alone; this
    class runs them as one batch.
    """

    def __init__(
        self, model: LlamaModel, embeds: Tensor, start: int, text: Tensor
    ) -> None:
        """embeds (B, L, D) are the input of layer 0; text (B, Lt) is false at padding."""
        self.layers = len(model.layers)
        self.start = start
        self.text = text
        self._model = model
        self._embeds = embeds

    @cached_property
    def _outputs(self) -> Mapping[str, Tensor]:
        """Outputs of every layer, and of its projections to queries and keys."""
        parts = ("", ".self_attn.q_proj", ".self_attn.k_proj")
        names = [
            f"layers.{layer}{part}" for layer in range(self.layers) for part in parts
        ]
        with record_outputs(self._model, names) as outputs:
            self._model(inputs_embeds=self._embeds, use_cache=False)
        return outputs

    @torch.no_grad()
    def read(self, output: PrefixOutput, layer: int) -> Tensor:
        """An output of all sequences; keys have as many heads as queries."""
        if output == "embeddings":
            return self._embeds
        if output in ("states", "normed"):
            states = self._outputs[f"layers.{layer}"]
            return states if output == "states" else self._model.norm(states)
        width = self._model.layers[layer].self_attn.head_dim
        query, key = (
            self._outputs[f"layers.{layer}.self_attn.{name}"]
            .unflatten(-1, (-1, width))
            .transpose(1, 2)
            for name in ("q_proj", "k_proj")
        )
        turns = self._model.rotary_emb(
            self._embeds, torch.arange(self._embeds.shape[1])[None]
        )
        query, key = apply_rotary_pos_emb(query, key, *turns)
        return (
            key
            if output == "keys"
            else attention_rows(query[:, :, -self.text.shape[1] :], key)
        )
