"""mini-LLaVA with transformers: a fixed grid of 144 tokens, pruned before the language model.

It has all inputs that any policy reads, and its resize control pools the tokens. No vLLM is
involved: figures measured with it check the model and the policies, not the plugin.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import ClassVar, get_args

import torch
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    CLIPModel,
    LlamaModel,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerBase,
)
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from benchmarks.yardsticks.examples import (
    CHECKPOINTS,
    IMAGE_TOKEN,
    PROMPT,
    Example,
    Split,
    draw_examples,
    weights_digest,
)
from benchmarks.yardsticks.questions import CATEGORIES
from benchmarks.yardsticks.scenes import CELL_PATCHES, CELLS, PATCHES, normalize_pixels
from benchmarks.yardsticks.yardstick import (
    FULL,
    RESIZED,
    AnswerScores,
    Budget,
    Case,
    CaseScores,
    content_words,
    keep_tokens,
    pad_ids,
    token_ids,
    tokenize_answers,
)
from vllm_autoprune.ops.rowwise import gather_rows
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.refine import pool_tokens, refine
from vllm_autoprune.tpdsl.tokens import (
    Grid,
    Instruction,
    Need,
    NextLayer,
    TowerStates,
    VisualTokens,
    Words,
)

_BEFORE_IMAGE, _AFTER_IMAGE = PROMPT["minillava"].split(IMAGE_TOKEN["minillava"])
_GRID = Grid(CELLS * CELL_PATCHES, CELLS * CELL_PATCHES)

EQUAL_POLICIES = {"pyramiddrop": "fastv"}
"""Base policies that keep the tokens of another one on this model, and have no row beside it.

