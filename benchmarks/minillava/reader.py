"""The checkpoint with transformers, opened for pruning by hand between projector and language.

Knows nothing about serving: figures made with it check the model, not the plugin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, CLIPModel, LlavaForConditionalGeneration

from benchmarks.minillava.prefix import LlamaPrefix
from benchmarks.minillava.split import Example
from benchmarks.minillava.towers import pixels
from benchmarks.minillava.vocabulary import AFTER_IMAGE, BEFORE_IMAGE
from vllm_autoprune.tpdsl.tokens import Grid, Instruction, NextLayer, TowerStates, VisualTokens


@dataclass(frozen=True)
class Answered:
    """Of M questions: whether greedy decoding gives the reference answer, and its likelihood.

    right (M,) bool: every token of the answer and its end is the likeliest; logprob (M,) float32:
    natural logarithm of the answer's probability, its end included.
    """

    right: Tensor
    logprob: Tensor


class Reader:
    """Answers questions from any rows that stand for an image."""

    def __init__(self, checkpoint: Path) -> None:
        load = {"dtype": torch.bfloat16, "attn_implementation": "eager"}
        self.llava = LlavaForConditionalGeneration.from_pretrained(checkpoint / "llava", **load)
        self.llava.requires_grad_(False)
        self.clip = CLIPModel.from_pretrained(checkpoint / "clip", dtype=torch.float32)
        self.clip.requires_grad_(False)
        self.words = AutoTokenizer.from_pretrained(checkpoint / "llava")
        self.eyes = AutoTokenizer.from_pretrained(checkpoint / "clip")
        vision = self.llava.config.vision_config
        side = vision.image_size // vision.patch_size
        self.grid = Grid(side, side)

    @torch.no_grad()
    def look(self, examples: Sequence[Example]) -> VisualTokens:
        """Every input that a policy may read, of M examples; an image is seen once."""
        images = {example.image_id: example.image for example in examples}
        places = {image_id: place for place, image_id in enumerate(images)}
        rows = torch.tensor([places[example.image_id] for example in examples])
        tower = self.llava.model.vision_tower
        read, after = (_Projections(tower.encoder.layers[layer].self_attn) for layer in (-2, -1))
        seen = tower(pixels(torch.stack(list(images.values()))), output_hidden_states=True)
        hidden = seen.hidden_states[-2][rows]
        query, key = (part[rows] for part in read.take())
        heads = tower.config.num_attention_heads
        project = self.llava.model.multi_modal_projector
        patches = hidden[:, 1:]
        features = project(patches)
        states = TowerStates(
            patches=patches,
            keys=key.unflatten(-1, (heads, -1)).mean(2)[:, 1:],
            project=project,
            cls=hidden[:, :1],
            next_layer=_as_one_head(*(part[rows] for part in after.take())),
        )
        return VisualTokens(
            features,
            self.grid,
            cls_attention=_cls_attention(query, key, heads),
            instruction=self._instruction(examples, patches),
            tower=states,
            language=self._prefix(examples, features),
        )

    def _instruction(self, examples: Sequence[Example], patches: Tensor) -> Instruction:
        eye = self.clip.visual_projection(self.clip.vision_model.post_layernorm(patches.float()))
        asked = [example.question for example in examples]
        encoded = self.eyes(asked, padding=True, return_tensors="pt")
        text = self.clip.text_projection(self.clip.text_model(**encoded).pooler_output)
        segments = torch.ones(len(examples), 1, dtype=torch.bool)
        sign = int(self.clip.config.autoprune_relevance_sign)
        return Instruction(eye, text[:, None], segments, sign)

    def _prefix(self, examples: Sequence[Example], features: Tensor) -> LlamaPrefix:
        asked = [self._ids(AFTER_IMAGE.format(question=one.question)) for one in examples]
        before, texts = self._framed(asked)
        held = torch.arange(texts.shape[1]) < torch.tensor([len(ids) for ids in asked])[:, None]
        return LlamaPrefix(
            self.llava.model.language_model,
            torch.cat((before, features, self._embed(texts)), 1),
            before.shape[1],
            held,
        )

    @torch.no_grad()
    def answer(self, examples: Sequence[Example], rows: Tensor) -> Answered:
        """What M questions are answered from rows (M, K, D), in the order they are given."""
        asked = [self._ids(AFTER_IMAGE.format(question=one.question)) for one in examples]
        end = self.words.eos_token_id
        answers = [[*self._ids(f" {one.answer}"), end] for one in examples]
        full = [ids + answer[:-1] for ids, answer in zip(asked, answers, strict=True)]
        before, texts = self._framed(full)
        embeds = torch.cat((before, rows.to(before.dtype), self._embed(texts)), 1)
        hidden = self.llava.model.language_model(inputs_embeds=embeds, use_cache=False)
        logits = self.llava.lm_head(hidden.last_hidden_state[:, -texts.shape[1] :]).float()
        right, logprob = [], []
        for row, ids, answer in zip(logits.log_softmax(-1), asked, answers, strict=True):
            said = row[len(ids) - 1 : len(ids) - 1 + len(answer)]
            wanted = torch.tensor(answer)
            right.append(bool((said.argmax(-1) == wanted).all()))
            logprob.append(said.gather(1, wanted[:, None]).sum())
        return Answered(torch.tensor(right), torch.stack(logprob))

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.words(text, add_special_tokens=False).input_ids
        return ids

    def _embed(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self.llava.get_input_embeddings()(ids)
        return embedded

    def _framed(self, texts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """What stands before the image (M, S, D), and texts (M, L) padded on the right.

        Padding follows the text, where the causal mask hides it from every real token.
        """
        longest = max(map(len, texts))
        padded = torch.tensor([ids + ids[-1:] * (longest - len(ids)) for ids in texts])
        before = self._embed(torch.tensor(self._ids(BEFORE_IMAGE)))
        return before.expand(len(texts), -1, -1), padded


class _Projections:
    """Queries and keys (B, 1 + N, Dv) of one attention layer at its next run."""

    def __init__(self, attention: nn.Module) -> None:
        self._seen: list[Tensor] = []
        self._hooks = [
            attention.get_submodule(name).register_forward_hook(self._note)
            for name in ("q_proj", "k_proj")
        ]

    def _note(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        self._seen.append(output.float())

    def take(self) -> tuple[Tensor, Tensor]:
        """(query, key), which is the order they run in; the hooks are gone afterwards."""
        for hook in self._hooks:
            hook.remove()
        query, key = self._seen
        return query, key


def _cls_attention(query: Tensor, key: Tensor, heads: int) -> Tensor:
    """(B, N): attention of [CLS] averaged over heads, [CLS] itself left out."""
    query, key = (part.unflatten(-1, (heads, -1)) for part in (query, key))
    scores = torch.einsum("bhd,bnhd->bhn", query[:, 0], key) * key.shape[-1] ** -0.5
    return scores.softmax(-1).mean(1)[:, 1:]


def _as_one_head(query: Tensor, key: Tensor) -> NextLayer:
    """The layer after the one that is read, taken as a single head."""
    scores = torch.einsum("bd,bnd->bn", query[:, 0], key) * key.shape[-1] ** -0.5
    return NextLayer(attention=scores.softmax(-1)[:, 1:], keys=key[:, 1:])
