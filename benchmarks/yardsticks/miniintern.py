"""mini-InternVL with transformers: tiles and a thumbnail, pruned before the language model.

It has the inputs that policies get from InternVL in a server; its resize control pools the tokens.
No vLLM is involved: figures measured with it check the model and the policies, not the plugin.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property, partial

import torch
from torch import Tensor
from transformers import (
    AutoProcessor,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    PreTrainedTokenizerBase,
)

from benchmarks.yardsticks.examples import Example, as_picture
from benchmarks.yardsticks.tiles import SIDE, TILE_TOKENS, order_patches
from benchmarks.yardsticks.yardstick import (
    Budget,
    EncodedBatch,
    EncodedImage,
    Scores,
    Yardstick,
    place_on_line,
    record_outputs,
)
from vllm_autoprune.tpdsl.refine import pool_tokens
from vllm_autoprune.tpdsl.tokens import Grid


class MiniIntern(Yardstick):
    """mini-InternVL: any rows can take the place of an image of one or three tiles."""

    name = "mini-InternVL"
    key = "miniintern"
    budgets = tuple(Budget(f"K = N/{n}", Fraction(1, n)) for n in (2, 4, 8, 16))
    usual_tokens = 3 * TILE_TOKENS
    available = frozenset(
        ("cls_attention", "instruction", "encoder", "merger_input", "words")
    )
    has_one_axis = True

    @cached_property
    def network(self) -> InternVLForConditionalGeneration:
        """The transformers model, in bfloat16."""
        return InternVLForConditionalGeneration.from_pretrained(
            self._checkpoint, dtype=torch.bfloat16, attn_implementation="eager"
        ).requires_grad_(False)

    @cached_property
    def processor(self) -> InternVLProcessor:
        """The tokenizer and the image processor of the model."""
        return AutoProcessor.from_pretrained(self._checkpoint)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the language model."""
        return self.processor.tokenizer

    @torch.no_grad()
    def encode(self, batch: Sequence[Example]) -> EncodedBatch:
        """Encode one image and M questions about it, with the inputs of policies in a server."""
        tokens = self.describe_image(batch, self.encode_image(batch[0].image))

        def score(_: Tensor, rows: Tensor, places: Tensor | None) -> Scores:
            if places is None:
                return self.score_rows(batch, rows)
            return self.score_rows(
                batch, rows, partial(place_on_line, places, tokens.count)
            )

        def score_resized(budget: int) -> Scores:
            pooled = pool_tokens(budget, tokens)
            # Resizing is most accurate with pooled tokens at their places in the whole image.
            return score(pooled.indices, pooled.features, pooled.places(tokens.count))

        return EncodedBatch(batch, tokens, score, score_resized)

    @torch.no_grad()
    def encode_image(self, image: Tensor) -> EncodedImage:
        """Encode an image (3, H, W) uint8."""
        inputs = self.processor.image_processor(as_picture(image), return_tensors="pt")
        model = self.network.model
        tower = model.vision_tower
        last = f"encoder.layer.{len(tower.encoder.layer) - 1}.attention"
        names = [f"{last}.{part}_proj" for part in "qk"]
        with record_outputs(tower, names) as outputs:
            encoded = tower(inputs["pixel_values"].to(self.network.dtype))
        patches = order_patches(encoded.last_hidden_state[:, 1:])
        # Attention to a token as a server measures it: the mean over heads, over [CLS] and all
        # patches of its tile as queries, and over the token's own patches.
        heads = tower.config.num_attention_heads
        query, key = (
            outputs[name].float().unflatten(-1, (heads, -1)).transpose(1, 2)
            for name in names
        )
        scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
        attention = scores.softmax(-1).mean((1, 2))[:, 1:, None]
        joined = patches.flatten(2).flatten(0, 1)
        return EncodedImage(
            Grid(SIDE, SIDE, len(patches)),
            model.multi_modal_projector(joined),
            order_patches(attention).mean((2, 3)).flatten(),
            patches.float().mean(2).flatten(0, 1),
            torch.stack((joined.float().abs().sum(1), joined.float().norm(dim=1)), 1),
        )
