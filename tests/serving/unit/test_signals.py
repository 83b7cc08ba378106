"""What policies read: the vision tower, relevance, the language model's first layers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
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
from vllm_autoprune import ConfigError
from vllm_autoprune.serving.plan import Ids
from vllm_autoprune.serving.settings import read_text_tower
from vllm_autoprune.serving.worker.question import (
    ClipTower,
    FirstLanguageLayers,
    InputEmbeddings,
    LlamaPrefix,
)
from vllm_autoprune.serving.worker.tower_hooks import (
    NAMES,
    AttentionHook,
    MergerHook,
    NextTowerLayer,
    QkvHook,
)

# ---- signals of the vision tower: attention, keys, the layer after it, what enters the merger ----

TOWER_HEADS, TOWER_HEAD = 2, 4


class Attention(nn.Module):
    """Attention with the call signature of vLLM's ``MMEncoderAttention``."""

    num_heads, scale = TOWER_HEADS, 0.5

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return value


def plain(query: Tensor, key: Tensor) -> Tensor:
    """``(n,)`` of one sequence, head by head."""
    heads = [
        (query[:, h] @ key[:, h].T * Attention.scale).softmax(dim=-1).mean(dim=0)
        for h in range(TOWER_HEADS)
    ]
    return torch.stack(heads).mean(dim=0)


def _made(*shape: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=source), torch.randn(*shape, generator=source)


def test_a_batch_of_sequences() -> None:
    module = Attention()
    listening = AttentionHook(module)
    query, key = _made(3, 7, TOWER_HEADS * TOWER_HEAD)
    with listening.recording():
        module(query, key, key)
    for received, q, k in zip(listening.take(), query, key, strict=True):
        expected = plain(q.view(7, TOWER_HEADS, TOWER_HEAD), k.view(7, TOWER_HEADS, TOWER_HEAD))
        torch.testing.assert_close(received, expected)
        torch.testing.assert_close(received.sum(), torch.tensor(1.0))


def test_packed_sequences_attend_only_to_themselves() -> None:
    module = Attention()
    listening = AttentionHook(module)
    query, key = _made(1, 9, TOWER_HEADS, TOWER_HEAD)
    with listening.recording():
        module(query=query, key=key, value=key)
    ahead, second = listening.take([4, 5])
    torch.testing.assert_close(ahead, plain(query[0, :4], key[0, :4]))
    torch.testing.assert_close(second, plain(query[0, 4:], key[0, 4:]))


def test_nothing_is_kept_of_calls_that_are_not_recorded() -> None:
    """Videos go through the same tower, and nobody takes what was read of them."""
    module, (query, key) = Attention(), _made(1, 5, TOWER_HEADS * TOWER_HEAD)
    AttentionHook(module)
    references = weakref.ref(query), weakref.ref(key)
    module(query, key, key)
    del query, key
    gc.collect()
    assert [reference() for reference in references] == [None, None]


# ---- [CLS] attention ----


