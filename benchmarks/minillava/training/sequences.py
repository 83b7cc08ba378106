"""Sequences of question blocks behind a shared prefix: padding, attention mask, loss on answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.minillava.questions import Question
from benchmarks.minillava.training.towers import LossParts

# Values of `blocks` for the shared prefix, and for padding.
PREFIX, PADDING = -1, -2
UNSCORED = -1
"""In `kinds`: no answer token that is scored."""
IGNORED = -100
"""In `labels`: no answer token."""


@dataclass
class TextSequence:
    """One growing sequence of question blocks; the first position of each is `start`."""

    start: int
    texts: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    def add(self, block: int, kind: int, question: list[int], answer: list[int]) -> None:
        """Append a question and its answer to a block."""
        # The label of a position is the token that follows it; the end token is not scored.
        length = len(question) + len(answer)
        first = self.start + self.blocks.count(block)
        self.texts += question + answer
        self.labels += [IGNORED] * (len(question) - 1) + answer + [IGNORED]
        self.kinds += [UNSCORED] * (len(question) - 1) + [kind] * (len(answer) - 1)
        self.kinds += [UNSCORED] * 2
        self.positions += range(first, first + length)
        self.blocks += [block] * length


def build_sequence(
    tokenizer: Tokenizer,
    questions: Sequence[tuple[str, Question]],
    start: int,
    end: int,
    kinds: Sequence[str],
) -> TextSequence:
    """Tokenise (text, question) pairs into one block each.

    `end` is the token behind every answer; `kinds` numbers the kinds of questions.
    """
    texts = tokenizer.encode_batch([text for text, _ in questions])
    answers = tokenizer.encode_batch([f" {question.answer}" for _, question in questions])
    sequence = TextSequence(start)
    for block, ((_, question), text, answer) in enumerate(
        zip(questions, texts, answers, strict=True)
    ):
        sequence.add(block, kinds.index(question.kind), text.ids, [*answer.ids, end])
    return sequence


def pad_rows(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
    """Rows padded on the right to the longest, one token at least."""
    longest = max(1, *map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])


def attention_mask(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask (B, 1, T, T): a token sees the prefix and the past of its own block."""
    length = blocks.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    same = blocks[:, :, None] == blocks[:, None, :]
    prefix = (blocks == PREFIX)[:, None, :]
    allowed = (same | prefix) & causal
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, -1e9)[:, None]


def answer_loss(
    head: nn.Module, hidden: Tensor, labels: Tensor, kinds: Tensor, names: Sequence[str]
) -> tuple[Tensor, LossParts]:
    """Cross entropy on answer tokens, and the accuracy on them of every kind that is asked.

    `hidden` (B, L, D) are the states that `head` makes logits of; `names` are those of the kinds.
    """
    labelled = labels >= 0
    logits = head(hidden[labelled]).float()
    expected, asked = labels[labelled], kinds[labelled]
    loss = F.cross_entropy(logits, expected)
    right = (logits.detach().argmax(-1) == expected).float()
    accuracies = {}
    for number, name in enumerate(names):
        of_kind = asked == number
        if of_kind.any():
            accuracies[name] = float(right[of_kind].mean())
    return loss, accuracies
