"""VisualTokens, tiles, and the language model's first layers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, apply_rotary_pos_emb

from tests.tpdsl.samples import images, plain
from vllm_autoprune import (
    Grid,
    SelectionError,
    VisualTokens,
    load_state,
    materialize,
    refine,
)
from vllm_autoprune.tpdsl.prefix import (
    DecoderLayer,
    DecoderPrefix,
    LanguagePrefix,
    RecordedPrefix,
    attention_rows,
)
from vllm_autoprune.tpdsl.tokens import TileGroup, join_groups, join_tiles, tile_groups


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (torch.zeros(4, 8), r"features must be \(B, N, D\), got shape \(4, 8\)"),
        (torch.zeros(1, 5, 8), "features hold N = 5 tokens but the grid 2 x 2 x 1 tiles has 4"),
    ],
)
def test_features_must_fit_the_grid(features: torch.Tensor, message: str) -> None:
    with pytest.raises(SelectionError, match=message):
        VisualTokens(features, Grid(2, 2))


def test_signals_must_fit_the_features() -> None:
    with pytest.raises(SelectionError, match=r"cls_attention must start with \(B, N\) = \(2, 4\)"):
        VisualTokens(torch.zeros(2, 4, 8), Grid(2, 2), torch.zeros(2, 3))
    given = images().instruction
    assert given is not None
    with pytest.raises(SelectionError, match=r"instruction\.patches must start with"):
        VisualTokens(torch.zeros(2, 4, 8), Grid(2, 2), instruction=given)


def test_half_precision_is_divided_before_it_is_widened() -> None:
    features = images(1, dtype=torch.float16).features
    divided = (features / features.norm(dim=-1, keepdim=True)).float()
    assert torch.equal(plain(features).unit, divided)
    widened = features.float() / features.float().norm(dim=-1, keepdim=True)
    assert not torch.equal(divided, widened)


def test_cosines_by_hand() -> None:
    tokens = plain(torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 1.0], [-5.0, 0.0]]), Grid(1, 2, 2))
    half = pytest.approx(0.5**0.5)
    assert tokens.cosine[0, 0].tolist() == [1, 0, half, -1]
    assert tokens.tile_cosine.shape == (2, 2, 2)
    assert tokens.tile_cosine[1, 0].tolist() == [pytest.approx(1), pytest.approx(-(0.5**0.5))]


def test_tile_and_image_views_share_their_rows() -> None:
    tokens = images(2, grid=Grid(2, 3, tiles=4))
    tiles = tokens.by_tile(tokens.features)
    assert tiles.shape == (8, 6, 16)
    assert torch.equal(tiles[5], tokens.features[1, 6:12])
    assert torch.equal(tokens.by_image(tiles), tokens.features)


def test_precomputed_cosines_give_the_same_result() -> None:
    policy = materialize(load_state("autoprune"), 8)
    tokens = images(batch=3)
    result = tokens.cosine.clone()
    known = dataclasses.replace(tokens, known_cosine=result)
    assert known.cosine is result
    assert torch.equal(refine(policy, known).indices, refine(policy, tokens).indices)


def test_cosines_of_another_shape_are_refused() -> None:
    tokens = images()
    with pytest.raises(SelectionError, match="known_cosine"):
        dataclasses.replace(tokens, known_cosine=torch.zeros(1, 4, 4))


def image_of(tiles: int, batch: int = 2) -> VisualTokens:
    """Tokens that hold their own number: 100 x image + index."""
    grid = Grid(2, 3, tiles)
    numbers = torch.arange(grid.tokens) + 100.0 * torch.arange(batch)[:, None]
    return VisualTokens(numbers[:, :, None], grid)


def test_nested_picks_interleave_by_rank_and_the_last_tiles_drop_their_last() -> None:
    picks = torch.tensor([[5, 0], [4, 1], [3, 2]])  # three tiles of one image
    actual = join_tiles(picks, image_of(3, batch=1), (2, 1, 1))
    assert actual.tolist() == [[5, 10, 15, 0]]


@pytest.mark.parametrize(
    ("budget", "groups"),
    [
        (6, [(0, 3, 2)]),
        (7, [(0, 1, 3), (1, 2, 2)]),
        (2, [(0, 2, 1)]),
        (18, [(0, 3, 6)]),
    ],
)
def test_tiles_of_equal_share_are_a_group(budget: int, groups: list[tuple[int, int, int]]) -> None:
    actual = tile_groups(image_of(3), budget)
    assert [(group.first, group.tiles, group.share) for group in actual] == groups


def test_a_group_sees_its_own_tiles_of_every_image() -> None:
    tokens = image_of(3)
    group = TileGroup(first=1, tiles=2, share=1)
    actual = group.of(tokens.features, tokens)[:, :, 0]
    assert actual[:, 0].tolist() == [6, 12, 106, 112] and actual.shape == (4, 6)
    within = torch.tensor([[0], [5], [1], [2]])
    assert group.within_image(within, tokens).tolist() == [[6], [17], [7], [14]]


def test_groups_are_joined_by_rank_with_surplus_rows_last() -> None:
    tokens = image_of(3)
    groups = tile_groups(tokens, 4)
    first = torch.tensor([[0, 1], [100, 101]])  # one tile of each image, two rows
    others = torch.tensor([[10], [20], [110], [120]])  # two tiles of each image, one row
    actual = join_groups([first, others], groups, tokens)
    assert actual.tolist() == [[0, 10, 20, 1], [100, 110, 120, 101]]
    deep = join_groups([first[:, :, None], others[:, :, None]], groups, tokens)
    assert deep.tolist() == actual[:, :, None].tolist()
    assert join_groups([others], [TileGroup(0, 2, 1)], tokens).tolist() == [[10, 20], [110, 120]]


def test_recording_returns_its_tensors_for_any_layer() -> None:
    states = torch.randn(1, 5, 4)
    prefix: LanguagePrefix = RecordedPrefix(
        1, torch.ones(1, 2, dtype=torch.bool), recorded_states=states
    )
    assert prefix.states(0) is prefix.states(7) is states


def test_missing_recording_is_named_in_the_error() -> None:
    nothing = RecordedPrefix(1, torch.ones(1, 2, dtype=torch.bool))
    for ask, name in (
        (nothing.embeddings, "embeddings"),
        (lambda: nothing.states(0), "states"),
        (lambda: nothing.normed(0), "normed states"),
        (lambda: nothing.keys(0), "keys"),
        (lambda: nothing.attention(0), "attention"),
    ):
        with pytest.raises(SelectionError, match=f"has no {name}"):
            ask()


def test_attention_rows_are_causal_and_heads_share_keys() -> None:
    queries, keys = torch.randn(4, 3, 8), torch.randn(2, 7, 8)
    rows = attention_rows(queries, keys)
    assert rows.shape == (4, 3, 7)
    torch.testing.assert_close(rows.sum(dim=-1), torch.ones(4, 3))
    # The first of the last three positions sees five of seven, and so on.
    assert [[int((row > 0).sum()) for row in head] for head in rows] == [[5, 6, 7]] * 4
    shared = torch.stack([keys[0], keys[0], keys[1], keys[1]])
    torch.testing.assert_close(rows, attention_rows(queries, shared))
    last = (queries[3, 2] @ keys[1].T * 8**-0.5).softmax(dim=0)
    torch.testing.assert_close(rows[3, 2], last)


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
