"""Mixin for models whose kept tokens keep their places: positions that the model computes.

Positions of text are known when a request arrives. Positions of image tokens are known only after
the selection, so they travel as trailing channels of the rows. Each channel is a digit in base 256,
which bfloat16 represents exactly.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from vllm_autoprune.serving.compat.worker import request_positions
from vllm_autoprune.serving.models.pruned_model import PrunedModel
from vllm_autoprune.serving.plan import FIELD, ItemPlan, Key, plan_error
from vllm_autoprune.serving.served_state import served_state
from vllm_autoprune.serving.worker.rows import count_channels

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.models.qwen2_5_vl import (
        Qwen2_5_VLForConditionalGeneration as _Stock,
    )
    from vllm.multimodal.inputs import MultiModalFeatureSpec
else:
    _Stock = object

_EMBEDS = "prompt_embeds"
"""Modality of parts of a prompt that are sent as embeddings, which runners count as text."""

_UNBOUNDED = (1 << 31) - 1
"""Number of positions of a model without a table of rotations."""


class PlacedModel(PrunedModel, _Stock):
    """Mixin for stock classes whose rows carry the positions of their tokens."""

    supports_mrope: ClassVar[Literal[True]] = True
    supports_multimodal_pruning: ClassVar[Literal[True]] = True
    """vLLM asks a model again for positions only if it declares this."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        model_config = vllm_config.model_config
        if served_state(model_config) is not None and model_config.uses_mrope:
            request_positions(model_config.multimodal_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # Some classes with M-RoPE serve checkpoints without it too.
        self.autoprune_axes: int = model_config.mrope_num_dims
        if self.autoprune is not None:
            # The stock model handles videos.
            self.is_multimodal_pruning_enabled = False
            self.autoprune_context: int = model_config.max_model_len
            buffers = self.get_language_model().named_buffers()
            tables = [
                len(table) for name, table in buffers if name.endswith("cos_sin_cache")
            ]
            self.autoprune_table: int = min(tables, default=_UNBOUNDED)

    @property
    def autoprune_counts_all(self) -> bool:
        """Whether rows without positions are counted together with rows that have them."""
        return True

    @abstractmethod
    def autoprune_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[Tensor, int]:
        """Positions ``(A, L)`` of the prompt with whole images, and the delta of what follows.

        The delta is added to the index of a generated token to get its position. Raises for items
        that are not possible.
        """

    @abstractmethod
    def autoprune_consecutive(self, length: int) -> Tensor:
        """Positions ``(A, L)`` of tokens that follow each other, which nothing moves later."""

    @abstractmethod
    def autoprune_place(
        self, ids: Tensor, positions: Tensor, channels: Sequence[Tensor], computed: int
    ) -> Tensor:
        """Set the positions of the image tokens of one prefill step in ``(A, L)``.

        ``channels`` has the position channels ``(m, C)`` of each item of the step, in prompt
        order. A token whose channels are below 0 stays where it is. The step begins at token
        ``computed``. Repeating this changes nothing. No host sync.
        """

    @abstractmethod
    def autoprune_delta(self, positions: Tensor) -> int:
        """The delta of :meth:`autoprune_positions`, from positions on the CPU."""

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[Tensor, int]:
        """Positions of the prompt with whole images, as stock (``SupportsMRoPE``).

        Grids and text that no server makes have no positions; tokens then follow each other.
        """
        if self.autoprune is None:
            return super().get_mrope_input_positions(input_tokens, mm_features)
        length = len(input_tokens)
        try:
            positions, delta = self.autoprune_positions(input_tokens, mm_features)
            # Beyond the table of rotations an index is out of range, which ends the engine. The API
            # server keeps generated tokens within the context, unless it cannot foresee them.
            start = int(positions[0].min())
            end = max(int(positions.max()) + 1, length + delta)
            if delta > self.autoprune_context:
                end += self.autoprune_context - length
            if positions.shape[1] != length or start < 0 or end > self.autoprune_table:
                raise plan_error(
                    f"gives {tuple(positions.shape)} positions, {start} to {end}"
                )
            return positions, delta
        except Exception as error:  # the engine must survive any input  # noqa: BLE001
            self.autoprune_reporter.report_error(
                error, "counting its tokens as positions"
            )
            return self.autoprune_consecutive(length), 0

    def autoprune_read_plan(self, feature: MultiModalFeatureSpec) -> ItemPlan | None:
        """The plan of an item; None if it has none."""
        if feature.data is None or FIELD not in feature.data:
            return None
        (plan,) = self.autoprune_plan_reader.read([feature.data[FIELD].data])
        return plan

    def autoprune_blank(self, plan: ItemPlan, error: Exception) -> Tensor:
        """Rows of zeros, whose tokens stay where they are."""
        rows = super().autoprune_blank(plan, error)
        unplaced = rows.new_full((len(rows), count_channels(self.autoprune_axes)), -1.0)
        return torch.cat([rows, unplaced], dim=1)

    def recompute_mrope_positions(
        self,
        input_ids: list[int] | Tensor | None,
        multimodal_embeddings: Sequence[Tensor],
        mrope_positions: Tensor,
        num_computed_tokens: int,
    ) -> tuple[Sequence[Tensor], Tensor, int]:
        """Split position channels off the rows, and set the positions of this step's image tokens.

        No position is beyond the model's table, whatever the channels of an image are. The stock
        method (``SupportsMultiModalPruning``) moves text on by an image's width, which is wrong for
        an image that is higher than wide. The delta was known before: the state of model runner V2
        keeps it, so the third value is for V1 alone.
        """
        vision = self.autoprune
        if vision is None:  # vLLM prunes the videos itself
            return super().recompute_mrope_positions(
                input_ids, multimodal_embeddings, mrope_positions, num_computed_tokens
            )
        count = count_channels(self.autoprune_axes)
        rows: list[Tensor] = []
        channels: list[Tensor] = []
        for embedding in multimodal_embeddings:
            if embedding.shape[1] == vision.row_width + count:
                channels.append(embedding[:, -count:])
                embedding = embedding[:, :-count]
            elif (
                self.autoprune_counts_all
                and getattr(embedding, "modality", "") != _EMBEDS
            ):
                shape = len(embedding), count
                channels.append(embedding.new_full(shape, -1, dtype=torch.float32))
            rows.append(embedding)
        positions = mrope_positions
        if channels:
            ids = (
                input_ids
                if isinstance(input_ids, Tensor)
                else torch.tensor(input_ids or ())
            )
            positions = self.autoprune_place(
                ids, positions, channels, num_computed_tokens
            )
            positions = positions.clamp(max=self.autoprune_table - 1)
        # V2 passes tensors, and to compute it from positions would wait for the device.
        on_device = isinstance(input_ids, Tensor)
        return rows, positions, 0 if on_device else self.autoprune_delta(positions)


def match_items(plans: Mapping[int, ItemPlan]) -> dict[int, int]:
    """Map each delta and each recall to the item at which the positions of its image begin.

    ``plans`` are by item, in prompt order. Deltas come in the order of their cores, and no core of
    another image has the same key. An image may be shown several times: a recall belongs to its
    last occurrence.
    """
    waiting: dict[Key, list[int]] = {}
    last: dict[Key, int] = {}
    firsts = {}
    for i, plan in sorted(plans.items()):
        if plan.part == "recall":
            if plan.key in last:
                firsts[i] = last[plan.key]
        elif plan.part == "delta":
            if waiting.get(plan.key):
                firsts[i] = waiting[plan.key].pop(0)
        else:
            last[plan.key] = i
            if plan.part == "core":
                waiting.setdefault(plan.key, []).append(i)
    return firsts
