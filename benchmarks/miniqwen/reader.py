"""mini-Qwen3-VL with transformers: inputs of policies, and answers given any tokens of an image.

No vLLM is involved: figures measured with it check the model and the policies, not the plugin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from benchmarks.minillava.reader import AnswerScores
from benchmarks.minillava.split import Example
from benchmarks.miniqwen.sizes import MERGE, TOKEN, Size
from benchmarks.miniqwen.split import convert_image
from benchmarks.miniqwen.tower_inputs import TowerHooks
from benchmarks.miniqwen.vocabulary import AFTER_IMAGE, BEFORE_IMAGE
from vllm_autoprune.serving.api.instruction import split_content_words
from vllm_autoprune.tpdsl.tokens import Grid, Instruction, MergerInput, VisualTokens, Words


@dataclass(frozen=True)
class EncodedImage:
    """An image after the vision tower.

    rows (N, D) are for the first layer of the language model, levels (N, D) each for the next ones.
    attention (N,) is what a token gets from all patches in the tower's last layer, encoder (N, Dv)
    the mean of its patches before the merger, and merger_norms (N, 2) the mean of their norms
    before the first deepstack merger.
    """

    size: Size
    rows: Tensor
    levels: tuple[Tensor, ...]
    attention: Tensor
    encoder: Tensor
    merger_norms: Tensor


class Reader:
    """A checkpoint that encodes images, and scores answers given some of their tokens."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = Qwen3VLForConditionalGeneration.from_pretrained(
            checkpoint, dtype=torch.bfloat16, attn_implementation="eager"
        )
        self.model.requires_grad_(False)
        self.processor = AutoProcessor.from_pretrained(checkpoint)

    @torch.no_grad()
    def encode(self, image: Tensor, budget: int | None = None) -> EncodedImage:
        """Encode an image (3, H, W) uint8, resized to at most `budget` tokens if given."""
        images = self.processor.image_processor
        size = dict(images.size)
        if budget is not None:
            size |= {"longest_edge": budget * TOKEN * TOKEN}
        inputs = images(convert_image(image), size=size, return_tensors="pt")
        grid = inputs["image_grid_thw"]
        tower = self.model.model.visual
        with TowerHooks(tower) as hooks:
            encoded = tower(inputs["pixel_values"].to(torch.bfloat16), grid_thw=grid)
        _, rows, columns = (int(side) for side in grid[0])
        return EncodedImage(
            Size(rows // MERGE, columns // MERGE),
            encoded.pooler_output,
            tuple(encoded.deepstack_features),
            hooks.attention(),
            hooks.encoder(),
            hooks.merger_norms(),
        )

    @torch.no_grad()
    def policy_inputs(self, examples: Sequence[Example], image: EncodedImage) -> VisualTokens:
        """What policies read of one image and M questions about it, as a server gives it to them.

        Relevance is measured in the language model's input embeddings, of which a question has the
        mean. A state's ``rank_at`` decides whether tokens are ranked after or before the merger.
        """
        count = len(examples)
        grid = Grid(image.size.rows, image.size.columns)
        features = image.rows.expand(count, -1, -1)
        questions = [self._ids(one.question) for one in examples]
        text = torch.stack([self._embed(ids).float().mean(0) for ids in questions])
        segments = torch.ones(count, 1, dtype=torch.bool)
        words = [
            [token for word in split_content_words(one.question) for token in self._ids(word)]
            for one in examples
        ]
        used = torch.arange(max(map(len, words))) < torch.tensor([[len(own)] for own in words])
        padded = [own + own[-1:] * (used.shape[1] - len(own)) for own in words]
        return VisualTokens(
            features,
            grid,
            cls_attention=image.attention.expand(count, -1),
            instruction=Instruction(features, text[:, None], segments, sign=1),
            known_cosine=VisualTokens(image.rows[None], grid).cosine.expand(count, -1, -1),
            encoder=image.encoder.expand(count, -1, -1),
            words=Words(self._embed(padded), used),
            merger_input=MergerInput(
                image.merger_norms.expand(count, -1, -1),
                VisualTokens(image.encoder[None], grid).cosine.expand(count, -1, -1),
            ),
        )

    @torch.no_grad()
    def score_answers(
        self,
        examples: Sequence[Example],
        image: EncodedImage,
        kept: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> AnswerScores:
        """Score the reference answers of M questions about one image.

        `kept` (M, K) are raster tokens of the image; they keep their positions. Without it, all are
        kept. `rows` (M, K, D) take the place of their rows for the first layer, where a policy
        merges tokens.
        """
        count, size = len(examples), image.size
        if kept is None:
            kept = torch.arange(size.tokens).expand(count, -1)
        end = self.processor.tokenizer.eos_token_id
        before = torch.tensor(self._ids(BEFORE_IMAGE))
        questions = [self._ids(AFTER_IMAGE.format(question=one.question)) for one in examples]
        answers = [[*self._ids(f" {one.answer}"), end] for one in examples]
        # Padding is on the right, where the causal mask hides it from every real token.
        full = [ids + answer[:-1] for ids, answer in zip(questions, answers, strict=True)]
        longest = max(map(len, full))
        texts = torch.tensor([ids + ids[-1:] * (longest - len(ids)) for ids in full])
        language = self.model.model.language_model
        embed, first = language.embed_tokens, len(before)
        rows = image.rows[kept] if rows is None else rows.to(image.rows.dtype)
        embeds = torch.cat((embed(before).expand(count, -1, -1), rows, embed(texts)), 1)
        visual = torch.zeros(embeds.shape[:2], dtype=torch.bool)
        visual[:, first : first + kept.shape[1]] = True
        hidden = language(
            inputs_embeds=embeds,
            position_ids=_positions(kept, size, first, longest),
            visual_pos_masks=visual,
            deepstack_visual_embeds=[level[kept].flatten(0, 1) for level in image.levels],
            use_cache=False,
        ).last_hidden_state[:, -longest:]
        logits = self.model.lm_head(hidden).float().log_softmax(-1)
        right, logprob = [], []
        for row, ids, answer in zip(logits, questions, answers, strict=True):
            predicted = row[len(ids) - 1 : len(ids) - 1 + len(answer)]
            expected = torch.tensor(answer)
            right.append(bool((predicted.argmax(-1) == expected).all()))
            logprob.append(predicted.gather(1, expected[:, None]).sum())
        return AnswerScores(torch.tensor(right), torch.stack(logprob))

    def _embed(self, ids: list[int] | list[list[int]]) -> Tensor:
        embedded: Tensor = self.model.get_input_embeddings()(torch.tensor(ids))
        return embedded

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.processor.tokenizer(text, add_special_tokens=False).input_ids
        return ids


def _positions(kept: Tensor, size: Size, first: int, texts: int) -> Tensor:
    """M-RoPE positions (3, M, T): text, kept tokens at their places in the whole image, text."""
    count = len(kept)
    lead = torch.arange(first).expand(3, count, -1)
    image = first + torch.stack((torch.zeros_like(kept), kept // size.columns, kept % size.columns))
    rest = first + max(size.rows, size.columns) + torch.arange(texts)
    return torch.cat((lead, image, rest.expand(3, count, -1)), 2)
