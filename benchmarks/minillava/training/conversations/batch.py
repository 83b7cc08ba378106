"""Batches of conversations: several turns about one image, with and without recalled tokens.

Each later turn of a conversation with recall has more image tokens in front of its question: tokens
that the conversation has not seen yet, among them those that the question needs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tokenizers import Tokenizer

from benchmarks.minillava.layout import Canvas
from benchmarks.minillava.questions import Question
from benchmarks.minillava.render import Scene
from benchmarks.minillava.training.language import (
    EVERY_KIND,
    RECALLED,
    TURNS,
    LanguageBatch,
    drop_tokens,
    pad_batch,
)
from benchmarks.minillava.training.scenes import training_scenes
from benchmarks.minillava.training.sequences import TextSequence
from benchmarks.minillava.training.texts import training_questions
from benchmarks.minillava.vocabulary import (
    AFTER_IMAGE,
    BEFORE_IMAGE,
    END,
    IMAGE_TOKEN,
    LATER_TURN,
    PAD,
    token_id,
)

CONVERSATIONS = 6
"""Conversations about each image of a batch."""
_QUESTIONS = 24
"""Questions about each image, from which the turns are drawn."""
_MOST_RECALLED = 16
# A selection by relevance also keeps patches around the one that holds the answer.
_MOST_AROUND = 4


def needed_patches(question: Question, scene: Scene) -> tuple[int, ...]:
    """The part of a question's evidence without which the answer cannot be known.

    Shapes have it on their middle patch, signs on all patches.
    """
    informative = {covered[0] for covered in scene.thing_patches}
    informative |= {patch for covered in scene.sign_patches for patch in covered}
    return tuple(patch for patch in question.evidence if patch in informative)


def _wanted_patches(rng: random.Random, question: Question, scene: Scene) -> Question:
    """The question with the needed part of its evidence and a few patches around it."""
    needed = needed_patches(question, scene)
    others = [patch for patch in question.evidence if patch not in needed]
    around = rng.sample(others, rng.randint(0, min(len(others), _MOST_AROUND)))
    return replace(question, evidence=(*needed, *around))


def recall_tokens(
    rng: random.Random, wanted: Sequence[int], seen: Iterable[int], number: int, patches: int
) -> list[int]:
    """`number` raster patches not seen yet, ascending: the wanted ones, then random ones."""
    hidden = [patch for patch in range(patches) if patch not in set(seen)]
    first = [patch for patch in wanted if patch in hidden]
    order = dict.fromkeys((*first, *rng.sample(hidden, len(hidden))))
    return sorted(list(order)[:number])


class ConversationWriter:
    """Appends conversations about one image to a sequence."""

    def __init__(
        self, rng: random.Random, tokenizer: Tokenizer, scene: Scene, kept: Sequence[int]
    ) -> None:
        self._rng, self._tokenizer, self._scene, self._kept = rng, tokenizer, scene, kept
        self._image, self._end = (token_id(tokenizer, token) for token in (IMAGE_TOKEN, END))

    def write(
        self, sequence: TextSequence, block: int, first: Question, pool: Sequence[Question]
    ) -> None:
        """Append one conversation without recall; only questions that can be answered follow."""
        others = [one for one in pool if one != first and self._answerable(one, self._kept)]
        questions = [first, *self._rng.sample(others, min(len(others), len(TURNS) - 1))]
        for number, question in enumerate(questions):
            template = AFTER_IMAGE if number == 0 else LATER_TURN
            text = self._encode(template.format(question=question.text))
            kind = TURNS[number] if self._answerable(question, self._kept) else None
            self._add(sequence, block, kind, question, text)

    def write_with_recall(
        self,
        sequence: TextSequence,
        block: int,
        first: Question,
        pool: Sequence[Question],
        patches: int,
    ) -> None:
        """Append one conversation in which every later turn recalls the same number of tokens."""
        rng, seen = self._rng, list(self._kept)
        others = [one for one in pool if one != first]
        questions = [first, *rng.sample(others, len(TURNS) - 1)]
        most = min(_MOST_RECALLED, (patches - len(seen)) // (len(TURNS) - 1))
        number = int(math.exp(rng.uniform(math.log(2), math.log(most + 1))))
        # The chat template puts a line break between image and text; a server may leave it out.
        after = AFTER_IMAGE if rng.random() < 0.5 else AFTER_IMAGE.removeprefix("\n")
        kind = TURNS[0] if self._answerable(first, seen) else None
        self._add(
            sequence, block, kind, first, self._encode(AFTER_IMAGE.format(question=first.text))
        )
        before = self._encode(BEFORE_IMAGE)
        for question in questions[1:]:
            wanted = _wanted_patches(rng, question, self._scene).evidence
            recalled = recall_tokens(rng, wanted, seen, number, patches)
            seen += recalled
            text = self._encode(after.format(question=question.text))
            kind = RECALLED if self._answerable(question, seen) else None
            ids = [*before, *[self._image] * number, *text]
            slots = [*[-1] * len(before), *recalled, *[-1] * len(text)]
            self._add(sequence, block, kind, question, ids, slots)

    def _answerable(self, question: Question, seen: Sequence[int]) -> bool:
        return set(needed_patches(question, self._scene)) <= set(seen)

    def _add(
        self,
        sequence: TextSequence,
        block: int,
        kind: str | None,
        question: Question,
        text: list[int],
        slots: Sequence[int] | None = None,
    ) -> None:
        answer = [*self._encode(f" {question.answer}"), self._end]
        number = None if kind is None else EVERY_KIND.index(kind)
        sequence.add(block, number, text, answer, slots)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids


def conversation_batch(
    seed: int, size: int, tokenizer: Tokenizer, canvas: Canvas, budget: int, recall: bool = True
) -> LanguageBatch:
    """Draw one batch that keeps `budget` image tokens in front of every conversation.

    If tokens are dropped, half of the conversations about an image recall some, unless `recall` is
    false.
    """
    drawn = training_scenes(seed, size, canvas)
    rng = random.Random(seed + 1)
    before = tokenizer.encode(BEFORE_IMAGE).ids
    sequences: list[TextSequence] = []
    kept: list[list[int]] = []
    for scene in drawn.scenes:
        pool = training_questions(rng, scene, canvas, _QUESTIONS)
        wanted = [_wanted_patches(rng, question, scene) for question in pool]
        chosen, _ = drop_tokens(rng, wanted, budget, canvas.patches)
        writer = ConversationWriter(rng, tokenizer, scene, chosen)
        sequence = TextSequence(len(before) + budget)
        for block, first in enumerate(pool[:CONVERSATIONS]):
            hidden = canvas.patches - budget
            if recall and block % 2 and hidden >= 2 * len(TURNS):
                writer.write_with_recall(sequence, block, first, pool, canvas.patches)
            else:
                writer.write(sequence, block, first, pool)
        sequences.append(sequence)
        kept.append(chosen)
    return pad_batch(drawn.images, kept, before, sequences, token_id(tokenizer, PAD))
