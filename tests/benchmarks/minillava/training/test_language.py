"""Language batches: questions share the image but do not see each other; only answers count."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.minillava.layout import Canvas
from benchmarks.minillava.questions import Question
from benchmarks.minillava.training.language import (
    PHRASES,
    QUESTIONS,
    LanguageBatch,
    draw_budget,
    drop_tokens,
    keep_informative_tokens,
    language_batch,
    language_loss,
)
from benchmarks.minillava.training.models import VISION_WIDTH, Projector, build_language_model
from benchmarks.minillava.training.scenes import training_scenes
from benchmarks.minillava.vocabulary import END, language_tokenizer, token_id

CANVAS = Canvas()
BLOCKS = sum(source.number for source in QUESTIONS)


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return language_tokenizer()


@pytest.fixture(scope="module")
def batch(words: Tokenizer) -> LanguageBatch:
    return language_batch(5, 2, words, CANVAS, CANVAS.patches)


def test_numbers_are_one_token_a_digit(words: Tokenizer) -> None:
    assert [len(words.encode(f" {number}").ids) for number in ("7", "42", "903", "4821")] == [
        1, 2, 3, 4,
    ]  # fmt: skip


def test_only_answers_and_their_ends_are_labelled(batch: LanguageBatch, words: Tokenizer) -> None:
    end = token_id(words, END)
    labelled = batch.labels[0] >= 0

    assert int((batch.labels[0] == end).sum()) == BLOCKS
    text = words.decode(batch.labels[0][labelled].tolist(), skip_special_tokens=False)
    answers = [answer.strip() for answer in text.split(END) if answer.strip()]
    assert len(answers) == BLOCKS
    assert not any("ASSISTANT" in text or "?" in text for text in answers)
    assert (batch.kinds[0][labelled] >= 0).sum() == labelled.sum() - BLOCKS


def test_labels_are_the_tokens_that_follow(batch: LanguageBatch) -> None:
    labelled = (batch.labels[0] >= 0).nonzero()[:, 0]

    assert torch.equal(batch.labels[0][labelled], batch.texts[0][labelled + 1])


def test_every_question_starts_right_after_the_image(batch: LanguageBatch) -> None:
    start = len(batch.before) + CANVAS.patches
    for block in range(BLOCKS):
        positions = batch.positions[0][batch.blocks[0] == block]
        assert positions.tolist() == list(range(start, start + len(positions)))


def test_a_question_sees_the_image_but_no_other_question(
    batch: LanguageBatch, words: Tokenizer
) -> None:
    torch.manual_seed(0)
    model, projector = build_language_model(words).bfloat16(), Projector().bfloat16()
    patches = torch.randn(2, CANVAS.patches, VISION_WIDTH).bfloat16()
    start = len(batch.before) + CANVAS.patches
    first = batch.blocks[:, start:] == 0
    alone = replace(batch, labels=batch.labels.where(first, -100))
    changed = batch.texts.where(first | (batch.texts < 0), batch.texts.flip(1))

    with torch.no_grad():
        loss, _ = language_loss(model, projector, alone, patches)
        beside_others, _ = language_loss(model, projector, replace(alone, texts=changed), patches)
        other_image, _ = language_loss(model, projector, alone, patches.flip(1))

    assert torch.equal(loss, beside_others)
    assert not torch.equal(loss, other_image)


def test_only_the_phrase_is_between_image_and_answer(words: Tokenizer) -> None:
    batch = language_batch(5, 2, words, CANVAS, CANVAS.patches, PHRASES)
    first = batch.texts[0][batch.blocks[0, -batch.texts.shape[1] :] == 0]
    scored = float((batch.labels >= 0).sum()) / float((batch.blocks >= 0).sum())

    text = words.decode(first.tolist(), skip_special_tokens=False)
    assert "ASSISTANT" not in text and text.endswith(END)
    assert scored > 0.3


def test_dropping_tokens_keeps_the_evidence_of_a_question_whole() -> None:
    questions = [
        Question("digit", "", "1", (3, 4, 5)),
        Question("count", "", "2", tuple(range(40, 52))),
        Question("existence", "", "no", ()),
        Question("digit", "", "7", (4, 90)),
    ]
    kept, answerable = drop_tokens(random.Random(0), questions, 8, CANVAS.patches)

    assert kept == sorted(set(kept)) and len(kept) == 8
    assert {3, 4, 5, 90} <= set(kept)
    assert answerable == [True, False, True, True]


def test_easier_batches_keep_informative_tokens(words: Tokenizer) -> None:
    drawn = training_scenes(5, 2, CANVAS, 3)
    for scene in drawn.scenes:
        kept = keep_informative_tokens(random.Random(0), scene, 12, CANVAS.patches)
        assert kept == sorted(set(kept)) and len(kept) == 12
        assert {patches[0] for patches in scene.thing_patches} <= set(kept)
        assert {patch for patches in scene.sign_patches for patch in patches} <= set(kept)
    with pytest.raises(ValueError, match="cannot hold"):
        keep_informative_tokens(random.Random(0), drawn.scenes[0], 1, CANVAS.patches)
    batch = language_batch(5, 2, words, CANVAS, 12, PHRASES, 3)
    assert batch.kept.shape == (2, 12)
    assert int((batch.kinds >= 0).any(1).sum()) == 2


def test_a_batch_with_dropped_tokens_has_fewer_questions(
    words: Tokenizer, batch: LanguageBatch
) -> None:
    thinned = language_batch(5, 2, words, CANVAS, 24)

    assert thinned.kept.shape == (2, 24)
    assert 0 < int((thinned.labels >= 0).sum()) < int((batch.labels >= 0).sum())


def test_every_token_is_kept_unless_dropout_is_asked_for() -> None:
    kept = {draw_budget(seed, 0.0, CANVAS) for seed in range(200)}
    dropped = [draw_budget(seed, 0.7, CANVAS) for seed in range(400)]

    assert kept == {CANVAS.patches}
    assert 0.6 < sum(budget < CANVAS.patches for budget in dropped) / 400 < 0.8
    assert min(dropped) >= 8