A quarter of its six layers, where PyramidDrop's first stage ranks, is the layer that FastV reads.
"""


class MiniLlava:
    """A checkpoint that encodes scenes, and scores answers given any rows in place of an image."""

    name: ClassVar[str] = "mini-LLaVA"
    default: ClassVar[str] = "minillava"
    budgets: ClassVar[Sequence[Budget]] = [
        Budget(f"K = {k}", Fraction(k, PATCHES)) for k in (72, 36, 18, 9)
    ]
    eighth: ClassVar[str] = "K = 18"
    usual_tokens: ClassVar[int] = PATCHES
    available: ClassVar[frozenset[Need]] = frozenset(get_args(Need)) - {"merger_input"}
    equal_policies: ClassVar[Collection[str]] = EQUAL_POLICIES
    categories: ClassVar[Mapping[str, Sequence[str]]] = CATEGORIES["minillava"]
    images_per_batch: ClassVar[int] = 4

    def __init__(self, checkpoint: Path | None = None) -> None:
        """Folders ``llava`` and ``clip``; without them the committed ones. Loaded at first use."""
        self._checkpoint = checkpoint or CHECKPOINTS["minillava"]

    @cached_property
    def model(self) -> str:
        """Name and digest of the weights, as in the evidence of shipped states."""
        return f"{self.name} {weights_digest(self._checkpoint)}"

    @cached_property
    def llava(self) -> LlavaForConditionalGeneration:
        """The model in bfloat16."""
        model: LlavaForConditionalGeneration = LlavaForConditionalGeneration.from_pretrained(
            self._checkpoint / "llava", dtype=torch.bfloat16, attn_implementation="eager"
        )
        return model.requires_grad_(False)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The language model's."""
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            self._checkpoint / "llava"
        )
        return tokenizer

    @cached_property
    def _clip(self) -> tuple[CLIPModel, PreTrainedTokenizerBase]:
        model = CLIPModel.from_pretrained(self._checkpoint / "clip", dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(self._checkpoint / "clip")
        return model.requires_grad_(False), tokenizer

    def draw(self, split: Split, images: int) -> Sequence[Example]:
        """Questions about the first scenes of a split."""
        return draw_examples(split, images)

    @torch.no_grad()
    def encode(self, batch: Sequence[Example]) -> _EncodedScenes:
        """All inputs of policies for M questions; an image that occurs twice is encoded once."""
        images = {example.image_id: example.image for example in batch}
        places = {image_id: place for place, image_id in enumerate(images)}
        rows = torch.tensor([places[example.image_id] for example in batch])
        tower = self.llava.model.vision_tower
        layers = tower.encoder.layers
        used, last = (_ProjectionHook(layers[number].self_attn) for number in (-2, -1))
        values = normalize_pixels(torch.stack(list(images.values())))
        hidden = tower(values, output_hidden_states=True).hidden_states[-2][rows]
        query, key = (part[rows] for part in used.take())
        heads = tower.config.num_attention_heads
        project = self.llava.model.multi_modal_projector
        patches = hidden[:, 1:]
        features = project(patches)
        # The last layer, with its heads taken as a single one.
        next_query, next_key = (part[rows] for part in last.take())
        next_layer = NextLayer(_cls_attention(next_query, next_key, 1), keys=next_key[:, 1:])
        states = TowerStates(
            patches=patches,
            keys=key.unflatten(-1, (heads, -1)).mean(2)[:, 1:],
            project=project,
            cls=hidden[:, :1],
            next_layer=next_layer,
        )
        words, present = content_words(self.tokenizer, batch)
        tokens = VisualTokens(
            features,
            _GRID,
            cls_attention=_cls_attention(query, key, heads),
            instruction=self._instruction(batch, patches),
            tower=states,
            language=self._prefix(batch, features),
            encoder=patches,
            words=Words(self._embed(words), present),
        )
        return _EncodedScenes(self, batch, tokens)

    @torch.no_grad()
    def score_answers(self, examples: Sequence[Example], rows: Tensor) -> AnswerScores:
        """Score the reference answers of M questions, given image rows (M, K, D) in order."""
        texts = tokenize_answers(self.tokenizer, _AFTER_IMAGE, examples)
        before = self._before_image(len(examples))
        embeds = torch.cat((before, rows.to(before.dtype), self._embed(texts.padded)), 1)
        hidden = self.llava.model.language_model(inputs_embeds=embeds, use_cache=False)
        length = texts.padded.shape[1]
        return texts.score(self.llava.lm_head(hidden.last_hidden_state[:, -length:]))

    def _instruction(self, examples: Sequence[Example], patches: Tensor) -> Instruction:
        clip, tokenizer = self._clip
        image = clip.visual_projection(clip.vision_model.post_layernorm(patches.float()))
        questions = [example.question for example in examples]
        encoded = tokenizer(questions, padding=True, return_tensors="pt")
        text = clip.text_projection(clip.text_model(**encoded).pooler_output)
        segments = torch.ones(len(examples), 1, dtype=torch.bool)
        sign = int(clip.config.autoprune_relevance_sign)
        return Instruction(image, text[:, None], segments, sign)

    def _prefix(self, examples: Sequence[Example], features: Tensor) -> LlamaPrefix:
        before = self._before_image(len(examples))
        texts, present = pad_ids(
            [
                token_ids(self.tokenizer, _AFTER_IMAGE.format(question=example.question))
                for example in examples
            ]
        )
        embeds = torch.cat((before, features, self._embed(texts)), 1)
        return LlamaPrefix(self.llava.model.language_model, embeds, before.shape[1], present)

    def _before_image(self, count: int) -> Tensor:
        """Embeddings (M, S, D) of the prompt before the image."""
        ids = torch.tensor(token_ids(self.tokenizer, _BEFORE_IMAGE))
        return self._embed(ids).expand(count, -1, -1)

    def _embed(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self.llava.get_input_embeddings()(ids)
        return embedded


class _EncodedScenes:
    """Questions about a few scenes."""

    def __init__(
        self, yardstick: MiniLlava, batch: Sequence[Example], tokens: VisualTokens
    ) -> None:
        self._yardstick, self._batch = yardstick, batch
        self.tokens = tokens

    @torch.no_grad()
    def score(self, case: Case) -> CaseScores:
        """Score the answers given the rows that the case keeps."""
        tokens, budget = self.tokens, case.budget.tokens(self.tokens.count)
        if case.state is not None:
            rows = refine(materialize(case.state, budget), tokens).features
        elif case.control == FULL:
            rows = tokens.features
        elif case.control == RESIZED:
            rows = pool_tokens(budget, tokens).features
        else:
            kept = case.kept
            if kept is None:
                kept = keep_tokens(self._batch, tokens.count, budget, case.control)
            rows = gather_rows(tokens.features, kept)
        return CaseScores(self._yardstick.score_answers(self._batch, rows), rows.shape[1])


class LlamaPrefix:
    """First layers of the language model over prompt, image and question; each is computed once.

    Implements :class:`vllm_autoprune.tpdsl.prefix.LanguagePrefix` for B sequences with
    text padded on the right.
    """

    def __init__(self, model: LlamaModel, embeds: Tensor, start: int, text: Tensor) -> None:
        """Embeds (B, L, D) are the input of layer 0; text (B, Lt) is false for padding."""
        self._model = model
        self._start, self._text = start, text
        self._states = [embeds]
        self._turns = model.rotary_emb(embeds, torch.arange(embeds.shape[1])[None])

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
        return self._states[0]

    @torch.no_grad()
    def states(self, layer: int) -> Tensor:
        """(B, L, D): the output of a layer, before any final norm."""
        length = self._states[0].shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        mask = torch.zeros(1, 1, length, length, dtype=self._states[0].dtype)
        mask.masked_fill_(future, torch.finfo(mask.dtype).min)
        while len(self._states) <= layer + 1:
            block = self._model.layers[len(self._states) - 1]
            self._states.append(
                block(
                    self._states[-1],
                    attention_mask=mask,
                    position_ids=torch.arange(length)[None],
                    position_embeddings=self._turns,
                )
            )
        return self._states[layer + 1]

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
        rows, length = self._text.shape[1], key.shape[2]
        scores = query[:, :, -rows:].float() @ key.float().transpose(2, 3)
        scores = scores * query.shape[-1] ** -0.5
        future = torch.ones(rows, length, dtype=torch.bool).triu(length - rows + 1)
        return scores.masked_fill(future, float("-inf")).softmax(-1)

    @torch.no_grad()
    def _rotated(self, layer: int) -> tuple[Tensor, Tensor]:
        """Queries and keys (B, H, L, d) of a layer after rotary embedding."""
        block = self._model.layers[layer]
        attention: LlamaAttention = block.self_attn
        normed = block.input_layernorm(self.states(layer - 1))
        shape = (*normed.shape[:-1], -1, attention.head_dim)
        query = attention.q_proj(normed).view(shape).transpose(1, 2)
        key = attention.k_proj(normed).view(shape).transpose(1, 2)
        rotated: tuple[Tensor, Tensor] = apply_rotary_pos_emb(query, key, *self._turns)
        return rotated


class _ProjectionHook:
    """Records the queries and keys (B, 1 + N, Dv) of one attention layer at its next run."""

    def __init__(self, attention: nn.Module) -> None:
        self._outputs: list[Tensor] = []
        self._hooks = [
            attention.get_submodule(name).register_forward_hook(self._record)
            for name in ("q_proj", "k_proj")
        ]

    def _record(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        self._outputs.append(output.float())

    def take(self) -> tuple[Tensor, Tensor]:
        """Remove the hooks and return (query, key), the order in which the layer computes them."""
        for hook in self._hooks:
            hook.remove()
        query, key = self._outputs
        return query, key


def _cls_attention(query: Tensor, key: Tensor, heads: int) -> Tensor:
    """(B, N): attention of [CLS] to the patches, averaged over heads."""
    query, key = (part.unflatten(-1, (heads, -1)) for part in (query, key))
    scores = torch.einsum("bhd,bnhd->bhn", query[:, 0], key) * key.shape[-1] ** -0.5
    return scores.softmax(-1).mean(1)[:, 1:]
