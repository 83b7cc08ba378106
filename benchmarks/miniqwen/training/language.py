"""Batches and loss of the stages that train the mergers and the language model."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3VLForConditionalGeneration

from benchmarks.minillava.questions import Question
from benchmarks.minillava.render import Scene
from benchmarks.minillava.training.language import drop_tokens
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

# Values of `LanguageBatch.blocks` for the shared image prefix, and for padding.
_PREFIX, _PADDING = -1, -2
_UNSCORED = -1
_IGNORED = -100
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


@dataclass
class _Sequence:
    """One growing sequence of question blocks, the first of which starts at position `start`."""

    start: int
    texts: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    def add(self, block: int, kind: int, question: list[int], answer: list[int]) -> None:
        # The label of a position is the token that follows it; the end token is not scored.
        self.texts += question + answer
        self.labels += [_IGNORED] * (len(question) - 1) + answer + [_IGNORED]
        self.kinds += [_UNSCORED] * (len(question) - 1) + [kind] * (len(answer) - 1)
        self.kinds += [_UNSCORED] * 2
        self.positions += range(self.start, self.start + len(question) + len(answer))
        self.blocks += [block] * (len(question) + len(answer))


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
    seen = view.seen
    start = len(before) + max(seen.rows, seen.columns) + len(after)
    sequences: list[_Sequence] = []
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
        sequences.append(_build_sequence(tokenizer, texts, start))
    names = name_tokens(tokenizer, pictures.labels)
    pad = token_id(tokenizer, PAD)
    return _pad_batch(torch.tensor(kept), before, after, seen, sequences, pad, names)


def split_template() -> tuple[str, str]:
    """The text between image and question, and the template from the question on."""
    between, rest = AFTER_IMAGE.split("{question}")
    return between, "{question}" + rest


def _build_sequence(
    tokenizer: Tokenizer, questions: Sequence[tuple[str, Question]], start: int
) -> _Sequence:
    """Tokenise (text, question) pairs into one block each."""
    end = token_id(tokenizer, END)
    texts = tokenizer.encode_batch([text for text, _ in questions])
    answers = tokenizer.encode_batch([f" {question.answer}" for _, question in questions])
    sequence = _Sequence(start)
    for block, ((_, question), text, answer) in enumerate(
        zip(questions, texts, answers, strict=True)
    ):
        sequence.add(block, TRAINED_KINDS.index(question.kind), text.ids, [*answer.ids, end])
    return sequence


def _pad_batch(
    kept: Tensor,
    before: list[int],
    after: list[int],
    seen: Size,
    sequences: Sequence[_Sequence],
    pad: int,
    names: Tensor,
) -> LanguageBatch:
    """Pad sequences on the right to the longest, and put the shared prefix in front."""
    longest = max(1, *(len(sequence.texts) for sequence in sequences))
    count = len(sequences)

    def padded(rows: list[list[int]], fill: int) -> Tensor:
        return torch.tensor([row + [fill] * (longest - len(row)) for row in rows])

    first = len(before)
    image = torch.stack((torch.full_like(kept, 0), kept // seen.columns, kept % seen.columns))
    text = padded([sequence.positions for sequence in sequences], 0)
    lead = torch.arange(first).expand(3, count, -1)
    between = sequences[0].start - len(after) + torch.arange(len(after))
    positions = [lead, image + first, between.expand(3, count, -1), text.expand(3, -1, -1)]
    prefix = torch.full((count, first + kept.shape[1] + len(after)), _PREFIX)
    blocks = padded([sequence.blocks for sequence in sequences], _PADDING)
    return LanguageBatch(
        before=torch.tensor(before),
        after=torch.tensor(after),
        kept=kept,
        texts=padded([sequence.texts for sequence in sequences], pad),
        labels=padded([sequence.labels for sequence in sequences], _IGNORED),
        kinds=padded([sequence.kinds for sequence in sequences], _UNSCORED),
        positions=torch.cat(positions, 2),
        blocks=torch.cat((prefix, blocks), 1),
        names=names,
    )


def _attention_mask(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask (B, 1, T, T): a token sees the prefix and the past of its own block."""
    length = blocks.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    same = blocks[:, :, None] == blocks[:, None, :]
    prefix = (blocks == _PREFIX)[:, None, :]
    allowed = (same | prefix) & causal
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, -1e9)[:, None]


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
    mask = _attention_mask(batch.blocks, hidden.dtype)
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
    labelled = batch.labels >= 0
    logits = model.lm_head(hidden[labelled]).float()
    expected, kinds = batch.labels[labelled], batch.kinds[labelled]
    loss = F.cross_entropy(logits, expected)
    right = (logits.detach().argmax(-1) == expected).float()
    naming = naming_loss(image, model.model.language_model.embed_tokens.weight, batch.names)
    parts = {"loss": float(loss.detach()), "naming": float(naming.detach())}
    loss = loss + _NAMING_WEIGHT * naming
    dropped = batch.kept.shape[1] < view.seen.tokens
    suffix = "dropped" if dropped else str(view.divisor)
    for number, kind in enumerate(TRAINED_KINDS):
        of_kind = kinds == number
        if of_kind.any():
            parts[f"{kind}/{suffix}"] = float(right[of_kind].mean())
    return loss, parts
