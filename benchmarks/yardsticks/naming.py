"""Naming: visual tokens start as the embeddings of the words for what they show, turned by 60°.

Without it the language model would have to find by chance which of many visual tokens a word is
about.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from string import ascii_lowercase
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.yardsticks.pages import MERGE
from benchmarks.yardsticks.scenes import COLOURS, SHAPES, WORDS
from benchmarks.yardsticks.training import UNLABELLED

NAMING_WEIGHT = 0.3
"""Weight of :func:`naming_loss` beside the loss of answers."""
MATCH_HEADS = 4
"""Number of heads of a layer that start by finding the tokens that show a word."""

_TURN = math.pi / 3
# With the scale of the other weights, outputs of untrained layers would drown the embeddings.
_OUTPUT_SCALE = 0.3
_MLP_SCALE = 0.1
# Scale from cosines to the logits of naming; a token of three names has a cosine of 0.58 with each.
_NAMING_SCALE = 20.0

_DIGITS = tuple(map(str, range(10)))
# Names of the classes of the fields that have any; each name is one token.
_NAMES: dict[str, Sequence[str]] = {
    "word": [f" {word}" for word in WORDS],
    "head": [f" {word}" for word in WORDS],
    "tens": [f" {digit}" for digit in _DIGITS],
    "units": _DIGITS,
    "digit": [f" {digit}" for digit in _DIGITS],
    "letter": ascii_lowercase,
    "name": [f" {colour} {shape}" for colour in COLOURS for shape in SHAPES],
}


@cache
def image_basis(width: int) -> Tensor:
    """A fixed rotation (D, D) from the embeddings of words to image tokens that show them.

    Every vector turns by `_TURN`, so an image token still has a positive cosine with the word for
    what it shows; policies that read the question can find it.
    """
    generator = torch.Generator().manual_seed(0)
    axes = torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
    cosine = math.cos(_TURN)
    sine = math.sin(_TURN)
    turn = torch.tensor([[cosine, -sine], [sine, cosine]])
    return axes @ torch.block_diag(*[turn] * (width // 2)) @ axes.T


def start_by_matching(language: nn.Module) -> None:
    """Let heads of every layer start by finding earlier image tokens that show a word.

    Keys and values undo the rotation of :func:`image_basis`, so that a word finds these tokens, and
    what they show is added in the basis of words.
    """
    layers: Any = language.get_submodule("layers")
    for layer in layers:
        attention = layer.self_attn
        key = attention.k_proj.weight
        value = attention.v_proj.weight
        basis = image_basis(value.shape[1])
        rows = MATCH_HEADS * attention.head_dim
        key[:rows] = attention.q_proj.weight[:rows] @ basis
        attention.o_proj.weight.copy_(_OUTPUT_SCALE * value.T)
        value.copy_(value @ basis)
        layer.mlp.down_proj.weight.mul_(_MLP_SCALE)


def skip_frequencies(attention: nn.Module, count: int) -> None:
    """Let heads that start by matching not read the fastest rotary frequencies."""
    width: Any = attention.head_dim
    for name in ("q_proj", "k_proj"):
        weight = attention.get_parameter(f"{name}.weight")
        # In a head, halves of pairs come first, then frequencies.
        heads = weight.view(-1, 2, width // 2, weight.shape[1])
        heads[:MATCH_HEADS, :, :count] = 0


def naming_loss(
    tokenizer: Tokenizer, rows: Tensor, table: Tensor, fields: Mapping[str, Tensor]
) -> Tensor:
    """Cross entropy of the cosines of rows (B, N, D) with the embeddings of what they show.

    The rows are in the basis of image tokens; table (V, D) has the embeddings of words; fields have
    labels (B, N · MERGE²) by name.
    """
    # Shares (B, N, V) of the words and digits that name what each image token shows.
    shares = torch.zeros(*rows.shape[:2], len(table))
    names = fields["colour"] * len(SHAPES) + fields["shape"]
    fields = {**fields, "name": torch.where(fields["colour"] >= 0, names, UNLABELLED)}
    for name, texts in _NAMES.items():
        ids = torch.tensor([tokenizer.encode(text).ids for text in texts]).squeeze(1)
        target = fields[name]
        image, patch = ((target >= 0) & (target < len(ids))).nonzero(as_tuple=True)
        shares[image, patch // MERGE**2, ids[target[image, patch]]] = 1.0
    shares = shares / shares.sum(-1, keepdim=True).clamp(min=1.0)
    shows = shares.sum(-1) > 0
    turned = F.normalize(rows[shows].float() @ image_basis(rows.shape[2]).T, dim=-1)
    logits = _NAMING_SCALE * turned @ F.normalize(table.float(), dim=-1).T
    return -(shares[shows] * logits.log_softmax(-1)).sum(-1).mean()
