from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.golden.case import load, names
from tests.serving.unit.conftest import TinyClip
from tests.serving.unit.samples import (
    BOS,
    EOS,
    SEGMENT,
    VISION_WIDTH,
    WIDTH,
    clip_config,
    served,
)
from vllm_autoprune.serving.models.vision import EncoderInputs, ImageInputs, ModelImage, Vision
from vllm_autoprune.serving.shared.plan import Ids
from vllm_autoprune.serving.shared.text_tower import read_text_tower
from vllm_autoprune.serving.worker.features import ImageFeatures
from vllm_autoprune.serving.worker.relevance import ClipTower, InputEmbeddings, split_segments

CPU = torch.device("cpu")
SHORT: Ids = (BOS, 5, EOS)
LONGER: Ids = (BOS, 5, 6, 7, 8, EOS)
LONG: Ids = (BOS, *range(10, 26), EOS)  # three segments of 8, 8 and 2
NO_END: Ids = (BOS, 5, 6)


@pytest.fixture(scope="module")
def tower(tiny_clip: TinyClip) -> ClipTower:
    return ClipTower(read_text_tower(str(tiny_clip.folder)), CPU)


def published(model: Any, ids: Ids, size: int) -> Tensor:
    """CDPruner's segments: zero-padded to a multiple of the length, then split."""
    count = max(1, -(-len(ids) // size))
    padded = torch.zeros(count * size, dtype=torch.int64)
    padded[: len(ids)] = torch.tensor(ids)
    mask = (torch.arange(count * size) < len(ids)).long()
    with torch.no_grad():
        output = model.text_model(
            input_ids=padded.view(count, size), attention_mask=mask.view(count, size)
        )
        return model.text_projection(output.pooler_output)


@pytest.mark.parametrize("name", names("clip_chunk"))
def test_segments_are_those_of_the_published_code(name: str) -> None:
    expected = load(name).expected
    ids = tuple(int(i) for i in expected["token_ids"])
    segments = split_segments(ids, 77)
    padded = np.zeros_like(expected["segments"])
    for row, segment in zip(padded, segments, strict=True):
        row[: len(segment)] = segment
    assert np.array_equal(padded, expected["segments"])
    lengths = expected["mask"].sum(axis=1).tolist()
    assert [len(segment) for segment in segments] == lengths


def test_no_ids_are_one_empty_segment() -> None:
    assert split_segments((), 77) == [()]


@pytest.mark.parametrize("ids", [SHORT, LONGER, LONG, NO_END])
def test_padding_to_the_full_length_would_change_nothing(
    tiny_clip: TinyClip, tower: ClipTower, ids: Ids
) -> None:
    text, used = tower.instructions([ids])
    assert used.all()
    torch.testing.assert_close(text[0], published(tiny_clip.model, ids, SEGMENT))


def test_a_batch_is_each_of_its_instructions_alone(tower: ClipTower) -> None:
    instructions = [SHORT, LONG, LONGER]
    text, used = tower.instructions(instructions)
    assert text.shape == (3, 3, WIDTH)
    assert used.tolist() == [[True, False, False], [True] * 3, [True, False, False]]
    for row, ids in enumerate(instructions):
        alone, _ = tower.instructions([ids])
        torch.testing.assert_close(text[row][used[row]], alone[0])


def test_different_instructions_have_different_embeddings(tower: ClipTower) -> None:
    text, _ = tower.instructions([(BOS, 5, 6, EOS), (BOS, 6, 5, EOS)])
    assert not torch.allclose(text[0], text[1], atol=1e-3)


def test_instruction_without_token_ids(tower: ClipTower) -> None:
    """A tokenizer without special tokens returns no ids for an empty instruction."""
    for instructions in ([()], [SHORT, ()]):
        text, used = tower.instructions(instructions)
        assert text.shape[:2] == used.shape == (len(instructions), 1)
        assert text.isfinite().all()


def test_later_segments_pool_where_the_published_code_did(tmp_path: Any) -> None:
    """Legacy checkpoints state end token 2 and pool at the largest id of each row."""
    from transformers import CLIPModel

    torch.manual_seed(3)
    config = clip_config(
        vocab_size=49408, hidden_size=8, max_position_embeddings=77, eos_token_id=2
    )
    model = CLIPModel(config).eval()
    model.save_pretrained(tmp_path)
    tower = _tower_of(tmp_path, segment=77)
    for name in names("clip_chunk"):
        expected = load(name).expected
        text, _ = tower.instructions([tuple(int(i) for i in expected["token_ids"])])
        with torch.no_grad():
            states = model.text_model(
                input_ids=torch.from_numpy(expected["segments"]).long(),
                attention_mask=torch.from_numpy(expected["mask"]).long(),
            ).last_hidden_state
            at = torch.from_numpy(expected["pooled_pos"]).long()
            pooled = model.text_projection(states[torch.arange(len(at)), at])
        torch.testing.assert_close(text[0], pooled)


def _tower_of(folder: Any, segment: int) -> ClipTower:
    from vllm_autoprune.serving.shared.text_tower import TextTower

    return ClipTower(TextTower(str(folder), -1, "test", segment, WIDTH, VISION_WIDTH), CPU)


def test_patches_go_through_the_norm_and_the_projection(
    tiny_clip: TinyClip, tower: ClipTower
) -> None:
    hidden = torch.randn(2, 16, VISION_WIDTH)
    model = tiny_clip.model
    with torch.no_grad():
        expected = model.visual_projection(model.vision_model.post_layernorm(hidden))
    torch.testing.assert_close(tower.patches(hidden), expected)
    half = tower.patches(hidden.bfloat16())
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, tower.patches(hidden.bfloat16().float()))


def test_the_tower_s_sign_is_the_description_s(tiny_clip: TinyClip, tower: ClipTower) -> None:
    assert tower.sign == read_text_tower(str(tiny_clip.folder)).sign == -1


def test_nothing_of_the_tower_is_trained(tower: ClipTower) -> None:
    text, _ = tower.instructions([SHORT])
    assert not text.requires_grad
    assert not tower.patches(torch.randn(1, 4, VISION_WIDTH)).requires_grad


class Lookup:
    """An embedding table that counts lookups."""

    def __init__(self) -> None:
        torch.manual_seed(4)
        self.table = nn.Embedding(32, 6)
        self.calls = 0

    def __call__(self, ids: Tensor) -> Tensor:
        self.calls += 1
        rows: Tensor = self.table(ids).detach()
        return rows


def test_input_embeddings_are_the_mean_of_the_instruction() -> None:
    lookup = Lookup()
    relevance = InputEmbeddings(lookup, CPU)
    text, used = relevance.instructions([(3, 4, 4)])
    rows = lookup.table.weight.detach()
    assert text.shape == (1, 1, 6)
    assert used.tolist() == [[True]]
    torch.testing.assert_close(text[0, 0], (rows[3] + 2 * rows[4]) / 3)
    assert relevance.sign == 1
    assert InputEmbeddings.patches(relevance, torch.zeros(1, 4, 6)) is None  # type: ignore[func-returns-value]


def test_an_empty_instruction_has_no_segment() -> None:
    relevance = InputEmbeddings(Lookup(), CPU)
    for instructions in ([()], [(), ()], [(1,), (), (2, 3)]):
        text, used = relevance.instructions(instructions)
        assert used[:, 0].tolist() == [len(ids) > 0 for ids in instructions]
        assert text.isfinite().all()
        assert not text[[not ids for ids in instructions]].any()


def test_a_batch_is_one_lookup_and_each_instruction_alone() -> None:
    lookup = Lookup()
    relevance = InputEmbeddings(lookup, CPU)
    instructions: list[Ids] = [(1, 2), (), (3,), (4, 5, 6)]
    text, _ = relevance.instructions(instructions)
    assert lookup.calls == 1
    for row, ids in enumerate(instructions):
        alone, _ = relevance.instructions([ids])
        assert torch.equal(text[row], alone[0])


def test_half_precision_embeddings_are_averaged_in_float32() -> None:
    lookup = Lookup()
    lookup.table.to(torch.bfloat16)
    text, _ = InputEmbeddings(lookup, CPU).instructions([tuple(range(32))])
    assert text.dtype == torch.float32
    torch.testing.assert_close(text[0, 0], lookup.table.weight.detach().float().mean(dim=0))


class AdaptedEmbedding(nn.Module):
    """Like vLLM's ``VocabParallelEmbeddingWithLoRA``: adds adapters of the running batch."""

    def __init__(self, base_layer: nn.Embedding) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self.base_layer(ids) + 1.0
        return embedded


class LanguageModel(nn.Module):
    """Scales what its inner model embeds, as Gemma 3 does."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.model: Any = nn.Module()
        self.model.embed_tokens = layer

    def embed_input_ids(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self.model.embed_tokens(ids) * 3.0
        return embedded


class EmbeddingsVision(Vision):
    """Vision side for tests of relevance by input embeddings only."""

    @staticmethod
    def tower(model: Any) -> nn.Module:
        return nn.Linear(1, 1)

    def images(self, inputs: EncoderInputs) -> list[ModelImage]:
        raise AssertionError("not called")

    def encode(self, images: Sequence[ImageInputs]) -> list[ImageFeatures]:
        raise AssertionError("not called")


@torch.no_grad()
def test_instructions_are_embedded_without_the_adapters_of_other_requests() -> None:
    base = nn.Embedding(16, 8)
    plain, adapted = LanguageModel(base), LanguageModel(AdaptedEmbedding(base))
    layer = adapted.model.embed_tokens
    model: Any = SimpleNamespace(get_language_model=lambda: adapted)
    relevance = EmbeddingsVision(model, served({"/constraints/selector/q_e": 4})).relevance()
    assert relevance is not None
    text, _ = relevance.instructions([(1, 2, 3)])
    expected = plain.embed_input_ids(torch.tensor([1, 2, 3])).mean(dim=0)
    assert torch.equal(text[0, 0], expected)
    assert adapted.model.embed_tokens is layer
