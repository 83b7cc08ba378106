"""``python -m benchmarks.yardsticks.train_miniqwen``: train mini-Qwen3-VL from scratch.

Shapes of the model, tokenizer and processor are those of the committed checkpoint.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from string import ascii_lowercase

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from benchmarks.yardsticks import pages, training
from benchmarks.yardsticks.examples import (
    CHECKPOINTS,
    PROMPT,
    keep_evidence,
    keep_first,
)
from benchmarks.yardsticks.pages import MERGE, TOKEN, Number, Page, Size, Word
from benchmarks.yardsticks.questions import BRIEF, SEEN, Question, Questions
from benchmarks.yardsticks.scenes import CELL, COLOURS, PATCH, SHAPES, WORDS, Scene
from benchmarks.yardsticks.training import UNLABELLED, Recipe

_QWEN = CHECKPOINTS["miniqwen"]
_LEAD, _, _REST = PROMPT["miniqwen"]
_BETWEEN, _BEHIND = _REST.split("{question}")

# Share of the last stage's full-size steps in which tokens are dropped.
_DROPOUT = 0.3
# The phrase stage starts with few shapes, words and tokens, and has all of them from this step on.
_CURRICULUM_STEPS = 300
_FEWEST = 4
_FEWEST_TOKENS = 16

_VISION_WIDTH = 128
_LANGUAGE_WIDTH = 192
_VOCABULARY = 768
_POSITION_GRID = 16
_POSITION_SCALE = 0.6
# Where heads of the first four layers attend at the start, in rows and columns from a patch; None
# is anywhere. Towers without such a start did not learn in 600 steps to attend to the neighbouring
# patch, which has the other digit of a number.
_LOOKS = (*[((0, -1), (0, 1), (-1, 0), (1, 0))] * 2, *[((0, None), (None, 0))] * 2)
_LOOK_STRENGTH = 33.0
_LOOK_FREQUENCIES = 3
_MATCH_HEADS = 4
_MATCH_SCALE = 1.7
_TURN = math.pi / 3
# With the scale of the other weights, outputs of untrained layers would drown the embeddings.
_OUTPUT_SCALE = 0.3
_MLP_SCALE = 0.1
# Scale from cosines to the logits of naming; a token of three names has a cosine of 0.58 with each.
_NAMING_SCALE = 20.0
_NAMING_WEIGHT = 0.3

_FIELDS: dict[str, int] = {
    "kind": 5,
    "word": len(WORDS),
    "head": len(WORDS) + 1,
    "tens": 10,
    "units": 10,
    "colour": len(COLOURS),
    "shape": len(SHAPES),
    "digit": 10,
    "lower": 2,
    "right": 2,
    "letter": 26,
}
"""Fields of dense labels of patches, and their numbers of classes.

