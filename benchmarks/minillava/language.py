"""The projector and the Llama that reads it: batches and loss of their training stage.

Knows nothing about how the vision tower was trained; it reads frozen penultimate patches.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.minillava.attention import LEAN
from benchmarks.minillava.layout import Canvas
from benchmarks.minillava.phrases import PHRASE_KINDS, training_phrases
from benchmarks.minillava.questions import Question, training_questions
from benchmarks.minillava.render import Scene
from benchmarks.minillava.towers import WIDTH, pixels, training_scenes
from benchmarks.minillava.vocabulary import (
    AFTER_IMAGE,
    BEFORE_IMAGE,
    BEGIN,
    END,
    PAD,
    VOCABULARY,
    token_id,
)
from benchmarks.minillava.wordings import KINDS

LANGUAGE_WIDTH = 192
# Blocks of a sequence: the shared image prefix, and padding that only sees itself.
_PREFIX, _PADDING = -1, -2
_UNSCORED = -1
EVERY_KIND = (*KINDS, *PHRASE_KINDS)


@dataclass(frozen=True)
class Course:
    """A part of what a stage asks about an image: `number` questions, each put into `frame`."""

    ask: Callable[[random.Random, Scene, Canvas, int], list[Question]]
    number: int
    frame: str


_PHRASE = " {question}"
PHRASES = (Course(training_phrases, 40, _PHRASE),)
# Some phrases go on, for what they have not taught yet, and so that nothing is forgotten.
QUESTIONS = (Course(training_questions, 12, AFTER_IMAGE), Course(training_phrases, 14, _PHRASE))


class Projector(nn.Module):
    """LLaVA-1.5's two linear layers with a GELU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(WIDTH, LANGUAGE_WIDTH)
        self.linear_2 = nn.Linear(LANGUAGE_WIDTH, LANGUAGE_WIDTH)

    def forward(self, patches: Tensor) -> Tensor:
        """(B, K, WIDTH) → (B, K, 192)."""
        projected: Tensor = self.linear_2(F.gelu(self.linear_1(patches)))
        return projected


def language_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A freshly initialised language model."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=LANGUAGE_WIDTH,
            intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=6,
            max_position_embeddings=4096,
            # At Llama's 0.02 a width of 192 starts with attention that is all but uniform.
            initializer_range=0.06,
            bos_token_id=token_id(tokenizer, BEGIN),
            eos_token_id=token_id(tokenizer, END),
            pad_token_id=token_id(tokenizer, PAD),
            tie_word_embeddings=False,
            attn_implementation=LEAN,
        )
    )


@dataclass(frozen=True)
class LanguageBatch:
    """Sequences of a prefix ("USER: " and K image tokens) and one block a question.

    `kept` (B, K) raster patches ascending; `before` (P,) ids; `texts`, `labels`, `kinds` (B, L),
    kinds are indices into `EVERY_KIND` where an answer is scored; `positions`, `blocks`
    (B, P + K + L).
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
    """How many image tokens a step keeps: all, or for a share of steps log-uniformly fewer."""
    rng = random.Random(seed)
    if rng.random() >= dropout:
        return canvas.patches
    return int(math.exp(rng.uniform(math.log(8), math.log(canvas.patches))))


def thin(
    rng: random.Random, asked: Sequence[Question], budget: int, patches: int
) -> tuple[list[int], list[bool]]:
    """Keep `budget` raster patches, ascending, and say which questions they can answer.

    Evidence is kept whole as long as it fits; the rest is random.
    """
    kept: dict[int, None] = {}
    for question in asked:
        together = kept | dict.fromkeys(question.evidence)
        kept = together if len(together) <= budget else kept
    kept |= dict.fromkeys(rng.sample(range(patches), patches))
    chosen = sorted(list(kept)[:budget])
    return chosen, [set(question.evidence) <= set(chosen) for question in asked]


def essence(rng: random.Random, scene: Scene, budget: int, patches: int) -> list[int]:
    """`budget` raster patches, ascending: every shape's middle, all of the signs, a random rest."""
    telling = [found[0] for found in scene.thing_patches]
    telling += [patch for found in scene.sign_patches for patch in found]
    if len(telling) > budget:
        raise ValueError(f"{budget} patches cannot hold the {len(telling)} that tell")
    return sorted(list(dict.fromkeys((*telling, *rng.sample(range(patches), patches))))[:budget])


