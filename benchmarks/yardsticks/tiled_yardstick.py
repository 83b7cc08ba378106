"""Models that see square tiles, with transformers, pruned before the language model.

They have the inputs that policies get in a server; their resize control pools the tokens. No vLLM
is involved: figures measured with them check the models and the policies, not the plugin.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cached_property, partial
from math import isqrt
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedTokenizerBase,
)

from benchmarks.yardsticks.examples import Example, as_picture
from benchmarks.yardsticks.tiles import order_patches
from benchmarks.yardsticks.yardstick import (
    Budget,
    EncodedBatch,
    EncodedImage,
    Scores,
    Yardstick,
    record_outputs,
)
from vllm_autoprune.ops.dtype import choose_dtype
from vllm_autoprune.tpdsl.refine import pool_tokens
from vllm_autoprune.tpdsl.tokens import Grid


class TiledYardstick(Yardstick):
    """A model in which any rows can take the place of an image of square tiles.

    ``before_patches`` is the number of a tile's states that are not of patches.
    """

    budgets = tuple(Budget(f"K = N/{n}", Fraction(1, n)) for n in (2, 4, 8, 16))
    before_patches: ClassVar[int] = 0

    @abstractmethod
    def project(self, patches: Tensor) -> Tensor:
        """Rows (N, D) that enter the language model, of the raster patches (M, P, C) of tiles."""

    @abstractmethod
    def arrange(
        self, places: Tensor | None, count: int, kept: int, lead: int, tail: int
    ) -> Mapping[str, object]:
        """Arguments of the language model for ``kept`` rows of an image of N = ``count`` tokens.

        ``lead`` and ``tail`` tokens of text are before and after them. ``places`` (M, K) are those
        of the rows in the whole image, None if they are packed.
        """

    @cached_property
    def network(self) -> Any:
        """The transformers model, in the dtype in which this machine multiplies fast."""
        return AutoModelForImageTextToText.from_pretrained(
            self._checkpoint, dtype=choose_dtype(), attn_implementation="eager"
        ).requires_grad_(False)

    @cached_property
    def processor(self) -> Any:
        """The tokenizer and the image processor of the model."""
        return AutoProcessor.from_pretrained(self._checkpoint)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the language model."""
        tokenizer: PreTrainedTokenizerBase = self.processor.tokenizer
        return tokenizer

    @torch.no_grad()
    def encode(self, batch: Sequence[Example]) -> EncodedBatch:
        """Encode one image and M questions about it, with the inputs of policies in a server."""
        tokens = self.describe_image(batch, self.encode_image(batch[0].image))

        def score(_: Tensor, rows: Tensor, places: Tensor | None) -> Scores:
            kept = rows.shape[1]
            return self.score_rows(
                batch, rows, partial(self.arrange, places, tokens.count, kept)
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
        tower = self.network.model.vision_tower
        # Queries and keys of the last layer.
        *_, last = (name for name, _ in tower.named_modules() if "q_proj" in name)
        names = (last, last.replace("q_proj", "k_proj"))
        with record_outputs(tower, names) as outputs:
            encoded = tower(inputs["pixel_values"].to(self.network.dtype))
        states = encoded.last_hidden_state[:, self.before_patches :]
        patches = order_patches(states)
        # Attention to a token as a server measures it: the mean over heads, over all states of its
        # tile as queries, and over the token's own patches.
        heads = tower.config.num_attention_heads
        query, key = (
            outputs[name].float().unflatten(-1, (heads, -1)).transpose(1, 2)
            for name in names
        )
        scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
        attention = scores.softmax(-1).mean((1, 2))[:, self.before_patches :, None]
        joined = patches.flatten(2).flatten(0, 1).float()
        tiles, tokens = patches.shape[:2]
        side = isqrt(tokens)
        return EncodedImage(
            Grid(side, side, tiles),
            self.project(states),
            order_patches(attention).mean((2, 3)).flatten(),
            patches.float().mean(2).flatten(0, 1),
            torch.stack((joined.abs().sum(1), joined.norm(dim=1)), 1),
        )
