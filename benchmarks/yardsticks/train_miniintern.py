"""``python -m benchmarks.yardsticks.train_miniintern``: train mini-InternVL from scratch.

Shapes of the model, tokenizer and processor are those of the committed checkpoint.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoConfig, InternVLForConditionalGeneration
from transformers.models.internvl.modeling_internvl import (
    InternVLVisionAttention,
    InternVLVisionModel,
)

from benchmarks.yardsticks import naming, pictures, tiles, training
from benchmarks.yardsticks.examples import CHECKPOINTS, split_prompt
from benchmarks.yardsticks.pages import MERGE, Page
from benchmarks.yardsticks.pictures import FIELD_WEIGHTS, FIELDS, Drawing
from benchmarks.yardsticks.questions import Question
from benchmarks.yardsticks.scenes import PATCH, WORDS, Scene
from benchmarks.yardsticks.tiles import SIDE, TILE, TiledSize
from benchmarks.yardsticks.training import UNLABELLED, Recipe

_INTERN = CHECKPOINTS["miniintern"]
_LEAD, _REST = split_prompt("miniintern")
_BETWEEN, _BEHIND = _REST.split("{question}")

# The phrase stage starts with few shapes, words and tokens, and has all of them from this step on.
_CURRICULUM_STEPS = 300
_FEWEST = 4
_FEWEST_TOKENS = 20

_VISION_WIDTH = 128
_WIDTH = 192
_POSITION_SCALE = 0.6
# Where heads of the first four layers attend at the start, in rows and columns from a patch; None
# is anywhere.
_LOOKS = (*[((0, -1), (0, 1), (-1, 0), (1, 0))] * 2, *[((0, None), (None, 0))] * 2)
_LOOK_STRENGTH = 3.3
# Heads that start by matching have queries and keys so much larger than others, because a token has
# a cosine of about a half with each word for what it shows. They do not read the fastest rotary
# frequencies, which turn by more than an image is long: with those they gave half as much attention
# to the tokens that show a word.
_MATCH_SCALE = 3.8
_FAST_FREQUENCIES = 5

_GRID = 4
"""Rows and columns in which labels of places divide a tile or thumbnail."""
_FIELDS: Mapping[str, int] = {
    **{name: count for name, count in FIELDS.items() if name not in ("lower", "right")},
    "row": _GRID,
    "column": _GRID,
    "view": len(tiles.SIZES),
}
"""Fields of dense labels of patches: those of all models, and these.

