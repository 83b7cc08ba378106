"""Packed questions give the probabilities that each has alone in the model's own forward pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration

from benchmarks.minillava.vocabulary import token_id
from benchmarks.miniqwen.sizes import MERGE, Size
from benchmarks.miniqwen.training.language import (
    draw_budget,
    language_batch,
    language_loss,
    language_states,
)
from benchmarks.miniqwen.training.pictures import View, draw_pictures
from benchmarks.miniqwen.vocabulary import IMAGE_TOKEN, language_tokenizer

SIZE = Size(6, 9)


@torch.no_grad()
@pytest.mark.parametrize("seen", [SIZE, Size(4, 6)])
def test_a_block_reads_the_image_and_itself_only(checkpoint: Path, seen: Size) -> None:
    words, view = language_tokenizer(), View(SIZE, seen)
    model = Qwen3VLForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    pictures = draw_pictures(5, 1, 1, view)
    batch = language_batch(5, words, pictures, view, seen.tokens, 3, 2)
    hidden, _ = language_states(model, batch, pictures, seen)
    logits = model.lm_head(hidden)
    frames = pictures.patches.float().flatten(1, 2).unflatten(2, (3, 1, -1))
    frames = frames.expand(-1, -1, -1, 2, -1).flatten(2)
    grid = torch.tensor([[1, seen.rows * MERGE, seen.columns * MERGE]])
    image = torch.full((seen.tokens,), token_id(words, IMAGE_TOKEN))
    start = batch.positions.shape[2] - batch.texts.shape[1]
    for picture in range(2):
        blocks = batch.blocks[picture, start:]
        for block in range(5):
            text = batch.texts[picture, blocks == block]
            ids = torch.cat((batch.before, image, batch.after, text))[None]
            own = model(
                input_ids=ids,
                pixel_values=frames[picture],
                image_grid_thw=grid,
                mm_token_type_ids=(ids == token_id(words, IMAGE_TOKEN)).int(),
            ).logits[0, -len(text) :]
            torch.testing.assert_close(logits[picture, blocks == block], own, atol=2e-3, rtol=1e-3)


def test_dropped_tokens_keep_the_evidence_of_every_question_that_stays() -> None:
    words, view = language_tokenizer(), View(SIZE, SIZE)
    pictures = draw_pictures(6, 1, 1, view)
    batch = language_batch(6, words, pictures, view, 6, 6, 0)
    assert batch.kept.shape == (2, 6)
    assert (batch.kept.diff(dim=1) > 0).all()
    rows, columns = batch.kept // SIZE.columns, batch.kept % SIZE.columns
    first = len(batch.before)
    image = batch.positions[:, :, first : first + 6] - first
    assert torch.equal(image, torch.stack((torch.zeros_like(rows), rows, columns)))
    # Text goes on behind the whole image.
    assert int(batch.positions[0, 0, first + 6]) == first + max(SIZE.rows, SIZE.columns)


def test_training_on_one_batch_lowers_its_loss(checkpoint: Path) -> None:
    words, view = language_tokenizer(), View(SIZE, SIZE)
    model = Qwen3VLForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    pictures = draw_pictures(7, 1, 1, view)
    batch = language_batch(7, words, pictures, view, SIZE.tokens, 4, 4)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(4):
        loss, parts = language_loss(model, batch, pictures, view)
        losses.append(parts["loss"])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[-1] < losses[0]


def test_budgets_lie_between_two_tokens_and_all() -> None:
    budgets = [draw_budget(seed, 0.5, 54) for seed in range(200)]
    assert 60 < budgets.count(54) < 140
    assert min(budgets) >= 2
