"""The CLIP pair: vision tower, text tower and the losses of their joint training stage.

Knows nothing about the language model. Relevance is trained on the path that serving reads:
penultimate patches, post layer norm, visual projection, against the projected text.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPConfig, CLIPModel

from benchmarks.minillava.questions import caption, pointing_text
from benchmarks.minillava.scenes import COLOURS, IMAGE, PATCH, PATCHES, SHAPES, SceneBatch, draw
from benchmarks.minillava.vocabulary import CLIP_BEGIN, CLIP_END, CLIP_LENGTH, token_id

WIDTH = 128
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
TEXTS_PER_IMAGE = 6
# Sharpness of pointing: cosines between -1 and 1 times this are the logits over 144 patches.
_SHARPNESS = 16.0


def clip_config(tokenizer: Tokenizer) -> CLIPConfig:
    """The sizes of both towers; larger cosine means more relevant."""
    shared = {
        "hidden_size": WIDTH,
        "intermediate_size": 3 * WIDTH,
        "num_attention_heads": 4,
        "projection_dim": WIDTH,
    }
    end = token_id(tokenizer, CLIP_END)
    config = CLIPConfig(
        projection_dim=WIDTH,
        vision_config={
            **shared, "num_hidden_layers": 5, "image_size": IMAGE, "patch_size": PATCH,
        },
        text_config={
            **shared, "num_hidden_layers": 2, "vocab_size": tokenizer.get_vocab_size(),
            "max_position_embeddings": CLIP_LENGTH, "eos_token_id": end, "pad_token_id": end,
            "bos_token_id": token_id(tokenizer, CLIP_BEGIN),
        },
        attn_implementation="eager",
    )  # fmt: skip
    config.autoprune_relevance_sign = 1
    return config


def pixels(images: Tensor) -> Tensor:
    """Normalised pixels (B, 3, 168, 168) bf16 of uint8 images, as the image processor does."""
    mean = torch.tensor(MEAN)[:, None, None]
    std = torch.tensor(STD)[:, None, None]
    return ((images.float() / 255 - mean) / std).to(torch.bfloat16)


def penultimate(clip: CLIPModel, values: Tensor) -> Tensor:
    """Hidden states (B, 145, 128) that LLaVA reads: the output of all layers but the last."""
    tower = clip.vision_model
    hidden = tower.pre_layrnorm(tower.embeddings(values))
    for layer in tower.encoder.layers[:-1]:
        hidden = layer(hidden, attention_mask=None)
    return hidden


class DenseHeads(nn.Module):
    """Training-only linear heads that name what a patch belongs to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, len(COLOURS) + len(SHAPES) + 10 + 1)

    def forward(self, patches: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(B, 144, 128) → colour, shape, digit and foreground logits."""
        logits = self.out(self.norm(patches)).float()
        colour, shape, digit, front = logits.split((len(COLOURS), len(SHAPES), 10, 1), -1)
        return colour, shape, digit, front[..., 0]


@dataclass(frozen=True)
class TowerBatch:
    """Pixels, dense targets (B, 144; -1 is background), texts and where they point."""

    values: Tensor
    colour: Tensor
    shape: Tensor
    digit: Tensor
    texts: Tensor  # (B * 6 + B, L): pointing texts, then captions
    targets: Tensor  # (B, 6, 144), rows sum to one


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """Right-padded ids (M, L) of texts, padded with the end token."""
    rows = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    longest = max(map(len, rows))
    assert longest <= CLIP_LENGTH
    end = token_id(tokenizer, CLIP_END)
    return torch.tensor([row + [end] * (longest - len(row)) for row in rows])


def tower_batch(seed: int, size: int, tokenizer: Tokenizer) -> TowerBatch:
    """Draw one batch of the tower stage."""
    drawn = draw(seed, size)
    rng = random.Random(seed + 1)
    texts: list[str] = []
    targets = torch.zeros(size, TEXTS_PER_IMAGE, PATCHES)
    for index, scene in enumerate(drawn.scenes):
        for row in range(TEXTS_PER_IMAGE):
            thing = rng.choice(scene.things)
            texts.append(pointing_text(rng, scene, thing))
            targets[index, row, list(thing.patches)] = 1 / len(thing.patches)
    texts.extend(caption(rng, scene) for scene in drawn.scenes)
    colour, shape, digit = _dense_targets(drawn)
    return TowerBatch(pixels(drawn.images), colour, shape, digit, encode(tokenizer, texts), targets)


def _dense_targets(drawn: SceneBatch) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.full((3, len(drawn.scenes), 9), -1)
    for index, scene in enumerate(drawn.scenes):
        for place, thing in enumerate(scene.things):
            rows[:, index, place] = torch.tensor((thing.colour, thing.shape, thing.digit))
    # The last column stays -1, which is where owner -1 (background) points to.
    colour, shape, digit = (row.gather(1, drawn.owner % 9) for row in rows)
    return colour, shape, digit


def tower_loss(
    clip: CLIPModel, heads: DenseHeads, batch: TowerBatch
) -> tuple[Tensor, dict[str, float]]:
    """The stage's loss and its parts: dense classes, pointing, image to caption contrast."""
    hidden = penultimate(clip, batch.values)
    patches = hidden[:, 1:]
    colour, shape, digit, front = heads(patches)
    seen = batch.colour >= 0
    dense = {
        "colour": F.cross_entropy(colour[seen], batch.colour[seen]),
        "shape": F.cross_entropy(shape[seen], batch.shape[seen]),
        "digit": F.cross_entropy(digit[seen], batch.digit[seen]),
        "front": F.binary_cross_entropy_with_logits(front, seen.float()),
    }
    pooled = clip.text_model(input_ids=batch.texts).pooler_output
    text = F.normalize(clip.text_projection(pooled).float(), dim=-1)
    size = len(batch.values)
    eye = clip.visual_projection(clip.vision_model.post_layernorm(patches))
    eye = F.normalize(eye.float(), dim=-1)
    pointers = text[: size * TEXTS_PER_IMAGE].view(size, TEXTS_PER_IMAGE, -1)
    cosines = pointers @ eye.transpose(1, 2)
    point = -(batch.targets * F.log_softmax(cosines * _SHARPNESS, -1)).sum(-1).mean()

    last = clip.vision_model.encoder.layers[-1](hidden, attention_mask=None)[:, 0]
    image = clip.visual_projection(clip.vision_model.post_layernorm(last))
    image = F.normalize(image.float(), dim=-1)
    logits = clip.logit_scale.float().exp().clamp(max=50) * image @ text[-size:].T
    same = torch.arange(size)
    contrast = F.cross_entropy(logits, same) + F.cross_entropy(logits.T, same)

    loss = sum(dense.values()) + point + 0.1 * contrast
    hit = batch.targets.gather(2, cosines.argmax(-1, keepdim=True)) > 0
    parts = {name: float(value.detach()) for name, value in dense.items()}
    parts |= {"point": float(point.detach()), "contrast": float(contrast.detach())}
    right = digit[seen].argmax(-1) == batch.digit[seen]
    parts |= {"digit_acc": float(right.float().mean()), "hit": float(hit.float().mean())}
    return loss, parts
