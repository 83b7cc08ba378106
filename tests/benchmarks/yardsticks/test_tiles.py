"""mini-InternVL without trained weights: its tiles, labels and questions, and how it is scored."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch.nn import functional
from transformers import AutoProcessor
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from benchmarks.yardsticks import naming, tiles, train_miniintern, training
from benchmarks.yardsticks.examples import (
    CHECKPOINTS,
    Example,
    as_picture,
    draw_examples,
    format_prompt,
)
from benchmarks.yardsticks.miniintern import MiniIntern
from benchmarks.yardsticks.pages import MERGE, TOKEN, Number, Page, Word, render_pages
from benchmarks.yardsticks.pictures import Drawing
from benchmarks.yardsticks.questions import SEEN, Questions
from benchmarks.yardsticks.scenes import CELL, Scene
from benchmarks.yardsticks.tiles import SIDE, TILE, TILE_TOKENS, TiledSize
from benchmarks.yardsticks.yardstick import ALL_TOKENS, Budget, Case

CHECKPOINT = CHECKPOINTS["miniintern"]
SIZES = pytest.mark.parametrize("size", tiles.SIZES, ids=str)


@pytest.fixture(scope="module")
def trainer() -> train_miniintern._Trainer:
    torch.manual_seed(0)
    return train_miniintern._Trainer(training.Recipe.read("miniintern"))


@SIZES
def test_tiles_and_thumbnails_are_those_of_the_processor(size: TiledSize) -> None:
    processor = AutoProcessor.from_pretrained(CHECKPOINT).image_processor
    page = size.draw_page(random.Random(3), "table")
    images, _ = render_pages([page], 3)
    inputs = processor(images[0], return_tensors="pt")
    (expected,) = size.split_tiles(images)
    assert inputs["num_patches"].tolist() == [size.views]
    assert size.tokens == size.views * TILE_TOKENS
    difference = (inputs["pixel_values"] - expected).abs()
    # One of 256 levels is 0.015; torchvision resizes bytes in fixed-point arithmetic.
    assert difference.max() < 0.03 and difference.mean() < 0.01


def test_patches_of_a_token_are_in_the_order_of_pixel_shuffle(
    trainer: train_miniintern._Trainer,
) -> None:
    side = SIDE * MERGE
    states = torch.randn(3, side * side, 8)
    shuffled = trainer.model.model.pixel_shuffle(states.view(3, side, side, 8))
    assert torch.equal(tiles.order_patches(states).flatten(2), shuffled.flatten(1, 2))


@SIZES
def test_evidence_is_where_pixels_show_the_shape(size: TiledSize) -> None:
    """In its tile and in the thumbnail, and nowhere else."""
    for seed in range(6):
        scene = size.draw_scene(random.Random(seed))
        scene = replace(scene, marks=())
        (image,), (rendered,) = size.render_scenes([scene], seed, clean=True)
        for number, thing in enumerate(scene.things):
            other = replace(thing, digit=(thing.digit + 5) % 10)
            things = [*scene.things]
            things[number] = other
            changed = replace(scene, things=tuple(things))
            (digit,), _ = size.render_scenes([changed], seed, clean=True)
            pixels = size.split_tiles(torch.stack((image, digit)))
            changed_pixels = (pixels[0] != pixels[1]).any(1).float()
            tokens = functional.avg_pool2d(changed_pixels, TOKEN).flatten()
            evidence = rendered.patches[thing]
            # A digit may reach into the next token, and the thumbnail is blurred.
            assert tokens[: size.rows * size.columns].argmax() == evidence[0]
            assert all(tokens[token] > 0 for token in evidence[: size.copies])
            assert len({token // TILE_TOKENS for token in evidence}) == size.copies


@SIZES
def test_a_page_has_its_relations_within_tiles_and_no_text_twice(
    size: TiledSize,
) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        page = size.draw_page(rng, rng.choice(("list", "table")))
        parts: list[Word | Number] = [*page.words, *page.numbers]
        tokens = [size.token(part.row, part.column) for part in parts]
        assert len({*tokens}) == len(tokens) and max(tokens) < size.tokens
        assert len({word.word for word in page.words}) == len(page.words) <= 28
        assert len({number.value for number in page.numbers}) == len(page.numbers)
        for number in page.numbers:
            tile = size.token(number.row, number.column) // TILE_TOKENS
            for word in filter(None, (number.label, number.head)):
                assert word in page.words
                assert size.token(word.row, word.column) // TILE_TOKENS == tile
            assert number.label is not None and number.label.row == number.row
        kind = "value" if page.style == "list" else "cell"
        for question in Questions(rng, page, size.cells, SEEN).generate(kind):
            shown = dict(zip(tokens, parts, strict=True))
            asked, *words = (shown[token] for token in question.evidence)
            assert isinstance(asked, Number) and str(asked.value) == question.answer
            assert {*words} == {*filter(None, (asked.label, asked.head))}


@SIZES
def test_grounding_answers_with_the_row_and_column_of_four(size: TiledSize) -> None:
    rng = random.Random(5)
    _, (scene,) = size.render_scenes([size.draw_scene(rng)], 5)
    height, width = size.pixels
    names = {thing.name: thing for thing in scene.things}
    answers = set[str]()
    for _ in range(30):
        (question,) = Questions(rng, scene, size.cells, SEEN).generate("grounding")
        (name,) = [name for name in names if f"he {name}" in question.text]
        thing = names[name]
        row = int((thing.row + 0.5) * CELL / height * 4) + 1
        column = int((thing.column + 0.5) * CELL / width * 4) + 1
        assert question.answer == f"row {row} column {column}"
        assert {*question.evidence} == {*scene.patches[thing]}
        answers.add(question.answer)
    assert len(answers) > 2


def test_one_scene_in_four_of_the_test_split_has_shapes_at_the_border_alone() -> None:
    inner = dict[str, set[int]]()
    for split in ("validation", "test"):
        examples = draw_examples(split, 24, "miniintern")
        inner[split] = {
            e.image_id
            for e in examples
            if e.answer in ("row 2 column 2", "row 3 column 3")
        }
    assert not {id_ for id_ in inner["test"] if id_ // 2 % 4 == 1}
    assert inner["validation"] and inner["test"]


@SIZES
def test_labels_are_of_what_a_tile_or_thumbnail_shows(size: TiledSize) -> None:
    drawing = Drawing.draw(4, size, 3, 3)
    labels = train_miniintern.label_views(drawing, size)
    by_token = {
        name: part.unflatten(1, (size.tokens, -1)) for name, part in labels.items()
    }
    thumbnail = (size.views - 1) * TILE_TOKENS
    for index, content in enumerate(drawing.contents):
        shown = {name: part[index] for name, part in by_token.items()}
        if isinstance(content, Page):
            for number in content.numbers:
                token = size.token(number.row, number.column)
                tens, units = divmod(number.value, 10)
                assert shown["tens"][token].max() == tens
                assert shown["units"][token].max() == units
        else:
            assert isinstance(content, Scene)
            for thing in content.things:
                token = content.patches[thing][0]
                assert shown["digit"][token].max() == thing.digit
                assert shown["colour"][token].max() == thing.colour
                assert shown["row"][token].max() == thing.row % 4
                assert shown["column"][token].max() == thing.column % 4
        if size.copies > 1:
            assert (shown["view"][thumbnail:] == tiles.SIZES.index(size)).all()
            details = ("word", "head", "tens", "units", "digit", "letter")
            assert all((shown[name][thumbnail:] == -1).all() for name in details)
            assert (shown["kind"][thumbnail:] > 0).any()
        assert (shown["view"][:thumbnail] == 0).all()


def test_heads_start_by_looking_at_neighbours(
    trainer: train_miniintern._Trainer,
) -> None:
    """Left, right, above and below in the first layer, along rows and columns in the third."""
    tower = trainer.model.model.vision_tower
    (size, *_) = tiles.SIZES
    drawing = Drawing.draw(1, size, 2, 2)
    pixels = size.split_tiles(drawing.images).flatten(0, 1)
    side = SIDE * MERGE
    for number, steps in (
        (0, ((0, -1), (0, 1), (-1, 0), (1, 0))),
        (2, ((0, 0), (0, 0))),
    ):
        states = tower.embeddings(pixels)
        for layer in tower.encoder.layer[:number]:
            states = layer(states)
        layer = tower.encoder.layer[number]
        attention = layer.attention
        normed = layer.layernorm_before(states)
        query, key = (
            part(normed).unflatten(2, (attention.num_heads, -1)).transpose(1, 2)
            for part in (attention.q_proj, attention.k_proj)
        )
        weights = (query @ key.transpose(2, 3) * attention.scale).softmax(-1)
        weights = weights[:, :, 1:, 1:].mean(0).unflatten(2, (side, side))
        for head, (row, column) in enumerate(steps):
            middle = weights[head, 5 * side + 5]
            if number:
                assert middle.sum(1 - head)[5] > 0.4
            else:
                assert divmod(int(middle.argmax()), side) == (5 + row, 5 + column)
                assert middle.max() > 0.3


def test_words_start_by_matching_the_tokens_that_show_them(
    trainer: train_miniintern._Trainer,
) -> None:
    """Each shows three words; positions are those of an image of three tiles and of a question."""
    model = trainer.model
    language = model.model.language_model
    words = model.get_input_embeddings().weight[300 : 300 + 3 * TILE_TOKENS]
    directions = functional.normalize(words, dim=1)
    names = torch.eye(len(words))
    shares = names + names.roll(7, 0) + names.roll(19, 0)
    rows = shares @ directions @ naming.image_basis(words.shape[1])
    states = torch.cat((rows, words))[None]
    positions = [*range(3, len(words) + 3), *[len(words) + 10] * len(words)]
    turns = language.rotary_emb(states, torch.tensor([positions]))
    for layer in language.layers:
        attention = layer.self_attn
        query, key = (
            part(layer.input_layernorm(states)).unflatten(2, (6, -1)).transpose(1, 2)
            for part in (attention.q_proj, attention.k_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *turns)
        heads = slice(naming.MATCH_HEADS)
        query = query[0, heads, len(words) :]
        key = key[0, heads, : len(words)]
        weights = (query @ key.transpose(1, 2) * attention.scaling).softmax(-1)
        assert (weights * shares.T).sum(2).mean() > 0.7


@pytest.fixture(scope="module")
def untrained(
    trainer: train_miniintern._Trainer, tmp_path_factory: pytest.TempPathFactory
) -> MiniIntern:
    out = tmp_path_factory.mktemp("miniintern")
    run = training.Training(training.Recipe.read("miniintern"), out)
    run.write_checkpoint(CHECKPOINT, {"": trainer.model})
    assert (out / "model.safetensors").stat().st_size < 10_000_000
    return MiniIntern(out)


@pytest.fixture(scope="module")
def scene() -> list[Example]:
    examples = draw_examples("validation", 12, "miniintern")
    (example, *_) = (
        e for e in examples if e.kind == "grounding" and max(e.image.shape) > TILE
    )
    return [e for e in examples if e.image_id == example.image_id]


@torch.no_grad()
def test_answers_score_as_in_the_whole_model(
    untrained: MiniIntern, scene: list[Example]
) -> None:
    untrained.network.float()
    scores = untrained.encode(scene).score(Case("full", ALL_TOKENS))
    assert scores.tokens == 3 * TILE_TOKENS
    for example, logprob in zip(scene, scores.logprob.tolist(), strict=True):
        answer = f" {example.answer}<|im_end|>"
        inputs = untrained.processor(
            text=format_prompt(example.question, "miniintern") + answer,
            images=as_picture(example.image),
            return_tensors="pt",
        )
        ids = untrained.token_ids(answer)
        logits = (
            untrained.network(**inputs).logits[0, -len(ids) - 1 : -1].log_softmax(-1)
        )
        expected = float(logits.gather(1, torch.tensor(ids)[:, None]).sum())
        assert logprob == pytest.approx(expected, abs=0.01)


def test_chat_template_makes_the_prompt_of_training(untrained: MiniIntern) -> None:
    content = [{"type": "image"}, {"type": "text", "text": "Where is it?"}]
    chat = [{"role": "user", "content": content}]
    text = untrained.processor.apply_chat_template(chat, add_generation_prompt=True)
    assert text == format_prompt("Where is it?", "miniintern")


@torch.no_grad()
def test_kept_tokens_stand_where_they_stood_in_the_whole_image(
    untrained: MiniIntern, scene: list[Example]
) -> None:
    encoded = untrained.encode(scene[:2])
    selection = torch.arange(1, encoded.tokens.count, 4).expand(2, -1)
    rows = encoded.tokens.features[:, selection[0]]
    true = encoded.score_kept(selection, rows, selection)
    packed = encoded.score_kept(selection, rows, None)
    assert true.tokens == packed.tokens == 27
    assert not torch.allclose(true.logprob, packed.logprob)
    everything = torch.arange(encoded.tokens.count).expand(2, -1)
    unpruned = encoded.score_kept(everything, encoded.tokens.features, everything)
    in_order = encoded.score_kept(everything, encoded.tokens.features, None)
    assert torch.allclose(unpruned.logprob, in_order.logprob, atol=1e-3)
    pooled = encoded.score(
        Case("resized", Budget("K = N/4", untrained.budgets[1].share))
    )
    assert pooled.tokens == 27


@torch.no_grad()
def test_a_token_has_the_signals_of_its_patches(
    untrained: MiniIntern, scene: list[Example]
) -> None:
    network = untrained.network
    image = untrained.encode_image(scene[0].image)
    inputs = untrained.processor.image_processor(
        as_picture(scene[0].image), return_tensors="pt"
    )
    pixels = inputs["pixel_values"].to(network.dtype)
    output = network.model.get_image_features(pixels, output_attentions=True)
    assert torch.allclose(image.rows, output.pooler_output.flatten(0, 1), atol=1e-2)
    side = SIDE * MERGE
    received = output.attentions[-1].float().mean((1, 2))[:, 1:].view(-1, side, side)
    expected = functional.avg_pool2d(received, MERGE).flatten()
    assert torch.allclose(image.attention, expected, atol=1e-4)
    states = (
        output.last_hidden_state[:, 1:]
        .float()
        .transpose(1, 2)
        .unflatten(2, (side, side))
    )
    means = functional.avg_pool2d(states, MERGE).flatten(2).transpose(1, 2)
    assert torch.allclose(image.encoder, means.flatten(0, 1), atol=1e-2)
    assert image.merger_norms.shape == (3 * TILE_TOKENS, 2)
