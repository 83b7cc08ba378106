"""mini-Qwen3-VL with transformers: pictures of any size, which the processor itself can resize.

It has the inputs that Qwen models have in a server. No vLLM is involved: figures measured with it
check the model and the policies, not the plugin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration, Qwen3VLProcessor
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision

from benchmarks.yardsticks.examples import IMAGE_TOKEN, PROMPT, Example, as_picture
from benchmarks.yardsticks.pages import MERGE, TOKEN, Size
from benchmarks.yardsticks.yardstick import (
    Budget,
    Call,
    EncodedBatch,
    Scores,
    Yardstick,
    content_words,
    record_calls,
    token_ids,
    tokenize_answers,
)
from vllm_autoprune.tpdsl.tokens import Grid, Instruction, MergerInput, VisualTokens, Words

_BEFORE_IMAGE, _AFTER_IMAGE = PROMPT["miniqwen"].split(IMAGE_TOKEN["miniqwen"])


@dataclass(frozen=True)
class _EncodedImage:
    """An image after the vision tower.

    rows (N, D) are for the first layer of the language model, levels (N, D) each for the next ones.
    attention (N,) is what a token gets from all patches in the tower's last layer, encoder (N, Dv)
    the mean of its patches before the merger, and merger_norms (N, 2) the mean of their norms
    before the first deepstack merger: the sum of absolute values and the Euclidean norm.
    """

    size: Size
    rows: Tensor
    levels: tuple[Tensor, ...]
    attention: Tensor
    encoder: Tensor
    merger_norms: Tensor


class MiniQwen(Yardstick):
    """A checkpoint that encodes images, and scores answers given some of their tokens."""

    name = "mini-Qwen3-VL"
    key = "miniqwen"
    default = "miniqwen"
    budgets = tuple(Budget(f"K = N/{n}", Fraction(1, n)) for n in (2, 4, 8, 16))
    eighth = "K = N/8"
    usual_tokens = 72
    available = frozenset(("cls_attention", "instruction", "encoder", "merger_input", "words"))

    @cached_property
    def qwen(self) -> Qwen3VLForConditionalGeneration:
        """The model in bfloat16."""
        model: Qwen3VLForConditionalGeneration = Qwen3VLForConditionalGeneration.from_pretrained(
            self._checkpoint, dtype=torch.bfloat16, attn_implementation="eager"
        )
        return model.requires_grad_(False)

    @cached_property
    def processor(self) -> Qwen3VLProcessor:
        """Its tokenizer and its image processor."""
        processor: Qwen3VLProcessor = AutoProcessor.from_pretrained(self._checkpoint)
        return processor

    def encode(self, batch: Sequence[Example]) -> _EncodedQuestions:
        """All inputs of policies for the questions about one image."""
        image = self.encode_image(batch[0].image)
        return _EncodedQuestions(self, batch, image)

    @torch.no_grad()
    def encode_image(self, image: Tensor, budget: int | None = None) -> _EncodedImage:
        """Encode an image (3, H, W) uint8, resized to at most `budget` tokens if given."""
        images = self.processor.image_processor
        size = dict(images.size)
        if budget is not None:
            size |= {"longest_edge": budget * TOKEN * TOKEN}
        inputs = images(as_picture(image), size=size, return_tensors="pt")
        grid = inputs["image_grid_thw"]
        tower = self.qwen.model.visual
        last = f"blocks.{len(tower.blocks) - 1}.attn"
        with record_calls(tower, ("merger", "deepstack_merger_list.0", last)) as calls:
            encoded = tower(inputs["pixel_values"].to(self.qwen.dtype), grid_thw=grid)
        _, rows, columns = (int(side) for side in grid[0])
        patches = _by_token(calls["merger"].args[0])
        early = _by_token(calls["deepstack_merger_list.0"].args[0])
        return _EncodedImage(
            Size(rows // MERGE, columns // MERGE),
            encoded.pooler_output,
            tuple(encoded.deepstack_features),
            _attention(tower.blocks[-1].attn, calls[last]),
            patches.mean(1),
            torch.stack([early.abs().sum(2), early.norm(dim=2)], 2).mean(1),
        )

    @torch.no_grad()
    def policy_inputs(self, examples: Sequence[Example], image: _EncodedImage) -> VisualTokens:
        """What policies read of one image and M questions about it, as a server gives it to them.

        Relevance is measured in the language model's input embeddings, of which a question has the
        mean. A state's ``rank_at`` decides whether tokens are ranked after or before the merger.
        """
        count = len(examples)
        grid = Grid(image.size.rows, image.size.columns)
        features = image.rows.expand(count, -1, -1)
        embed, tokenizer = self.qwen.get_input_embeddings(), self.processor.tokenizer
        questions = [torch.tensor(token_ids(tokenizer, example.question)) for example in examples]
        text = torch.stack([embed(ids).float().mean(0) for ids in questions])
        segments = torch.ones(count, 1, dtype=torch.bool)
        words, present = content_words(tokenizer, examples)
        return VisualTokens(
            features,
            grid,
            cls_attention=image.attention.expand(count, -1),
            instruction=Instruction(features, text[:, None], segments, sign=1),
            known_cosine=VisualTokens(image.rows[None], grid).cosine.expand(count, -1, -1),
            encoder=image.encoder.expand(count, -1, -1),
            words=Words(embed(words), present),
            merger_input=MergerInput(
                image.merger_norms.expand(count, -1, -1),
                VisualTokens(image.encoder[None], grid).cosine.expand(count, -1, -1),
            ),
        )

    @torch.no_grad()
    def score_answers(
        self,
        examples: Sequence[Example],
        image: _EncodedImage,
        kept: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Scores:
        """Score the reference answers of M questions about one image.

        `kept` (M, K) are raster tokens of the image; they keep their positions. Without it, all are
        kept. `rows` (M, K, D) take the place of their rows for the first layer, where a policy
        merges tokens.
        """
        count, size = len(examples), image.size
        if kept is None:
            kept = torch.arange(size.tokens).expand(count, -1)
        tokenizer = self.processor.tokenizer
        texts = tokenize_answers(tokenizer, _AFTER_IMAGE, examples)
        language = self.qwen.model.language_model
        before = language.embed_tokens(torch.tensor(token_ids(tokenizer, _BEFORE_IMAGE)))
        start, length = len(before), texts.padded.shape[1]
        rows = image.rows[kept] if rows is None else rows.to(image.rows.dtype)
        embeds = (before.expand(count, -1, -1), rows, language.embed_tokens(texts.padded))
        visual = torch.zeros(count, start + kept.shape[1] + length, dtype=torch.bool)
        visual[:, start : start + kept.shape[1]] = True
        # M-RoPE: text, kept tokens at their places in the whole image, text behind the whole image.
        places = (torch.zeros_like(kept), kept // size.columns, kept % size.columns)
        behind = start + max(size.rows, size.columns) + torch.arange(length)
        positions = (
            torch.arange(start).expand(3, count, -1),
            start + torch.stack(places),
            behind.expand(3, count, -1),
        )
        hidden = language(
            inputs_embeds=torch.cat(embeds, 1),
            position_ids=torch.cat(positions, 2),
            visual_pos_masks=visual,
            deepstack_visual_embeds=[level[kept].flatten(0, 1) for level in image.levels],
            use_cache=False,
        ).last_hidden_state[:, -length:]
        return texts.score(self.qwen.lm_head(hidden), kept.shape[1])


class _EncodedQuestions(EncodedBatch):
    """Questions about one image."""

    def __init__(self, yardstick: MiniQwen, batch: Sequence[Example], image: _EncodedImage) -> None:
        super().__init__(batch, yardstick.policy_inputs(batch, image))
        self._yardstick, self._image = yardstick, image

    def score_kept(self, kept: Tensor, rows: Tensor) -> Scores:
        """Tokens keep their positions in the whole image."""
        return self._yardstick.score_answers(self.batch, self._image, kept, rows)

    def score_resized(self, budget: int) -> Scores:
        """All tokens of the image that the processor makes of it, limited to K."""
        image = self._yardstick.encode_image(self.batch[0].image, budget)
        return self._yardstick.score_answers(self.batch, image)


def _attention(attention: nn.Module, call: Call) -> Tensor:
    """(N,): attention to each token in one layer, measured as a server does.

    The mean over heads and over all patches as queries, then over the patches of a token.
    """
    hidden = call.args[0] if call.args else call.kwargs["hidden_states"]
    turns, heads = call.kwargs["position_embeddings"], attention.num_heads
    assert isinstance(hidden, Tensor) and isinstance(turns, tuple) and isinstance(heads, int)
    joined = attention.get_submodule("qkv")(hidden)
    query, key, _ = joined.unflatten(-1, (3, heads, -1)).unbind(1)
    query, key = (
        part.float().transpose(0, 1) for part in apply_rotary_pos_emb_vision(query, key, *turns)
    )
    scores = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
    return _by_token(scores.softmax(-1).mean((0, 1))).mean(1)


def _by_token(patches: Tensor) -> Tensor:
    """Values (P, ...) of patches as those of tokens (N, MERGE², ...), in float32."""
    return patches.float().unflatten(0, (-1, MERGE**2))
