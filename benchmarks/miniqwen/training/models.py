"""The model that is trained: transformers' modules, run on batches of images of one size."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLTextModel,
    Qwen3VLVisionModel,
    rotate_half,
)
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from benchmarks.minillava.layout import PATCH
from benchmarks.minillava.training.models import in_place_attention
from benchmarks.minillava.vocabulary import token_id
from benchmarks.miniqwen.sizes import MERGE, Size
from benchmarks.miniqwen.training.pictures import FIELDS
from benchmarks.miniqwen.vocabulary import (
    END,
    IMAGE_TOKEN,
    PAD,
    VIDEO_TOKEN,
    VISION_END,
    VISION_START,
    VOCABULARY,
)

VISION_WIDTH = 128
LANGUAGE_WIDTH = 192
_FRAMES = 2
"""Frames per temporal patch: an image is a video of two equal frames."""
_POSITION_GRID = 16
# Rows and columns must be readable from the first step on.
_POSITION_SCALE = 0.6
# Where the heads of the first layers look at the start, in rows and columns from a patch; None is
# anywhere. From a start without preference, a tower did not learn in 600 steps to look at the patch
# beside, which has the other digit of a number.
_NEAR = ((0, -1), (0, 1), (-1, 0), (1, 0))
_AXES = ((0, None), (None, 0))
_LOOKS: tuple[tuple[tuple[int | None, int | None], ...], ...] = (_NEAR, _NEAR, _AXES, _AXES)
_LOOK_STRENGTH = 33.0
_LOOK_FREQUENCIES = 3
_MATCH_HEADS = 4
_MATCH_SCALE = 1.7
# At the scale of the other weights, outputs of untrained layers would drown the embeddings.
_OUTPUT_SCALE, _MLP_SCALE = 0.3, 0.1


def model_config(tokenizer: Tokenizer) -> Qwen3VLConfig:
    """The sizes of both towers."""
    config = Qwen3VLConfig(
        vision_config={
            "depth": 5, "hidden_size": VISION_WIDTH, "intermediate_size": 3 * VISION_WIDTH,
            "num_heads": 4, "patch_size": PATCH, "spatial_merge_size": MERGE,
            "temporal_patch_size": _FRAMES, "out_hidden_size": LANGUAGE_WIDTH,
            "num_position_embeddings": _POSITION_GRID**2, "deepstack_visual_indexes": [2, 3],
            "initializer_range": 0.05,
        },
        text_config={
            "vocab_size": VOCABULARY, "hidden_size": LANGUAGE_WIDTH, "intermediate_size": 512,
            "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 6,
            "head_dim": 32, "max_position_embeddings": 4096, "initializer_range": 0.06,
            "pad_token_id": token_id(tokenizer, PAD), "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 100000.0, "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
        image_token_id=token_id(tokenizer, IMAGE_TOKEN),
        video_token_id=token_id(tokenizer, VIDEO_TOKEN),
        vision_start_token_id=token_id(tokenizer, VISION_START),
        vision_end_token_id=token_id(tokenizer, VISION_END),
        tie_word_embeddings=True,
    )  # fmt: skip
    config.text_config.eos_token_id = token_id(tokenizer, END)
    return config


def build_model(tokenizer: Tokenizer) -> Qwen3VLForConditionalGeneration:
    """Initialise the model; the position table starts as waves over rows and columns."""
    model = Qwen3VLForConditionalGeneration(model_config(tokenizer))
    model.model.language_model.config._attn_implementation = "in_place"
    with torch.no_grad():
        frequencies = torch.pi / 2 ** torch.linspace(0, 4, VISION_WIDTH // 4)
        angles = torch.arange(_POSITION_GRID)[:, None] * frequencies
        waves = torch.cat((angles.sin(), angles.cos()), 1)
        row = waves[:, None].expand(_POSITION_GRID, _POSITION_GRID, -1)
        table = torch.cat((row, row.transpose(0, 1)), -1).flatten(0, 1)
        model.model.visual.pos_embed.weight.copy_(table * _POSITION_SCALE)
        _point_heads(model.model.visual)
        _match_heads(model.model.language_model)
    return model


def _point_heads(tower: Qwen3VLVisionModel) -> None:
    """Set the biases of queries and keys so that rotation gives heads their first looks."""
    frequencies = tower.rotary_pos_emb.inv_freq[:_LOOK_FREQUENCIES]
    strength = _LOOK_STRENGTH**0.5
    for block, looks in zip(tower.blocks, _LOOKS, strict=False):
        bias = block.attn.qkv.bias.view(3, block.attn.num_heads, 2, 2, -1)
        # Halves of a rotated pair come first, then rows and columns, then frequencies.
        for head, look in enumerate(looks):
            for axis, offset in enumerate(look):
                if offset is not None:
                    angles = -frequencies * offset
                    bias[0, head, 0, axis, :_LOOK_FREQUENCIES] = strength
                    bias[1, head, 0, axis, :_LOOK_FREQUENCIES] = strength * angles.cos()
                    bias[1, head, 1, axis, :_LOOK_FREQUENCIES] = strength * angles.sin()


@functools.cache
def image_basis() -> Tensor:
    """A fixed rotation (D, D) from embeddings of words to image tokens that show them."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(LANGUAGE_WIDTH, LANGUAGE_WIDTH, generator=generator)
    return torch.linalg.qr(matrix)[0]


