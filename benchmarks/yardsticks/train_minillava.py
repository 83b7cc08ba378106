"""``python -m benchmarks.yardsticks.train_minillava``: train mini-LLaVA and its CLIP from scratch.

Shapes of the models, tokenizers and processors are those of the committed checkpoint. Relevance is
trained on the path that serving reads: penultimate patches, post layer norm and visual projection,
compared with the projected text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPConfig, CLIPModel, LlamaForCausalLM, LlavaConfig
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from benchmarks.yardsticks import scenes, training
from benchmarks.yardsticks.examples import CLIP, LLAVA, PROMPT, keep_first
from benchmarks.yardsticks.questions import BRIEF, SEEN, Questions
from benchmarks.yardsticks.scenes import (
    CELL_PATCHES,
    CELLS,
    COLOURS,
    NEIGHBOURS,
    PATCHES,
    SHAPES,
    Scene,
    Sign,
    Thing,
)
from benchmarks.yardsticks.training import UNLABELLED, Recipe, TextBatch

# Scenes of the phrase stage start with two shapes in few tokens, and are complete from this step
# on.
_CURRICULUM_STEPS = 700
_CURRICULUM_TOKENS = 12
# With CLIP's scale of 0.02, the position table would be drowned by the patches.
_POSITION_SCALE = 0.5
_PHRASES_PER_IMAGE = 3
# Scale from cosines to the logits of pointing over the patches.
_POINTING_SCALE = 16.0

_BEFORE_IMAGE, _, _BEHIND_IMAGE = PROMPT["minillava"]

_FIELDS: dict[str, int] = {
    "kind": 3,
    "colour": len(COLOURS),
    "shape": len(SHAPES),
    "digit": 10,
    "row": CELLS,
    "column": CELLS,
    "slot": scenes.MAX_DIGITS,
    "length": scenes.MAX_DIGITS - 1,
    "centre": 2,
    **{
        f"near{place} {name}": count + 1
        for place in range(len(NEIGHBOURS))
        for name, count in (("colour", len(COLOURS)), ("shape", len(SHAPES)))
    },
}
"""Fields of dense labels of patches, and their numbers of classes.

kind: 0 background, 1 shape, 2 sign; row and column: in cells; slot: position of a digit within the
number; length: digits of the number minus two; centre: 1 on the middle patch of a shape, 0 on its
others; digit: only on a sign's patches and on the middle patch of a shape, so that no other patch
learns to repeat it; near: colour and form of the shapes on the left, on the right, above and below,
or the last class if there is none.
"""
_FIELD_WEIGHTS = {name: 0.5 for name in _FIELDS if name.startswith("near")} | {
    "digit": 2.0
}


def _penultimate_states(clip: CLIPModel, images: Tensor) -> Tensor:
    """Hidden states (B, 1 + N, Dv) before CLIP's last layer; LLaVA reads these."""
    tower = clip.vision_model
    hidden = tower.pre_layrnorm(tower.embeddings(scenes.normalize_pixels(images)))
    for layer in tower.encoder.layers[:-1]:
        hidden = layer(hidden, attention_mask=None)
    return hidden


def _draw_scenes(
    seed: int, size: int, max_shapes: int | None = None
) -> tuple[Tensor, list[Scene]]:
    """Images (B, 3, H, W) and scenes in the arrangements of training.

    `max_shapes` makes scenes easier: each keeps at most that many shapes. In about half of them all
    shapes have the same form or the same colour, so that only the other word of a name tells them
    apart. Without such scenes a small model learns to find a shape by the last word of its name, is
    right half of the time, and never gets better.
    """
    rng = random.Random(seed)
    drawn = [Scene.draw(rng, rng.choice(scenes.TRAINING_STYLES)) for _ in range(size)]
    if max_shapes is not None:
        for index, scene in enumerate(drawn):
            things = scene.things[:max_shapes]
            if rng.random() < 0.5:
                if rng.random() < 0.5:
                    colours = rng.sample(range(len(COLOURS)), len(COLOURS))
                    shapes = [rng.randrange(len(SHAPES))] * len(COLOURS)
                else:
                    colours = [rng.randrange(len(COLOURS))] * len(SHAPES)
                    shapes = rng.sample(range(len(SHAPES)), len(SHAPES))
                things = tuple(
                    replace(thing, colour=colour, shape=shape)
                    for thing, colour, shape in zip(
                        things, colours, shapes, strict=False
                    )
                )
            drawn[index] = replace(scene, things=things)
    return scenes.render_scenes(drawn, CELLS, seed)


