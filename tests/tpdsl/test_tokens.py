"""VisualTokens, tiles, and the language model's first layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, apply_rotary_pos_emb

from tests.tpdsl.samples import images, plain
from vllm_autoprune import Grid, SelectionError, VisualTokens, load_state, materialize, refine
from vllm_autoprune.tpdsl.prefix import DecoderLayer, DecoderPrefix
from vllm_autoprune.tpdsl.tokens import join_tiles


@pytest.mark.parametrize("shape", [(4, 8), (1, 5, 8)])
def test_features_must_fit_the_grid(shape: tuple[int, ...]) -> None:
    with pytest.raises(SelectionError, match="N = 4 of the grid 2 x 2 x 1 tiles, got shape"):
        VisualTokens(torch.zeros(shape), Grid(2, 2))


def test_cosines_by_hand_or_as_they_are_known() -> None:
    tokens = plain(torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 1.0], [-5.0, 0.0]]), Grid(1, 2, 2))
    half = pytest.approx(0.5**0.5)
    assert tokens.cosine[0, 0].tolist() == [1, 0, half, -1]
    assert tokens.tile_cosine[1, 0].tolist() == [pytest.approx(1), pytest.approx(-(0.5**0.5))]
    policy, three = materialize(load_state("autoprune"), 8), images(batch=3)
    known = replace(three, known_cosine=three.cosine.clone())
    assert known.cosine is known.known_cosine
    assert torch.equal(refine(policy, known).indices, refine(policy, three).indices)


def test_nested_picks_interleave_by_rank_and_the_last_tiles_drop_their_last() -> None:
    picks, image = torch.tensor([[5, 0], [4, 1], [3, 2]]), plain(torch.eye(18), Grid(2, 3, 3))
    assert join_tiles(picks, image, (2, 1, 1)).tolist() == [[5, 10, 15, 0]]


START, COUNT, TEXT, HEAD = 2, 9, 5, 8
LENGTH = START + COUNT + TEXT
SEQUENCE = torch.randn(LENGTH, 32, generator=torch.Generator().manual_seed(7))


def model_of(key_heads: int) -> LlamaModel:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=key_heads,
        head_dim=HEAD,
        attn_implementation="eager",
    )
    model = LlamaModel(config).eval().requires_grad_(False)
    for parameter in model.parameters():  # norms are all ones otherwise, and attention is flat
        parameter.copy_(parameter + 0.3 * torch.randn_like(parameter))
    return model


def layer_of(model: LlamaModel, layer: LlamaDecoderLayer) -> DecoderLayer:
    attention = layer.self_attn

    def heads(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        result = [attention.q_proj(rows), attention.k_proj(rows), attention.v_proj(rows)]
        query, key, value = (part.unflatten(-1, (-1, HEAD)).transpose(0, 1) for part in result)
        cosine, sine = model.rotary_emb(rows[None], torch.arange(len(rows))[None])
        query, key = apply_rotary_pos_emb(query[None], key[None], cosine, sine)
        return query[0], key[0], value

    return DecoderLayer(
        layer.input_layernorm, heads, attention.o_proj, layer.post_attention_layernorm, layer.mlp
    )


def prefix_of(model: LlamaModel, sequence: Tensor = SEQUENCE) -> DecoderPrefix:
    layers = [layer_of(model, layer) for layer in model.layers]
    return DecoderPrefix(layers, model.norm, sequence, START, TEXT)


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_layers_equal_transformers(key_heads: int) -> None:
    """Eager attention in float32, the whole model at once."""
    model = model_of(key_heads)
    expected = model(
        inputs_embeds=SEQUENCE[None], output_hidden_states=True, output_attentions=True
    )
    prefix = prefix_of(model)
    assert (prefix.layers, prefix.start, prefix.text.tolist()) == (3, START, [[True] * TEXT])
    assert torch.equal(prefix.embeddings(), SEQUENCE[None])
    for layer in (1, 0, 2):  # in any order
        attention, cached = prefix.attention(layer), expected.past_key_values.layers[layer]
        torch.testing.assert_close(attention, expected.attentions[layer][:, :, -TEXT:])
        torch.testing.assert_close(prefix.keys(layer), cached.keys, rtol=1e-4, atol=1e-5)
        # The model's own last hidden state is normed already.
        states = prefix.states(layer) if layer < 2 else prefix.normed(2)
        hidden = expected.hidden_states[layer + 1] if layer < 2 else expected.last_hidden_state
        torch.testing.assert_close(states, hidden, rtol=1e-4, atol=1e-4)
    with pytest.raises(SelectionError, match=r"reads layer 3.*layers 0 to 2.*'layer'"):
        prefix.keys(3)


def test_only_requested_layers_run_and_attention_is_float32() -> None:
    model = model_of(2).to(torch.bfloat16)
    ran: list[int] = []
    for number, layer in enumerate(model.layers):
        layer.mlp.register_forward_hook(lambda *_, number=number: ran.append(number))
    prefix = prefix_of(model, SEQUENCE.bfloat16())
    rows = prefix.attention(1)
    prefix.keys(1)
    assert ran == [0] and rows.dtype == torch.float32
    torch.testing.assert_close(rows.sum(dim=-1), torch.ones(1, 4, TEXT))
    assert prefix.states(1).dtype == torch.bfloat16
    prefix.states(0)
    assert ran == [0, 1]
