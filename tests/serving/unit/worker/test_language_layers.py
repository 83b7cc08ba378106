from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vllm_autoprune.serving.worker import language_layers as under_test
from vllm_autoprune.serving.worker.language_layers import FirstLanguageLayers, LlamaPrefix
from vllm_autoprune.tpdsl.language_prefix import LanguagePrefix

CPU = torch.device("cpu")
BOS, LAYERS, WIDTH, HEADS, KEY_HEADS, HEAD = 1, 3, 24, 4, 2, 6


@pytest.fixture(scope="module")
def llama() -> Any:
    """Transformers' own model with grouped key heads, eager, so that it shows its attention."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
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
        self.ran: list[int] = []
        self.layers = [self._layer(llama, i) for i in range(LAYERS)]

    def _layer(self, llama: Any, index: int) -> SimpleNamespace:
        layer = llama.layers[index]
        own = layer.self_attn

        def qkv(hidden: Tensor) -> tuple[Tensor, None]:
            return torch.cat([f(hidden) for f in (own.q_proj, own.k_proj, own.v_proj)], -1), None

        def rotary(positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

            cos, sin = llama.rotary_emb(query[None], positions[None])
            heads = [part.unflatten(-1, (-1, HEAD)).transpose(0, 1)[None] for part in (query, key)]
            turned = apply_rotary_pos_emb(heads[0], heads[1], cos, sin)
            return tuple(part[0].transpose(0, 1).flatten(1) for part in turned)

        def mlp(hidden: Tensor) -> Tensor:
            self.ran.append(index)
            done: Tensor = layer.mlp(hidden)
            return done

        attention = SimpleNamespace(
            qkv_proj=qkv,
            rotary_emb=rotary,
            o_proj=lambda mixed: (own.o_proj(mixed), None),
            q_size=HEADS * HEAD,
            kv_size=KEY_HEADS * HEAD,
            head_dim=HEAD,
            scaling=HEAD**-0.5,
            total_num_kv_heads=KEY_HEADS,
        )
        return SimpleNamespace(
            self_attn=attention,
            mlp=mlp,
            input_layernorm=layer.input_layernorm,
            post_attention_layernorm=layer.post_attention_layernorm,
        )


def image(tokens: int = 9, seed: int = 0) -> Tensor:
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


def read(served: Served, *ids: int, shown: Tensor | None = None) -> LlamaPrefix:
    first = FirstLanguageLayers(served, (BOS,), CPU)
    return first.read(image() if shown is None else shown, ids)


def test_it_is_a_language_prefix(llama: Any) -> None:
    prefix: LanguagePrefix = read(Served(llama), 5, 6, 7)
    assert prefix.start == 1
    assert prefix.text.tolist() == [[True, True, True]]


def test_the_sequence_is_start_image_instruction(llama: Any) -> None:
    shown = image()
    (row,) = read(Served(llama), 5, 6, shown=shown).embeddings()
    table = llama.embed_tokens.weight
    assert torch.equal(row, torch.cat([table[[BOS]], shown, table[[5, 6]]]))


def test_empty_instruction_is_the_start_token(llama: Any) -> None:
    prefix = read(Served(llama))
    assert prefix.text.tolist() == [[True]]
    assert torch.equal(prefix.embeddings()[0, -1], llama.embed_tokens.weight[BOS])
    assert prefix.attention(0).shape == (1, HEADS, 1, 11)


def test_layers_equal_transformers(llama: Any) -> None:
    """States, normed states, rotated keys and the text's attention rows, in float32."""
    prefix = read(Served(llama), 5, 6, 7)
    whole = llama(
        inputs_embeds=prefix.embeddings(), output_hidden_states=True, output_attentions=True
    )
    for layer in range(LAYERS):
        attention = prefix.attention(layer)
        assert attention.dtype == torch.float32
        torch.testing.assert_close(attention, whole.attentions[layer][:, :, -3:])
        torch.testing.assert_close(prefix.keys(layer), whole.past_key_values.layers[layer].keys)
        if layer < LAYERS - 1:  # transformers norms the last one
            torch.testing.assert_close(prefix.states(layer), whole.hidden_states[layer + 1])
            expected = llama.norm(whole.hidden_states[layer + 1])
            torch.testing.assert_close(prefix.normed(layer), expected)
    torch.testing.assert_close(prefix.normed(LAYERS - 1), whole.last_hidden_state)


def test_only_requested_layers_run(llama: Any) -> None:
    served = Served(llama)
    prefix = read(served, 5)
    prefix.embeddings()
    prefix.keys(0)
    prefix.attention(0)
    assert served.ran == []
    prefix.attention(1)
    prefix.states(0)
    prefix.normed(0)
    prefix.keys(1)
    assert served.ran == [0]
    prefix.states(1)
    assert served.ran == [0, 1]


def test_attention_is_causal(llama: Any) -> None:
    rows = read(Served(llama), 5, 6, 7).attention(1)[0]
    assert (rows[:, 0, -2:] == 0).all() and (rows[:, 1, -1:] == 0).all()
    assert (rows[:, 2] > 0).all()
    torch.testing.assert_close(rows.sum(dim=-1), torch.ones(HEADS, 3))


@pytest.mark.parametrize("copies", [1, 2])
def test_heads_of_ranks_are_concatenated(
    llama: Any, monkeypatch: pytest.MonkeyPatch, copies: int
) -> None:
    """Two ranks, or four that hold each of two key heads twice."""
    whole = read(Served(llama), 5, 6, 7)
    expected = (whole.keys(1), whole.attention(1))
    part = read(Served(llama), 5, 6, 7)
    monkeypatch.setattr(under_test, "world_size", lambda: KEY_HEADS * copies)

    def joined(mine: Tensor, dim: int) -> Tensor:
        # Stands in for the gather: key heads come as often as ranks hold them.
        assert dim == 0
        return mine.repeat_interleave(copies, dim=0) if len(mine) == KEY_HEADS else mine

    monkeypatch.setattr(under_test, "gather_over_ranks", joined)
    assert torch.equal(part.keys(1), expected[0])
    assert torch.equal(part.attention(1), expected[1])
