"""What policies read: the vision tower, relevance, the language model's first layers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel

from tests.golden.case import load, names
from tests.serving.engine import CLIP
from tests.serving.unit.signal_models import (
    HIDDEN,
    LAYERS,
    START,
    VISION_WIDTH,
    Attention,
    served_model,
)
from vllm_autoprune import ConfigError
from vllm_autoprune.serving.plan import Ids
from vllm_autoprune.serving.worker.question import (
    ClipTower,
    InputEmbeddings,
    LlamaPrefix,
)
from vllm_autoprune.serving.worker.tower_hooks import (
    NEXT_LAYER_WEIGHTS,
    InputHook,
    Merger,
    NextTowerLayer,
    QueriesAndKeys,
)
from vllm_autoprune.text_tower import TextTower, read_text_tower

CPU = torch.device("cpu")

close = torch.testing.assert_close


@pytest.fixture(scope="module")
def clip() -> Any:
    """The CLIP of mini-LLaVA by transformers, eager, so that it shows its attention."""
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return CLIPModel.from_pretrained(str(CLIP), **options).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def run(clip: Any) -> Any:
    """States and attentions of every layer of its vision tower, of which the fourth is read."""
    pixels = torch.randn(2, 3, clip.config.vision_config.image_size, 168)
    return clip.vision_model(pixels, output_attentions=True, output_hidden_states=True)


# ---- attention and keys within the tower ----


@pytest.mark.parametrize("counts", [None, [4, 5]], ids=["batch", "packed"])
@pytest.mark.parametrize("named", [True, False])
def test_received_attention_is_the_mean_over_queries_and_heads(
    counts: list[int] | None, named: bool
) -> None:
    """Of each sequence alone, whether they are a batch or lie one behind another."""
    attention = Attention()
    hook = QueriesAndKeys.hook(attention)
    shape = (1, 9) if counts else (3, 7)
    query, key = torch.randn(2, *shape, 2 * 4)
    with hook.recording():
        if named:
            attention(query=query, key=key, value=key)
        else:
            attention(query.unflatten(-1, (2, 4)), key.unflatten(-1, (2, 4)), key)
    parts = [p[0].split(counts) if counts else p.unbind() for p in (query, key)]
    for received, q, k in zip(hook.take().received(counts), *parts, strict=True):
        q, k = (part.view(-1, 2, 4).transpose(0, 1) for part in (q, k))
        close(received, (q @ k.transpose(1, 2) * 0.5).softmax(dim=-1).mean(dim=(0, 1)))
        close(received.sum(), torch.tensor(1.0))


def test_nothing_is_kept_of_calls_that_are_not_recorded() -> None:
    """Videos go through the same tower, and nobody takes what was read of them."""
    module = nn.Identity()
    hook = InputHook(module, lambda inputs: inputs)
    inputs = torch.randn(4)
    reference = weakref.ref(inputs)
    module(inputs)
    del inputs
    gc.collect()
    assert reference() is None and not module._forward_pre_hooks
    with hook.recording():
        module(torch.zeros(1))
        module(torch.ones(1))
    module(torch.zeros(1))
    assert torch.equal(hook.take(), torch.ones(1)) and not module._forward_pre_hooks


# ---- what enters a patch merger ----


@pytest.mark.parametrize("joined", [False, True])
def test_rows_are_the_mean_of_patches_and_norms_the_mean_of_theirs(
    joined: bool,
) -> None:
    """Of five tokens of four patches; joined patches have the norms of the row that they are."""
    module = nn.Identity()
    patches = torch.randn(5, 4, 6)
    merger = Merger(module, 4, module, joined)
    rows = merger.hook_rows()
    norms = merger.hook_norms()
    with rows.recording(), norms.recording():
        module(patches.flatten(1) if joined else patches.view(20, 1, 6))
    taken = rows.take()
    close(taken, patches.mean(dim=1))
    assert taken.untyped_storage().nbytes() == 5 * 6 * 4, (
        "the merger's input is not kept"
    )
    vectors = patches.flatten(1)[:, None] if joined else patches
    expected = torch.stack([vectors.abs().sum(-1), (vectors**2).sum(-1).sqrt()], dim=2)
    close(norms.take(), expected.mean(dim=1))


# ---- the layer after the one that is read ----

NEXT = 4
LIKE = torch.zeros(1)
PREFIXES = (
    "vision_tower.vision_model.encoder.layers.",
    "model.vision_tower.vision_model.encoder.layers.",
    "model.vision_tower.encoder.layers.",
)


def checkpoint(clip: Any, prefix: str = PREFIXES[0]) -> Iterator[tuple[str, Tensor]]:
    """The tower's layers as a checkpoint streams them, among other things."""
    yield "language_model.model.layers.4.self_attn.q_proj.weight", torch.zeros(3, 3)
    for name, weight in clip.vision_model.encoder.layers.state_dict().items():
        yield prefix + name, weight


