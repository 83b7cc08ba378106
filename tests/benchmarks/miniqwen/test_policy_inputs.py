"""What policies read of mini-Qwen3-VL is what its own tower and embeddings compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_vl import modeling_qwen3_vl

from benchmarks.minillava.split import Example
from benchmarks.miniqwen.reader import Reader
from benchmarks.miniqwen.split import draw_examples, image_size
from vllm_autoprune import load_state, materialize
from vllm_autoprune.tpdsl.refine import refine


@pytest.fixture(scope="module")
def reader(checkpoint: Path) -> Reader:
    return Reader(checkpoint)


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return [one for one in draw_examples("search", 2) if one.image_id == 1]


def test_attention_is_that_of_the_last_layer_averaged_over_a_tokens_patches(
    reader: Reader, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    probabilities: list[Tensor] = []
    attend = modeling_qwen3_vl.eager_attention_forward

    def record(*args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        output, weights = attend(*args, **kwargs)
        probabilities.append(weights)
        return output, weights

    monkeypatch.setattr(modeling_qwen3_vl, "eager_attention_forward", record)
    image = reader.encode(examples[0].image)
    received = probabilities[-1][0].float().mean((0, 1))
    expected = received.view(-1, 4).mean(1)
    assert image.attention.shape == (image_size(examples[0].image).tokens,)
    assert torch.allclose(image.attention, expected, atol=1e-4)
    assert image.attention.sum() == pytest.approx(0.25, abs=1e-3)


def test_encoder_rows_are_what_the_merger_merges(reader: Reader, examples: list[Example]) -> None:
    image = reader.encode(examples[0].image)
    tower = reader.model.model.visual
    assert image.encoder.shape == (image.size.tokens, tower.config.hidden_size)
    # Patches that are all alike are merged into the row of their mean.
    alike = image.encoder[:1].expand(4, -1)
    assert torch.allclose(alike.mean(0), image.encoder[0])
    assert not torch.allclose(image.encoder[0], image.encoder[-1])


def test_merger_input_is_the_state_behind_the_last_and_the_first_deepstack_block(
    reader: Reader, examples: list[Example]
) -> None:
    """Rows of the last block and norms of an early one, token by token from all blocks' states."""
    tower = reader.model.model.visual
    states: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda _, args, output: states.append(output.float()))
        for block in tower.blocks
    ]
    image = reader.encode(examples[0].image)
    for hook in hooks:
        hook.remove()
    first = states[tower.config.deepstack_visual_indexes[0]]
    for token in range(image.size.tokens):
        own = slice(4 * token, 4 * token + 4)
        assert torch.allclose(image.encoder[token], states[-1][own].sum(0) / 4, atol=1e-5)
        lengths = [float((patch**2).sum() ** 0.5) for patch in first[own]]
        totals = [float(patch.abs().sum()) for patch in first[own]]
        expected = torch.tensor([sum(totals) / 4, sum(lengths) / 4])
        assert torch.allclose(image.merger_norms[token], expected, rtol=1e-4)


def test_ranking_before_the_merger_keeps_other_tokens_with_their_own_rows(
    reader: Reader, examples: list[Example]
) -> None:
    image = reader.encode(examples[0].image)
    tokens = reader.policy_inputs(examples[:1], image)
    after = load_state("cen_divprune")
    before = after.model_copy(update={"rank_at": "merger_in"})
    kept = [refine(materialize(state, 9), tokens) for state in (after, before)]
    assert not torch.equal(kept[0].indices, kept[1].indices)
    for refined in kept:
        assert torch.equal(refined.features[0], image.rows[refined.indices[0]])


def test_each_question_has_relevance_and_words_of_its_own(
    reader: Reader, examples: list[Example]
) -> None:
    tokens = reader.policy_inputs(examples, reader.encode(examples[0].image))
    assert tokens.batch == len(examples) and tokens.instruction is not None
    embed = reader.model.get_input_embeddings()
    ids = reader.processor.tokenizer(examples[2].question, add_special_tokens=False).input_ids
    mean = embed(torch.tensor(ids)).float().mean(0)
    assert torch.allclose(tokens.instruction.text[2, 0], mean)
    kept = refine(materialize(load_state("cdpruner"), 9), tokens).indices
    assert len({tuple(row) for row in kept.tolist()}) > 1
    blind = refine(materialize(load_state("divprune"), 9), tokens).indices
    assert len({tuple(row) for row in blind.tolist()}) == 1


def test_rows_of_a_policy_take_the_place_of_the_images(
    reader: Reader, examples: list[Example]
) -> None:
    image = reader.encode(examples[0].image)
    kept = torch.arange(0, image.size.tokens, 3).expand(len(examples), -1)
    own = reader.score_answers(examples, image, kept).logprob
    same = reader.score_answers(examples, image, kept, image.rows[kept]).logprob
    other = reader.score_answers(examples, image, kept, image.rows[kept] * 0.5).logprob
    assert torch.equal(own, same) and not torch.equal(own, other)
