"""Batches and losses of the two stages that train the CLIP towers.

Relevance is trained on the path that serving reads: penultimate patches, post layer norm and visual
projection, compared with the projected text.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPModel

from benchmarks.minillava.layout import Canvas
from benchmarks.minillava.render import normalize_pixels, render_characters
from benchmarks.minillava.training.models import DenseHeads, penultimate_states
from benchmarks.minillava.training.scenes import Labels, label_patches, training_scenes
from benchmarks.minillava.training.texts import caption, pointing_phrase
from benchmarks.minillava.vocabulary import CLIP_END, CLIP_LENGTH, token_id

PHRASES_PER_IMAGE = 3
# Logits of pointing over the patches are cosines times this.
_POINTING_SCALE = 16.0

LossParts = dict[str, float]
"""Losses and accuracies by name, for the log."""


@dataclass(frozen=True)
class TowerBatch:
    """Pixels, dense targets, and texts: B * P phrases, then B captions.

    `targets` (B, P, N) spreads a weight of one over the patches that each phrase names.
    """

    values: Tensor
    labels: Labels
    texts: Tensor
    targets: Tensor


def encode_texts(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """Token ids (M, L) of texts, padded on the right with the end token."""
    rows = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    longest = max(map(len, rows))
    assert longest <= CLIP_LENGTH
    end = token_id(tokenizer, CLIP_END)
    return torch.tensor([row + [end] * (longest - len(row)) for row in rows])


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
        normalize_pixels(drawn.images),
        label_patches(drawn.scenes, canvas),
        encode_texts(tokenizer, texts),
        targets,
    )


def classification_loss(logits: Tensor, target: Tensor) -> tuple[Tensor, float]:
    """Cross entropy and accuracy over the patches where the target applies."""
    labelled = target >= 0
    predicted, expected = logits[labelled].float(), target[labelled]
    accuracy = (predicted.detach().argmax(-1) == expected).float().mean()
    return F.cross_entropy(predicted, expected), float(accuracy)


def reading_loss(
    clip: CLIPModel, heads: DenseHeads, seed: int, size: int, canvas: Canvas
) -> tuple[Tensor, LossParts]:
    """Loss of the reading stage: the digit and the colour of every patch of images of digits."""
    images, digit, colour = render_characters(seed, size, canvas)
    logits, _ = heads(penultimate_states(clip, normalize_pixels(images))[:, 1:])
    digit_loss, accuracy = classification_loss(logits["digit"], digit)
    colour_loss, _ = classification_loss(logits["colour"], colour)
    parts = {"digit": float(digit_loss.detach()), "digit_acc": accuracy}
    return digit_loss + 0.3 * colour_loss, parts


def _dense_loss(heads: DenseHeads, patches: Tensor, labels: Labels) -> tuple[Tensor, LossParts]:
    """Sum of the losses over every field of the labels, and the accuracies."""
    logits, near = heads(patches)
    targets = {
        "kind": labels.kind, "colour": labels.colour, "shape": labels.shape,
        "digit": labels.digit, "row": labels.row, "column": labels.column,
        "slot": labels.slot, "length": labels.length, "centre": labels.centre,
    }  # fmt: skip
    losses: list[Tensor] = []
    parts: LossParts = {}
    for name, target in targets.items():
        loss, accuracy = classification_loss(logits[name], target)
        losses.append(loss * (2.0 if name == "digit" else 1.0))
        parts[name] = accuracy
    accuracies: list[float] = []
    for place, (colour, shape) in enumerate(near):
        for neighbour_logits, field in ((colour, 0), (shape, 1)):
            target = labels.near[:, :, place, field]
            loss, accuracy = classification_loss(neighbour_logits, target)
            losses.append(loss * 0.5)
            accuracies.append(accuracy)
    parts["near"] = sum(accuracies) / len(accuracies)
    return torch.stack(losses).sum(), parts


def tower_loss(clip: CLIPModel, heads: DenseHeads, batch: TowerBatch) -> tuple[Tensor, LossParts]:
    """Loss of the tower stage: dense classes, pointing, and image-caption contrast."""
    hidden = penultimate_states(clip, batch.values)
    patches = hidden[:, 1:]
    dense, parts = _dense_loss(heads, patches, batch.labels)
    pooled = clip.text_model(input_ids=batch.texts).pooler_output
    text = F.normalize(clip.text_projection(pooled).float(), dim=-1)
    size = len(batch.values)
    projected = clip.visual_projection(clip.vision_model.post_layernorm(patches))
    projected = F.normalize(projected.float(), dim=-1)
    phrases = text[: size * PHRASES_PER_IMAGE].view(size, PHRASES_PER_IMAGE, -1)
    cosines = phrases @ projected.transpose(1, 2)
    pointing = -(batch.targets * F.log_softmax(cosines * _POINTING_SCALE, -1)).sum(-1).mean()

    last = clip.vision_model.encoder.layers[-1](hidden, attention_mask=None)[:, 0]
    image = clip.visual_projection(clip.vision_model.post_layernorm(last))
    contrast = _contrastive_loss(F.normalize(image.float(), dim=-1), text[-size:], clip.logit_scale)
    loss = dense + 0.5 * pointing + 0.1 * contrast
    hit = batch.targets.gather(2, cosines.argmax(-1, keepdim=True)) > 0
    totals = {"loss": float(loss.detach()), "contrast": float(contrast.detach())}
    return loss, totals | parts | {"hit": float(hit.float().mean())}


def _contrastive_loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """CLIP's symmetric contrastive loss over unit rows (B, C)."""
    logits = scale.float().exp().clamp(max=50) * image @ text.T
    same = torch.arange(len(image))
    return F.cross_entropy(logits, same) + F.cross_entropy(logits.T, same)
