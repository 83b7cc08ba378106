"""mini-LLaVA with transformers, split between projector and language model for pruning.

No vLLM is involved: figures measured with it check the model and the policies, not the plugin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, CLIPModel, LlavaForConditionalGeneration

from benchmarks.minillava.prefix import LlamaPrefix
from benchmarks.minillava.render import normalize_pixels
from benchmarks.minillava.split import Example
from benchmarks.minillava.vocabulary import AFTER_IMAGE, BEFORE_IMAGE
from vllm_autoprune.serving.api.instruction import split_content_words
from vllm_autoprune.tpdsl.tokens import (
    Grid,
    Instruction,
    NextLayer,
    TowerStates,
    VisualTokens,
    Words,
)


@dataclass(frozen=True)
class AnswerScores:
    """Scores of the reference answers to M questions.

    right (M,) bool: greedy decoding gives exactly the reference answer and then stops; logprob (M,)
    float32: natural logarithm of the probability of the answer and its end token.
    """

    right: Tensor
    logprob: Tensor


class Reader:
    """A checkpoint that encodes images, and scores answers given any rows in place of an image."""

    def __init__(self, checkpoint: Path) -> None:
        load = {"dtype": torch.bfloat16, "attn_implementation": "eager"}
        self.llava = LlavaForConditionalGeneration.from_pretrained(checkpoint / "llava", **load)
        self.llava.requires_grad_(False)
        self.clip = CLIPModel.from_pretrained(checkpoint / "clip", dtype=torch.float32)
        self.clip.requires_grad_(False)
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint / "llava")
        self.clip_tokenizer = AutoTokenizer.from_pretrained(checkpoint / "clip")
        vision = self.llava.config.vision_config
        side = vision.image_size // vision.patch_size
        self.grid = Grid(side, side)

    @torch.no_grad()
    def encode(self, examples: Sequence[Example]) -> VisualTokens:
        """All inputs of policies for M examples; an image that occurs twice is encoded once."""
        images = {example.image_id: example.image for example in examples}
        places = {image_id: place for place, image_id in enumerate(images)}
        rows = torch.tensor([places[example.image_id] for example in examples])
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
        states = TowerStates(
            patches=patches,
            keys=key.unflatten(-1, (heads, -1)).mean(2)[:, 1:],
            project=project,
            cls=hidden[:, :1],
            next_layer=_single_head_layer(*(part[rows] for part in last.take())),
        )
        return VisualTokens(
            features,
            self.grid,
            cls_attention=_cls_attention(query, key, heads),
            instruction=self._instruction(examples, patches),
            tower=states,
            language=self._prefix(examples, features),
            encoder=patches,
            words=self._words(examples),
        )

    def _instruction(self, examples: Sequence[Example], patches: Tensor) -> Instruction:
        image = self.clip.visual_projection(self.clip.vision_model.post_layernorm(patches.float()))
        questions = [example.question for example in examples]
        encoded = self.clip_tokenizer(questions, padding=True, return_tensors="pt")
        text = self.clip.text_projection(self.clip.text_model(**encoded).pooler_output)
        segments = torch.ones(len(examples), 1, dtype=torch.bool)
        sign = int(self.clip.config.autoprune_relevance_sign)
        return Instruction(image, text[:, None], segments, sign)

    def _words(self, examples: Sequence[Example]) -> Words:
        words = [split_content_words(example.question) for example in examples]
        ids = [[token for word in own for token in self._ids(word)] for own in words]
        lengths = torch.tensor([len(own) for own in ids])
        longest = int(lengths.max())
        padded = torch.tensor([own + [0] * (longest - len(own)) for own in ids])
        return Words(self._embed(padded), torch.arange(longest) < lengths[:, None])

    def _prefix(self, examples: Sequence[Example], features: Tensor) -> LlamaPrefix:
        questions = self._question_ids(examples)
        before, texts = self._prompt_parts(questions)
        lengths = torch.tensor([len(ids) for ids in questions])
        present = torch.arange(texts.shape[1]) < lengths[:, None]
        return LlamaPrefix(
            self.llava.model.language_model,
            torch.cat((before, features, self._embed(texts)), 1),
            before.shape[1],
            present,
        )

    @torch.no_grad()
    def score_answers(self, examples: Sequence[Example], rows: Tensor) -> AnswerScores:
        """Score the reference answers of M questions, given image rows (M, K, D) in order."""
        questions = self._question_ids(examples)
        end = self.tokenizer.eos_token_id
        answers = [[*self._ids(f" {one.answer}"), end] for one in examples]
        full = [ids + answer[:-1] for ids, answer in zip(questions, answers, strict=True)]
        before, texts = self._prompt_parts(full)
        embeds = torch.cat((before, rows.to(before.dtype), self._embed(texts)), 1)
        hidden = self.llava.model.language_model(inputs_embeds=embeds, use_cache=False)
        logits = self.llava.lm_head(hidden.last_hidden_state[:, -texts.shape[1] :]).float()
        right, logprob = [], []
        for row, ids, answer in zip(logits.log_softmax(-1), questions, answers, strict=True):
            predicted = row[len(ids) - 1 : len(ids) - 1 + len(answer)]
            expected = torch.tensor(answer)
            right.append(bool((predicted.argmax(-1) == expected).all()))
            logprob.append(predicted.gather(1, expected[:, None]).sum())
        return AnswerScores(torch.tensor(right), torch.stack(logprob))

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def _question_ids(self, examples: Sequence[Example]) -> list[list[int]]:
        return [self._ids(AFTER_IMAGE.format(question=one.question)) for one in examples]

    def _embed(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self.llava.get_input_embeddings()(ids)
        return embedded

    def _prompt_parts(self, texts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Embeddings (M, S, D) of the prompt before the image, and texts (M, L) after it.

        Texts are padded on the right, where the causal mask hides padding from every real token.
        """
        longest = max(map(len, texts))
        padded = torch.tensor([ids + ids[-1:] * (longest - len(ids)) for ids in texts])
        before = self._embed(torch.tensor(self._ids(BEFORE_IMAGE)))
        return before.expand(len(texts), -1, -1), padded


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


def _single_head_layer(query: Tensor, key: Tensor) -> NextLayer:
    """The last layer of the tower, with its heads taken as a single one."""
    scores = torch.einsum("bd,bnd->bn", query[:, 0], key) * key.shape[-1] ** -0.5
    return NextLayer(attention=scores.softmax(-1)[:, 1:], keys=key[:, 1:])
