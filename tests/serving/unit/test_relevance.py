"""Relevance by a text tower or input embeddings, and the language model's first layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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
)
from vllm_autoprune.serving.plan import Ids
from vllm_autoprune.serving.settings import read_text_tower
from vllm_autoprune.serving.worker.question import (
    ClipTower,
    FirstLanguageLayers,
    InputEmbeddings,
    LlamaPrefix,
)

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
    from vllm_autoprune.serving.settings import TextTower

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


def test_input_embeddings_are_the_mean_of_the_instruction() -> None:
    rows = torch.randn(32, 6)
    relevance = InputEmbeddings(rows.__getitem__, CPU)
    text, used = relevance.instructions([(3, 4, 4), (), (5,)])
    assert text.shape == (3, 1, 6)
    assert used.tolist() == [[True], [False], [True]]
    torch.testing.assert_close(text[0, 0], (rows[3] + 2 * rows[4]) / 3)
    torch.testing.assert_close(text[2, 0], rows[5])
    assert relevance.sign == 1
    assert InputEmbeddings.patches(relevance, torch.zeros(1, 4, 6)) is None  # type: ignore[func-returns-value]


# ---- first layers of the language model ----

START, LAYERS, HIDDEN, HEADS, KEY_HEADS, HEAD = 1, 3, 24, 4, 2, 6


@pytest.fixture(scope="module")
def llama() -> Any:
    """Transformers' own model with grouped key heads, eager, so that it shows its attention."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=40,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=HEAD,
        max_position_embeddings=128,
        attn_implementation="eager",
    )
    model = LlamaModel(config).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        nn.init.normal_(weight, mean=float("norm" in name), std=0.3)
    return model


class Served:
    """The same weights with the names and shapes of vLLM's ``LlamaModel``."""

    def __init__(self, llama: Any) -> None:
        self.embed_tokens = llama.embed_tokens
        self.norm = llama.norm
        self.layers = [self._layer(llama, layer) for layer in llama.layers]

    def _layer(self, llama: Any, layer: Any) -> SimpleNamespace:
        heads = layer.self_attn

        def qkv(hidden: Tensor) -> tuple[Tensor, None]:
            return torch.cat(
                [f(hidden) for f in (heads.q_proj, heads.k_proj, heads.v_proj)], -1
            ), None

        def rotary(positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

            cos, sin = llama.rotary_emb(query[None], positions[None])
            heads = [part.unflatten(-1, (-1, HEAD)).transpose(0, 1)[None] for part in (query, key)]
            turned = apply_rotary_pos_emb(heads[0], heads[1], cos, sin)
            return tuple(part[0].transpose(0, 1).flatten(1) for part in turned)

        attention = SimpleNamespace(
            qkv_proj=qkv,
            rotary_emb=rotary,
            o_proj=lambda mixed: (heads.o_proj(mixed), None),
            q_size=HEADS * HEAD,
            kv_size=KEY_HEADS * HEAD,
            head_dim=HEAD,
            scaling=HEAD**-0.5,
            total_num_kv_heads=KEY_HEADS,
        )
        return SimpleNamespace(
            self_attn=attention,
            mlp=layer.mlp,
            input_layernorm=layer.input_layernorm,
            post_attention_layernorm=layer.post_attention_layernorm,
        )


def image(tokens: int = 9, seed: int = 0) -> Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


def read(served: Served, *ids: int, shown: Tensor | None = None) -> LlamaPrefix:
    layers = FirstLanguageLayers(served, (START,), CPU)
    return layers.read(image() if shown is None else shown, ids)


def test_layers_equal_transformers(llama: Any) -> None:
    """States, normed states, rotated keys and the text's attention rows, in float32."""
    prefix = read(Served(llama), 5, 6, 7)
    expected_run = llama(
        inputs_embeds=prefix.embeddings(), output_hidden_states=True, output_attentions=True
    )
    for layer in range(LAYERS):
        attention = prefix.attention(layer)
        assert attention.dtype == torch.float32
        torch.testing.assert_close(attention, expected_run.attentions[layer][:, :, -3:])
        torch.testing.assert_close(
            prefix.keys(layer), expected_run.past_key_values.layers[layer].keys
        )
        if layer < LAYERS - 1:  # transformers norms the last one
            torch.testing.assert_close(prefix.states(layer), expected_run.hidden_states[layer + 1])
            expected = llama.norm(expected_run.hidden_states[layer + 1])
            torch.testing.assert_close(prefix.normed(layer), expected)
    torch.testing.assert_close(prefix.normed(LAYERS - 1), expected_run.last_hidden_state)
