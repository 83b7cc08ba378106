"""mini-Qwen3-VL with transformers: pictures of any size, which its processor can resize.

It has the inputs that policies get from Qwen models in a server. No vLLM is involved: figures
measured with it check the model and the policies, not the plugin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import torch
from torch import Tensor
from transformers import (
    AutoProcessor,
    PreTrainedTokenizerBase,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision

from benchmarks.yardsticks.examples import Example, as_picture
from benchmarks.yardsticks.pages import MERGE, TOKEN, Size
from benchmarks.yardsticks.yardstick import (
    Budget,
    EncodedBatch,
    EncodedImage,
    Scores,
    Yardstick,
    record_outputs,
)
from vllm_autoprune.tpdsl.tokens import Grid


@dataclass(frozen=True)
class _EncodedImage(EncodedImage):
    """An image whose ``levels`` (N, D) are each added in one of the next layers.

    merger_norms are those of the first deepstack merger.
    """

    size: Size
    levels: tuple[Tensor, ...]


class MiniQwen(Yardstick):
    """mini-Qwen3-VL: encodes images, and scores answers for a selection of their tokens."""

    name = "mini-Qwen3-VL"
    key = "miniqwen"
    search_result = "miniqwen"
    budgets = tuple(Budget(f"K = N/{n}", Fraction(1, n)) for n in (2, 4, 8, 16))
    usual_tokens = 72
    available = frozenset(
        ("cls_attention", "instruction", "encoder", "merger_input", "words")
    )

    @cached_property
    def network(self) -> Qwen3VLForConditionalGeneration:
        """The transformers model, in bfloat16."""
        return Qwen3VLForConditionalGeneration.from_pretrained(
            self._checkpoint, dtype=torch.bfloat16, attn_implementation="eager"
        ).requires_grad_(False)

    @cached_property
    def processor(self) -> Qwen3VLProcessor:
        """The tokenizer and the image processor of the model."""
        return AutoProcessor.from_pretrained(self._checkpoint)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the language model."""
        return self.processor.tokenizer

    @torch.no_grad()
    def encode(self, batch: Sequence[Example]) -> EncodedBatch:
        """Encode one image and M questions about it, with the inputs of policies in a server."""
        image = self.encode_image(batch[0].image)
        tokens = self.describe_image(batch, image)
        return EncodedBatch(
            batch,
            tokens,
            lambda selection, rows, places: self.score_image(
                batch, image, selection, rows
            ),
            lambda budget: self.score_image(
                batch, self.encode_image(batch[0].image, budget)
            ),
        )

    @torch.no_grad()
    def encode_image(self, image: Tensor, budget: int | None = None) -> _EncodedImage:
        """Encode an image (3, H, W) uint8; `budget` resizes it to at most that many tokens."""
        images = self.processor.image_processor
        size = dict(images.size)
        if budget is not None:
            size |= {"longest_edge": budget * TOKEN * TOKEN}
        inputs = images(as_picture(image), size=size, return_tensors="pt")
        grid = inputs["image_grid_thw"]
        tower = self.network.model.visual
        early = f"blocks.{tower.deepstack_visual_indexes[0]}"
        last = f"blocks.{len(tower.blocks) - 1}.attn.qkv"
        with record_outputs(tower, (early, last, "rotary_pos_emb")) as outputs:
            encoded = tower(
                inputs["pixel_values"].to(self.network.dtype), grid_thw=grid
            )
        _, rows, columns = (int(side) for side in grid[0])

        def by_token(patches: Tensor) -> Tensor:
            """Reshape values (P, ...) of patches to (N, MERGE², ...), by token, in float32."""
            return patches.float().unflatten(0, (-1, MERGE**2))

        before_merger = by_token(outputs[early])
        # Attention to a token as a server measures it: the mean over heads, over all patches as
        # queries, and over the token's own patches.
        heads = tower.blocks[-1].attn.num_heads
        query, key, _ = outputs[last].unflatten(-1, (3, heads, -1)).unbind(1)
        query, key = (
            part.float().transpose(0, 1)
            for part in apply_rotary_pos_emb_vision(
                query, key, *outputs["rotary_pos_emb"]
            )
        )
        scores = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
        norms = (before_merger.abs().sum(2), before_merger.norm(dim=2))
        seen = Size(rows // MERGE, columns // MERGE)
        return _EncodedImage(
            Grid(seen.rows, seen.columns),
            encoded.pooler_output,
            by_token(scores.softmax(-1).mean((0, 1))).mean(1),
            by_token(encoded.last_hidden_state).mean(1),
            torch.stack(norms, 2).mean(1),
            seen,
            tuple(encoded.deepstack_features),
        )

    def score_image(
        self,
        examples: Sequence[Example],
        image: _EncodedImage,
        selection: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Scores:
        """Score the reference answers of M questions about one image.

        `selection` (M, K) has raster tokens of the image, which keep their positions; None keeps
        all. `rows` (M, K, D) replace the tokens' rows in the first layer, for policies that merge
        tokens.
        """
        count = len(examples)
        size = image.size
        if selection is None:
            selection = torch.arange(size.tokens).expand(count, -1)

        def place(lead: int, tail: int) -> dict[str, object]:
            visual = torch.zeros(
                count, lead + selection.shape[1] + tail, dtype=torch.bool
            )
            visual[:, lead : lead + selection.shape[1]] = True
            start = lead + max(size.rows, size.columns)
            positions = (
                torch.arange(lead).expand(3, count, -1),
                lead + size.rotary_positions(selection),
                torch.arange(start, start + tail).expand(3, count, -1),
            )
            levels = [level[selection].flatten(0, 1) for level in image.levels]
            return {
                "position_ids": torch.cat(positions, 2),
                "visual_pos_masks": visual,
                "deepstack_visual_embeds": levels,
            }

        return self.score_rows(
            examples, image.rows[selection] if rows is None else rows, place
        )
