"""mini-Qwen3-VL with transformers: answers given any tokens of an image of any size.

No vLLM is involved: figures measured with it check the model, not the plugin.
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
from benchmarks.miniqwen.vocabulary import AFTER_IMAGE, BEFORE_IMAGE


@dataclass(frozen=True)
class EncodedImage:
    """Rows (N, D) of an image for the first layer, and those added after the next layers."""

    size: Size
    rows: Tensor
    levels: tuple[Tensor, ...]


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
        values = inputs["pixel_values"].to(torch.bfloat16)
        encoded = self.model.model.visual(values, grid_thw=grid)
        _, rows, columns = (int(side) for side in grid[0])
        levels = tuple(encoded.deepstack_features)
        return EncodedImage(Size(rows // MERGE, columns // MERGE), encoded.pooler_output, levels)

    @torch.no_grad()
    def score_answers(
        self, examples: Sequence[Example], image: EncodedImage, kept: Tensor | None = None
    ) -> AnswerScores:
        """Score the reference answers of M questions about one image.

        `kept` (M, K) are ascending raster tokens of the image; they keep their positions. Without
        it, all are kept.
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
        embeds = torch.cat((embed(before).expand(count, -1, -1), image.rows[kept], embed(texts)), 1)
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
