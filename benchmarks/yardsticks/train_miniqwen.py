"""``python -m benchmarks.yardsticks.train_miniqwen``: train mini-Qwen3-VL from scratch.

Shapes of the model, tokenizer and processor are those of the committed checkpoint. The modules are
those of transformers, run on batches of images of one size.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel, rotate_half
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from benchmarks.yardsticks import pages, training
from benchmarks.yardsticks.examples import CHECKPOINTS, IMAGE_TOKEN, PROMPT, ask_about
from benchmarks.yardsticks.questions import BRIEF, CATEGORIES, SEEN
from benchmarks.yardsticks.scenes import CELL, COLOURS, PATCH, SHAPES, Scene

_QWEN = CHECKPOINTS["miniqwen"]
_LEAD, _REST = PROMPT["miniqwen"].split(IMAGE_TOKEN["miniqwen"])
_BETWEEN, _BEHIND = _REST.split("{question}")

STAGES = (
    # The model continues with the next stage, so the rate does not fall at the end of this one.
    training.Stage("reading", 200, 12, 2e-3, 20, 0.0),
    training.Stage("tower", 2600, 12, 2e-3, 50, 0.5),
    training.Stage("naming", 150, 4, 2e-3, 15, 0.5),
    training.Stage("phrases", 600, 6, 1.5e-3, 20, 0.0),
    training.Stage("questions", 850, 6, 1.5e-3, 20, 0.4),
)

# Shares of pictures seen at full size and limited to 1/2, 1/4, 1/8 and 1/16 of their tokens.
_READING_VIEWS = (0.5, 0.3, 0.2, 0.0, 0.0)
_TOWER_VIEWS = (0.3, 0.3, 0.25, 0.1, 0.05)
_WHOLE_VIEWS = (1.0, 0.0, 0.0, 0.0, 0.0)
_PHRASE_VIEWS = (0.8, 0.12, 0.08, 0.0, 0.0)
_QUESTION_VIEWS = (0.45, 0.25, 0.2, 0.07, 0.03)
# Share of the steps of the last stage in which tokens are dropped, at full size.
_DROPOUT = 0.3
# The phrase stage starts with few shapes, words and tokens, and has all of them at this step.
_CURRICULUM_STEPS = 300
_FEWEST, _FEWEST_TOKENS = 4, 16

_VISION_WIDTH, _LANGUAGE_WIDTH, _VOCABULARY = 128, 192, 768
_POSITION_GRID, _POSITION_SCALE = 16, 0.6
# Where the heads of the first layers look at the start, in rows and columns from a patch; None is
# anywhere. From a start without preference, a tower did not learn in 600 steps to look at the patch
# beside, which has the other digit of a number.
_NEAR = ((0, -1), (0, 1), (-1, 0), (1, 0))
_AXES = ((0, None), (None, 0))
_LOOKS: tuple[tuple[tuple[int | None, int | None], ...], ...] = (_NEAR, _NEAR, _AXES, _AXES)
_LOOK_STRENGTH, _LOOK_FREQUENCIES = 33.0, 3
_MATCH_HEADS, _MATCH_SCALE = 4, 1.7
# At the scale of the other weights, outputs of untrained layers would drown the embeddings.
_OUTPUT_SCALE, _MLP_SCALE = 0.3, 0.1
# Naming's logits are cosines times this; a token of three names has a cosine of 0.58 with each.
_NAMING_SCALE, _NAMING_WEIGHT = 20.0, 0.3

FIELDS: dict[str, int] = {
    "kind": 4, "word": len(pages.WORDS), "head": len(pages.WORDS) + 1, "tens": 10, "units": 10,
    "colour": len(COLOURS), "shape": len(SHAPES), "digit": 10, "lower": 2, "right": 2,
}  # fmt: skip
"""Fields of dense labels of patches, and their numbers of classes.

