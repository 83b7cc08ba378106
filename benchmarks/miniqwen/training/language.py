"""Batches and loss of the stages that train the mergers and the language model."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3VLForConditionalGeneration

from benchmarks.minillava.render import Scene
from benchmarks.minillava.training.language import drop_tokens
from benchmarks.minillava.training.sequences import (
    IGNORED,
    PADDING,
    PREFIX,
    UNSCORED,
    TextSequence,
    answer_loss,
    attention_mask,
    build_sequence,
    pad_rows,
)
from benchmarks.minillava.training.towers import LossParts
from benchmarks.minillava.vocabulary import token_id
from benchmarks.miniqwen.pages import Number, Page, Word
from benchmarks.miniqwen.sizes import Size
from benchmarks.miniqwen.training.models import merge_states, tower_states
from benchmarks.miniqwen.training.naming import name_tokens, naming_loss
from benchmarks.miniqwen.training.pictures import Pictures, View
from benchmarks.miniqwen.training.texts import (
    PHRASE_WEIGHTS,
    QUESTION_WEIGHTS,
    TRAINED_KINDS,
    draw_texts,
)
from benchmarks.miniqwen.vocabulary import AFTER_IMAGE, BEFORE_IMAGE, END, PAD

_PHRASE = " {question}"
_NAMING_WEIGHT = 0.3


@dataclass(frozen=True)
class LanguageBatch:
    """Sequences of a shared prefix and one block per question.

    The prefix is the text before the image, K of its tokens, and the text between image and
    question. `before` (P,), `after` (Q,) ids; `kept` (B, K) raster tokens ascending; `texts`,
    `labels`, `kinds` (B, L), where kinds are indices into `TRAINED_KINDS` at the answer tokens that
    are scored; `positions` (3, B, T) of M-RoPE and `blocks` (B, T) of the whole sequence; `names`
    (B, N, VOCABULARY) are the targets of `naming_loss`.
    """

    before: Tensor
    after: Tensor
    kept: Tensor
    texts: Tensor
    labels: Tensor
    kinds: Tensor
    positions: Tensor
    blocks: Tensor
    names: Tensor


def draw_budget(seed: int, share: float, tokens: int) -> int:
    """Number of image tokens of a step: all, or for a `share` of steps log-uniform."""
    rng = random.Random(seed)
    if rng.random() >= share:
        return tokens
    return max(1, int(math.exp(rng.uniform(math.log(2), math.log(tokens)))))


def keep_informative_tokens(
    rng: random.Random, content: Scene | Page, size: Size, budget: int
) -> list[int]:
    """`budget` raster tokens, ascending: those that show a digit, a word or a number first."""
    parts: list[Word | Number] = []
    if isinstance(content, Page):
        parts += (*content.words, *content.numbers)
        shown = [part.row * size.columns + part.column for part in parts]
    else:
        shown = [tokens[0] for tokens in content.thing_patches]
    rng.shuffle(shown)
    order = (*shown, *rng.sample(range(size.tokens), size.tokens))
    return sorted(list(dict.fromkeys(order))[:budget])


def language_batch(
    seed: int,
    tokenizer: Tokenizer,
    pictures: Pictures,
    view: View,
    budget: int,
    questions: int,
    phrases: int,
    informative: bool = False,
) -> LanguageBatch:
    """Draw `questions` and `phrases` about every picture.

    Tokens are only dropped at full size: as far as the evidence of the questions allows or, if
    `informative`, first those that show nothing.
    """
    rng = random.Random(seed + 1)
    weights = QUESTION_WEIGHTS if questions else PHRASE_WEIGHTS
    between, template = split_template()
    before, after = tokenizer.encode(BEFORE_IMAGE).ids, tokenizer.encode(between).ids
    seen, end = view.seen, token_id(tokenizer, END)
    start = len(before) + max(seen.rows, seen.columns) + len(after)
    sequences: list[TextSequence] = []
    kept: list[list[int]] = []
    for content in pictures.contents:
        texts = [
            (text.format(question=one.text), one)
            for text, number, brief in ((template, questions, False), (_PHRASE, phrases, True))
            for one in draw_texts(rng, content, view.size, number, brief, weights)
        ]
        chosen = list(range(seen.tokens))
        if informative:
            chosen = keep_informative_tokens(rng, content, view.size, budget)
        elif budget < seen.tokens:
            asked = [question for _, question in texts]
            chosen, answerable = drop_tokens(rng, asked, budget, seen.tokens)
            texts = [one for one, keep in zip(texts, answerable, strict=True) if keep]
        kept.append(chosen)
        sequences.append(build_sequence(tokenizer, texts, start, end, TRAINED_KINDS))
    names = name_tokens(tokenizer, pictures.labels)
    pad = token_id(tokenizer, PAD)
    return _pad_batch(torch.tensor(kept), before, after, seen, sequences, pad, names)


def split_template() -> tuple[str, str]:
    """The text between image and question, and the template from the question on."""
    between, rest = AFTER_IMAGE.split("{question}")
    return between, "{question}" + rest


def _pad_batch(
    kept: Tensor,
    before: list[int],
    after: list[int],
    seen: Size,
    sequences: Sequence[TextSequence],
    pad: int,
    names: Tensor,
) -> LanguageBatch:
    """Pad sequences on the right to the longest, and put the shared prefix in front."""
    count, first = len(sequences), len(before)
    image = torch.stack((torch.full_like(kept, 0), kept // seen.columns, kept % seen.columns))
    text = pad_rows([sequence.positions for sequence in sequences], 0)
    lead = torch.arange(first).expand(3, count, -1)
    between = sequences[0].start - len(after) + torch.arange(len(after))
    positions = [lead, image + first, between.expand(3, count, -1), text.expand(3, -1, -1)]
    prefix = torch.full((count, first + kept.shape[1] + len(after)), PREFIX)
    blocks = pad_rows([sequence.blocks for sequence in sequences], PADDING)
    return LanguageBatch(
        before=torch.tensor(before),
        after=torch.tensor(after),
        kept=kept,
        texts=pad_rows([sequence.texts for sequence in sequences], pad),
        labels=pad_rows([sequence.labels for sequence in sequences], IGNORED),
        kinds=pad_rows([sequence.kinds for sequence in sequences], UNSCORED),
        positions=torch.cat(positions, 2),
        blocks=torch.cat((prefix, blocks), 1),
        names=names,
    )


def language_states(
    model: Qwen3VLForConditionalGeneration, batch: LanguageBatch, pictures: Pictures, seen: Size
) -> tuple[Tensor, Tensor]:
    """Normed states (B, L, LANGUAGE_WIDTH) of the last layer at the texts of a batch.

    Also the rows (B, N, LANGUAGE_WIDTH) of all image tokens for the first layer.
    """
    tower, language = model.model.visual, model.model.language_model
    with torch.no_grad():
        states = tower_states(tower, pictures.patches, seen)
    image, levels = merge_states(tower, states)
    rows = torch.arange(len(batch.kept))[:, None]
    embed = language.embed_tokens
    before = embed(batch.before).expand(len(rows), -1, -1)
    after = embed(batch.after).expand(len(rows), -1, -1)
    hidden = torch.cat((before, image[rows, batch.kept], after, embed(batch.texts)), 1)
    first, length = before.shape[1], hidden.shape[1]
    behind = length - first - batch.kept.shape[1]
    angles = language.rotary_emb(hidden, batch.positions)
    mask = attention_mask(batch.blocks, hidden.dtype)
    for number, layer in enumerate(language.layers):
        hidden = layer(hidden, position_embeddings=angles, attention_mask=mask)
        if number < len(levels):
            hidden = hidden + F.pad(levels[number][rows, batch.kept], (0, 0, first, behind))
    normed: Tensor = language.norm(hidden[:, -batch.texts.shape[1] :])
    return normed, image


def merger_loss(
    model: Qwen3VLForConditionalGeneration, tokenizer: Tokenizer, pictures: Pictures, view: View
) -> tuple[Tensor, LossParts]:
    """`naming_loss` of the rows of all image tokens, without the language model."""
    tower = model.model.visual
    with torch.no_grad():
        states = tower_states(tower, pictures.patches, view.seen)
    rows, _ = merge_states(tower, states)
    names = name_tokens(tokenizer, pictures.labels)
    loss = naming_loss(rows, model.get_input_embeddings().weight, names)
    return loss, {"loss": float(loss.detach())}


def language_loss(
    model: Qwen3VLForConditionalGeneration, batch: LanguageBatch, pictures: Pictures, view: View
) -> tuple[Tensor, LossParts]:
    """Cross entropy on answer tokens, with the accuracy of every kind.

    Kinds end in the divisor of the view, or in "dropped" where tokens are dropped.
    """
    hidden, image = language_states(model, batch, pictures, view.seen)
    dropped = batch.kept.shape[1] < view.seen.tokens
    suffix = "dropped" if dropped else str(view.divisor)
    names = [f"{kind}/{suffix}" for kind in TRAINED_KINDS]
    loss, accuracies = answer_loss(model.lm_head, hidden, batch.labels, batch.kinds, names)
    naming = naming_loss(image, model.model.language_model.embed_tokens.weight, batch.names)
    parts = {"loss": float(loss.detach()), "naming": float(naming.detach())}
    return loss + _NAMING_WEIGHT * naming, parts | accuracies