@dataclass
class _Row:
    """One growing sequence of question blocks."""

    start: int
    texts: list[int]
    labels: list[int]
    kinds: list[int]
    positions: list[int]
    blocks: list[int]

    def add(self, block: int, kind: int, asked: list[int], answer: list[int]) -> None:
        # A position is labelled with the token that follows it; the end mark is not scored.
        self.texts += asked + answer
        self.labels += [-100] * (len(asked) - 1) + answer + [-100]
        self.kinds += [_UNSCORED] * (len(asked) - 1) + [kind] * (len(answer) - 1)
        self.kinds += [_UNSCORED] * 2
        self.positions += range(self.start, self.start + len(asked) + len(answer))
        self.blocks += [block] * (len(asked) + len(answer))


def language_batch(
    seed: int,
    size: int,
    tokenizer: Tokenizer,
    canvas: Canvas,
    budget: int,
    courses: Sequence[Course] = QUESTIONS,
    most: int | None = None,
) -> LanguageBatch:
    """Draw one batch that keeps `budget` image tokens.

    With `most` it is for a beginner: scenes of at most so many shapes, and tokens that tell.
    """
    drawn = training_scenes(seed, size, canvas, most)
    rng = random.Random(seed + 1)
    before = tokenizer.encode(BEFORE_IMAGE).ids
    end, pad = token_id(tokenizer, END), token_id(tokenizer, PAD)
    start = len(before) + budget
    rows: list[_Row] = []
    kept: list[list[int]] = []
    for scene in drawn.scenes:
        framed = [
            (course.frame.format(question=one.text), one)
            for course in courses
            for one in course.ask(rng, scene, canvas, course.number)
        ]
        chosen, answerable = list(range(budget)), [True] * len(framed)
        if most is not None:
            chosen = essence(rng, scene, budget, canvas.patches)
        elif budget < canvas.patches:
            chosen, answerable = thin(rng, [one for _, one in framed], budget, canvas.patches)
        framed = [pair for pair, take in zip(framed, answerable, strict=True) if take]
        kept.append(chosen)
        texts = tokenizer.encode_batch([text for text, _ in framed])
        answers = tokenizer.encode_batch([f" {one.answer}" for _, one in framed])
        row = _Row(start, [], [], [], [], [])
        for block, ((_, question), text, answer) in enumerate(
            zip(framed, texts, answers, strict=True)
        ):
            row.add(block, EVERY_KIND.index(question.kind), text.ids, [*answer.ids, end])
        rows.append(row)
    longest = max(len(row.texts) for row in rows)

    def column(values: list[list[int]], fill: int) -> Tensor:
        return torch.tensor([row + [fill] * (longest - len(row)) for row in values])

    ahead = torch.arange(start).expand(size, start)
    positions = column([row.positions for row in rows], 0)
    blocks = column([row.blocks for row in rows], _PADDING)
    return LanguageBatch(
        values=pixels(drawn.images),
        kept=torch.tensor(kept),
        before=torch.tensor(before),
        texts=column([row.texts for row in rows], pad),
        labels=column([row.labels for row in rows], -100),
        kinds=column([row.kinds for row in rows], _UNSCORED),
        positions=torch.cat((ahead, positions), 1),
        blocks=torch.cat((torch.full((size, start), _PREFIX), blocks), 1),
    )


def _mask(blocks: Tensor) -> Tensor:
    """Additive bf16 mask (B, 1, T, T): the prefix and one's own block, never the future."""
    length = blocks.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    same = blocks[:, :, None] == blocks[:, None, :]
    prefix = (blocks == _PREFIX)[:, None, :]
    allowed = (same | prefix) & causal
    mask = torch.zeros(allowed.shape, dtype=torch.bfloat16).masked_fill_(~allowed, -1e9)
    return mask[:, None]


def language_loss(
    model: LlamaForCausalLM, projector: Projector, batch: LanguageBatch, patches: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Cross entropy on answer tokens; patches (B, N, WIDTH) come from the frozen tower.

    The parts are the loss and the share of right answer tokens of each kind that is asked.
    """
    rows = torch.arange(len(batch.kept))[:, None]
    image = projector(patches[rows, batch.kept])
    embed = model.get_input_embeddings()
    before = embed(batch.before).expand(len(rows), -1, -1)
    hidden = model.model(
        inputs_embeds=torch.cat((before, image, embed(batch.texts)), 1),
        attention_mask=_mask(batch.blocks),
        position_ids=batch.positions,
        use_cache=False,
    ).last_hidden_state
    hidden = hidden[:, -batch.texts.shape[1] :]
    asked = batch.labels >= 0
    logits = model.lm_head(hidden[asked]).float()
    wanted, kinds = batch.labels[asked], batch.kinds[asked]
    loss = F.cross_entropy(logits, wanted)
    right = (logits.detach().argmax(-1) == wanted).float()
    parts = {"loss": float(loss.detach())}
    for number, kind in enumerate(EVERY_KIND):
        ours = kinds == number
        if ours.any():
            parts[kind] = float(right[ours].mean())
    return loss, parts