def _label_patches(drawn: Sequence[Scene]) -> Tensor:
    """Labels (fields, B, N) of all patches of shapes and signs; the others are background."""
    labels = torch.full((len(_FIELDS), len(drawn), PATCHES), UNLABELLED)
    labels[0] = 0
    for index, scene in enumerate(drawn):
        for thing in scene.things:
            near: list[int] = []
            for step in NEIGHBOURS:
                other = scene.neighbour(thing, *step)
                near += (
                    (other.colour, other.shape)
                    if other
                    else (len(COLOURS), len(SHAPES))
                )
            for rank, patch in enumerate(scene.patches[thing]):
                digit = thing.digit if rank == 0 else UNLABELLED
                named = [
                    1,
                    thing.colour,
                    thing.shape,
                    digit,
                    thing.row,
                    thing.column,
                    -1,
                    -1,
                ]
                labels[:, index, patch] = torch.tensor([*named, int(rank == 0), *near])
        for sign in scene.signs:
            cell = (sign.row // CELL_PATCHES, sign.column // CELL_PATCHES)
            for slot, patch in enumerate(scene.patches[sign]):
                number = sign.number
                named = [2, sign.colour, -1, number[slot], *cell, slot, len(number) - 2]
                labels[: len(named), index, patch] = torch.tensor(named)
    return labels


def _draw_phrases(seed: int, drawn: Sequence[Scene]) -> tuple[list[str], Tensor]:
    """B * P phrases that each name one part of a scene, then B captions of three parts.

    Targets (B, P, N) spread a weight of one over the patches that a phrase names. The text tower is
    trained on such phrases and never on questions, so its relevance to a whole question is good but
    not perfect, as in a real model.
    """
    rng = random.Random(seed)
    texts: list[str] = []
    targets = torch.zeros(len(drawn), _PHRASES_PER_IMAGE, PATCHES)
    for index, scene in enumerate(drawn):
        digits = [thing.digit for thing in scene.things]
        for row in range(_PHRASES_PER_IMAGE):
            part: Thing | Sign
            if scene.signs and rng.random() < 0.2:
                part = rng.choice(scene.signs)
                texts.append(f"the {part.name}")
            else:
                part = rng.choice(scene.things)
                if digits.count(part.digit) == 1 and rng.random() < 0.35:
                    texts.append(f"the digit {part.digit}")
                else:
                    names = (part.name, part.name_with_article, f"the {part.name}")
                    texts.append(rng.choice(names))
            patches = scene.patches[part]
            targets[index, row, list(patches)] = 1 / len(patches)
    for scene in drawn:
        parts: Sequence[Thing | Sign] = rng.sample((*scene.things, *scene.signs), 3)
        texts.append(
            ", ".join(
                f"{part.name} {part.text if isinstance(part, Sign) else part.digit}"
                for part in parts
            )
        )
    return texts, targets


def _draw_texts(
    seed: int,
    recipe: Recipe,
    words: Tokenizer,
    drawn: Sequence[Scene],
    budget: int | None = None,
) -> tuple[Tensor, TextBatch]:
    """Kept raster patches (B, K), and texts about every scene.

    The texts are questions and phrases, and all patches are kept. With a `budget` they are only
    phrases, and this many patches are kept: middles of shapes and whole signs first. Phrases
    continue beside the questions, because they still teach something and prevent forgetting.
    """
    rng = random.Random(seed + 1)
    phrases = recipe.phrases["scenes"]
    pictures = []
    selections = []
    for scene in drawn:
        source = Questions(rng, scene, (CELLS, CELLS), BRIEF)
        if budget is None:
            asking = replace(source, wordings=SEEN)
            weights = recipe.questions["scenes"]
            texts = asking.draw_texts(weights, 12, _BEHIND_IMAGE)
            texts += source.draw_texts(phrases, 14, " {question}")
            selections.append(list(range(PATCHES)))
        else:
            texts = source.draw_texts(phrases, 40, " {question}")
            evidence = [scene.patches[thing][0] for thing in scene.things]
            evidence += [patch for sign in scene.signs for patch in scene.patches[sign]]
            selections.append(keep_first(rng, evidence, budget, PATCHES))
        pictures.append(texts)
    start = len(words.encode(_BEFORE_IMAGE).ids) + len(selections[0])
    return torch.tensor(selections), TextBatch.build(
        words, pictures, start, "</s>", "<pad>"
    )


class _Trainer:
    """Both untrained models, and the loss of every stage of a recipe.

    A loss is that of one batch, given its seed and the number of the step.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._clip_words, self._words = (
            Tokenizer.from_file(str(folder / "tokenizer.json"))
            for folder in (CLIP, LLAVA)
        )
        self.clip = CLIPModel(
            CLIPConfig.from_pretrained(CLIP, attn_implementation="eager")
        )
        vision = self.clip.vision_model
        vision.config._attn_implementation = training.IN_PLACE
        width = vision.config.hidden_size
        with torch.no_grad():
            table = vision.embeddings.position_embedding.weight
            table[1:] = training.position_waves(scenes.GRID, width) * _POSITION_SCALE
        self.heads = training.DenseHeads(width, _FIELDS)
        config = LlavaConfig.from_pretrained(LLAVA)
        config.text_config._attn_implementation = training.IN_PLACE
        self.projector = LlavaMultiModalProjector(config)
        self.model = LlamaForCausalLM(config.text_config)

    def reading_loss(self, seed: int, step: int) -> Tensor:
        """Loss of reading the digit and the colour of every patch, in images of digits."""
        size = self._recipe.stages[0].images
        images, digit, colour = scenes.render_characters(seed, size)
        fields = list(_FIELDS)
        labels = torch.full((len(fields), *digit.shape), UNLABELLED)
        labels[fields.index("digit")] = digit
        labels[fields.index("colour")] = colour
        patches = _penultimate_states(self.clip, images)[:, 1:]
        return self.heads.loss(patches, labels, {"colour": 0.3})

    def tower_loss(self, seed: int, step: int) -> Tensor:
        """Loss of dense classes, of pointing from phrases, and of image-caption contrast."""
        clip = self.clip
        vision = clip.vision_model
        images, drawn = _draw_scenes(seed, self._recipe.stages[1].images)
        hidden = _penultimate_states(clip, images)
        last = vision.encoder.layers[-1](hidden, attention_mask=None)
        patches = hidden[:, 1:]
        pooled = vision.post_layernorm(last[:, 0])
        dense = self.heads.loss(patches, _label_patches(drawn), _FIELD_WEIGHTS)
        texts, targets = _draw_phrases(seed + 1, drawn)
        text, projected, image = (
            F.normalize(part.float(), dim=-1)
            for part in (
                self.encode_texts(texts),
                clip.visual_projection(vision.post_layernorm(patches)),
                clip.visual_projection(pooled),
            )
        )
        phrases, captions = text.split([len(texts) - len(images), len(images)])
        cosines = phrases.unflatten(0, targets.shape[:2]) @ projected.transpose(1, 2)
        pointing = (
            -(targets * F.log_softmax(cosines * _POINTING_SCALE, -1)).sum(-1).mean()
        )
        # CLIP's symmetric contrastive loss between images and captions.
        scale = clip.logit_scale.float().exp().clamp(max=50)
        pairs = torch.arange(len(images))
        logits = scale * image @ captions.T
        contrast = F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)
        return dense + 0.5 * pointing + 0.1 * contrast

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Projections (B, Dp) of texts from the text tower."""
        end = self.clip.config.text_config.eos_token_id
        ids = [self._clip_words.encode(text).ids for text in texts]
        longest = max(map(len, ids))
        padded = torch.tensor([row + [end] * (longest - len(row)) for row in ids])
        output = self.clip.text_model(input_ids=padded)
        return self.clip.text_projection(output.pooler_output)

    def phrase_loss(self, seed: int, step: int) -> Tensor:
        """Loss of answers to phrases; at first scenes are easy and patches few."""
        # Progress is slow at first, because attention among many tokens is slow to join the words
        # of a name.
        progress = min(1.0, step / _CURRICULUM_STEPS) ** 2
        shapes = 2 + round((scenes.MAX_SHAPES - 2) * progress)
        budget = _CURRICULUM_TOKENS + round((PATCHES - _CURRICULUM_TOKENS) * progress)
        images, drawn = _draw_scenes(seed, self._recipe.stages[2].images, shapes)
        return self._answer_loss(seed, images, drawn, budget)

    def question_loss(self, seed: int, step: int) -> Tensor:
        """Loss of answers to questions and phrases, with all patches."""
        images, drawn = _draw_scenes(seed, self._recipe.stages[3].images)
        return self._answer_loss(seed, images, drawn)

    def _answer_loss(
        self,
        seed: int,
        images: Tensor,
        drawn: Sequence[Scene],
        budget: int | None = None,
    ) -> Tensor:
        """Cross entropy on answer tokens that follow the lead and the kept image tokens."""
        selection, texts = _draw_texts(seed, self._recipe, self._words, drawn, budget)
        lead = torch.tensor(self._words.encode(_BEFORE_IMAGE).ids)
        count = len(selection)
        embed = self.model.get_input_embeddings()
        patches = _penultimate_states(self.clip, images)[:, 1:]
        image = self.projector(patches[torch.arange(count)[:, None], selection])
        prefix = torch.cat((embed(lead).expand(count, -1, -1), image), 1)
        positions = torch.arange(prefix.shape[1]).expand(count, -1)
        loss, _ = texts.answer_loss(self.model, self.model.model, prefix, positions)
        return loss


def train(run: training.Training) -> None:
    """Train all stages and write both checkpoints."""
    torch.manual_seed(run.seed)
    trainer = _Trainer(run.recipe)
    clip = trainer.clip
    tower = {"clip": clip, "heads": trainer.heads}
    run.run_stage(0, tower, trainer.reading_loss)
    run.run_stage(1, tower, trainer.tower_loss)
    clip.requires_grad_(False)
    language = {"projector": trainer.projector, "model": trainer.model}
    run.run_stage(2, language, trainer.phrase_loss)
    run.run_stage(3, language, trainer.question_loss)
    run.write_checkpoint(CLIP, {"": clip}, "clip")
    parts = {
        "vision_tower.vision_model.": clip.vision_model,
        "multi_modal_projector.": trainer.projector,
        "language_model.": trainer.model,
    }
    run.write_checkpoint(LLAVA, parts, "llava")


if __name__ == "__main__":
    raise SystemExit(training.Training.start("minillava", train))
