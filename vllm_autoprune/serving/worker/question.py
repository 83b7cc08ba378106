"""What policies read of the question: spaces of relevance, the language model's first layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from vllm_autoprune.ops.rowwise import upload
from vllm_autoprune.serving.plan import Ids
from vllm_autoprune.serving.settings import TextTower
from vllm_autoprune.serving.worker.tensor_parallel import gather_over_ranks, world_size
from vllm_autoprune.tpdsl.prefix import DecoderLayer, DecoderPrefix, PrefixOutput

if TYPE_CHECKING:
    from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaModel

# Embedding spaces in which relevance is measured: CLIP's, or the language model's own.


class RelevanceSpace(Protocol):
    """Space into which visual tokens and instructions are embedded."""

    sign: int

    def patches(self, hidden: Tensor) -> Tensor | None:
        """Vision-tower states ``(B, N, Dv)`` in that space; None where it is the projected one."""

    def instructions(self, ids: Sequence[Ids]) -> tuple[Tensor, Tensor]:
        """Text ``(B, M, C)`` and which of its rows are segments ``(B, M)``."""


class InputEmbeddings:
    """The language model's input space: an instruction is the mean of its embeddings.

    The sign is +1: only CLIP's relevance is inverted, according to CDPruner's authors and to those
    who use the method with models without a text tower.
    """

    sign = 1

    def __init__(self, embed: Callable[[Tensor], Tensor], device: torch.device) -> None:
        self._embed = embed
        self._device = device

    def patches(self, hidden: Tensor) -> None:
        """None, because the projected features are compared."""
        return None

    def instructions(self, ids: Sequence[Ids]) -> tuple[Tensor, Tensor]:
        """One segment each; an empty instruction has none."""
        # One lookup for the batch: under tensor parallelism every lookup is a collective.
        flat = upload(torch.tensor([t for row in ids for t in row] or [0]), self._device)
        embedded = self._embed(flat).float()
        lengths = [len(row) for row in ids]
        parts = embedded[: sum(lengths)].split(lengths)
        zero = embedded.new_zeros(embedded.shape[1])
        means = [part.mean(dim=0) if len(part) else zero for part in parts]
        used = upload(torch.tensor([[n > 0] for n in lengths]), self._device)
        return torch.stack(means)[:, None], used


class ClipTower:
    """CLIP's joint space, as CDPruner's code measures relevance on LLaVA.

    Patches are the states that the model itself reads, through CLIP's post_layernorm and visual
    projection; the text tower's pooled output is projected. All of it in float32, as published.
    """

    def __init__(self, tower: TextTower, device: torch.device) -> None:
        from transformers import CLIPModel

        self.sign = tower.sign
        self._segment = tower.segment
        self._device = device
        clip = CLIPModel.from_pretrained(tower.path, dtype=torch.float32)
        self._text = nn.ModuleDict({"model": clip.text_model, "projection": clip.text_projection})
        self._vision = nn.Sequential(clip.vision_model.post_layernorm, clip.visual_projection)
        for part in (self._text, self._vision):
            part.to(device).eval().requires_grad_(False)

    def patches(self, hidden: Tensor) -> Tensor:
        """``(B, N, Dv)`` -> ``(B, N, C)``."""
        projected: Tensor = self._vision(hidden.float())
        return projected

    def instructions(self, ids: Sequence[Ids]) -> tuple[Tensor, Tensor]:
        """One row for each segment; all segments of a batch go through the tower at once."""
        # Nothing is kept of a text: its time would tell another tenant that it was asked before.
        cut = {row: split_segments(row, self._segment) for row in ids}
        pooled = self._pooled([segment for row in cut.values() for segment in row])
        rows = dict(zip(cut, pooled.split([len(row) for row in cut.values()]), strict=True))
        parts = [rows[row] for row in ids]
        text = nn.utils.rnn.pad_sequence(parts, batch_first=True)
        counts = upload(torch.tensor([len(part) for part in parts]), self._device)
        used = torch.arange(text.shape[1], device=self._device)[None] < counts[:, None]
        return text, used

    def _pooled(self, rows: Sequence[Ids]) -> Tensor:
        # The tower is causal and pools at the end token, so padding behind changes nothing: neither
        # its length nor a mask, whose values transformers would read from the device.
        length = max(1, *map(len, rows))  # some tokenizers return no ids for an empty instruction
        ids = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows], dtype=torch.int64)
        output = self._text["model"](input_ids=upload(ids, self._device))
        projected: Tensor = self._text["projection"](output.pooler_output)
        return projected


def split_segments(ids: Ids, size: int) -> list[Ids]:
    """Token ids cut into segments of the tower's length, the last one shorter.

    CDPruner pads the whole to a multiple of the length instead of truncating; later segments
    have no start token and pool where the tower finds its end token, faithfully so.
    """
    return [ids[i : i + size] for i in range(0, max(len(ids), 1), size)]


# First layers of the served language model over [start, image, instruction], before prefill.
#
# The layers' own projections, norms and MLP are called with plain attention: no KV cache, no
# attention metadata, outside of the compiled graph. One image at a time and without padding, so an
# image's selection cannot depend on its batch, and memory is that of one sequence.


class FirstLanguageLayers:
    """The first layers of a Llama, as they are served."""

    def __init__(self, model: LlamaModel, start: Ids, device: torch.device) -> None:
        self._model = model
        self._start = start
        self._device = device

    def read(self, image: Tensor, instruction: Ids) -> LlamaPrefix:
        """The prefix of one image ``(N, D)``; nothing but the embeddings is computed yet.

        An empty instruction is the start token once more: policies ask for at least one word.
        """
        words = instruction or self._start
        ids = upload(torch.tensor([*self._start, *words]), self._device)
        embedded = self._model.embed_tokens(ids)
        before, after = embedded.split([len(self._start), len(words)])
        sequence = torch.cat([before, image.to(embedded.dtype), after])
        return LlamaPrefix(self._model, sequence, len(self._start), len(words))


class LlamaPrefix(DecoderPrefix):
    """Prefix of one image, layer by layer.

    Every tensor-parallel rank must make the same calls in the same order; results are bit-identical
    on all ranks.
    """

    def __init__(self, model: LlamaModel, sequence: Tensor, start: int, words: int) -> None:
        positions = torch.arange(len(sequence), device=sequence.device)
        layers = [_decoder_layer(block, positions) for block in model.layers]
        super().__init__(layers, model.norm, sequence, start, words)
        self._model = model

    def read(self, output: PrefixOutput, layer: int) -> Tensor:
        """The output of the one sequence, heads gathered over ranks."""
        local, shared = super().read(output, layer), world_size()
        if shared == 1 or output not in ("keys", "attention"):
            return local
        heads = gather_over_ranks(local[0], dim=0)[None]
        if output == "attention":
            return heads
        # Where there are more ranks than key heads, neighbours hold the same one.
        copies = max(1, shared // self._model.layers[layer].self_attn.total_num_kv_heads)
        return heads[:, ::copies]


def _decoder_layer(block: LlamaDecoderLayer, positions: Tensor) -> DecoderLayer:
    """The layer as it is served; norms are called without a residual, into which they write."""
    attention = block.self_attn

    def heads(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        packed, _ = attention.qkv_proj(rows)
        sizes = [attention.q_size, attention.kv_size, attention.kv_size]
        query, key, value = packed.split(sizes, dim=-1)
        query, key = attention.rotary_emb(positions, query, key)
        width = attention.head_dim
        query, key, value = (
            part.unflatten(-1, (-1, width)).transpose(0, 1) for part in (query, key, value)
        )
        return query, key, value

    def output(rows: Tensor) -> Tensor:
        projected: Tensor = attention.o_proj(rows)[0]
        return projected

    return DecoderLayer(
        block.input_layernorm, heads, output, block.post_attention_layernorm, block.mlp
    )
