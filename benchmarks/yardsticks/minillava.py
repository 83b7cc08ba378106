"""mini-LLaVA with transformers: a fixed grid of 144 tokens, pruned before the language model.

It has all inputs that any policy reads, and its resize control pools the tokens. No vLLM is
involved: figures measured with it check the model and the policies, not the plugin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from typing import get_args

import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    CLIPModel,
    LlamaModel,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerBase,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from benchmarks.yardsticks.examples import IMAGE_TOKEN, PROMPT, Example
from benchmarks.yardsticks.scenes import PATCHES, normalize_pixels
from benchmarks.yardsticks.yardstick import (
    Budget,
    EncodedBatch,
    Scores,
    Yardstick,
    content_words,
    pad_ids,
    token_ids,
    tokenize_answers,
)
from vllm_autoprune.checkpoint import LlavaVision
from vllm_autoprune.tpdsl.prefix import LanguagePrefix, PrefixOutput, attention_rows
from vllm_autoprune.tpdsl.refine import pool_tokens
from vllm_autoprune.tpdsl.tokens import Instruction, Need, VisualTokens, Words

_BEFORE_IMAGE, _AFTER_IMAGE = PROMPT["minillava"].split(IMAGE_TOKEN["minillava"])


class MiniLlava(Yardstick):
    """A checkpoint, folders ``llava`` and ``clip``, with any rows in place of an image."""

    name = "mini-LLaVA"
    key = "minillava"
    default = "minillava"
    budgets = tuple(Budget(f"K = {k}", Fraction(k, PATCHES)) for k in (72, 36, 18, 9))
    eighth = "K = 18"
    usual_tokens = PATCHES
    available = frozenset(get_args(Need)) - {"merger_input"}
    # A quarter of its six layers, where PyramidDrop's first stage ranks, is the layer of FastV.
    equal_policies = ("pyramiddrop",)
    images_per_batch = 4

    @cached_property
    def _vision(self) -> LlavaVision:
        return LlavaVision(self._checkpoint / "llava")

    @property
    def llava(self) -> LlavaForConditionalGeneration:
        """The model in bfloat16."""
        model: LlavaForConditionalGeneration = self._vision.model
        return model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The language model's."""
        tokenizer: PreTrainedTokenizerBase = self._vision.processor.tokenizer
        return tokenizer

    @cached_property
    def _clip(self) -> tuple[CLIPModel, PreTrainedTokenizerBase]:
        model = CLIPModel.from_pretrained(self._checkpoint / "clip", dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(self._checkpoint / "clip")
        return model.requires_grad_(False), tokenizer

    @torch.no_grad()
    def encode(self, batch: Sequence[Example]) -> _EncodedScenes:
        """All inputs of policies for M questions."""
        pixels = normalize_pixels(torch.stack([example.image for example in batch]))
        tokens = self._vision.encode_pixels(pixels)
        questions = [example.question for example in batch]
        # As a server's text tower, in float32.
        clip, clip_tokenizer = self._clip
        patches = tokens.require_encoder().float()
        image = clip.visual_projection(clip.vision_model.post_layernorm(patches))
        encoded = clip_tokenizer(questions, padding=True, return_tensors="pt")
        text = clip.text_projection(clip.text_model(**encoded).pooler_output)
        segments = torch.ones(len(batch), 1, dtype=torch.bool)
        sign = int(clip.config.autoprune_relevance_sign)
        words, used = content_words(self.tokenizer, batch)
        behind = [token_ids(self.tokenizer, _AFTER_IMAGE.format(question=q)) for q in questions]
        ids, present = pad_ids(behind)
        before, model = self._before_image(len(batch)), self.llava.model.language_model
        embeds = torch.cat((before, tokens.features, self._embed(ids)), 1)
        tokens = replace(
            tokens,
            instruction=Instruction(image, text[:, None], segments, sign),
            words=Words(self._embed(words), used),
            language=LlamaPrefix(model, embeds, before.shape[1], present),
        )
        return _EncodedScenes(self, batch, tokens)

    @torch.no_grad()
    def score_answers(self, examples: Sequence[Example], rows: Tensor) -> Scores:
        """Score the reference answers of M questions, given image rows (M, K, D) in order."""
        texts = tokenize_answers(self.tokenizer, _AFTER_IMAGE, examples)
        before = self._before_image(len(examples))
        embeds = torch.cat((before, rows.to(before.dtype), self._embed(texts.padded)), 1)
        hidden = self.llava.model.language_model(inputs_embeds=embeds, use_cache=False)
        length = texts.padded.shape[1]
        logits = self.llava.lm_head(hidden.last_hidden_state[:, -length:])
        return texts.score(logits, rows.shape[1])

    def _before_image(self, count: int) -> Tensor:
        """Embeddings (M, S, D) of the prompt before the image."""
        ids = torch.tensor(token_ids(self.tokenizer, _BEFORE_IMAGE))
        return self._embed(ids).expand(count, -1, -1)

    def _embed(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self.llava.get_input_embeddings()(ids)
        return embedded


class _EncodedScenes(EncodedBatch):
    """Questions about a few scenes."""

    def __init__(
        self, yardstick: MiniLlava, batch: Sequence[Example], tokens: VisualTokens
    ) -> None:
        super().__init__(batch, tokens)
        self._yardstick = yardstick

    def score_kept(self, kept: Tensor, rows: Tensor) -> Scores:
        """Positions are those in the sequence, whichever tokens the rows are of."""
        return self._yardstick.score_answers(self.batch, rows)

    def score_resized(self, budget: int) -> Scores:
        """Tokens pooled to K cells."""
        return self._yardstick.score_answers(self.batch, pool_tokens(budget, self.tokens).features)


class LlamaPrefix(LanguagePrefix):
    """First layers of the language model over prompt, image and question; each is computed once.

    B sequences with text padded on the right. Unlike a server's it runs a batch as one.
    """

    def __init__(self, model: LlamaModel, embeds: Tensor, start: int, text: Tensor) -> None:
        """Embeds (B, L, D) are the input of layer 0; text (B, Lt) is false for padding."""
        self.layers, self.start, self.text = len(model.layers), start, text
        self._model, self._states = model, [embeds]
        self._turns = model.rotary_emb(embeds, torch.arange(embeds.shape[1])[None])

    @torch.no_grad()
    def read(self, output: PrefixOutput, layer: int) -> Tensor:
        """An output of all sequences; heads are those of keys and of queries alike."""
        if output == "embeddings":
            return self._states[0]
        if output in ("states", "normed"):
            states = self._input_of(layer + 1)
            return states if output == "states" else self._model.norm(states)
        query, key = self._rotated(layer)
        return key if output == "keys" else attention_rows(query[:, :, -self.text.shape[1] :], key)

    def _input_of(self, layer: int) -> Tensor:
        """(B, L, D): the input of a layer, after running those before it."""
        embeds = self._states[0]
        length = embeds.shape[1]
        lowest = torch.finfo(embeds.dtype).min
        mask = torch.full((1, 1, length, length), lowest, dtype=embeds.dtype).triu(1)
        while len(self._states) <= layer:
            block = self._model.layers[len(self._states) - 1]
            self._states.append(
                block(self._states[-1], attention_mask=mask, position_embeddings=self._turns)
            )
        return self._states[layer]

    def _rotated(self, layer: int) -> tuple[Tensor, Tensor]:
        """Queries and keys (B, H, L, d) of a layer after rotary embedding."""
        block = self._model.layers[layer]
        attention, normed = block.self_attn, block.input_layernorm(self._input_of(layer))
        query, key = (
            project(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj)
        )
        rotated: tuple[Tensor, Tensor] = apply_rotary_pos_emb(query, key, *self._turns)
        return rotated
