"""Batches and loss of the stages that train the projector and the language model."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.minillava.layout import Canvas
from benchmarks.minillava.questions import Question
from benchmarks.minillava.render import Scene, normalize_pixels
from benchmarks.minillava.training.models import Projector
from benchmarks.minillava.training.scenes import training_scenes
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
from benchmarks.minillava.training.texts import (
    PHRASE_KINDS,
    training_phrases,
    training_questions,
)
from benchmarks.minillava.training.towers import LossParts
from benchmarks.minillava.vocabulary import AFTER_IMAGE, BEFORE_IMAGE, END, PAD, token_id
from benchmarks.minillava.wordings import KINDS

EVERY_KIND = (*KINDS, *PHRASE_KINDS)
"""Names under which the log has accuracies."""


@dataclass(frozen=True)
class TextSource:
    """`number` questions or phrases about each image, each put into a prompt template."""

    generate: Callable[[random.Random, Scene, Canvas, int], list[Question]]
    number: int
    template: str


_PHRASE = " {question}"
PHRASES = (TextSource(training_phrases, 40, _PHRASE),)
# Phrases go on beside the questions, for what they have not taught yet and against forgetting.
QUESTIONS = (
    TextSource(training_questions, 12, AFTER_IMAGE),
    TextSource(training_phrases, 14, _PHRASE),
)


@dataclass(frozen=True)
class LanguageBatch:
    """Sequences of a shared prefix ("USER: " and K image tokens) and one block per question.

    `kept` (B, K) raster patches ascending; `before` (P,) ids; `texts`, `labels`, `kinds` (B, L),
    where kinds are indices into `EVERY_KIND` at the answer tokens that are scored; `positions`,
    `blocks` (B, P + K + L).
    """

    values: Tensor
    kept: Tensor
    before: Tensor
    texts: Tensor
    labels: Tensor
    kinds: Tensor
    positions: Tensor
    blocks: Tensor


def draw_budget(seed: int, dropout: float, canvas: Canvas) -> int:
    """Number of image tokens of a step: all, or for a share `dropout` of steps log-uniform."""
    rng = random.Random(seed)
    if rng.random() >= dropout:
        return canvas.patches
    return int(math.exp(rng.uniform(math.log(8), math.log(canvas.patches))))


def drop_tokens(
    rng: random.Random, questions: Sequence[Question], budget: int, patches: int
) -> tuple[list[int], list[bool]]:
    """Keep `budget` raster patches, ascending, and tell which questions they can answer.

    The evidence of each question is kept as a whole as long as it fits; the rest is random.
    """
    kept: dict[int, None] = {}
    for question in questions:
        extended = kept | dict.fromkeys(question.evidence)
        kept = extended if len(extended) <= budget else kept
    kept |= dict.fromkeys(rng.sample(range(patches), patches))
    chosen = sorted(list(kept)[:budget])
    return chosen, [set(question.evidence) <= set(chosen) for question in questions]


def keep_informative_tokens(
    rng: random.Random, scene: Scene, budget: int, patches: int
) -> list[int]:
    """`budget` raster patches, ascending: shapes' middles, whole signs, then random ones."""
    informative = [covered[0] for covered in scene.thing_patches]
    informative += [patch for covered in scene.sign_patches for patch in covered]
    if len(informative) > budget:
        raise ValueError(f"{budget} patches cannot hold the {len(informative)} informative ones")
    order = (*informative, *rng.sample(range(patches), patches))
    return sorted(list(dict.fromkeys(order))[:budget])


def language_batch(
    seed: int,
    size: int,
    tokenizer: Tokenizer,
    canvas: Canvas,
    budget: int,
    sources: Sequence[TextSource] = QUESTIONS,
    max_shapes: int | None = None,
) -> LanguageBatch:
    """Draw one batch that keeps `budget` image tokens.

    `max_shapes` makes it easier: scenes of at most so many shapes, and informative tokens first.
    """
    drawn = training_scenes(seed, size, canvas, max_shapes)
    rng = random.Random(seed + 1)
    before = tokenizer.encode(BEFORE_IMAGE).ids
    start, end = len(before) + budget, token_id(tokenizer, END)
    sequences: list[TextSequence] = []
    kept: list[list[int]] = []
    for scene in drawn.scenes:
        questions = [
            (source.template.format(question=one.text), one)
            for source in sources
            for one in source.generate(rng, scene, canvas, source.number)
        ]
        chosen = list(range(budget))
        if max_shapes is not None:
            chosen = keep_informative_tokens(rng, scene, budget, canvas.patches)
        elif budget < canvas.patches:
            asked = [question for _, question in questions]
            chosen, answerable = drop_tokens(rng, asked, budget, canvas.patches)
            questions = [one for one, keep in zip(questions, answerable, strict=True) if keep]
        kept.append(chosen)
        sequences.append(build_sequence(tokenizer, questions, start, end, EVERY_KIND))
    return pad_batch(drawn.images, kept, before, sequences, token_id(tokenizer, PAD))


def pad_batch(
    images: Tensor,
    kept: list[list[int]],
    before: list[int],
    sequences: Sequence[TextSequence],
    pad: int,
) -> LanguageBatch:
    """Pad sequences on the right to the longest, and put the shared prefix in front."""
    size, start = len(sequences), sequences[0].start
    positions = pad_rows([sequence.positions for sequence in sequences], 0)
    blocks = pad_rows([sequence.blocks for sequence in sequences], PADDING)
    return LanguageBatch(
        values=normalize_pixels(images),
        kept=torch.tensor(kept),
        before=torch.tensor(before),
        texts=pad_rows([sequence.texts for sequence in sequences], pad),
        labels=pad_rows([sequence.labels for sequence in sequences], IGNORED),
        kinds=pad_rows([sequence.kinds for sequence in sequences], UNSCORED),
        positions=torch.cat((torch.arange(start).expand(size, start), positions), 1),
        blocks=torch.cat((torch.full((size, start), PREFIX), blocks), 1),
    )


def language_loss(
    model: LlamaForCausalLM, projector: Projector, batch: LanguageBatch, patches: Tensor
) -> tuple[Tensor, LossParts]:
    """Cross entropy on answer tokens; `patches` (B, N, VISION_WIDTH) come from the frozen tower.

    The parts are the loss, and the accuracy on answer tokens of every kind that is asked.
    """
    rows = torch.arange(len(batch.kept))[:, None]
    image = projector(patches[rows, batch.kept])
    embed = model.get_input_embeddings()
    before, texts = embed(batch.before).expand(len(rows), -1, -1), embed(batch.texts)
    hidden = model.model(
        inputs_embeds=torch.cat((before, image, texts), 1),
        attention_mask=attention_mask(batch.blocks, torch.bfloat16),
        position_ids=batch.positions,
        use_cache=False,
    ).last_hidden_state
    hidden = hidden[:, -batch.texts.shape[1] :]
    loss, accuracies = answer_loss(model.lm_head, hidden, batch.labels, batch.kinds, EVERY_KIND)
    return loss, {"loss": float(loss.detach())} | accuracies
