"""The models that are trained: CLIP's two towers, the projector and the language model."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    CLIPConfig,
    CLIPModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from benchmarks.minillava.layout import COLOURS, MAX_DIGITS, NEIGHBOURS, PATCH, SHAPES, Canvas
from benchmarks.minillava.vocabulary import (
    BEGIN,
    CLIP_BEGIN,
    CLIP_END,
    CLIP_LENGTH,
    END,
    PAD,
    VOCABULARY,
    token_id,
)

VISION_WIDTH = 160
TEXT_WIDTH = 128
LANGUAGE_WIDTH = 192
# The language model must be able to read rows and columns from the first step on, or it learns to
# do without them: at CLIP's scale of 0.02 the position table is drowned by the patches.
_POSITION_SCALE = 0.5
_ATTENTION = "in_place"


def in_place_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **unused: object,
) -> tuple[Tensor, None]:
    """Eager attention (B, H, T, D) → (B, T, H, D) with fewer passes over (B, H, T, T).

    It scales the queries instead of the weights and stays in the inputs' type throughout, which
    saves a good part of a training step on a CPU.
    """
    weights = (query * scaling) @ key.transpose(2, 3)
    if attention_mask is not None:
        weights += attention_mask
    return (weights.softmax(-1) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(_ATTENTION, in_place_attention)


def clip_config(tokenizer: Tokenizer, canvas: Canvas) -> CLIPConfig:
    """The sizes of both towers; a larger cosine means more relevant."""
    end = token_id(tokenizer, CLIP_END)
    config = CLIPConfig(
        projection_dim=TEXT_WIDTH,
        vision_config={
            "hidden_size": VISION_WIDTH, "intermediate_size": 3 * VISION_WIDTH,
            "num_attention_heads": 5, "projection_dim": TEXT_WIDTH, "num_hidden_layers": 5,
            "image_size": canvas.image, "patch_size": PATCH,
        },
        text_config={
            "hidden_size": TEXT_WIDTH, "intermediate_size": 3 * TEXT_WIDTH,
            "num_attention_heads": 4, "projection_dim": TEXT_WIDTH, "num_hidden_layers": 2,
            "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": CLIP_LENGTH,
            "eos_token_id": end, "pad_token_id": end,
            "bos_token_id": token_id(tokenizer, CLIP_BEGIN),
        },
        attn_implementation="eager",
    )  # fmt: skip
    config.autoprune_relevance_sign = 1
    return config


def build_clip(tokenizer: Tokenizer, canvas: Canvas) -> CLIPModel:
    """Initialise both towers; the position table starts as waves over rows and columns."""
    clip = CLIPModel(clip_config(tokenizer, canvas))
    clip.vision_model.config._attn_implementation = _ATTENTION
    with torch.no_grad():
        table = clip.vision_model.embeddings.position_embedding.weight
        table[1:] = _position_waves(canvas.grid) * _POSITION_SCALE
    return clip


def _position_waves(grid: int) -> Tensor:
    """(N, VISION_WIDTH): sines and cosines of every patch's row and column."""
    frequencies = torch.pi / 2 ** torch.linspace(0, 4, VISION_WIDTH // 4)
    angles = torch.arange(grid)[:, None] * frequencies
    waves = torch.cat((angles.sin(), angles.cos()), 1)
    row = waves[:, None].expand(grid, grid, -1)
    return torch.cat((row, row.transpose(0, 1)), -1).flatten(0, 1)


def penultimate_states(clip: CLIPModel, values: Tensor) -> Tensor:
    """Hidden states (B, 1 + N, VISION_WIDTH) before the last layer, which LLaVA reads."""
    tower = clip.vision_model
    hidden = tower.pre_layrnorm(tower.embeddings(values))
    for layer in tower.encoder.layers[:-1]:
        hidden = layer(hidden, attention_mask=None)
    return hidden


class DenseHeads(nn.Module):
    """Linear classifiers of single patches, which exist during training only."""

    def __init__(self, canvas: Canvas) -> None:
        super().__init__()
        self.sizes = {
            "kind": 3, "colour": len(COLOURS), "shape": len(SHAPES), "digit": 10,
            "row": canvas.cells, "column": canvas.cells, "slot": MAX_DIGITS,
            "length": MAX_DIGITS - 1, "centre": 2,
        }  # fmt: skip
        self.near = (len(COLOURS) + 1, len(SHAPES) + 1)
        self.norm = nn.LayerNorm(VISION_WIDTH)
        total = sum(self.sizes.values()) + len(NEIGHBOURS) * sum(self.near)
        self.out = nn.Linear(VISION_WIDTH, total)

    def forward(self, patches: Tensor) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
        """(B, N, VISION_WIDTH) → logits by field of `Labels`, and of each neighbour."""
        logits = self.out(self.norm(patches))
        own, near = logits.split([sum(self.sizes.values()), len(NEIGHBOURS) * sum(self.near)], -1)
        parts = own.split(list(self.sizes.values()), -1)
        neighbours = near.unflatten(-1, (len(NEIGHBOURS), sum(self.near))).unbind(-2)
        pairs = [
            (colour, shape) for colour, shape in (one.split(self.near, -1) for one in neighbours)
        ]
        return dict(zip(self.sizes, parts, strict=True)), pairs


class Projector(nn.Module):
    """LLaVA-1.5's projector: two linear layers with a GELU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(VISION_WIDTH, LANGUAGE_WIDTH)
        self.linear_2 = nn.Linear(LANGUAGE_WIDTH, LANGUAGE_WIDTH)

    def forward(self, patches: Tensor) -> Tensor:
        """(B, K, VISION_WIDTH) → (B, K, LANGUAGE_WIDTH)."""
        projected: Tensor = self.linear_2(F.gelu(self.linear_1(patches)))
        return projected


def build_language_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """Initialise the language model."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=LANGUAGE_WIDTH,
            intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=6,
            max_position_embeddings=4096,
            # At Llama's 0.02, attention of this width starts almost uniform.
            initializer_range=0.06,
            bos_token_id=token_id(tokenizer, BEGIN),
            eos_token_id=token_id(tokenizer, END),
            pad_token_id=token_id(tokenizer, PAD),
            tie_word_embeddings=False,
            attn_implementation=_ATTENTION,
        )
    )