class Qkv(nn.Module):
    """Like vLLM's QKVParallelLinear: one fused product, and None as bias."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return nn.functional.linear(hidden, self.weight, self.bias), None


def attention(qkv: Qkv, heads: int, scale: float) -> Any:
    return SimpleNamespace(
        qkv_proj=qkv, num_heads=heads, num_heads_per_partition=heads, scale=scale, tp_size=1
    )


def test_attention_and_keys_are_those_of_the_layer_the_model_reads() -> None:
    """Transformers' ``attentions[-2]``, from the same weights in one fused projection."""
    from transformers import CLIPVisionModel

    torch.manual_seed(1)
    config = clip_config().vision_config
    model = CLIPVisionModel._from_config(config, attn_implementation="eager").eval()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.2)
    pixels = torch.randn(2, 3, config.image_size, config.image_size)
    with torch.no_grad():
        seen = model(pixels, output_attentions=True, output_hidden_states=True)
    (layer,) = [m for name, m in model.named_modules() if name.endswith("encoder.layers.1")]
    projections = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
    qkv = Qkv(
        torch.cat([p.weight.detach() for p in projections]),
        torch.cat([p.bias.detach() for p in projections]),
    )
    heads = config.num_attention_heads
    hook = QkvHook(attention(qkv, heads, scale=(config.hidden_size // heads) ** -0.5))
    with torch.no_grad():
        normed = layer.layer_norm1(seen.hidden_states[-3])
        qkv(normed)
        captured = hook.take()
        keys = layer.self_attn.k_proj(normed).unflatten(-1, (heads, -1)).mean(dim=2)
    attention_row = captured.cls_attention()
    torch.testing.assert_close(captured.mean_keys(), keys[:, 1:])
    assert len(seen.attentions) == 3
    torch.testing.assert_close(attention_row, seen.attentions[-2].mean(dim=1)[:, 0, 1:])
    assert not torch.allclose(attention_row, seen.attentions[-1].mean(dim=1)[:, 0, 1:], atol=1e-3)


# ---- what enters a patch merger ----

PATCHES, CHANNELS, N = 4, 6, 5


def entering(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Patches ``(N, 4, C)`` of N tokens."""
    source = torch.Generator().manual_seed(seed)
    return torch.randn(N, PATCHES, CHANNELS, generator=source).to(dtype)


def mean_and_norms(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and norms of tokens, one patch after the other."""
    rows, norms = [], []
    for token in patches.double():
        rows.append(sum(token) / len(token))
        sizes = [[float(patch.abs().sum()), float((patch**2).sum()) ** 0.5] for patch in token]
        norms.append(torch.tensor(sizes, dtype=torch.float64).mean(dim=0))
    return torch.stack(rows).float(), torch.stack(norms).float()


def test_rows_are_the_mean_of_patches_and_norms_the_mean_of_theirs() -> None:
    merger = nn.Identity()
    hook, patches = MergerHook(merger, PATCHES, merger), entering()
    with hook.recording():
        merger(patches.view(N * PATCHES, 1, CHANNELS))
    for found, expected in zip(hook.take(), mean_and_norms(patches), strict=True):
        torch.testing.assert_close(found, expected)


def test_nothing_is_read_or_kept_outside_of_a_recording() -> None:
    merger = nn.Identity()
    hook = MergerHook(merger, PATCHES, merger)
    assert not merger._forward_pre_hooks
    with hook.recording():
        merger(entering().flatten(0, 1))
    assert not merger._forward_pre_hooks
    rows, _ = hook.take()
    merger(entering(1).flatten(0, 1))
    with hook.recording():
        merger(entering().flatten(0, 1))
    assert torch.equal(hook.take()[0], rows)
    assert rows.untyped_storage().nbytes() == N * CHANNELS * 4, "the merger's input is not kept"


# ---- the layer after the one that is read ----

CONFIG = clip_config().vision_config  # three layers; the model reads what the second one gives
NEXT = 2
LIKE = torch.zeros(1)
PREFIXES = (
    "vision_tower.vision_model.encoder.layers.",
    "model.vision_tower.vision_model.encoder.layers.",
    "model.vision_tower.encoder.layers.",
)


@pytest.fixture(scope="module")
def tower() -> Any:
    """A CLIP tower of transformers whose weights are all random."""
    from transformers import CLIPVisionModel

    torch.manual_seed(1)
    model = CLIPVisionModel._from_config(CONFIG, attn_implementation="eager").eval()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.2)
    return model


def checkpoint(tower: Any, prefix: str = PREFIXES[0]) -> Iterator[tuple[str, Tensor]]:
    """The tower's layers as a checkpoint streams them, among other things."""
    yield "language_model.model.layers.2.self_attn.q_proj.weight", torch.zeros(3, 3)
    for name, weight in tower.state_dict().items():
        _, separator, rest = name.partition("encoder.layers.")
        if separator:
            yield prefix + rest, weight


def load_layer(tower: Any, prefix: str = PREFIXES[0], like: Tensor = LIKE) -> NextTowerLayer:
    layer = NextTowerLayer(CONFIG, NEXT)
    for _ in layer.capture_weights(checkpoint(tower, prefix), like):
        pass
    layer.require_weights()
    return layer


@pytest.mark.parametrize("prefix", PREFIXES)
def test_attention_is_of_one_wide_head_of_the_next_layer(tower: Any, prefix: str) -> None:
    """PruMerge's own rule, from transformers' modules: q k^T / sqrt(Dv) over [CLS] and patches."""
    pixels = torch.randn(2, 3, CONFIG.image_size, CONFIG.image_size)
    with torch.no_grad():
        states = tower(pixels, output_hidden_states=True).hidden_states[-2]
        (block,) = [m for name, m in tower.named_modules() if name.endswith(f"layers.{NEXT}")]
        normed = block.layer_norm1(states)
        query, key = block.self_attn.q_proj(normed), block.self_attn.k_proj(normed)
        every_row = (query @ key.transpose(1, 2) * CONFIG.hidden_size**-0.5).softmax(dim=-1)
    attention, keys = load_layer(tower, prefix)(states)
    torch.testing.assert_close(attention, every_row[:, 0, 1:])
    torch.testing.assert_close(keys, key[:, 1:])


def test_copies_are_kept_in_the_tower_s_dtype(tower: Any) -> None:
    """Loaders reuse their buffers, and serve in another dtype than checkpoints have."""
    weights = {name: weight.clone() for name, weight in checkpoint(tower)}
    layer = NextTowerLayer(CONFIG, NEXT)
    for _ in layer.capture_weights(iter(weights.items()), LIKE):
        pass
    for weight in weights.values():
        weight.fill_(torch.nan)
    attention, keys = layer(torch.randn(1, 5, CONFIG.hidden_size))
    assert attention.isfinite().all() and keys.isfinite().all()
    half = load_layer(tower, like=torch.zeros(1, dtype=torch.bfloat16))
    attention, keys = half(torch.randn(1, 5, CONFIG.hidden_size, dtype=torch.bfloat16))
    assert (attention.dtype, keys.dtype) == (torch.float32, torch.bfloat16)


def test_other_weights_replace_the_first_while_the_model_has_none(tower: Any) -> None:
    """``reload_weights`` of a running engine: the model's parameters are on the meta device."""
    layer, states = load_layer(tower), torch.randn(1, 5, CONFIG.hidden_size)
    _, before = layer(states)
    doubled = ((name, weight * 2) for name, weight in checkpoint(tower))
    for _ in layer.capture_weights(doubled, torch.zeros(1, device="meta")):
        pass
    _, after = layer(states)
    assert after.isfinite().all() and not torch.allclose(before, after)


@pytest.mark.parametrize("lost", NAMES)
def test_missing_weights_are_named(tower: Any, lost: str) -> None:
    layer = NextTowerLayer(CONFIG, NEXT)
    weights = ((n, w) for n, w in checkpoint(tower) if not n.endswith(f"layers.{NEXT}.{lost}"))
    for _ in layer.capture_weights(weights, LIKE):
        pass
    with pytest.raises(ConfigError) as caught:
        layer.require_weights()
    (problem,) = caught.value.problems
    assert problem.where.endswith(f"encoder.layers.{NEXT}.{lost}")
    assert "not in the checkpoint" in problem.what


def test_weights_of_another_shape_are_refused(tower: Any) -> None:
    layer = NextTowerLayer(CONFIG, NEXT)
    packed = (
        (name, weight[:, :3] if name.endswith("k_proj.weight") else weight)
        for name, weight in checkpoint(tower)
    )
    for _ in layer.capture_weights(packed, LIKE):
        pass
    with pytest.raises(ConfigError, match=r"has shape \(24, 3\), not \(24, 24\)"):
        layer.require_weights()


def test_dummies_serve_where_nothing_was_loaded(tower: Any) -> None:
    """``--load-format dummy`` never shows the model a checkpoint."""
    layer = NextTowerLayer(CONFIG, NEXT)
    layer.init_dummy_weights(LIKE)
    attention, keys = layer(torch.randn(2, 10, CONFIG.hidden_size))
    assert attention.shape == (2, 9)
    assert keys.shape == (2, 9, CONFIG.hidden_size)
    assert attention.isfinite().all()
    real = load_layer(tower)
    before = real(torch.ones(1, 3, CONFIG.hidden_size))[1]
    real.init_dummy_weights(LIKE)
    assert torch.equal(real(torch.ones(1, 3, CONFIG.hidden_size))[1], before)


# ---- relevance by a text tower or input embeddings, and the language model's first layers ----

CPU = torch.device("cpu")
SHORT: Ids = (BOS, 5, EOS)
LONGER: Ids = (BOS, 5, 6, 7, 8, EOS)
LONG: Ids = (BOS, *range(10, 26), EOS)  # three segments of 8, 8 and 2
NO_END: Ids = (BOS, 5, 6)


@pytest.fixture(scope="module")
def text_tower(tiny_clip: TinyClip) -> ClipTower:
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
    tiny_clip: TinyClip, text_tower: ClipTower, ids: Ids
) -> None:
    text, used = text_tower.instructions([ids])
    assert used.all()
    torch.testing.assert_close(text[0], published(tiny_clip.model, ids, SEGMENT))


def test_a_batch_is_each_of_its_instructions_alone(text_tower: ClipTower) -> None:
    instructions = [SHORT, LONG, LONGER]
    text, used = text_tower.instructions(instructions)
    assert text.shape == (3, 3, WIDTH)
    assert used.tolist() == [[True, False, False], [True] * 3, [True, False, False]]
    for row, ids in enumerate(instructions):
        alone, _ = text_tower.instructions([ids])
        torch.testing.assert_close(text[row][used[row]], alone[0])


def test_instruction_without_token_ids(text_tower: ClipTower) -> None:
    """A tokenizer without special tokens returns no ids for an empty instruction."""
    for instructions in ([()], [SHORT, ()]):
        text, used = text_tower.instructions(instructions)
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
    text_tower = _tower_of(tmp_path, segment=77)
    for name in names("clip_chunk"):
        expected = load(name).expected
        text, _ = text_tower.instructions([tuple(int(i) for i in expected["token_ids"])])
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
    tiny_clip: TinyClip, text_tower: ClipTower
) -> None:
    hidden = torch.randn(2, 16, VISION_WIDTH)
    model = tiny_clip.model
    with torch.no_grad():
        expected = model.visual_projection(model.vision_model.post_layernorm(hidden))
    torch.testing.assert_close(text_tower.patches(hidden), expected)
    half = text_tower.patches(hidden.bfloat16())
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, text_tower.patches(hidden.bfloat16().float()))


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
