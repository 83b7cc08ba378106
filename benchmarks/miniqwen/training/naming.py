"""Loss that ties image tokens to the words for what they show.

Without it the language model has to find by chance which of many image tokens a word is about.
"""

from __future__ import annotations

import functools

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from benchmarks.minillava.layout import COLOURS, SHAPES
from benchmarks.miniqwen.pages import WORDS
from benchmarks.miniqwen.sizes import MERGE
from benchmarks.miniqwen.training.models import image_basis
from benchmarks.miniqwen.training.pictures import FIELDS
from benchmarks.miniqwen.vocabulary import VOCABULARY

# Logits are cosines times this; a token of three names has a cosine of 0.58 with each.
_SCALE = 20.0


@functools.cache
def _token_tables() -> dict[str, list[str]]:
    """Texts of every class of the fields that have a word, each one token."""
    digits = list(map(str, range(10)))
    return {
        "word": [f" {word}" for word in WORDS],
        "head": [f" {word}" for word in WORDS],
        "tens": [f" {digit}" for digit in digits],
        "units": digits,
        "digit": [f" {digit}" for digit in digits],
        "name": [f" {colour} {shape}" for colour in COLOURS for shape in SHAPES],
    }


def name_tokens(tokenizer: Tokenizer, labels: Tensor) -> Tensor:
    """Shares (B, N, VOCABULARY) of the tokens for what each image token shows; zero for nothing."""
    _, count, patches = labels.shape
    shares = torch.zeros(count, patches // MERGE**2, VOCABULARY)
    fields = dict(zip(FIELDS, labels, strict=True))
    fields["name"] = torch.where(
        fields["colour"] >= 0, fields["colour"] * len(SHAPES) + fields["shape"], -1
    )
    for name, texts in _token_tables().items():
        ids = torch.tensor([_single_token(tokenizer, text) for text in texts])
        target = fields[name]
        image, patch = ((target >= 0) & (target < len(ids))).nonzero(as_tuple=True)
        shares[image, patch // MERGE**2, ids[target[image, patch]]] = 1.0
    return shares / shares.sum(-1, keepdim=True).clamp(min=1.0)


def _single_token(tokenizer: Tokenizer, text: str) -> int:
    ids: list[int] = tokenizer.encode(text).ids
    assert len(ids) == 1, text
    return ids[0]


def naming_loss(rows: Tensor, table: Tensor, names: Tensor) -> Tensor:
    """Cross entropy between shares of tokens and the cosines of rows (B, N, D) with the table.

    The rows are in the basis of image tokens.
    """
    shows = names.sum(-1) > 0
    turned = F.normalize(rows[shows].float() @ image_basis().T, dim=-1)
    logits = _SCALE * turned @ F.normalize(table.float(), dim=-1).T
    return -(names[shows] * logits.log_softmax(-1)).sum(-1).mean()