def load_layer(
    clip: Any, weights: Any, like: Tensor = LIKE, layer: Any = None
) -> NextTowerLayer:
    layer = layer or NextTowerLayer(clip.config.vision_config, NEXT)
    for _ in layer.capture_weights(weights, like):
        pass
    return layer


@pytest.mark.parametrize("prefix", PREFIXES)
def test_attention_is_of_one_wide_head_of_the_next_layer(
    clip: Any, run: Any, prefix: str
) -> None:
    """PruMerge's own rule, from transformers' modules: q k^T / sqrt(Dv) over [CLS] and patches."""
    states = run.hidden_states[-2]
    block = clip.vision_model.encoder.layers[NEXT]
    normed = block.layer_norm1(states)
    query = block.self_attn.q_proj(normed)
    key = block.self_attn.k_proj(normed)
    every_row = (query @ key.transpose(1, 2) * VISION_WIDTH**-0.5).softmax(dim=-1)
    layer = load_layer(clip, checkpoint(clip, prefix))
    layer.require_weights()
    attention, keys = layer(states)
    close(attention, every_row[:, 0, 1:])
    close(keys, key[:, 1:])


def test_weights_are_copied_in_the_tower_s_dtype_and_replaced_by_new_ones(
    clip: Any,
) -> None:
    """Loaders reuse their buffers; at a reload the model's parameters are on the meta device."""
    weights = {name: weight.clone() for name, weight in checkpoint(clip)}
    layer = load_layer(clip, weights.items(), LIKE.bfloat16())
    for weight in weights.values():
        weight.fill_(torch.nan)
    states = torch.randn(1, 5, VISION_WIDTH, dtype=torch.bfloat16)
    attention, keys = layer(states)
    assert (attention.dtype, keys.dtype) == (torch.float32, torch.bfloat16)
    layer.init_dummy_weights(LIKE)
    assert torch.equal(layer(states)[1], keys) and bool(keys.isfinite().all())
    doubled = ((name, weight * 2) for name, weight in checkpoint(clip))
    load_layer(clip, doubled, torch.zeros(1, device="meta"), layer)
    assert not torch.allclose(layer(states)[1], keys)


@pytest.mark.parametrize("packed", [False, True])
def test_missing_weights_and_their_shapes_are_named(clip: Any, packed: bool) -> None:
    for name in NEXT_LAYER_WEIGHTS:
        weights = dict(checkpoint(clip))
        weight = weights.pop(f"{PREFIXES[0]}{NEXT}.{name}")
        if packed:
            weights[f"{PREFIXES[0]}{NEXT}.{name}"] = weight[..., :3]
        with pytest.raises(ConfigError) as caught:
            load_layer(clip, weights.items()).require_weights()
        (problem,) = caught.value.problems
        assert problem.where.endswith(f"encoder.layers.{NEXT}.{name}")
        assert ("has shape" if packed else "not in the checkpoint") in problem.what


def test_dummies_serve_where_nothing_was_loaded(clip: Any) -> None:
    """``--load-format dummy`` never shows the model a checkpoint."""
    layer = NextTowerLayer(clip.config.vision_config, NEXT)
    layer.init_dummy_weights(LIKE)
    layer.require_weights()
    attention, keys = layer(torch.randn(2, 10, VISION_WIDTH))
    assert (attention.shape, keys.shape) == ((2, 9), (2, 9, VISION_WIDTH))
    assert bool(attention.isfinite().all())


# ---- relevance by a text tower or input embeddings ----


@pytest.fixture(scope="module")
def text_tower() -> ClipTower:
    return ClipTower(read_text_tower(str(CLIP)), CPU)


