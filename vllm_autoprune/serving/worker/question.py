"""What policies read of the question: spaces of relevance, the language model's first layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from vllm_autoprune.ops.rowwise import upload
from vllm_autoprune.serving.compat.worker import world_size
from vllm_autoprune.serving.plan import Ids
from vllm_autoprune.text_tower import TextTower
from vllm_autoprune.tpdsl.prefix import DecoderLayer, DecoderPrefix, PrefixOutput

if TYPE_CHECKING:
    from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaModel


class RelevanceSpace(Protocol):
    """Space in which visual tokens and instructions are embedded to measure relevance."""

    sign: int

    def patches(self, hidden: Tensor) -> Tensor | None:
        """Vision-tower states ``(B, N, Dv)`` in that space; None if it is the projected space."""

    def instructions(self, ids: Sequence[Ids]) -> tuple[Tensor, Tensor]:
        """Text ``(B, M, C)`` and the mask ``(B, M)`` of its rows that are segments."""


class InputEmbeddings:
    """The language model's input space: an instruction is the mean of its embeddings.

    The sign is +1: only CLIP's relevance is inverted, according to CDPruner's authors and to users
    of the method with models without a text tower.
    """

    sign = 1

    def __init__(self, embed: Callable[[Tensor], Tensor], device: torch.device) -> None:
        self._embed = embed
        self._device = device

    def patches(self, hidden: Tensor) -> None:
        """None, because the projected features are compared."""
        return None

    def instructions(self, ids: Sequence[Ids]) -> tuple[Tensor, Tensor]:
        """One segment per instruction; an empty instruction has none."""
        # One lookup for the batch: under tensor parallelism every lookup is a collective.
        flat = upload(
            torch.tensor([t for row in ids for t in row] or [0]), self._device
        )
        embedded = self._embed(flat).float()
        lengths = [len(row) for row in ids]
        parts = embedded[: sum(lengths)].split(lengths)
        zero = embedded.new_zeros(embedded.shape[1])
        means = [part.mean(dim=0) if len(part) else zero for part in parts]
        used = upload(torch.tensor([[n > 0] for n in lengths]), self._device)
        return torch.stack(means)[:, None], used


class ClipTower:
    """CLIP's joint space, in which CDPruner's code measures relevance on LLaVA.

    Patches are the states that the model itself reads, mapped by CLIP's post_layernorm and visual
    projection; text is the text tower's pooled output, projected. Everything is in float32, as
    published.
    """

    def __init__(self, tower: TextTower, device: torch.device) -> None:
        from transformers import CLIPModel

        self.sign = tower.sign
        self._segment = tower.segment
        self._device = device
        clip = CLIPModel.from_pretrained(tower.path, dtype=torch.float32)
        self._text = nn.ModuleDict(
            {"model": clip.text_model, "projection": clip.text_projection}
        )
        self._vision = nn.Sequential(
            clip.vision_model.post_layernorm, clip.visual_projection
        )
        for part in (self._text, self._vision):
            part.to(device).eval().requires_grad_(False)

    def patches(self, hidden: Tensor) -> Tensor:
        """``(B, N, Dv)`` -> ``(B, N, C)``."""
        projected: Tensor = self._vision(hidden.float())
        return projected

    def instructions(self, ids: Sequence[Ids]) -> tuple[Tensor, Tensor]:
        """One row for each segment; all segments of a batch go through the tower at once.

        CDPruner pads the text to a multiple of the tower's length instead of truncating it. As
        there, later segments have no start token, and are pooled at the tower's end token.
        """
        # Nothing is cached by text: a shorter time would tell another tenant that it was asked
        # before.
        size = self._segment
        segments_of = {
            instruction: [
                instruction[i : i + size]
                for i in range(0, max(len(instruction), 1), size)
            ]
            for instruction in ids
        }
        segments = [segment for parts in segments_of.values() for segment in parts]
        # The tower is causal and pools at the end token, so padding after it changes nothing,
        # however long it is. No mask is passed: transformers would read its values from the device.
        length = max(
            1, *map(len, segments)
        )  # some tokenizers return no ids for an empty instruction
        padded = torch.tensor(
            [[*segment, *[0] * (length - len(segment))] for segment in segments]
        ).long()
        output = self._text["model"](input_ids=upload(padded, self._device))
        pooled: Tensor = self._text["projection"](output.pooler_output)
        counts = [len(parts) for parts in segments_of.values()]
        embedded = dict(zip(segments_of, pooled.split(counts), strict=True))
        rows = [embedded[instruction] for instruction in ids]
        text = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = upload(torch.tensor([len(part) for part in rows]), self._device)
        used = torch.arange(text.shape[1], device=self._device)[None] < lengths[:, None]
        return text, used


class LlamaPrefix(DecoderPrefix):
    """First layers of the served Llama over [start, image, instruction], before prefill.

    The layers' own projections, norms and MLP are called with plain attention: no KV cache, no
    attention metadata, outside of the compiled graph. Images ``(N, D)`` run one at a time and
    without padding, so that an image's selection cannot depend on its batch, and memory is that of
    one sequence. Only the embeddings are computed before a layer is read. Every tensor-parallel
    rank must make the same calls in the same order; results are bit-identical on all ranks.
    """

    def __init__(
        self, model: LlamaModel, start: Ids, image: Tensor, instruction: Ids
    ) -> None:
        # An empty instruction is replaced by the start token, because policies need at least one
        # word.
        words = instruction or start
        embedded = model.embed_tokens(
            upload(torch.tensor([*start, *words]), image.device)
        )
        before, after = embedded.split([len(start), len(words)])
        sequence = torch.cat([before, image.to(embedded.dtype), after])
        positions = torch.arange(len(sequence), device=sequence.device)
        layers = [_make_layer(block, positions) for block in model.layers]
        super().__init__(layers, model.norm, sequence, len(start), len(words))
        self._model = model

    def read(self, output: PrefixOutput, layer: int) -> Tensor:
        """The output of the sequence, with heads gathered over ranks."""
        local = super().read(output, layer)
        ranks = world_size()
        if ranks == 1 or output not in ("keys", "attention"):
            return local
        from vllm.distributed import tensor_model_parallel_all_gather

        heads: Tensor = tensor_model_parallel_all_gather(local[0].contiguous(), 0)[None]
        if output == "attention":
            return heads
        # With more ranks than key heads, neighbouring ranks hold the same key head.
        copies = max(1, ranks // self._model.layers[layer].self_attn.total_num_kv_heads)
        return heads[:, ::copies]


def _make_layer(block: LlamaDecoderLayer, positions: Tensor) -> DecoderLayer:
    """The layer as it is served; norms get no residual, which they would overwrite."""
    attention = block.self_attn

    def heads(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        packed, _ = attention.qkv_proj(rows)
        sizes = [attention.q_size, attention.kv_size, attention.kv_size]
        query, key, value = packed.split(sizes, dim=-1)
        query, key = attention.rotary_emb(positions, query, key)
        width = attention.head_dim
        query, key, value = (
            part.unflatten(-1, (-1, width)).transpose(0, 1)
            for part in (query, key, value)
        )
        return query, key, value

    def output(rows: Tensor) -> Tensor:
        projected: Tensor = attention.o_proj(rows)[0]
        return projected

    return DecoderLayer(
        block.input_layernorm, heads, output, block.post_attention_layernorm, block.mlp
    )