kind: 0 background, 1 word, 2 number, 3 shape; word: of a word itself, of a number the word beside
it; head: of a number in a table the word above it, the last class elsewhere.
"""
_FIELD_WEIGHTS = {"digit": 2.0, "tens": 1.5, "units": 1.5, "word": 1.5}
_DIGITS = tuple(map(str, range(10)))
# Texts of every class of the fields that have a word, each one token.
_NAMES: dict[str, Sequence[str]] = {
    "word": [f" {word}" for word in pages.WORDS],
    "head": [f" {word}" for word in pages.WORDS],
    "tens": [f" {digit}" for digit in _DIGITS],
    "units": _DIGITS,
    "digit": [f" {digit}" for digit in _DIGITS],
    "name": [f" {colour} {shape}" for colour in COLOURS for shape in SHAPES],
}

# Relative frequencies, of scenes and of pages, while only phrases are asked.
_PHRASE_WEIGHTS = (
    {
        "digit": 7, "colour": 3, "shape": 3, "count": 10, "quarter": 4, "existence": 6,
        "reading": 6, training.HALF: 4,
    },
    {"value": 7, "word": 6, "cell": 12, "compare": 9, "find": 6},
)  # fmt: skip
# Later on, what is learnt late is asked more often.
_QUESTION_WEIGHTS = (
    {
        "digit": 5, "colour": 4, "shape": 3, "count": 12, "quarter": 3, "existence": 6,
        "reading": 12,
    },
    {"value": 5, "word": 10, "cell": 9, "compare": 10, "find": 4},
)  # fmt: skip
_KINDS = [kind for kinds in CATEGORIES["miniqwen"].values() for kind in kinds]
_TRAINED_KINDS = (*_KINDS, *map(training.phrase_kind, (*_KINDS, training.HALF)))


@dataclass(frozen=True)
class View:
    """A size of pictures, and the size at which the model sees them.

    The processor makes it of an image limited to one token in `divisor`.
    """

    size: pages.Size
    seen: pages.Size
    divisor: int = 1


@dataclass(frozen=True)
class Pictures:
    """Patches (B, N, MERGE², 3 · PATCH²), labels (fields, B, N · MERGE²), and their contents."""

    patches: Tensor
    labels: Tensor
    contents: Sequence[Scene | pages.Page]


def _draw_view(seed: int, shares: Sequence[float]) -> View:
    """Draw a view; `shares` are of all tokens, and of a half, fourth, eighth and sixteenth.

    Ranks draw the same, because the one with fewer patches would wait.
    """
    rng = random.Random(seed // training.RANKS)
    size = rng.choice(pages.SIZES)
    divisor = rng.choices((1, 2, 4, 8, 16), shares)[0]
    seen = size if divisor == 1 else shrink_size(size, size.tokens // divisor)
    return View(size, seen, divisor)


def shrink_size(size: pages.Size, budget: int) -> pages.Size:
    """The size that the image processor gives an image of `size` limited to `budget` tokens."""
    height, width = smart_resize(
        size.height,
        size.width,
        pages.TOKEN,
        pages.TOKEN * pages.TOKEN,
        budget * pages.TOKEN * pages.TOKEN,
    )
    return pages.Size(height // pages.TOKEN, width // pages.TOKEN)


def draw_pictures(
    seed: int,
    scene_count: int,
    page_count: int,
    view: View,
    plain: bool = False,
    most: int | None = None,
) -> Pictures:
    """Draw scenes and then pages; `plain` pages are full of unrelated words and numbers.

    `most` makes them easier: scenes of at most so many shapes, pages of at most so many words.
    """
    rng, size = random.Random(seed), view.size
    images: list[Tensor] = []
    contents: list[Scene | pages.Page] = []
    items: list[Iterator[list[float]]] = []
    if scene_count:
        layouts = [
            pages.draw_rectangle(rng, size, most or pages.MOST_SHAPES) for _ in range(scene_count)
        ]
        drawn, shown = pages.render_rectangles(layouts, size, seed)
        images.append(drawn)
        contents += shown
        items += [_shape_rows(scene, size) for scene in shown]
    if page_count:
        texts = [
            pages.fill_page(rng, size)
            if plain
            else pages.draw_page(rng, rng.choice(pages.PAGE_STYLES), size, most or len(pages.WORDS))
            for _ in range(page_count)
        ]
        drawn, centres = pages.render_pages(texts, seed)
        images.append(drawn)
        contents += texts
        items += map(_text_rows, texts, centres)
    patches = pages.split_patches(pages.resize_images(torch.cat(images), view.seen))
    rows = [[index, *row] for index, of_image in enumerate(items) for row in of_image]
    return Pictures(patches, _label_patches(torch.tensor(rows), len(contents), view), contents)


def _shape_rows(scene: Scene, size: pages.Size) -> Iterator[list[float]]:
    """Centre in pixels, half extents and labels of every shape of a scene."""
    height, width = size.cells
    for thing in scene.layout.things:
        x, y = (thing.column + 0.5) * CELL + thing.shift[0], (thing.row + 0.5) * CELL
        lower, right = thing.row >= height // 2, thing.column >= width // 2
        box = [x, y + thing.shift[1], 0.8 * thing.radius, 0.8 * thing.radius]
        yield [*box, 3, -1, -1, -1, -1, thing.colour, thing.shape, thing.digit, lower, right]


def _text_rows(page: pages.Page, centres: Sequence[tuple[float, float]]) -> Iterator[list[float]]:
    """Centre in pixels, half extents and labels of every word and number of a page."""
    boxes = iter([x, y, pages.TOKEN / 2, PATCH / 2] for x, y in centres)
    for word in page.words:
        yield [*next(boxes), 1, word.word, *[training.UNLABELLED] * 8]
    for number in page.numbers:
        label = head = training.UNLABELLED
        if number.label is not None:
            label, head = number.label.word, number.head.word if number.head else len(pages.WORDS)
        tens, units = divmod(number.value, 10)
        yield [*next(boxes), 2, label, head, tens, units, *[training.UNLABELLED] * 5]


def _patch_centres(size: pages.Size) -> Tensor:
    """Centres (P, 2) in pixels, x and y, of all patches in the order of their tokens."""
    patch = torch.arange(size.tokens * pages.MERGE * pages.MERGE)
    token, inner = patch // (pages.MERGE * pages.MERGE), patch % (pages.MERGE * pages.MERGE)
    row = token // size.columns * pages.MERGE + inner // pages.MERGE
    column = token % size.columns * pages.MERGE + inner % pages.MERGE
    return (torch.stack((column, row), 1) + 0.5) * PATCH


def _label_patches(items: Tensor, count: int, view: View) -> Tensor:
    """Labels (fields, B, P) of items (M, 5 + fields); a patch of two items has a kind only."""
    scale = torch.tensor([view.seen.width / view.size.width, view.seen.height / view.size.height])
    centres = _patch_centres(view.seen)
    distance = centres - items[:, None, 1:3] * scale
    reach = (items[:, None, 3:5] * scale).clamp(min=PATCH / 2)
    item, patch = (distance.abs() < reach).all(-1).nonzero(as_tuple=True)
    image = items[item, 0].long()
    labels = torch.full((len(FIELDS), count, len(centres)), training.UNLABELLED)
    labels[0] = 0
    covers = torch.zeros(count, len(centres), dtype=torch.long)
    covers.index_put_((image, patch), torch.ones_like(patch), accumulate=True)
    labels[:, image, patch] = items[item, 5:].T.long()
    labels[1:, covers > 1] = training.UNLABELLED
    # A shape's digit is in its middle; elsewhere it would be one of several copies.
    digit = list(FIELDS).index("digit")
    off_centre = (distance[item, patch].abs() >= PATCH / 2).any(-1)
    labels[digit, image[off_centre], patch[off_centre]] = training.UNLABELLED
    return labels


def _build_model() -> Qwen3VLForConditionalGeneration:
    """The untrained model, with heads that look at neighbours and at what shows a word."""
    model = Qwen3VLForConditionalGeneration(AutoConfig.from_pretrained(_QWEN))
    tower, language = model.model.visual, model.model.language_model
    language.config._attn_implementation = "in_place"
    with torch.no_grad():
        waves = training.position_waves(_POSITION_GRID, _VISION_WIDTH)
        tower.pos_embed.weight.copy_(waves * _POSITION_SCALE)
        # Biases of queries and keys, so that rotation gives heads their first looks.
        frequencies = tower.rotary_pos_emb.inv_freq[:_LOOK_FREQUENCIES]
        strength = _LOOK_STRENGTH**0.5
        for block, looks in zip(tower.blocks, _LOOKS, strict=False):
            bias = block.attn.qkv.bias.view(3, block.attn.num_heads, 2, 2, -1)
            # Halves of a rotated pair come first, then rows and columns, then frequencies.
            for head, look in enumerate(looks):
                for axis, offset in enumerate(look):
                    if offset is not None:
                        angles = -frequencies * offset
                        bias[0, head, 0, axis, :_LOOK_FREQUENCIES] = strength
                        bias[1, head, 0, axis, :_LOOK_FREQUENCIES] = strength * angles.cos()
                        bias[1, head, 1, axis, :_LOOK_FREQUENCIES] = strength * angles.sin()
        # Keys and values undo the rotation of `_image_basis`, so that a word finds image tokens,
        # but not itself, and what they show is added in the basis of words.
        for layer in language.layers:
            attention = layer.self_attn
            rows = _MATCH_HEADS * attention.head_dim
            attention.k_proj.weight[:rows] = attention.q_proj.weight[:rows] @ _image_basis()
            attention.o_proj.weight.copy_(_OUTPUT_SCALE * attention.v_proj.weight.T)
            attention.v_proj.weight.copy_(attention.v_proj.weight @ _image_basis())
            layer.mlp.down_proj.weight.mul_(_MLP_SCALE)
            for norm in (attention.q_norm, attention.k_norm):
                norm.weight.fill_(_MATCH_SCALE)
    return model


@cache
def _image_basis() -> Tensor:
    """A fixed rotation (D, D) from embeddings of words to image tokens that show them."""
    generator = torch.Generator().manual_seed(0)
    return torch.linalg.qr(torch.randn(_LANGUAGE_WIDTH, _LANGUAGE_WIDTH, generator=generator))[0]


@cache
def _positions(size: pages.Size) -> tuple[Tensor, Tensor, Tensor]:
    """Taps (P, 4) and weights (P, 4) of the position table, and rows and columns (2, P)."""
    grid = torch.tensor([[1, size.rows * pages.MERGE, size.columns * pages.MERGE]])
    taps, weights = get_vision_interpolation_indices_and_weights(
        grid, _POSITION_GRID, align_corners=True, spatial_merge_size=pages.MERGE
    )
    return taps, weights, get_vision_position_ids(grid, pages.MERGE)


def _tower_states(tower: Qwen3VLVisionModel, patches: Tensor, size: pages.Size) -> list[Tensor]:
    """States (B, P, Dv) that each deepstack merger reads, and of the last layer.

    The images have one size; patches (B, N, MERGE², 3 · PATCH²).
    """
    taps, weights, places = _positions(size)
    kernel = tower.patch_embed.proj.weight.sum(2).flatten(1)
    hidden = patches.flatten(1, 2).to(kernel.dtype) @ kernel.T + tower.patch_embed.proj.bias
    table = (tower.pos_embed(taps) * weights[:, :, None]).sum(1)
    hidden = hidden + table.to(hidden.dtype)
    with torch.no_grad():
        cosine, sine = (part.to(hidden.dtype) for part in tower.rotary_pos_emb(hidden, places))
    states: list[Tensor] = []
    for number, block in enumerate(tower.blocks):
        attention = block.attn
        rows = attention.qkv(block.norm1(hidden))
        rows = rows.unflatten(-1, (3, attention.num_heads, attention.head_dim))
        query, key, value = rows.permute(2, 0, 3, 1, 4)
        query = query * cosine + rotate_half(query) * sine
        key = key * cosine + rotate_half(key) * sine
        mixed, _ = training.attend_in_place(attention, query, key, value, None, attention.scaling)
        hidden = hidden + attention.proj(mixed.flatten(2))
        hidden = hidden + block.mlp(block.norm2(hidden))
        if number in tower.deepstack_visual_indexes:
            states.append(hidden)
    return [*states, hidden]


def _merge_states(tower: Qwen3VLVisionModel, states: Sequence[Tensor]) -> list[Tensor]:
    """Rows (B, N, D) of `_tower_states`: those added after the first layers, and for the first."""
    mergers: list[nn.Module] = [*tower.deepstack_merger_list, tower.merger]
    return [
        merger(state.flatten(0, 1)).unflatten(0, (len(state), -1))
        for merger, state in zip(mergers, states, strict=True)
    ]


def _name_tokens(tokenizer: Tokenizer, labels: Tensor) -> Tensor:
    """Shares (B, N, V) of the tokens for what each image token shows; zero for nothing."""
    _, count, patches = labels.shape
    shares = torch.zeros(count, patches // pages.MERGE**2, _VOCABULARY)
    fields = dict(zip(FIELDS, labels, strict=True))
    names = fields["colour"] * len(SHAPES) + fields["shape"]
    fields["name"] = torch.where(fields["colour"] >= 0, names, training.UNLABELLED)
    for name, texts in _NAMES.items():
        ids = torch.tensor([tokenizer.encode(text).ids for text in texts]).squeeze(1)
        target = fields[name]
        image, patch = ((target >= 0) & (target < len(ids))).nonzero(as_tuple=True)
        shares[image, patch // pages.MERGE**2, ids[target[image, patch]]] = 1.0
    return shares / shares.sum(-1, keepdim=True).clamp(min=1.0)


def _naming_loss(rows: Tensor, table: Tensor, names: Tensor) -> Tensor:
    """Cross entropy between shares of tokens and the cosines of rows (B, N, D) with the table.

    It ties image tokens to the words for what they show: without it the language model has to find
    by chance which of many image tokens a word is about. The rows are in the basis of image tokens.
    """
    shows = names.sum(-1) > 0
    turned = F.normalize(rows[shows].float() @ _image_basis().T, dim=-1)
    logits = _NAMING_SCALE * turned @ F.normalize(table.float(), dim=-1).T
    return -(names[shows] * logits.log_softmax(-1)).sum(-1).mean()


@dataclass(frozen=True)
class LanguageBatch:
    """Texts behind a prefix: ids `before` (P,), image tokens `kept` (B, K), ids `after` (Q,).

    `positions` (3, B, T) of M-RoPE are of the whole sequence.
    """

    before: Tensor
    after: Tensor
    kept: Tensor
    positions: Tensor
    texts: training.TextBatch


def draw_batch(
    seed: int,
    tokenizer: Tokenizer,
    pictures: Pictures,
    view: View,
    budget: int,
    questions: int,
    phrases: int,
    shown_first: bool = False,
) -> LanguageBatch:
    """Draw `questions` and `phrases` about every picture.

    Tokens are only dropped at full size: as far as the evidence of the questions allows or, if
    `shown_first`, those that show nothing before the others.
    """
    rng, seen = random.Random(seed + 1), view.seen
    before, after = (torch.tensor(tokenizer.encode(text).ids) for text in (_LEAD, _BETWEEN))
    behind_image = len(before) + max(seen.rows, seen.columns)
    asked, kept = [], []
    for content in pictures.contents:
        texts = []
        weights = (_QUESTION_WEIGHTS if questions else _PHRASE_WEIGHTS)[
            isinstance(content, pages.Page)
        ]
        for form, number, wordings in (
            ("{question}" + _BEHIND, questions, SEEN), (" {question}", phrases, BRIEF)
        ):  # fmt: skip
            source = ask_about(rng, content, view.size, wordings)
            drawn = training.draw_texts(source, weights, number, wordings is BRIEF)
            texts += [(form.format(question=question.text), question) for question in drawn]
        chosen = list(range(seen.tokens))
        if shown_first:
            if isinstance(content, pages.Page):
                parts: list[pages.Word | pages.Number] = [*content.words, *content.numbers]
                shown = [part.row * seen.columns + part.column for part in parts]
            else:
                shown = [tokens[0] for tokens in content.thing_patches]
            rng.shuffle(shown)
            chosen = training.keep_shown_tokens(rng, shown, budget, seen.tokens)
        elif budget < seen.tokens:
            chosen, texts = training.keep_evidence(rng, texts, budget, seen.tokens)
        asked.append(texts)
        kept.append(chosen)
    end, pad = "<|im_end|>", "<|endoftext|>"
    start = behind_image + len(after)
    batch = training.build_texts(tokenizer, asked, start, end, pad, _TRAINED_KINDS)
    tokens, count = torch.tensor(kept), len(kept)
    places = (torch.zeros_like(tokens), tokens // seen.columns, tokens % seen.columns)
    positions = (
        torch.arange(len(before)).expand(3, count, -1),
        torch.stack(places) + len(before),
        (behind_image + torch.arange(len(after))).expand(3, count, -1),
        batch.positions.expand(3, -1, -1),
    )
    return LanguageBatch(before, after, tokens, torch.cat(positions, 2), batch)


def language_states(
    model: Qwen3VLForConditionalGeneration,
    batch: LanguageBatch,
    pictures: Pictures,
    seen: pages.Size,
) -> tuple[Tensor, Tensor]:
    """Normed states (B, L, D) of the last layer at the texts of a batch.

    Also the rows (B, N, D) of all image tokens for the first layer.
    """
    tower, language = model.model.visual, model.model.language_model
    with torch.no_grad():
        states = _tower_states(tower, pictures.patches, seen)
    *levels, image = _merge_states(tower, states)
    rows, embed = torch.arange(len(batch.kept))[:, None], language.embed_tokens
    before, after = (embed(ids).expand(len(rows), -1, -1) for ids in (batch.before, batch.after))
    texts = embed(batch.texts.texts)
    hidden = torch.cat((before, image[rows, batch.kept], after, texts), 1)
    begin, behind = before.shape[1], after.shape[1] + texts.shape[1]
    angles = language.rotary_emb(hidden, batch.positions)
    mask = batch.texts.mask(hidden.shape[1] - texts.shape[1], hidden.dtype)
    for number, layer in enumerate(language.layers):
        hidden = layer(hidden, position_embeddings=angles, attention_mask=mask)
        if number < len(levels):
            hidden = hidden + F.pad(levels[number][rows, batch.kept], (0, 0, begin, behind))
    normed: Tensor = language.norm(hidden[:, -texts.shape[1] :])
    return normed, image


def language_loss(
    model: Qwen3VLForConditionalGeneration,
    tokenizer: Tokenizer,
    batch: LanguageBatch,
    pictures: Pictures,
    view: View,
) -> training.Loss:
    """Cross entropy on answer tokens, with the accuracy of every kind, and the naming loss.

    Kinds end in the divisor of the view, or in "dropped" where tokens are dropped.
    """
    hidden, image = language_states(model, batch, pictures, view.seen)
    suffix = "dropped" if batch.kept.shape[1] < view.seen.tokens else str(view.divisor)
    names = [f"{kind}/{suffix}" for kind in _TRAINED_KINDS]
    loss, parts = batch.texts.loss(model.lm_head, hidden, names)
    table = model.model.language_model.embed_tokens.weight
    naming = _naming_loss(image, table, _name_tokens(tokenizer, pictures.labels))
    return loss + _NAMING_WEIGHT * naming, parts | {"naming": float(naming.detach())}


def _draw_budget(seed: int, tokens: int) -> int:
    """Number of image tokens of a step: all, or for a share of steps log-uniform."""
    rng = random.Random(seed // training.RANKS)
    if rng.random() >= _DROPOUT:
        return tokens
    return max(1, int(math.exp(rng.uniform(math.log(2), math.log(tokens)))))


def train_rank(rank: int, run: training.Run) -> None:
    """Train all stages as one of the ranks."""
    training.join_ranks(run, rank)
    words = Tokenizer.from_file(str(_QWEN / "tokenizer.json"))
    model = _build_model()
    tower, mergers = model.model.visual, model.model.visual.deepstack_merger_list
    heads = training.DenseHeads(_VISION_WIDTH, FIELDS)
    reading, towers, naming, phrases, questions = run.stages

    def dense_loss(
        stage: training.Stage, shares: Sequence[float], plain: bool, seed: int, step: int
    ) -> training.Loss:
        view, scenes = _draw_view(seed, shares), stage.images // 3
        pictures = draw_pictures(seed, scenes, stage.images - scenes, view, plain)
        *_, patches = _tower_states(tower, pictures.patches, view.seen)
        return heads.loss(patches, pictures.labels, _FIELD_WEIGHTS, f"/{view.divisor}")

    def token_loss(seed: int, step: int) -> training.Loss:
        """The mergers' rows become those of the words that a picture shows."""
        view = _draw_view(seed, _WHOLE_VIEWS)
        pictures = draw_pictures(seed, naming.images, naming.images, view)
        with torch.no_grad():
            states = _tower_states(tower, pictures.patches, view.seen)
        *_, rows = _merge_states(tower, states)
        names = _name_tokens(words, pictures.labels)
        loss = _naming_loss(rows, model.get_input_embeddings().weight, names)
        return loss, {"loss": float(loss.detach())}

    def phrase_loss(seed: int, step: int) -> training.Loss:
        view = _draw_view(seed, _PHRASE_VIEWS)
        progress = min(1.0, step / (_CURRICULUM_STEPS * run.steps_scale)) ** 2
        most = _FEWEST + round((len(pages.WORDS) - _FEWEST) * progress)
        scenes = phrases.images // 2
        pictures = draw_pictures(seed, scenes, phrases.images - scenes, view, most=most)
        budget, full = view.seen.tokens, view.seen == view.size
        if full:
            budget = _FEWEST_TOKENS + round((budget - _FEWEST_TOKENS) * progress)
        batch = draw_batch(seed, words, pictures, view, budget, 0, 40, shown_first=full)
        return language_loss(model, words, batch, pictures, view)

    def question_loss(seed: int, step: int) -> training.Loss:
        view, scenes = _draw_view(seed, _QUESTION_VIEWS), questions.images // 2
        budget = view.seen.tokens
        if view.seen == view.size:
            budget = _draw_budget(seed, budget)
        pictures = draw_pictures(seed, scenes, questions.images - scenes, view)
        batch = draw_batch(seed, words, pictures, view, budget, 12, 12)
        return language_loss(model, words, batch, pictures, view)

    for merger in (tower.merger, mergers):
        merger.requires_grad_(False)
    vision: dict[str, nn.Module] = {"tower": tower, "heads": heads}
    training.run_stage(run, 0, vision, partial(dense_loss, reading, _READING_VIEWS, True))
    training.run_stage(run, 1, vision, partial(dense_loss, towers, _TOWER_VIEWS, False))
    model.requires_grad_(False)
    for part in (tower.merger, mergers, model.get_input_embeddings()):
        part.requires_grad_(True)
    # The modules that the next stage does not train have to be of the same type.
    model.to(torch.bfloat16)
    training.run_stage(run, 2, {"model": model}, token_loss)
    model.requires_grad_(True)
    tower.requires_grad_(False)
    for merger in (tower.merger, mergers):
        merger.requires_grad_(True)
    training.run_stage(run, 3, {"model": model}, phrase_loss)
    training.run_stage(run, 4, {"model": model}, question_loss)
    if rank == 0:
        tensors = model.state_dict()
        del tensors["lm_head.weight"]  # tied to the embedding table
        training.write_checkpoint(run.out, _QWEN, tensors)
        training.log(f"wrote {run.out}")
    dist.destroy_process_group()


if __name__ == "__main__":
    training.start("Train mini-Qwen3-VL from scratch.", STAGES, train_rank)