def test_a_batch_is_each_of_its_instructions_alone(text_tower: ClipTower) -> None:
    """Also one without ids: some tokenizers return none for an empty instruction."""
    bos = 476
    # Of mini-LLaVA's CLIP, whose norms are trained: defaults would hide a missing one.
    eos = 477
    short: Ids = (bos, 5, eos)
    long: Ids = (bos, *range(10, 108), eos)  # three segments of 40, 40 and 20
    instructions = [short, long, (bos, 5, 6, 7, 8, eos), ()]
    text, used = text_tower.instructions(instructions)
    assert text.shape[:2] == (4, 3) and bool(text.isfinite().all())
    assert used.sum(dim=1).tolist() == [1, 3, 1, 1] and bool(used[:, 0].all())
    for row, ids in enumerate(instructions):
        close(text[row][used[row]], text_tower.instructions([ids])[0][0])


def test_later_segments_pool_where_the_published_code_did(tmp_path: Any) -> None:
    """Legacy checkpoints state end token 2 and pool at the largest id of each row."""
    torch.manual_seed(3)
    text = {"vocab_size": 49408, "hidden_size": 8, "max_position_embeddings": 77}
    vision = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 2, "eos_token_id": 2}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision)).eval()
    model.save_pretrained(tmp_path)
    tower = ClipTower(TextTower(str(tmp_path), -1, "test", 77, 512, 24), CPU)
    for name in names("clip_chunk"):
        expected = load(name).expected
        pooled_text, _ = tower.instructions(
            [tuple(int(i) for i in expected["token_ids"])]
        )
        with torch.no_grad():
            states = model.text_model(
                input_ids=torch.from_numpy(expected["segments"]).long(),
                attention_mask=torch.from_numpy(expected["mask"]).long(),
            ).last_hidden_state
            pooled_at = torch.from_numpy(expected["pooled_pos"]).long()
            pooled = model.text_projection(
                states[torch.arange(len(pooled_at)), pooled_at]
            )
        close(pooled_text[0], pooled)


def test_patches_go_through_the_norm_and_the_projection_in_float32(
    clip: Any, text_tower: ClipTower
) -> None:
    hidden = torch.randn(2, 16, VISION_WIDTH).bfloat16()
    normed = clip.vision_model.post_layernorm(hidden.float())
    close(text_tower.patches(hidden), clip.visual_projection(normed))


def test_input_embeddings_are_the_mean_of_the_instruction() -> None:
    rows = torch.randn(32, 6)
    relevance = InputEmbeddings(rows.__getitem__, CPU)
    text, used = relevance.instructions([(3, 4, 4), (), (5,)])
    assert (text.shape, used.tolist()) == ((3, 1, 6), [[True], [False], [True]])
    close(text[[0, 2], 0], torch.stack([(rows[3] + 2 * rows[4]) / 3, rows[5]]))
    assert relevance.sign == 1


# ---- first layers of the language model ----


def test_layers_equal_transformers(llama: Any) -> None:
    """States, normed states, rotated keys and the text's attention rows, in float32."""
    prefix = LlamaPrefix(
        served_model(llama), (START,), torch.randn(9, HIDDEN), (5, 6, 7)
    )
    expected = llama(
        inputs_embeds=prefix.embeddings(),
        output_hidden_states=True,
        output_attentions=True,
    )
    for layer in range(LAYERS):
        attention = prefix.attention(layer)
        assert attention.dtype == torch.float32
        close(attention, expected.attentions[layer][:, :, -3:])
        close(prefix.keys(layer), expected.past_key_values.layers[layer].keys)
        if layer < LAYERS - 1:  # transformers norms the last one
            states = expected.hidden_states[layer + 1]
            close(prefix.states(layer), states)
            close(prefix.normed(layer), llama.norm(states))
    close(prefix.normed(LAYERS - 1), expected.last_hidden_state)


def test_an_empty_instruction_is_the_start_once_more(llama: Any) -> None:
    empty, start = (
        LlamaPrefix(
            served_model(llama), (START,), torch.ones(9, HIDDEN), ids
        ).embeddings()
        for ids in ((), (START,))
    )
    assert torch.equal(empty, start) and empty.shape[1] == 11