kind: 0 background, 1 word, 2 number, 3 shape, 4 mark or nonsense; word: the word itself or, on a
number, the word beside it; head: on a number of a table, the word above it, elsewhere the last
class; letter: that of a mark, or the first one of nonsense.
"""
_FIELD_WEIGHTS = {"digit": 2.0, "tens": 1.5, "units": 1.5, "word": 1.5, "letter": 0.5}
_DIGITS = tuple(map(str, range(10)))
# Names of the classes of the fields that have any; each name is one token.
_NAMES: dict[str, Sequence[str]] = {
    "word": [f" {word}" for word in WORDS],
    "head": [f" {word}" for word in WORDS],
    "tens": [f" {digit}" for digit in _DIGITS],
    "units": _DIGITS,
    "digit": [f" {digit}" for digit in _DIGITS],
    "letter": ascii_lowercase,
    "name": [f" {colour} {shape}" for colour in COLOURS for shape in SHAPES],
}


@dataclass(frozen=True)
class _Pictures:
    """Pictures of one size, and the size at which the model sees them.

    patches (B, N, MERGE², 3 · PATCH²) and labels (fields, B, N · MERGE²) have the size that is
    seen.
    """

    size: Size
    seen: Size
    patches: Tensor
    labels: Tensor
    contents: Sequence[Scene | Page]

    def encode(self, tower: Qwen3VLVisionModel) -> tuple[Tensor, Tensor, list[Tensor]]:
        """States (B, P, Dv) of the last layer, rows (B, N, D) for layer 0, deepstack rows."""
        count = len(self.contents)
        # Both frames of a patch are equal.
        frames = (
            self.patches.flatten(0, 2).unflatten(1, (3, 1, -1)).expand(-1, -1, 2, -1)
        )
        seen = self.seen
        grid = torch.tensor([[1, seen.rows * MERGE, seen.columns * MERGE]] * count)
        encoded = tower(frames.flatten(1), grid_thw=grid)
        states, merged, *levels = (
            part.unflatten(0, (count, -1))
            for part in (
                encoded.last_hidden_state,
                encoded.pooler_output,
                *encoded.deepstack_features,
            )
        )
        return states, merged, levels

    def draw_texts(
        self, seed: int, recipe: Recipe, budget: int, phrases_only: bool
    ) -> tuple[Tensor, list[list[Question]]]:
        """Kept image tokens (B, K), and questions and phrases about every picture.

        With phrases only, tokens are dropped from pictures of full size; those of words, numbers
        and middles of shapes are dropped last. Otherwise tokens are dropped down to `budget`, and
        questions without their evidence are left out.
        """
        rng = random.Random(seed + 1)
        seen = self.seen
        kinds = recipe.phrases if phrases_only else recipe.questions
        questions = list[list[Question]]()
        selections = list[list[int]]()
        for content in self.contents:
            weights = kinds["pages" if isinstance(content, Page) else "scenes"]
            source = Questions(rng, content, self.size.cells, SEEN)
            texts = source.draw_texts(
                weights, 0 if phrases_only else 12, "{question}" + _BEHIND
            )
            source = replace(source, wordings=BRIEF)
            texts += source.draw_texts(
                weights, 40 if phrases_only else 12, " {question}"
            )
            tokens = list(range(seen.tokens))
            evidence = list[int]()
            if phrases_only and seen == self.size:
                if isinstance(content, Page):
                    parts: list[Word | Number] = [*content.words, *content.numbers]
                    evidence = [part.row * seen.columns + part.column for part in parts]
                else:
                    evidence = [content.patches[thing][0] for thing in content.things]
                rng.shuffle(evidence)
                tokens = keep_first(rng, evidence, budget, seen.tokens)
            elif budget < seen.tokens:
                tokens = keep_evidence(rng, texts, budget, seen.tokens)
                texts = [text for text in texts if set(text.evidence) <= set(tokens)]
            questions.append(texts)
            selections.append(tokens)
        return torch.tensor(selections), questions


def _draw_pictures(
    seed: int,
    views: Sequence[float],
    scene_count: int,
    page_count: int,
    plain: bool = False,
    maximum: int | None = None,
) -> _Pictures:
    """Draw scenes, then pages; with `plain` all pages are full ones.

    `views` are weights of seeing pictures with all tokens, or a half, fourth, eighth or sixteenth
    of them. `maximum` makes pictures easier: it limits the shapes of a scene and the words of a
    page.
    """
    # All batches of a step have the same sizes.
    rng = random.Random(seed // training.PARTS)
    size = rng.choice(pages.SIZES)
    divisor = rng.choices((1, 2, 4, 8, 16), views)[0]
    seen = size if divisor == 1 else size.limit(size.tokens // divisor)
    rng = random.Random(seed)
    max_shapes = maximum or pages.MAX_SHAPES
    scenes = [size.draw_scene(rng, max_shapes) for _ in range(scene_count)]
    images, scenes = size.render_scenes(scenes, seed)
    texts = []
    for _ in range(page_count):
        style: pages.PageStyle = "full" if plain else rng.choice(pages.PAGE_STYLES)
        texts.append(Page.draw(rng, style, size, maximum or len(WORDS)))
    page_images, centres = pages.render_pages(texts, seed)
    items = list[_Item]()
    for index, scene in enumerate(scenes):
        items += _list_scene_items(index, scene, size)
    for index, page in enumerate(texts):
        items += _list_page_items(len(scenes) + index, page, centres[index])
    contents: list[Scene | Page] = [*scenes, *texts]
    labels = _label_patches(torch.tensor(items), len(contents), size, seen)
    patches = seen.split_patches(torch.cat((images, page_images)))
    return _Pictures(size, seen, patches, labels, contents)


_Item = Sequence[float]
"""A shape, mark or text: index of its picture, centre and half extents in pixels, and labels."""


def _list_scene_items(index: int, scene: Scene, size: Size) -> Iterator[_Item]:
    height, width = size.cells
    for thing in (*scene.things, *scene.marks):
        if thing.letter is None:
            labels = _label(
                kind=3,
                colour=thing.colour,
                shape=thing.shape,
                digit=thing.digit,
                lower=thing.row >= height // 2,
                right=thing.column >= width // 2,
            )
        else:
            labels = _label(kind=4, letter=thing.letter)
        x = (thing.column + 0.5) * CELL + thing.shift[0]
        y = (thing.row + 0.5) * CELL + thing.shift[1]
        extent = 0.8 * thing.radius
        yield [index, x, y, extent, extent, *labels]


def _list_page_items(
    index: int, page: Page, centres: Sequence[tuple[float, float]]
) -> Iterator[_Item]:
    labels = [_label(kind=1, word=word.word) for word in page.words]
    for number in page.numbers:
        names = {}
        if number.label is not None:
            head = number.head.word if number.head else len(WORDS)
            names = {"word": number.label.word, "head": head}
        tens, units = divmod(number.value, 10)
        labels.append(_label(kind=2, tens=tens, units=units, **names))
    for part in page.nonsense:
        labels.append(_label(kind=4, letter=ascii_lowercase.index(part.text[0])))
    for centre, values in zip(centres, labels, strict=True):
        yield [index, *centre, TOKEN / 2, PATCH / 2, *values]


def _label(**fields: int) -> list[int]:
    """Labels of all fields in their order; fields without a value are unlabelled."""
    return [int(fields.get(name, UNLABELLED)) for name in _FIELDS]


def _label_patches(items: Tensor, count: int, size: Size, seen: Size) -> Tensor:
    """Labels (fields, B, P) from items (M, 5 + fields); a patch of two items has only a kind."""
    # Centres (P, 2) in pixels, x and y, of all patches in the order of their tokens.
    patch = torch.arange(seen.tokens * MERGE * MERGE)
    token = patch // (MERGE * MERGE)
    inner = patch % (MERGE * MERGE)
    row = token // seen.columns * MERGE + inner // MERGE
    column = token % seen.columns * MERGE + inner % MERGE
    centres = (torch.stack((column, row), 1) + 0.5) * PATCH

    (height, width) = size.pixels
    (seen_height, seen_width) = seen.pixels
    scale = torch.tensor([seen_width / width, seen_height / height])
    distance = centres - items[:, None, 1:3] * scale
    reach = (items[:, None, 3:5] * scale).clamp(min=PATCH / 2)
    item, patch = (distance.abs() < reach).all(-1).nonzero(as_tuple=True)
    image = items[item, 0].long()
    labels = torch.full((len(_FIELDS), count, len(centres)), UNLABELLED)
    labels[0] = 0
    covers = torch.zeros(count, len(centres), dtype=torch.long)
    covers.index_put_((image, patch), torch.ones_like(patch), accumulate=True)
    labels[:, image, patch] = items[item, 5:].T.long()
    labels[1:, covers > 1] = UNLABELLED
    # A shape's digit labels only its middle, which shows it; labels of a text are on all of its
    # patches.
    off_centre = (distance[item, patch].abs() >= PATCH / 2).any(-1)
    off_centre &= items[item, 3] == items[item, 4]
    for field in ("digit", "letter"):
        index = list(_FIELDS).index(field)
        labels[index, image[off_centre], patch[off_centre]] = UNLABELLED
    return labels


def _build_model() -> Qwen3VLForConditionalGeneration:
    """The untrained model, whose heads start by attending to neighbours and to tokens of a word."""
    model = Qwen3VLForConditionalGeneration(AutoConfig.from_pretrained(_QWEN))
    tower = model.model.visual
    language = model.model.language_model
    for part in (tower, language):
        part.config._attn_implementation = training.IN_PLACE
    with torch.no_grad():
        waves = training.position_waves(_POSITION_GRID, _VISION_WIDTH)
        tower.pos_embed.weight.copy_(waves * _POSITION_SCALE)
        # Biases of queries and keys that, with rotary positions, give heads their first direction.
        frequencies = tower.rotary_pos_emb.inv_freq[:_LOOK_FREQUENCIES]
        strength = _LOOK_STRENGTH**0.5
        for block, looks in zip(tower.blocks, _LOOKS, strict=False):
            bias = block.attn.qkv.bias.view(3, block.attn.num_heads, 2, 2, -1)
            # In a rotated vector, halves of pairs come first, then rows and columns, then
            # frequencies.
            for head, look in enumerate(looks):
                for axis, offset in enumerate(look):
                    if offset is not None:
                        angles = -frequencies * offset
                        bias[0, head, 0, axis, :_LOOK_FREQUENCIES] = strength
                        bias[1, head, 0, axis, :_LOOK_FREQUENCIES] = (
                            strength * angles.cos()
                        )
                        bias[1, head, 1, axis, :_LOOK_FREQUENCIES] = (
                            strength * angles.sin()
                        )
        # Keys and values undo the rotation of `_image_basis`, so that a word finds earlier image
        # tokens, and what these show is added in the basis of words.
        for layer in language.layers:
            attention = layer.self_attn
            rows = _MATCH_HEADS * attention.head_dim
            attention.k_proj.weight[:rows] = (
                attention.q_proj.weight[:rows] @ _image_basis()
            )
            attention.o_proj.weight.copy_(_OUTPUT_SCALE * attention.v_proj.weight.T)
            attention.v_proj.weight.copy_(attention.v_proj.weight @ _image_basis())
            layer.mlp.down_proj.weight.mul_(_MLP_SCALE)
            for norm in (attention.q_norm, attention.k_norm):
                norm.weight.fill_(_MATCH_SCALE)
    return model


@cache
def _image_basis() -> Tensor:
    """A fixed rotation (D, D) from the embeddings of words to image tokens that show them.

    Every vector turns by `_TURN`, so an image token still has a positive cosine with the word for
    what it shows; policies that read the question can find it.
    """
    generator = torch.Generator().manual_seed(0)
    axes = torch.linalg.qr(
        torch.randn(_LANGUAGE_WIDTH, _LANGUAGE_WIDTH, generator=generator)
    )[0]
    cosine = math.cos(_TURN)
    sine = math.sin(_TURN)
    turn = torch.tensor([[cosine, -sine], [sine, cosine]])
    return axes @ torch.block_diag(*[turn] * (_LANGUAGE_WIDTH // 2)) @ axes.T


def _naming_loss(
    tokenizer: Tokenizer, rows: Tensor, table: Tensor, labels: Tensor
) -> Tensor:
    """Cross entropy of the cosines of rows (B, N, D) with the embeddings of what they show.

    It ties image tokens to the words for what they show. Without it the language model would have
    to find by chance which of many image tokens a word is about. The rows are in the basis of image
    tokens; labels are (fields, B, N · MERGE²).
    """
    # Shares (B, N, V) of the words and digits that name what each image token shows.
    _, count, patches = labels.shape
    shares = torch.zeros(count, patches // MERGE**2, _VOCABULARY)
    fields = dict(zip(_FIELDS, labels, strict=True))
    names = fields["colour"] * len(SHAPES) + fields["shape"]
    fields["name"] = torch.where(fields["colour"] >= 0, names, UNLABELLED)
    for name, texts in _NAMES.items():
        ids = torch.tensor([tokenizer.encode(text).ids for text in texts]).squeeze(1)
        target = fields[name]
        image, patch = ((target >= 0) & (target < len(ids))).nonzero(as_tuple=True)
        shares[image, patch // MERGE**2, ids[target[image, patch]]] = 1.0
    shares = shares / shares.sum(-1, keepdim=True).clamp(min=1.0)
    shows = shares.sum(-1) > 0
    turned = F.normalize(rows[shows].float() @ _image_basis().T, dim=-1)
    logits = _NAMING_SCALE * turned @ F.normalize(table.float(), dim=-1).T
    return -(shares[shows] * logits.log_softmax(-1)).sum(-1).mean()


class _Trainer:
    """The untrained model, and the loss of every stage of a recipe.

    A loss is that of one batch, given its seed and the number of the step.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._words = Tokenizer.from_file(str(_QWEN / "tokenizer.json"))
        self.model = _build_model()
        self.heads = training.DenseHeads(_VISION_WIDTH, _FIELDS)
        self._tower = self.model.model.visual
        self._embed = self.model.get_input_embeddings()

    def dense_loss(self, number: int, seed: int, step: int) -> Tensor:
        """Cross entropy on the dense labels of patches."""
        stage = self._recipe.stages[number]
        scenes = stage.images // 3
        pictures = _draw_pictures(
            seed, stage.views, scenes, stage.images - scenes, plain=number == 0
        )
        states, _, _ = pictures.encode(self._tower)
        return self.heads.loss(states, pictures.labels, _FIELD_WEIGHTS)

    def naming_loss(self, seed: int, step: int) -> Tensor:
        """Loss that turns the mergers' rows into those of the words for what a picture shows."""
        stage = self._recipe.stages[2]
        pictures = _draw_pictures(seed, stage.views, stage.images, stage.images)
        _, rows, _ = pictures.encode(self._tower)
        return _naming_loss(self._words, rows, self._embed.weight, pictures.labels)

    def phrase_loss(self, seed: int, step: int) -> Tensor:
        """Loss of answers to phrases; at first pictures are easy and tokens few."""
        progress = min(1.0, step / _CURRICULUM_STEPS) ** 2
        pictures = self._draw_halves(
            3, seed, _FEWEST + round((len(WORDS) - _FEWEST) * progress)
        )
        budget = pictures.seen.tokens
        if pictures.seen == pictures.size:
            budget = _FEWEST_TOKENS + round((budget - _FEWEST_TOKENS) * progress)
        return self._answer_loss(seed, pictures, budget, phrases_only=True)

    def question_loss(self, seed: int, step: int) -> Tensor:
        """Loss of answers to questions and phrases; some steps drop tokens at full size."""
        rng = random.Random(seed // training.PARTS)
        pictures = self._draw_halves(4, seed)
        budget = pictures.seen.tokens
        if pictures.seen == pictures.size and rng.random() < _DROPOUT:
            budget = max(1, int(math.exp(rng.uniform(math.log(2), math.log(budget)))))
        return self._answer_loss(seed, pictures, budget, phrases_only=False)

    def _draw_halves(
        self, number: int, seed: int, maximum: int | None = None
    ) -> _Pictures:
        """Draw the pictures of a stage; half of them are scenes."""
        stage = self._recipe.stages[number]
        scenes = stage.images // 2
        return _draw_pictures(
            seed, stage.views, scenes, stage.images - scenes, maximum=maximum
        )

    def _answer_loss(
        self, seed: int, pictures: _Pictures, budget: int, phrases_only: bool
    ) -> Tensor:
        """Cross entropy on answer tokens after `budget` image tokens, and the loss of naming."""
        words = self._words
        embed = self._embed
        selection, questions = pictures.draw_texts(
            seed, self._recipe, budget, phrases_only
        )
        lead, tail = (
            torch.tensor(words.encode(text).ids) for text in (_LEAD, _BETWEEN)
        )
        seen = pictures.seen
        behind_image = len(lead) + max(seen.rows, seen.columns)
        start = behind_image + len(tail)
        texts = training.TextBatch.build(
            words, questions, start, "<|im_end|>", "<|endoftext|>"
        )
        _, image, levels = pictures.encode(self._tower)
        count = len(selection)
        rows = torch.arange(count)[:, None]
        leading, trailing = (embed(ids).expand(count, -1, -1) for ids in (lead, tail))
        prefix = torch.cat((leading, image[rows, selection], trailing), 1)
        visual = torch.zeros(count, prefix.shape[1] + texts.texts.shape[1]).bool()
        visual[:, len(lead) : len(lead) + selection.shape[1]] = True
        positions = (
            torch.arange(len(lead)).expand(3, count, -1),
            seen.rotary_positions(selection) + len(lead),
            torch.arange(behind_image, start).expand(3, count, -1),
        )
        loss, _ = texts.answer_loss(
            self.model,
            self.model.model.language_model,
            prefix,
            torch.cat(positions, 2),
            visual_pos_masks=visual,
            deepstack_visual_embeds=[
                level[rows, selection].flatten(0, 1) for level in levels
            ],
        )
        naming = _naming_loss(words, image, embed.weight, pictures.labels)
        return loss + _NAMING_WEIGHT * naming


def train(run: training.Training) -> None:
    """Train all stages and write the checkpoint."""
    torch.manual_seed(run.seed)
    trainer = _Trainer(run.recipe)
    model = trainer.model
    tower = model.model.visual
    language = model.model.language_model
    mergers = (tower.merger, tower.deepstack_merger_list)
    patches = (tower.patch_embed, tower.pos_embed, tower.blocks)
    stages: Sequence[tuple[Sequence[nn.Module], Callable[[int, int], Tensor]]] = (
        (patches, partial(trainer.dense_loss, 0)),
        (patches, partial(trainer.dense_loss, 1)),
        ((*mergers, language.embed_tokens), trainer.naming_loss),
        ((*mergers, language), trainer.phrase_loss),
        ((*mergers, language), trainer.question_loss),
    )
    for number, (trained, loss) in enumerate(stages):
        model.requires_grad_(False)
        trainer.heads.requires_grad_(number < 2)
        for part in trained:
            part.requires_grad_(True)
        run.run_stage(number, {"model": model, "heads": trainer.heads}, loss)
    run.write_checkpoint(_QWEN, {"": model})


if __name__ == "__main__":
    raise SystemExit(training.Training.start("miniqwen", train))
