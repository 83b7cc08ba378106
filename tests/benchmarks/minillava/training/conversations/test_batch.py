"""Conversation batches are what the chat template renders; recalled tokens are new ones."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from benchmarks.minillava.layout import Canvas
from benchmarks.minillava.split import LLAVA
from benchmarks.minillava.training.conversations.batch import (
    CONVERSATIONS,
    conversation_batch,
    needed_patches,
    recall_tokens,
)
from benchmarks.minillava.training.language import (
    EVERY_KIND,
    RECALLED,
    TURNS,
    LanguageBatch,
    language_loss,
)
from benchmarks.minillava.training.models import VISION_WIDTH, Projector, build_language_model
from benchmarks.minillava.training.scenes import training_scenes
from benchmarks.minillava.training.texts import training_questions
from benchmarks.minillava.vocabulary import BEFORE_IMAGE, IMAGE_TOKEN, language_tokenizer, token_id

CANVAS = Canvas()
BUDGET = 16


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return language_tokenizer()


@pytest.fixture(scope="module")
def batch(words: Tokenizer) -> LanguageBatch:
    return conversation_batch(5, 2, words, CANVAS, BUDGET)


def _block(batch: LanguageBatch, row: int, block: int) -> torch.Tensor:
    return batch.blocks[row, -batch.texts.shape[1] :] == block


def _messages(text: str) -> list[dict[str, object]]:
    """The chat whose rendering is this text, whose first user turn has the image."""
    messages: list[dict[str, object]] = []
    for number, turn in enumerate(text.removesuffix("</s>").split("</s>")):
        question, answer = turn.split(" ASSISTANT: ")
        question = question.removeprefix(BEFORE_IMAGE)
        content: list[dict[str, str]] = []
        if number == 0 or question.startswith(IMAGE_TOKEN):
            content.append({"type": "image"})
        content.append({"type": "text", "text": question.removeprefix(IMAGE_TOKEN).lstrip("\n")})
        messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": answer})
    return messages


def test_a_conversation_is_token_for_token_what_the_chat_template_renders(
    words: Tokenizer, batch: LanguageBatch
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(LLAVA)
    image = token_id(words, IMAGE_TOKEN)
    with_recall = set[bool]()
    for row in range(2):
        for block in range(CONVERSATIONS):
            ids = batch.texts[row][_block(batch, row, block)].tolist()
            # One placeholder for each group of image tokens, as in a request.
            request = [one for one, last in zip(ids, [0, *ids], strict=False)
                       if one != image or last != image]  # fmt: skip
            text = words.decode(request, skip_special_tokens=False)
            if f"{IMAGE_TOKEN}\n" not in text and IMAGE_TOKEN in text:
                continue  # without the line break that the template puts after an image
            chat = tokenizer.apply_chat_template(_messages(text), return_dict=False)
            assert chat == [*batch.before.tolist(), image, *request]
            with_recall.add(IMAGE_TOKEN in text)
    assert with_recall == {True, False}


def test_only_answers_that_can_be_known_are_labelled(
    words: Tokenizer, batch: LanguageBatch
) -> None:
    labelled = batch.labels >= 0
    text = words.decode(batch.labels[labelled].tolist(), skip_special_tokens=False)
    scored = batch.kinds[batch.kinds >= 0].unique().tolist()

    assert "ASSISTANT" not in text and "?" not in text
    assert {EVERY_KIND[kind] for kind in scored} <= {*TURNS, RECALLED}
    assert EVERY_KIND.index(RECALLED) in scored
    followers = torch.cat((batch.texts[:, 1:], batch.texts[:, :1]), 1)
    assert torch.equal(batch.labels[labelled], followers[labelled])


def test_a_conversation_recalls_the_same_number_of_new_tokens_each_turn(
    batch: LanguageBatch,
) -> None:
    for row in range(2):
        kept = set(batch.kept[row].tolist())
        for block in range(1, CONVERSATIONS, 2):
            patches = batch.patches[row][_block(batch, row, block)]
            recalled = patches[patches >= 0].tolist()
            assert len(recalled) % 3 == 0 and recalled
            assert len(set(recalled)) == len(recalled) and not kept & set(recalled)
            size = len(recalled) // 3
            turns = [recalled[start : start + size] for start in range(0, len(recalled), size)]
            assert all(turn == sorted(turn) for turn in turns)
        for block in range(0, CONVERSATIONS, 2):
            assert (batch.patches[row][_block(batch, row, block)] < 0).all()


def test_positions_continue_over_the_turns_of_a_conversation(batch: LanguageBatch) -> None:
    start = len(batch.before) + BUDGET
    for block in range(CONVERSATIONS):
        positions = batch.positions[0][batch.blocks[0] == block]
        assert positions.tolist() == list(range(start, start + len(positions)))


def test_no_token_is_recalled_where_all_are_kept(words: Tokenizer) -> None:
    whole = conversation_batch(5, 1, words, CANVAS, CANVAS.patches)

    assert (whole.patches < 0).all()
    assert whole.kept[0].tolist() == list(range(CANVAS.patches))


def test_training_without_recall_has_no_token_in_a_later_turn(words: Tokenizer) -> None:
    batch = conversation_batch(5, 2, words, CANVAS, BUDGET, recall=False)

    assert (batch.patches < 0).all()
    assert EVERY_KIND.index(RECALLED) not in batch.kinds.unique().tolist()


def test_recalled_tokens_are_the_wanted_ones_first() -> None:
    recalled = recall_tokens(random.Random(0), [7, 3, 90], [3, 4, 5], 6, CANVAS.patches)

    assert recalled == sorted(set(recalled)) and len(recalled) == 6
    assert {7, 90} <= set(recalled) and not {3, 4, 5} & set(recalled)


def test_the_middle_of_a_shape_and_the_whole_of_a_sign_are_needed() -> None:
    scene = training_scenes(5, 1, CANVAS).scenes[0]
    questions = training_questions(random.Random(0), scene, CANVAS, 40)

    for question in questions:
        needed = needed_patches(question, scene)
        assert set(needed) <= set(question.evidence)
        if question.kind == "digit":
            assert needed == question.evidence[:1]
        if question.kind == "text":
            assert needed == question.evidence


def test_a_recalled_token_has_the_features_of_its_patch(batch: LanguageBatch) -> None:
    torch.manual_seed(0)
    model = build_language_model(language_tokenizer()).bfloat16()
    projector = Projector().bfloat16()
    patches = torch.randn(2, CANVAS.patches, VISION_WIDTH).bfloat16()
    recalled = int(batch.patches[0].max())
    changed = patches.clone()
    changed[0, recalled] += 1
    unused = patches.clone()
    seen = {*batch.kept[0].tolist(), *batch.patches[0].tolist()}
    unused[0, next(patch for patch in range(CANVAS.patches) if patch not in seen)] += 1
    only = replace(
        batch, labels=batch.labels.where(batch.kinds == EVERY_KIND.index(RECALLED), -100)
    )

    with torch.no_grad():
        loss, _ = language_loss(model, projector, only, patches)
        other, _ = language_loss(model, projector, only, changed)
        same, _ = language_loss(model, projector, only, unused)

    assert not torch.equal(loss, other)
    assert torch.equal(loss, same)