row and column: place of a shape or text in its tile or thumbnail; view: 0 in a tile, else the
number of the size that a thumbnail shows.
"""
# What is too small to be read in a thumbnail.
_DETAILS = ("word", "head", "tens", "units", "digit", "letter")


@dataclass(frozen=True)
class _Pictures:
    """Pictures of one size as tiles and thumbnails.

    pixels (B, V, 3, TILE, TILE); labels (B, N · MERGE²) by field, in the order of tokens.
    """

    size: TiledSize
    pixels: Tensor
    labels: Mapping[str, Tensor]
    contents: Sequence[Scene | Page]

    @classmethod
    def draw(
        cls,
        seed: int,
        views: Sequence[float],
        scenes: int,
        texts: int,
        *,
        plain: bool = False,
        maximum: int | None = None,
    ) -> _Pictures:
        """Draw scenes, then pages (``texts``); ``views`` are weights of sizes.

        ``plain`` and ``maximum`` are those of :meth:`Drawing.draw`.
        """
        # All batches of a step have the same size.
        rng = random.Random(seed // training.PARTS)
        (size,) = rng.choices(tiles.SIZES, views)
        drawing = Drawing.draw(seed, size, scenes, texts, plain=plain, maximum=maximum)
        pixels = size.split_tiles(drawing.images)
        return cls(size, pixels, label_views(drawing, size), drawing.contents)

    def encode(self, tower: InternVLVisionModel) -> Tensor:
        """States (B, N, MERGE², C) of the patches of every token."""
        states = tower(pixel_values=self.pixels.flatten(0, 1)).last_hidden_state
        patches = tiles.order_patches(states[:, 1:])
        return patches.unflatten(0, (len(self.contents), -1)).flatten(1, 2)

    def draw_texts(
        self, seed: int, recipe: Recipe, budget: int, *, phrases_only: bool
    ) -> tuple[Tensor, list[list[Question]]]:
        """Kept visual tokens (B, K), and questions and phrases about every picture."""
        rng = random.Random(seed + 1)
        questions = list[list[Question]]()
        selections = list[list[int]]()
        for content in self.contents:
            questions.append(
                pictures.draw_texts(
                    rng, content, self.size, recipe, _BEHIND, phrases_only=phrases_only
                )
            )
            selections.append(pictures.keep_parts(rng, content, self.size, budget))
        return torch.tensor(selections), questions


def label_views(drawing: Drawing, size: TiledSize) -> dict[str, Tensor]:
    """Labels (B, N · MERGE²) of the patches of all tiles and thumbnails, by field.

    Labels of a place are those within the tile or thumbnail.
    """
    line = (torch.arange(SIDE * MERGE) + 0.5) * PATCH
    raster = torch.stack(torch.meshgrid(line, line, indexing="ij")[::-1], -1)
    centres = tiles.order_patches(raster.flatten(0, 1)[None])[0].flatten(0, 1)
    labels = list[Tensor]()
    count = len(drawing.contents)
    for index, (scale, offset) in enumerate(size.frames()):
        items = pictures.scale_items(drawing.items, scale, offset)
        items = items[((items[:, 1:3] >= 0) & (items[:, 1:3] < TILE)).all(1)]
        column, row = (items[:, 1:3] * _GRID / TILE).floor().T
        extended = torch.cat((items, row[:, None], column[:, None]), 1)
        view = pictures.label_patches(extended, count, centres)
        fields = dict(zip((*FIELDS, "row", "column"), view, strict=True))
        is_thumbnail = size.copies > 1 and index == size.views - 1
        for name in _DETAILS if is_thumbnail else ():
            fields[name] = torch.full_like(fields[name], UNLABELLED)
        number = tiles.SIZES.index(size) if is_thumbnail else 0
        fields["view"] = torch.full_like(fields["kind"], number)
        labels.append(torch.stack([fields[name] for name in _FIELDS]))
    return dict(zip(_FIELDS, torch.cat(labels, 2), strict=True))


def _build_model() -> InternVLForConditionalGeneration:
    """The untrained model, whose heads start by attending to neighbours and to tokens of a word."""
    model = InternVLForConditionalGeneration(AutoConfig.from_pretrained(_INTERN))
    tower = model.model.vision_tower
    language = model.model.language_model
    for part in (tower, language):
        part.config._attn_implementation = training.IN_PLACE
    with torch.no_grad():
        waves = training.position_waves(SIDE * MERGE, _VISION_WIDTH)
        tower.embeddings.position_embeddings[0, 1:] = waves * _POSITION_SCALE
        blocks = tower.encoder.layer
        for layer, looks in zip(blocks, _LOOKS, strict=False):
            for head, look in enumerate(looks):
                _aim_head(layer.attention, head, look)
        # What aimed heads read starts as places alone, or each patch would attend to itself.
        writers = [
            tower.embeddings.patch_embeddings.projection,
            *(layer.attention.projection_layer for layer in blocks),
            *(layer.mlp.fc2 for layer in blocks),
        ]
        for writer in writers:
            writer.weight[:: _VISION_WIDTH // blocks[0].attention.head_dim] = 0
        naming.start_by_matching(language)
        for layer in language.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                # In a head, halves of pairs come first, then frequencies.
                heads = projection.weight.view(
                    -1, 2, layer.self_attn.head_dim // 2, _WIDTH
                )
                heads[: naming.MATCH_HEADS, :, :_FAST_FREQUENCIES] = 0
                heads[: naming.MATCH_HEADS] *= _MATCH_SCALE
    return model


def _aim_head(
    attention: InternVLVisionAttention, head: int, look: tuple[int | None, ...]
) -> None:
    """Let a head of the tower start by attending to patches at an offset (rows, columns).

    A shift by an offset rotates every pair of a sine and a cosine of :func:`position_waves`. Where
    the offset is None, the head attends anywhere. All heads read the same waves.
    """
    queries = attention.q_proj.weight
    keys = attention.k_proj.weight
    frequencies = training.wave_frequencies(_VISION_WIDTH)
    width = attention.head_dim
    waves = range(0, len(frequencies), _VISION_WIDTH // width)
    for axis, offset in enumerate(look):
        if offset is None:
            continue
        for number, wave in enumerate(waves):
            row = head * width + axis * width // 2 + 2 * number
            pair = [(2 * axis + part) * len(frequencies) + wave for part in range(2)]
            turn = frequencies[wave] * offset
            rotation = torch.tensor(
                [[turn.cos(), turn.sin()], [-turn.sin(), turn.cos()]]
            )
            keys[row : row + 2, pair] += _LOOK_STRENGTH * torch.eye(2)
            queries[row : row + 2, pair] += _LOOK_STRENGTH * rotation


class _Trainer:
    """The untrained model, and the loss of every stage of a recipe.

    A loss is that of one batch, given its seed and the number of the step.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._words = Tokenizer.from_file(str(_INTERN / "tokenizer.json"))
        self.model = _build_model()
        self.heads = training.DenseHeads(_VISION_WIDTH, _FIELDS)

    def dense_loss(self, number: int, seed: int, step: int) -> Tensor:
        """Cross entropy on the dense labels of patches."""
        stage = self._recipe.stages[number]
        scenes = stage.images // 3
        drawn = _Pictures.draw(
            seed, stage.views, scenes, stage.images - scenes, plain=number == 0
        )
        states = drawn.encode(self.model.model.vision_tower).flatten(1, 2)
        labels = torch.stack([*drawn.labels.values()])
        return self.heads.loss(states, labels, FIELD_WEIGHTS)

    def naming_loss(self, seed: int, step: int) -> Tensor:
        """Loss that turns the projector's rows into those of the words for what tokens show."""
        stage = self._recipe.stages[2]
        drawn = _Pictures.draw(seed, stage.views, stage.images, stage.images)
        return self._naming_loss(self._project(drawn), drawn)

    def phrase_loss(self, seed: int, step: int) -> Tensor:
        """Loss of answers to phrases; at first pictures are easy and tokens few."""
        progress = min(1.0, step / _CURRICULUM_STEPS) ** 2
        drawn = self._draw_halves(
            3, seed, _FEWEST + round((len(WORDS) - _FEWEST) * progress)
        )
        tokens = drawn.size.tokens
        budget = _FEWEST_TOKENS + round((tokens - _FEWEST_TOKENS) * progress)
        return self._answer_loss(seed, drawn, budget, phrases_only=True)

    def question_loss(self, seed: int, step: int) -> Tensor:
        """Loss of answers to questions and phrases, with all tokens."""
        drawn = self._draw_halves(4, seed)
        return self._answer_loss(seed, drawn, drawn.size.tokens, phrases_only=False)

    def _draw_halves(
        self, number: int, seed: int, maximum: int | None = None
    ) -> _Pictures:
        """Draw the pictures of a stage; half of them are scenes."""
        stage = self._recipe.stages[number]
        scenes = stage.images // 2
        return _Pictures.draw(
            seed, stage.views, scenes, stage.images - scenes, maximum=maximum
        )

    def _project(self, drawn: _Pictures) -> Tensor:
        """Rows (B, N, D) that enter the language model."""
        states = drawn.encode(self.model.model.vision_tower)
        rows: Tensor = self.model.model.multi_modal_projector(states.flatten(2))
        return rows

    def _naming_loss(self, rows: Tensor, drawn: _Pictures) -> Tensor:
        table = self.model.get_input_embeddings().weight
        return naming.naming_loss(self._words, rows, table, drawn.labels)

    def _answer_loss(
        self, seed: int, drawn: _Pictures, budget: int, *, phrases_only: bool
    ) -> Tensor:
        """Cross entropy on answer tokens after `budget` image tokens, and the loss of naming."""
        words = self._words
        embed = self.model.get_input_embeddings()
        selection, questions = drawn.draw_texts(
            seed, self._recipe, budget, phrases_only=phrases_only
        )
        lead, tail = (
            torch.tensor(words.encode(text).ids) for text in (_LEAD, _BETWEEN)
        )
        behind_image = len(lead) + drawn.size.tokens
        start = behind_image + len(tail)
        texts = training.TextBatch.build(
            words, questions, start, "<|im_end|>", "<|endoftext|>"
        )
        image = self._project(drawn)
        count = len(selection)
        rows = torch.arange(count)[:, None]
        leading, trailing = (embed(ids).expand(count, -1, -1) for ids in (lead, tail))
        prefix = torch.cat((leading, image[rows, selection], trailing), 1)
        positions = (
            torch.arange(len(lead)).expand(count, -1),
            len(lead) + selection,
            torch.arange(behind_image, start).expand(count, -1),
        )
        loss, _ = texts.answer_loss(
            self.model,
            self.model.model.language_model,
            prefix,
            torch.cat(positions, 1),
        )
        return loss + naming.NAMING_WEIGHT * self._naming_loss(image, drawn)


def train(run: training.Training) -> None:
    """Train all stages and write the checkpoint."""
    torch.manual_seed(run.seed)
    trainer = _Trainer(run.recipe)
    model = trainer.model
    tower = model.model.vision_tower
    projector = model.model.multi_modal_projector
    language = model.model.language_model
    stages: Sequence[tuple[Sequence[nn.Module], Callable[[int, int], Tensor]]] = (
        ((tower,), partial(trainer.dense_loss, 0)),
        ((tower,), partial(trainer.dense_loss, 1)),
        ((projector, language.embed_tokens), trainer.naming_loss),
        ((projector, language), trainer.phrase_loss),
        ((projector, language), trainer.question_loss),
    )
    for number, (trained, loss) in enumerate(stages):
        model.requires_grad_(False)
        trainer.heads.requires_grad_(number < 2)
        for part in trained:
            part.requires_grad_(True)
        run.run_stage(number, {"model": model, "heads": trainer.heads}, loss)
    run.write_checkpoint(_INTERN, {"": model})


if __name__ == "__main__":
    raise SystemExit(training.Training.start("miniintern", train))
