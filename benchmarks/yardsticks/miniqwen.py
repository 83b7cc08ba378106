"""mini-Qwen3-VL with transformers: pictures of any size, which its processor can resize.

It has the inputs that policies get from Qwen models in a server. No vLLM is involved: figures
measured with it check the model and the policies, not the plugin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
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
from vllm_autoprune.tpdsl.tower import Tower, keep_cells


@dataclass(frozen=True)
class _EncodedImage(EncodedImage):
    """An image whose ``levels`` (N, D) are each added in one of the next layers.

    merger_norms are those of the first deepstack merger. places (N,) are those of the tokens in the
    whole image, from which some cells may have left the tower.
    """

    size: Size
    levels: tuple[Tensor, ...]
    places: Tensor


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
    def encode_image(
        self, image: Tensor, budget: int | None = None, tower: Tower | None = None
    ) -> _EncodedImage:
        """Encode an image (3, H, W) uint8; `budget` resizes it to at most that many tokens.

        By the rule of `tower`, cells leave the vision tower on the way.
        """
        images = self.processor.image_processor
        size = dict(images.size)
        if budget is not None:
            size |= {"longest_edge": budget * TOKEN * TOKEN}
        inputs = images(as_picture(image), size=size, return_tensors="pt")
        grid = inputs["image_grid_thw"]
        visual = self.network.model.visual
        early = f"blocks.{visual.deepstack_visual_indexes[0]}"
        last = f"blocks.{len(visual.blocks) - 1}.attn.qkv"
        with (
            record_outputs(visual, (early, last, "rotary_pos_emb")) as outputs,
            cutting(visual, tower) as remaining,
        ):
            encoded = visual(
                inputs["pixel_values"].to(self.network.dtype), grid_thw=grid
            )
        _, rows, columns = (int(side) for side in grid[0])
        seen = Size(rows // MERGE, columns // MERGE)
        cells = remaining[0] if remaining else torch.arange(seen.tokens)

        def at_cells(values: Tensor) -> Tensor:
            """Values (N, ...) of the cells that have not left, of any layer."""
            return values[cells] if len(values) > len(cells) else values

        def by_token(patches: Tensor) -> Tensor:
            """Reshape values (P, ...) of patches to (N, MERGE², ...), by token, in float32."""
            return patches.float().unflatten(0, (-1, MERGE**2))

        before_merger = at_cells(by_token(outputs[early]))
        # Attention to a token as a server measures it: the mean over heads, over all patches as
        # queries, and over the token's own patches.
        heads = visual.blocks[-1].attn.num_heads
        query, key, _ = outputs[last].unflatten(-1, (3, heads, -1)).unbind(1)
        query, key = (
            part.float().transpose(0, 1)
            for part in apply_rotary_pos_emb_vision(
                query,
                key,
                *(
                    at_cells(by_token(o)).flatten(0, 1)
                    for o in outputs["rotary_pos_emb"]
                ),
            )
        )
        scores = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
        norms = (before_merger.abs().sum(2), before_merger.norm(dim=2))
        return _EncodedImage(
            Grid(seen.rows, seen.columns, remaining=len(cells) if remaining else 0),
            encoded.pooler_output,
            by_token(scores.softmax(-1).mean((0, 1))).mean(1),
            by_token(encoded.last_hidden_state).mean(1),
            torch.stack(norms, 2).mean(1),
            seen,
            tuple(map(at_cells, encoded.deepstack_features)),
            cells,
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
            selection = torch.arange(image.grid.tokens).expand(count, -1)

        def place(lead: int, tail: int) -> dict[str, object]:
            visual = torch.zeros(
                count, lead + selection.shape[1] + tail, dtype=torch.bool
            )
            visual[:, lead : lead + selection.shape[1]] = True
            start = lead + max(size.rows, size.columns)
            positions = (
                torch.arange(lead).expand(3, count, -1),
                lead + size.rotary_positions(image.places[selection]),
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


@contextmanager
def cutting(visual: Any, rule: Tower | None) -> Iterator[list[Tensor]]:
    """Let cells of the one image of a call leave the tower ``visual`` by a rule.

    Yields a list that gets the indices ``(M,)`` of the cells that stay, if any leave.
    """
    remaining: list[Tensor] = []
    if rule is None:
        yield remaining
        return
    blocks = list(visual.blocks)
    start = round(rule.depth * len(blocks))

    def enter(
        block: nn.Module, inputs: tuple[Tensor], named: dict[str, Any]
    ) -> tuple[tuple[Tensor], dict[str, Any]]:
        cells = inputs[0].unflatten(0, (-1, MERGE**2))
        if not remaining:
            states = cells.mean(dim=1, dtype=torch.float32)
            count = rule.count_cells(len(states))
            remaining.append(keep_cells(states, count, rule.criterion))
            cells = cells[remaining[0]]
        rotary = [
            table.unflatten(0, (-1, MERGE**2))[remaining[0]].flatten(0, 1)
            for table in named["position_embeddings"]
        ]
        hidden = cells.flatten(0, 1)
        edges = torch.tensor([0, len(hidden)], dtype=torch.int32)
        lengths = {"cu_seqlens": edges, "max_seqlen": len(hidden)}
        return (hidden,), {**named, **lengths, "position_embeddings": tuple(rotary)}

    handles = [
        block.register_forward_pre_hook(enter, with_kwargs=True)
        for block in blocks[start:]
    ]
    try:
        yield remaining
    finally:
        for handle in handles:
            handle.remove()
