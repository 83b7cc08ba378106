"""The CLIP pair: vision tower, text tower and the losses of their joint training.

Knows nothing about the language model. Relevance is trained on the path that serving reads:
penultimate patches, post layer norm, visual projection, against the projected text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPConfig, CLIPModel

from benchmarks.minillava.attention import LEAN
from benchmarks.minillava.layout import (
    COLOURS,
    LONGEST_NUMBER,
    PATCH,
    SHAPES,
    TRAINING_STYLES,
    Canvas,
    alike,
    draw_layout,
)
from benchmarks.minillava.questions import caption, pointing_phrase
from benchmarks.minillava.render import (
    NEIGHBOURS,
    Batch,
    Labels,
    characters,
    labels,
    render,
)
from benchmarks.minillava.vocabulary import CLIP_BEGIN, CLIP_END, CLIP_LENGTH, token_id

WIDTH = 160
TEXT_WIDTH = 128
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
PHRASES_PER_IMAGE = 3
# Sharpness of pointing: cosines between -1 and 1 times this are the logits over the patches.
_SHARPNESS = 16.0
# Rows and columns must be there from the first step on, or the language model learns to do
# without them; a table that starts at CLIP's 0.02 is drowned by the patches.
_POSITION_SCALE = 0.5


def clip_config(tokenizer: Tokenizer, canvas: Canvas) -> CLIPConfig:
    """The sizes of both towers; larger cosine means more relevant."""
    end = token_id(tokenizer, CLIP_END)
    config = CLIPConfig(
        projection_dim=TEXT_WIDTH,
        vision_config={
            "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_attention_heads": 5,
            "projection_dim": TEXT_WIDTH, "num_hidden_layers": 5, "image_size": canvas.image,
            "patch_size": PATCH,
        },
        text_config={
            "hidden_size": TEXT_WIDTH, "intermediate_size": 3 * TEXT_WIDTH,
            "num_attention_heads": 4, "projection_dim": TEXT_WIDTH, "num_hidden_layers": 2,
            "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": CLIP_LENGTH,
            "eos_token_id": end, "pad_token_id": end,
            "bos_token_id": token_id(tokenizer, CLIP_BEGIN),
        },
        attn_implementation="eager",
    )  # fmt: skip
    config.autoprune_relevance_sign = 1
    return config


def clip_model(tokenizer: Tokenizer, canvas: Canvas) -> CLIPModel:
    """A fresh pair of towers whose position table starts as waves over rows and columns."""
    clip = CLIPModel(clip_config(tokenizer, canvas))
    clip.vision_model.config._attn_implementation = LEAN
    with torch.no_grad():
        table = clip.vision_model.embeddings.position_embedding.weight
        table[1:] = _waves(canvas.grid) * _POSITION_SCALE
    return clip


def _waves(grid: int) -> Tensor:
    """(N, WIDTH): sines and cosines of a patch's row and column."""
    frequencies = torch.pi / 2 ** torch.linspace(0, 4, WIDTH // 4)
    angles = torch.arange(grid)[:, None] * frequencies
    waves = torch.cat((angles.sin(), angles.cos()), 1)
    row = waves[:, None].expand(grid, grid, -1)
    return torch.cat((row, row.transpose(0, 1)), -1).flatten(0, 1)


def pixels(images: Tensor) -> Tensor:
    """Normalised pixels (B, 3, H, W) bf16 of uint8 images, as the image processor does."""
    mean = torch.tensor(MEAN)[:, None, None]
    std = torch.tensor(STD)[:, None, None]
    return ((images.float() / 255 - mean) / std).to(torch.bfloat16)


def penultimate(clip: CLIPModel, values: Tensor) -> Tensor:
    """Hidden states (B, 1 + N, WIDTH) that LLaVA reads: the output of all layers but the last."""
    tower = clip.vision_model
    hidden = tower.pre_layrnorm(tower.embeddings(values))
    for layer in tower.encoder.layers[:-1]:
        hidden = layer(hidden, attention_mask=None)
    return hidden


class DenseHeads(nn.Module):
    """Training-only linear heads that name what a patch belongs to."""

    def __init__(self, canvas: Canvas) -> None:
        super().__init__()
        self.sizes = {
            "kind": 3, "colour": len(COLOURS), "shape": len(SHAPES), "digit": 10,
            "row": canvas.cells, "column": canvas.cells, "slot": LONGEST_NUMBER,
            "length": LONGEST_NUMBER - 1, "centre": 2,
        }  # fmt: skip
        self.near = (len(COLOURS) + 1, len(SHAPES) + 1)
        self.norm = nn.LayerNorm(WIDTH)
        every = sum(self.sizes.values()) + len(NEIGHBOURS) * sum(self.near)
        self.out = nn.Linear(WIDTH, every)

    def forward(self, patches: Tensor) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
        """(B, N, WIDTH) → logits by name of a `Labels` field, and of each neighbour."""
        logits = self.out(self.norm(patches))
        own, near = logits.split([sum(self.sizes.values()), len(NEIGHBOURS) * sum(self.near)], -1)
        parts = own.split(list(self.sizes.values()), -1)
        beside = near.unflatten(-1, (len(NEIGHBOURS), sum(self.near))).unbind(-2)
        pairs = [(colour, shape) for colour, shape in (one.split(self.near, -1) for one in beside)]
        return dict(zip(self.sizes, parts, strict=True)), pairs


@dataclass(frozen=True)
class TowerBatch:
    """Pixels, dense targets, texts (B * P phrases, then B captions) and where phrases point."""

    values: Tensor
    labels: Labels
    texts: Tensor
    targets: Tensor  # (B, P, N), rows sum to one


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """Right-padded ids (M, L) of texts, padded with the end token."""
    rows = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    longest = max(map(len, rows))
    assert longest <= CLIP_LENGTH
    end = token_id(tokenizer, CLIP_END)
    return torch.tensor([row + [end] * (longest - len(row)) for row in rows])


def training_scenes(seed: int, size: int, canvas: Canvas, most: int | None = None) -> Batch:
    """Draw scenes of the arrangements that training may see.

    With `most` they are for a beginner: of at most so many shapes, and alike in every second scene.
    """
    rng = random.Random(seed)
    layouts = [draw_layout(rng, rng.choice(TRAINING_STYLES), canvas) for _ in range(size)]
    if most is not None:
        layouts = [replace(layout, things=layout.things[:most]) for layout in layouts]
        layouts = [alike(rng, one) if rng.random() < 0.5 else one for one in layouts]
    return render(layouts, canvas, seed)


def tower_batch(seed: int, size: int, tokenizer: Tokenizer, canvas: Canvas) -> TowerBatch:
    """Draw one batch of the tower stage."""
    drawn = training_scenes(seed, size, canvas)
    rng = random.Random(seed + 1)
    texts: list[str] = []
    targets = torch.zeros(size, PHRASES_PER_IMAGE, canvas.patches)
    for index, scene in enumerate(drawn.scenes):
        for row in range(PHRASES_PER_IMAGE):
            phrase, patches = pointing_phrase(rng, scene)
            texts.append(phrase)
            targets[index, row, list(patches)] = 1 / len(patches)
    texts.extend(caption(rng, scene) for scene in drawn.scenes)
    return TowerBatch(
        pixels(drawn.images), labels(drawn.scenes, canvas), encode(tokenizer, texts), targets
    )


def _named(logits: Tensor, target: Tensor) -> tuple[Tensor, float]:
    """Cross entropy and accuracy over the patches where the target makes sense."""
    asked = target >= 0
    found, wanted = logits[asked].float(), target[asked]
    right = (found.detach().argmax(-1) == wanted).float().mean()
    return F.cross_entropy(found, wanted), float(right)


def reading_loss(
    clip: CLIPModel, heads: DenseHeads, seed: int, size: int, canvas: Canvas
) -> tuple[Tensor, dict[str, float]]:
    """The primer: name the digit and the colour of every patch of images full of digits."""
    images, digit, colour = characters(seed, size, canvas)
    found, _ = heads(penultimate(clip, pixels(images))[:, 1:])
    digits, right = _named(found["digit"], digit)
    colours, _ = _named(found["colour"], colour)
    return digits + 0.3 * colours, {"digit": float(digits.detach()), "digit_acc": right}


def _dense_loss(
    heads: DenseHeads, patches: Tensor, wanted: Labels
) -> tuple[Tensor, dict[str, float]]:
    found, near = heads(patches)
    targets = {
        "kind": wanted.kind, "colour": wanted.colour, "shape": wanted.shape,
        "digit": wanted.digit, "row": wanted.row, "column": wanted.column,
        "slot": wanted.slot, "length": wanted.length, "centre": wanted.centre,
    }  # fmt: skip
    losses: list[Tensor] = []
    right: dict[str, float] = {}
    for name, target in targets.items():
        loss, share = _named(found[name], target)
        losses.append(loss * (2.0 if name == "digit" else 1.0))
        right[name] = share
    shares: list[float] = []
    for place, (colour, shape) in enumerate(near):
        for logits, part in ((colour, 0), (shape, 1)):
            loss, share = _named(logits, wanted.near[:, :, place, part])
            losses.append(loss * 0.5)
            shares.append(share)
    right["near"] = sum(shares) / len(shares)
    return torch.stack(losses).sum(), right


def tower_loss(
    clip: CLIPModel, heads: DenseHeads, batch: TowerBatch
) -> tuple[Tensor, dict[str, float]]:
    """The stage's loss and its parts: dense classes, pointing, image to caption contrast."""
    hidden = penultimate(clip, batch.values)
    patches = hidden[:, 1:]
    dense, right = _dense_loss(heads, patches, batch.labels)
    pooled = clip.text_model(input_ids=batch.texts).pooler_output
    text = F.normalize(clip.text_projection(pooled).float(), dim=-1)
    size = len(batch.values)
    eye = clip.visual_projection(clip.vision_model.post_layernorm(patches))
    eye = F.normalize(eye.float(), dim=-1)
    pointers = text[: size * PHRASES_PER_IMAGE].view(size, PHRASES_PER_IMAGE, -1)
    cosines = pointers @ eye.transpose(1, 2)
    point = -(batch.targets * F.log_softmax(cosines * _SHARPNESS, -1)).sum(-1).mean()

    last = clip.vision_model.encoder.layers[-1](hidden, attention_mask=None)[:, 0]
    image = clip.visual_projection(clip.vision_model.post_layernorm(last))
    contrast = _contrast(F.normalize(image.float(), dim=-1), text[-size:], clip.logit_scale)
    loss = dense + 0.5 * point + 0.1 * contrast
    hit = batch.targets.gather(2, cosines.argmax(-1, keepdim=True)) > 0
    parts = {"loss": float(loss.detach()), "contrast": float(contrast.detach())}
    return loss, parts | right | {"hit": float(hit.float().mean())}


def _contrast(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """CLIP's symmetric loss over (B, C) unit rows."""
    logits = scale.float().exp().clamp(max=50) * image @ text.T
    same = torch.arange(len(image))
    return F.cross_entropy(logits, same) + F.cross_entropy(logits.T, same)


def relevance(
    clip: CLIPModel, patches: Tensor, texts: Sequence[str], tokenizer: Tokenizer
) -> Tensor:
    """Cosines (M, N) between texts and the patches (M, N, WIDTH) of their images."""
    pooled = clip.text_model(input_ids=encode(tokenizer, list(texts))).pooler_output
    text = F.normalize(clip.text_projection(pooled).float(), dim=-1)
    eye = F.normalize(
        clip.visual_projection(clip.vision_model.post_layernorm(patches)).float(), dim=-1
    )
    cosines: Tensor = (eye @ text[:, :, None])[..., 0]
    return cosines