def _match_heads(language: Qwen3VLTextModel) -> None:
    """Let the heads of the language model start with a look at the image tokens that show a word.

    Keys and values undo the rotation of `image_basis`, so that a word finds image tokens, but not
    itself, and what they show is added in the basis of words.
    """
    undo = image_basis()
    for layer in language.layers:
        attention = layer.self_attn
        rows = _MATCH_HEADS * attention.head_dim
        attention.k_proj.weight[:rows] = attention.q_proj.weight[:rows] @ undo
        attention.o_proj.weight.copy_(_OUTPUT_SCALE * attention.v_proj.weight.T)
        attention.v_proj.weight.copy_(attention.v_proj.weight @ undo)
        layer.mlp.down_proj.weight.mul_(_MLP_SCALE)
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight.fill_(_MATCH_SCALE)


@functools.cache
def _positions(size: Size) -> tuple[Tensor, Tensor, Tensor]:
    """Taps (P, 4) and weights (P, 4) of the position table, and rows and columns (2, P)."""
    grid = torch.tensor([[1, size.rows * MERGE, size.columns * MERGE]])
    taps, weights = get_vision_interpolation_indices_and_weights(
        grid, _POSITION_GRID, align_corners=True, spatial_merge_size=MERGE
    )
    return taps, weights, get_vision_position_ids(grid, MERGE)


@dataclass(frozen=True)
class TowerStates:
    """States (B, P, VISION_WIDTH) that each deepstack merger reads, and of the last layer."""

    levels: tuple[Tensor, ...]
    last: Tensor


def tower_states(tower: Qwen3VLVisionModel, patches: Tensor, size: Size) -> TowerStates:
    """States of images of one size; patches (B, N, MERGE², 3 · PATCH²)."""
    taps, weights, places = _positions(size)
    kernel = tower.patch_embed.proj.weight.sum(2).flatten(1)
    hidden = patches.flatten(1, 2).to(kernel.dtype) @ kernel.T + tower.patch_embed.proj.bias
    table = (tower.pos_embed(taps) * weights[:, :, None]).sum(1)
    hidden = hidden + table.to(hidden.dtype)
    with torch.no_grad():
        cosine, sine = (part.to(hidden.dtype) for part in tower.rotary_pos_emb(hidden, places))
    levels: list[Tensor] = []
    for number, block in enumerate(tower.blocks):
        attention = block.attn
        rows = attention.qkv(block.norm1(hidden))
        rows = rows.unflatten(-1, (3, attention.num_heads, attention.head_dim))
        query, key, value = rows.permute(2, 0, 3, 1, 4)
        query = query * cosine + rotate_half(query) * sine
        key = key * cosine + rotate_half(key) * sine
        mixed, _ = in_place_attention(attention, query, key, value, None, attention.scaling)
        hidden = hidden + attention.proj(mixed.flatten(2))
        hidden = hidden + block.mlp(block.norm2(hidden))
        if number in tower.deepstack_visual_indexes:
            levels.append(hidden)
    return TowerStates(tuple(levels), hidden)


def merge_states(tower: Qwen3VLVisionModel, states: TowerStates) -> tuple[Tensor, list[Tensor]]:
    """Rows (B, N, LANGUAGE_WIDTH) for the first layer, and those added after the next layers."""
    size = len(states.last)

    def merged(merger: nn.Module, patches: Tensor) -> Tensor:
        rows: Tensor = merger(patches.flatten(0, 1))
        return rows.unflatten(0, (size, -1))

    levels = zip(tower.deepstack_merger_list, states.levels, strict=True)
    return merged(tower.merger, states.last), [merged(merger, level) for merger, level in levels]


class DenseHeads(nn.Module):
    """Linear classifiers of single patches, which exist during training only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(VISION_WIDTH)
        self.out = nn.Linear(VISION_WIDTH, sum(FIELDS.values()))

    def forward(self, patches: Tensor) -> dict[str, Tensor]:
        """(B, P, VISION_WIDTH) → logits by field."""
        logits = self.out(self.norm(patches)).split(list(FIELDS.values()), -1)
        return dict(zip(FIELDS, logits, strict=True))
