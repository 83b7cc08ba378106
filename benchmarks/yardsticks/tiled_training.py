"""Training of models that see square tiles: pictures, labels, and the loss of every stage.

Positions of their language models have one axis.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import ClassVar

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.internvl.modeling_internvl import InternVLVisionAttention
from transformers.models.siglip.modeling_siglip import SiglipAttention

from benchmarks.yardsticks import naming, pictures, tiles, training
from benchmarks.yardsticks.examples import CHECKPOINTS, split_prompt
from benchmarks.yardsticks.pages import MERGE, Page
from benchmarks.yardsticks.pictures import FIELD_WEIGHTS, FIELDS, Drawing
from benchmarks.yardsticks.questions import Model, Question
from benchmarks.yardsticks.scenes import PATCH, WORDS, Scene
from benchmarks.yardsticks.tiles import TiledSize
from benchmarks.yardsticks.training import UNLABELLED, Recipe

# The phrase stage starts with few shapes, words and tokens, and has all of them from this step on.
_CURRICULUM_STEPS = 300
_FEWEST = 4
_FEWEST_TOKENS = 20

_POSITION_SCALE = 0.6
# Where heads of the first four layers attend at the start, in rows and columns from a patch; None
# is anywhere.
_LOOKS = (*[((0, -1), (0, 1), (-1, 0), (1, 0))] * 2, *[((0, None), (None, 0))] * 2)
_LOOK_STRENGTH = 3.3
# Fields that classifiers keep in the rows of tokens, from which names would squeeze them out.
_PLACES = ("row", "column")

# What is too small to be read in a thumbnail.
_DETAILS = ("word", "head", "tens", "units", "digit", "letter")


def list_fields(sizes: Sequence[TiledSize]) -> dict[str, int]:
    """Fields of dense labels of patches: those of all models, and these.

    row and column: place of a shape or text in its tile or thumbnail; view: 0 in a tile, else the
    number of the size that a thumbnail shows.
    """
    shared = {
        name: count for name, count in FIELDS.items() if name not in ("lower", "right")
    }
    cells = sizes[0].tile_cells
    return {**shared, "row": cells, "column": cells, "view": len(sizes)}


@dataclass(frozen=True)
class Pictures:
    """Pictures of one size as tiles and thumbnails.

    pixels (B, V, 3, S, S); labels (B, N · MERGE²) by field, in the order of tokens.
    """

    size: TiledSize
    pixels: Tensor
    labels: Mapping[str, Tensor]
    contents: Sequence[Scene | Page]

    @classmethod
    def draw(
        cls,
        seed: int,
        size: TiledSize,
        scenes: int,
        texts: int,
        *,
        plain: bool = False,
        maximum: int | None = None,
    ) -> Pictures:
        """Draw scenes, then pages (``texts``).

        ``plain`` and ``maximum`` are those of :meth:`Drawing.draw`.
        """
        drawing = Drawing.draw(seed, size, scenes, texts, plain=plain, maximum=maximum)
        pixels = size.split_tiles(drawing.images)
        return cls(size, pixels, label_views(drawing, size), drawing.contents)

    def join_views(self, patches: Tensor) -> Tensor:
        """States (B, N, MERGE², C) of raster patches (B · V, P, C), by token."""
        by_token = tiles.order_patches(patches)
        return by_token.unflatten(0, (len(self.contents), -1)).flatten(1, 2)

    def draw_texts(
        self,
        seed: int,
        recipe: Recipe,
        budget: int,
        behind: str,
        *,
        phrases_only: bool,
    ) -> tuple[Tensor, list[list[Question]]]:
        """Kept visual tokens (B, K), and questions and phrases about every picture."""
        rng = random.Random(seed + 1)
        questions = list[list[Question]]()
        selections = list[list[int]]()
        for content in self.contents:
            questions.append(
                pictures.draw_texts(
                    rng, content, self.size, recipe, behind, phrases_only=phrases_only
                )
            )
            selections.append(pictures.keep_parts(rng, content, self.size, budget))
        return torch.tensor(selections), questions


def label_views(drawing: Drawing, size: TiledSize) -> dict[str, Tensor]:
    """Labels (B, N · MERGE²) of the patches of all tiles and thumbnails, by field.

    Labels of a place are those within the tile or thumbnail.
    """
    line = (torch.arange(size.side * MERGE) + 0.5) * PATCH
    raster = torch.stack(torch.meshgrid(line, line, indexing="ij")[::-1], -1)
    centres = tiles.order_patches(raster.flatten(0, 1)[None])[0].flatten(0, 1)
    names = list_fields([size])
    labels = list[Tensor]()
    count = len(drawing.contents)
    for index, (scale, offset) in enumerate(size.frames()):
        items = pictures.scale_items(drawing.items, scale, offset)
        inside = (items[:, 1:3] >= 0) & (items[:, 1:3] < size.tile_pixels)
        items = items[inside.all(1)]
        column, row = (items[:, 1:3] * size.tile_cells / size.tile_pixels).floor().T
        extended = torch.cat((items, row[:, None], column[:, None]), 1)
        view = pictures.label_patches(extended, count, centres)
        fields = dict(zip((*FIELDS, "row", "column"), view, strict=True))
        is_thumbnail = size.copies > 1 and index == size.views - 1
        for name in _DETAILS if is_thumbnail else ():
            fields[name] = torch.full_like(fields[name], UNLABELLED)
        number = tiles.SIZES.index(size) if is_thumbnail else 0
        fields["view"] = torch.full_like(fields["kind"], number)
        labels.append(torch.stack([fields[name] for name in names]))
    return dict(zip(names, torch.cat(labels, 2), strict=True))


def start_by_looking(
    table: Tensor,
    attentions: Sequence[InternVLVisionAttention | SiglipAttention],
    writers: Sequence[nn.Linear | nn.Conv2d],
) -> None:
    """Let heads of a tower's first layers start by attending to neighbours.

    table (P, C) has the positions of patches. ``writers`` are the layers whose outputs are added up
    in the states of patches.
    """
    grid = isqrt(len(table))
    width = table.shape[1]
    table.copy_(training.position_waves(grid, width) * _POSITION_SCALE)
    for attention, looks in zip(attentions, _LOOKS, strict=False):
        for head, look in enumerate(looks):
            _aim_head(attention, head, look)
    # What aimed heads read starts as places alone, or each patch would attend to itself.
    for writer in writers:
        writer.weight[:: width // attentions[0].head_dim] = 0


def _aim_head(
    attention: InternVLVisionAttention | SiglipAttention,
    head: int,
    look: tuple[int | None, ...],
) -> None:
    """Let a head of the tower start by attending to patches at an offset (rows, columns).

    A shift by an offset rotates every pair of a sine and a cosine of :func:`position_waves`. Where
    the offset is None, the head attends anywhere. All heads read the same waves.
    """
    queries = attention.q_proj.weight
    keys = attention.k_proj.weight
    frequencies = training.wave_frequencies(queries.shape[1])
    width = attention.head_dim
    waves = range(0, len(frequencies), queries.shape[1] // width)
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


class TiledTrainer(ABC):
    """The untrained model, and the loss of every stage of a recipe.

    A loss is that of one batch, given its seed and the number of the step. ``sizes`` are those of
    the model's pictures; ``end`` and ``pad`` are the tokens after an answer and after a text;
    ``before_patches`` is the number of a tile's states that are not of patches; ``tells_places`` is
    whether classifiers of rows and columns keep places in the rows of tokens.
    """

    key: ClassVar[Model]
    sizes: ClassVar[Sequence[TiledSize]]
    end: ClassVar[str]
    pad: ClassVar[str]
    before_patches: ClassVar[int] = 0
    tells_places: ClassVar[bool] = False

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._words = Tokenizer.from_file(str(CHECKPOINTS[self.key] / "tokenizer.json"))
        lead, behind_image = split_prompt(self.key)
        between, self._behind = behind_image.split("{question}")
        self._lead, self._tail = (
            torch.tensor(self._words.encode(text).ids) for text in (lead, between)
        )
        self.model = self.build_model()
        config = self.model.config
        fields = list_fields(self.sizes)
        self.heads = training.DenseHeads(config.vision_config.hidden_size, fields)
        places = {name: fields[name] for name in _PLACES}
        self.place_heads = training.DenseHeads(config.text_config.hidden_size, places)

    @abstractmethod
    def build_model(self) -> PreTrainedModel:
        """The untrained model."""

    @abstractmethod
    def project(self, drawn: Pictures, patches: Tensor) -> Tensor:
        """Rows (B, N, D) that enter the language model, of raster patches (B · V, P, C)."""

    def list_modules(self) -> dict[str, nn.Module]:
        """Modules of a checkpoint, by the prefix of their weights' names."""
        return {"": self.model}

    def find_mutual(self, start: int, stop: int) -> slice:
        """The positions of an image, from start to stop, that see each other; none by default."""
        return slice(0)

    def dense_loss(self, number: int, seed: int, step: int) -> Tensor:
        """Loss on the dense labels of pictures, of which a third are scenes."""
        images = self._recipe.stages[number].images
        scenes = images // 3
        drawn = self._draw(number, seed, scenes, images - scenes, plain=number == 0)
        states = drawn.join_views(self._encode(drawn))
        return self.label_loss(states, torch.stack([*drawn.labels.values()]))

    def label_loss(self, states: Tensor, labels: Tensor) -> Tensor:
        """Loss on labels (fields, B, N · MERGE²) of the states (B, N, MERGE², C) of patches."""
        return self.heads.loss(states.flatten(1, 2), labels, FIELD_WEIGHTS)

    def naming_loss(self, seed: int, step: int) -> Tensor:
        """Loss that turns the projector's rows into those of the words for what tokens show."""
        images = self._recipe.stages[2].images
        drawn = self._draw(2, seed, images, images)
        return self._naming_loss(self.project(drawn, self._encode(drawn)), drawn)

    def phrase_loss(self, seed: int, step: int) -> Tensor:
        """Loss of answers to phrases; at first pictures are easy and tokens few."""
        progress = min(1.0, step / _CURRICULUM_STEPS) ** 2
        maximum = _FEWEST + round((len(WORDS) - _FEWEST) * progress)
        drawn = self._draw_halves(3, seed, maximum)
        tokens = drawn.size.tokens
        budget = _FEWEST_TOKENS + round((tokens - _FEWEST_TOKENS) * progress)
        return self._answer_loss(seed, drawn, budget, phrases_only=True)

    def question_loss(self, seed: int, step: int) -> Tensor:
        """Loss of answers to questions and phrases, with all tokens."""
        drawn = self._draw_halves(4, seed)
        return self._answer_loss(seed, drawn, drawn.size.tokens, phrases_only=False)

    def _draw_halves(
        self, number: int, seed: int, maximum: int | None = None
    ) -> Pictures:
        """Draw the pictures of a stage; half of them are scenes."""
        images = self._recipe.stages[number].images
        scenes = images // 2
        return self._draw(number, seed, scenes, images - scenes, maximum=maximum)

    def _draw(
        self,
        number: int,
        seed: int,
        scenes: int,
        texts: int,
        *,
        plain: bool = False,
        maximum: int | None = None,
    ) -> Pictures:
        """Draw pictures of a size that a stage's weights (``views``) choose."""
        # All batches of a step have the same size.
        rng = random.Random(seed // training.PARTS)
        (size,) = rng.choices(self.sizes, self._recipe.stages[number].views)
        return Pictures.draw(seed, size, scenes, texts, plain=plain, maximum=maximum)

    def _encode(self, drawn: Pictures) -> Tensor:
        """Raster patches (B · V, P, C) after the vision tower."""
        tower = self.model.model.vision_tower
        states: Tensor = tower(
            pixel_values=drawn.pixels.flatten(0, 1)
        ).last_hidden_state
        return states[:, self.before_patches :]

    def _naming_loss(self, rows: Tensor, drawn: Pictures) -> Tensor:
        """Loss of naming, and of places if the model tells them, of rows (B, N, D)."""
        table = self.model.get_input_embeddings().weight
        loss = naming.naming_loss(self._words, rows, table, drawn.labels)
        if not self.tells_places:
            return loss
        patches = torch.stack([drawn.labels[name] for name in _PLACES])
        tokens = patches.unflatten(2, (rows.shape[1], -1)).amax(3)
        return loss + self.place_heads.loss(rows, tokens, {})

    def _answer_loss(
        self, seed: int, drawn: Pictures, budget: int, *, phrases_only: bool
    ) -> Tensor:
        """Cross entropy on answer tokens after `budget` image tokens, and the loss of naming."""
        selection, questions = drawn.draw_texts(
            seed, self._recipe, budget, self._behind, phrases_only=phrases_only
        )
        lead = len(self._lead)
        behind_image = lead + drawn.size.tokens
        start = behind_image + len(self._tail)
        texts = training.TextBatch.build(
            self._words, questions, start, self.end, self.pad
        )
        image = self.project(drawn, self._encode(drawn))
        count = len(selection)
        rows = torch.arange(count)[:, None]
        embed = self.model.get_input_embeddings()
        leading, trailing = (
            embed(ids).expand(count, -1, -1) for ids in (self._lead, self._tail)
        )
        prefix = torch.cat((leading, image[rows, selection], trailing), 1)
        positions = (
            torch.arange(lead).expand(count, -1),
            lead + selection,
            torch.arange(behind_image, start).expand(count, -1),
        )
        loss, _ = texts.answer_loss(
            self.model,
            self.model.model.language_model,
            prefix,
            torch.cat(positions, 1),
            mutual=self.find_mutual(lead, lead + budget),
        )
        return loss + naming.NAMING_WEIGHT * self._naming_loss(image, drawn)


def train(run: training.Training, trainer: type[TiledTrainer]) -> None:
    """Train all stages and write the checkpoint."""
    torch.manual_seed(run.seed)
    losses = trainer(run.recipe)
    model = losses.model
    tower = model.model.vision_tower
    projector = model.model.multi_modal_projector
    language = model.model.language_model
    stages: Sequence[tuple[Sequence[nn.Module], Callable[[int, int], Tensor]]] = (
        ((tower,), partial(losses.dense_loss, 0)),
        ((tower,), partial(losses.dense_loss, 1)),
        ((projector, language.embed_tokens), losses.naming_loss),
        ((projector, language), losses.phrase_loss),
        ((projector, language), losses.question_loss),
    )
    for number, (trained, loss) in enumerate(stages):
        model.requires_grad_(False)
        losses.heads.requires_grad_(number < 2)
        losses.place_heads.requires_grad_(losses.tells_places and number >= 2)
        for part in trained:
            part.requires_grad_(True)
        modules = {
            "model": model,
            "heads": losses.heads,
            "place_heads": losses.place_heads,
        }
        run.run_stage(number, modules, loss)
    run.write_checkpoint(CHECKPOINTS[trainer.key], losses.list_modules())
