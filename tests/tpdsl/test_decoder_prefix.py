from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, apply_rotary_pos_emb

from vllm_autoprune.tpdsl.prefix import DecoderLayer, DecoderPrefix, LanguagePrefix

START, COUNT, TEXT = 2, 9, 5
LENGTH = START + COUNT + TEXT
HEAD = 8


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


def prefix_of(model: LlamaModel, embeddings: Tensor, text: Tensor) -> DecoderPrefix:
    layers = [layer_of(model, layer) for layer in model.layers]
    return DecoderPrefix(layers, model.norm, embeddings, START, text)


def embeddings_of(batch: int = 2) -> Tensor:
    return torch.randn(batch, LENGTH, 32, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("key_heads", [4, 2, 1])
class TestAgainstTransformers:
    """Eager attention in float32, the whole model at once."""

    def test_states_attention_keys_and_the_final_norm(self, key_heads: int) -> None:
        model = model_of(key_heads)
        embeddings = embeddings_of()
        keys: list[Tensor] = []
        for layer in model.layers:
            layer.self_attn.k_proj.register_forward_hook(
                lambda module, given, made: keys.append(made)  # before rotation
            )
        with torch.no_grad():
            seen = model(
                inputs_embeds=embeddings,
                output_hidden_states=True,
                output_attentions=True,
                use_cache=False,
            )
        del keys[3:]
        prefix: LanguagePrefix = prefix_of(model, embeddings, torch.ones(2, TEXT, dtype=torch.bool))
        assert prefix.layers == 3 and prefix.start == START
        assert torch.equal(prefix.embeddings(), embeddings)
        for layer in (1, 0, 2):  # in any order
            attention = prefix.attention(layer)
            assert attention.dtype == torch.float32
            assert attention.shape == (2, 4, TEXT, LENGTH)
            torch.testing.assert_close(attention, seen.attentions[layer][:, :, -TEXT:])
            cosine, sine = model.rotary_emb(embeddings, torch.arange(LENGTH)[None])
            plain = keys[layer].unflatten(-1, (-1, HEAD)).transpose(1, 2)
            _, rotated = apply_rotary_pos_emb(plain, plain, cosine, sine)
            torch.testing.assert_close(prefix.keys(layer), rotated, rtol=1e-4, atol=1e-5)
            # The model's own last hidden state is normed already.
            if layer < 2:
                torch.testing.assert_close(
                    prefix.states(layer), seen.hidden_states[layer + 1], rtol=1e-4, atol=1e-4
                )
        torch.testing.assert_close(prefix.normed(2), seen.last_hidden_state, rtol=1e-4, atol=1e-4)

    def test_padding_and_the_batch_change_no_bit(self, key_heads: int) -> None:
        model = model_of(key_heads)
        embeddings = embeddings_of()
        text = torch.ones(2, TEXT, dtype=torch.bool)
        text[1, 3:] = False
        both = prefix_of(model, embeddings, text)
        alone = prefix_of(model, embeddings[1:, :-2], text[1:, :3])
        short = LENGTH - 2
        for layer in range(3):
            for mine, yours in (
                (both.states(layer), alone.states(layer)),
                (both.normed(layer), alone.normed(layer)),
            ):
                assert torch.equal(mine[1:, :short], yours)
                assert not mine[1, short:].any()
            assert torch.equal(both.keys(layer)[1:, :, :short], alone.keys(layer))
            rows = both.attention(layer)[1:]
            assert torch.equal(rows[:, :, :3, :short], alone.attention(layer))
            assert not rows[:, :, 3:].any() and not rows[..., short:].any()


def test_only_requested_layers_run() -> None:
    model = model_of(4)
    ran: list[int] = []
    for number, layer in enumerate(model.layers):
        layer.mlp.register_forward_hook(lambda *_, number=number: ran.append(number))
    prefix = prefix_of(model, embeddings_of(1), torch.ones(1, TEXT, dtype=torch.bool))
    prefix.attention(1)
    prefix.keys(1)
    assert ran == [0]
    prefix.states(1)
    prefix.states(0)
    assert ran == [0, 1]


def test_half_precision_attends_in_float32() -> None:
    model = model_of(2).to(torch.bfloat16)
    prefix = prefix_of(model, embeddings_of(1).bfloat16(), torch.ones(1, TEXT, dtype=torch.bool))
    rows = prefix.attention(1)
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows.sum(dim=-1), torch.ones(1, 4, TEXT))
    assert prefix.states(1).dtype == torch.bfloat16
