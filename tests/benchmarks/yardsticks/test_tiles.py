"""mini-InternVL and mini-Gemma without weights: tiles, labels, questions, and scores of answers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch.nn import functional
from transformers import AutoProcessor

from benchmarks.yardsticks import (
    naming,
    open_yardstick,
    tiled_training,
    tiles,
    train_minigemma,
    train_miniintern,
    training,
)
from benchmarks.yardsticks.examples import (
    CHECKPOINTS,
    Example,
    as_picture,
    draw_examples,
    format_prompt,
    split_prompt,
)
from benchmarks.yardsticks.pages import MERGE, TOKEN, Number, Page, Word, render_pages
from benchmarks.yardsticks.pictures import Drawing
from benchmarks.yardsticks.questions import SEEN, Model, Questions
from benchmarks.yardsticks.scenes import CELL, Scene
from benchmarks.yardsticks.tiled_yardstick import TiledYardstick
from benchmarks.yardsticks.tiles import SIDE, SQUARE, TILE, TiledSize
from benchmarks.yardsticks.yardstick import ALL_TOKENS, Budget, Case, record_outputs

TRAINERS: dict[Model, type[tiled_training.TiledTrainer]] = {
    "miniintern": train_miniintern._Trainer,
    "minigemma": train_minigemma._Trainer,
}
SIZES = pytest.mark.parametrize("size", [*tiles.SIZES, SQUARE], ids=str)


@pytest.fixture(scope="module", params=TRAINERS)
def trainer(request: pytest.FixtureRequest) -> tiled_training.TiledTrainer:
    torch.manual_seed(0)
    return TRAINERS[request.param](training.Recipe.read(request.param))


@SIZES
def test_tiles_and_thumbnails_are_those_of_the_processor(size: TiledSize) -> None:
    key: Model = "minigemma" if size == SQUARE else "miniintern"
    processor = AutoProcessor.from_pretrained(CHECKPOINTS[key]).image_processor
    page = size.draw_page(random.Random(3), "table")
    images, _ = render_pages([page], 3)
    inputs = processor(images[0], return_tensors="pt")
    (expected,) = size.split_tiles(images)
    assert len(inputs["pixel_values"]) == size.views
    assert size.tokens == size.views * size.side**2
    difference = (inputs["pixel_values"] - expected).abs()
    # One of 256 levels is 0.015; torchvision resizes bytes in fixed-point arithmetic.
    assert difference.max() < 0.03 and difference.mean() < 0.01


def test_patches_of_a_token_are_in_the_order_of_pixel_shuffle() -> None:
    model = train_miniintern._Trainer(training.Recipe.read("miniintern")).model
    side = SIDE * MERGE
    states = torch.randn(3, side * side, 8)
    shuffled = model.model.pixel_shuffle(states.view(3, side, side, 8))
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
            assert len({token // size.side**2 for token in evidence}) == size.copies


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
            tile = size.token(number.row, number.column) // size.side**2
            for word in filter(None, (number.label, number.head)):
                assert word in page.words
                assert size.token(word.row, word.column) // size.side**2 == tile
            assert number.label is not None and number.label.row == number.row
        kind = "value" if page.style == "list" else "cell"
        for question in Questions(rng, page, size.cells, SEEN).generate(kind):
            shown = dict(zip(tokens, parts, strict=True))
            asked, *words = (shown[token] for token in question.evidence)
            assert isinstance(asked, Number) and str(asked.value) == question.answer
            assert {*words} == {*filter(None, (asked.label, asked.head))}


@SIZES
def test_grounding_answers_with_row_and_column_of_as_many_as_a_tile_has_cells(
    size: TiledSize,
) -> None:
    rng = random.Random(5)
    _, (scene,) = size.render_scenes([size.draw_scene(rng)], 5)
    height, width = size.pixels
    names = {thing.name: thing for thing in scene.things}
    answers = set[str]()
    for _ in range(30):
        (question,) = Questions(rng, scene, size.cells, SEEN).generate("grounding")
        (name,) = [name for name in names if f"he {name}" in question.text]
        thing = names[name]
        row = int((thing.row + 0.5) * CELL / height * size.tile_cells) + 1
        column = int((thing.column + 0.5) * CELL / width * size.tile_cells) + 1
        assert question.answer == f"row {row} column {column}"
        assert {*question.evidence} == {*scene.patches[thing]}
        answers.add(question.answer)
    assert len(answers) > 2


def test_one_scene_in_four_of_the_test_split_has_shapes_at_the_border_alone() -> None:
    inner = dict[str, set[int]]()
    (size, *_) = TRAINERS["minigemma"].sizes
    for split in ("validation", "test"):
        places = {
            (example.image_id, *map(int, example.answer.split()[1::2]))
            for example in draw_examples(split, 24, "minigemma")
            if example.kind == "grounding"
        }
        inner[split] = {
            id_ for id_, *place in places if not {1, size.tile_cells} & {*place}
        }
    assert not {id_ for id_ in inner["test"] if id_ // 2 % 4 == 1}
    assert inner["validation"] and inner["test"]


@SIZES
def test_labels_are_of_what_a_tile_or_thumbnail_shows(size: TiledSize) -> None:
    drawing = Drawing.draw(4, size, 3, 3)
    labels = tiled_training.label_views(drawing, size)
    by_token = {
        name: part.unflatten(1, (size.tokens, -1)) for name, part in labels.items()
    }
    # A picture of a single tile has none.
    thumbnail = (size.views - 1) * size.side**2 or size.tokens
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
                assert shown["row"][token].max() == thing.row % size.tile_cells
                assert shown["column"][token].max() == thing.column % size.tile_cells
        if size.copies > 1:
            assert (shown["view"][thumbnail:] == tiles.SIZES.index(size)).all()
            details = ("word", "head", "tens", "units", "digit", "letter")
            assert all((shown[name][thumbnail:] == -1).all() for name in details)
            assert (shown["kind"][thumbnail:] > 0).any()
        assert (shown["view"][:thumbnail] == 0).all()


def test_heads_start_by_looking_at_neighbours(
    trainer: tiled_training.TiledTrainer,
) -> None:
    """Left, right, above and below in the first layer, along rows and columns in the third."""
    tower = trainer.model.model.vision_tower
    (size, *_) = trainer.sizes
    drawn = tiled_training.Pictures.draw(1, size, 2, 2)
    names = [name for name, _ in tower.named_modules() if name.endswith("q_proj")]
    names += [name.replace("q_proj", "k_proj") for name in names]
    with record_outputs(tower, names) as outputs:
        tower(drawn.pixels.flatten(0, 1))
    heads = tower.config.num_attention_heads
    side = size.side * MERGE
    for number, steps in (
        (0, ((0, -1), (0, 1), (-1, 0), (1, 0))),
        (2, ((0, 0), (0, 0))),
    ):
        query, key = (
            outputs[name].unflatten(2, (heads, -1)).transpose(1, 2)
            for name in (names[number], names[len(names) // 2 + number])
        )
        weights = (query @ key.transpose(2, 3) / query.shape[3] ** 0.5).softmax(-1)
        start = trainer.before_patches
        weights = weights[:, :, start:, start:].mean(0).unflatten(2, (side, side))
        for head, (row, column) in enumerate(steps):
            middle = weights[head, 5 * side + 5]
            if number:
                assert middle.sum(1 - head)[5] > 0.4
            else:
                assert divmod(int(middle.argmax()), side) == (5 + row, 5 + column)
                assert middle.max() > 0.3


@torch.no_grad()
def test_words_start_by_matching_the_tokens_that_show_them(
    trainer: tiled_training.TiledTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shows three words; positions are those of the largest image and of a question."""
    model = trainer.model
    language = model.model.language_model
    monkeypatch.setattr(language.config, "_attn_implementation", "eager")
    count = trainer.sizes[-1].tokens
    ids = torch.arange(300, 300 + count)
    words = model.get_input_embeddings()(ids)
    directions = functional.normalize(words, dim=1)
    names = torch.eye(count)
    shares = names + names.roll(7, 0) + names.roll(19, 0)
    rows = shares @ directions @ naming.image_basis(words.shape[1])
    states = torch.cat((rows, words))[None]
    positions = torch.tensor([[*range(3, count + 3), *[count + 10] * count]])
    # Words attend to the image alone.
    mask = torch.zeros(1, 1, 2 * count, 2 * count)
    mask[..., count:] = -torch.inf
    for layer in language.layers:
        attention = layer.self_attn
        kind = [attention.layer_type] if trainer.key == "minigemma" else []
        _, weights = attention(
            layer.input_layernorm(states),
            position_embeddings=language.rotary_emb(states, positions, *kind),
            attention_mask=mask,
        )
        found = weights[0, : naming.MATCH_HEADS, count:, :count] * shares.T
        assert found.sum(2).mean() > 0.7


@pytest.fixture(scope="module")
def untrained(
    trainer: tiled_training.TiledTrainer, tmp_path_factory: pytest.TempPathFactory
) -> TiledYardstick:
    out = tmp_path_factory.mktemp(trainer.key)
    run = training.Training(training.Recipe.read(trainer.key), out)
    run.write_checkpoint(CHECKPOINTS[trainer.key], trainer.list_modules())
    assert (out / "model.safetensors").stat().st_size < 10_000_000
    yardstick = open_yardstick(trainer.key, out)
    assert isinstance(yardstick, TiledYardstick)
    return yardstick


@pytest.fixture(scope="module")
def scene(untrained: TiledYardstick) -> list[Example]:
    examples = draw_examples("validation", 12, untrained.key)
    (example, *_) = (
        e for e in examples if e.kind == "digit" and max(e.image.shape) > TILE
    )
    return [e for e in examples if e.image_id == example.image_id]


@torch.no_grad()
def test_answers_score_as_in_the_whole_model(
    untrained: TiledYardstick, scene: list[Example]
) -> None:
    untrained.network.float()
    scores = untrained.encode(scene).score(Case("full", ALL_TOKENS))
    assert scores.tokens == untrained.usual_tokens
    for example, logprob in zip(scene, scores.logprob.tolist(), strict=True):
        answer = f" {example.answer}{untrained.tokenizer.eos_token}"
        inputs = untrained.processor(
            text=format_prompt(example.question, untrained.key) + answer,
            images=as_picture(example.image),
            return_tensors="pt",
        )
        ids = untrained.token_ids(answer)
        logits = (
            untrained.network(**inputs).logits[0, -len(ids) - 1 : -1].log_softmax(-1)
        )
        expected = float(logits.gather(1, torch.tensor(ids)[:, None]).sum())
        assert logprob == pytest.approx(expected, abs=0.01)


def test_chat_template_makes_the_prompt_of_training(untrained: TiledYardstick) -> None:
    content = [{"type": "image"}, {"type": "text", "text": "Where is it?"}]
    chat = [{"role": "user", "content": content}]
    text = untrained.processor.apply_chat_template(chat, add_generation_prompt=True)
    assert text == format_prompt("Where is it?", untrained.key)


@torch.no_grad()
def test_kept_tokens_stand_where_they_stood_in_the_whole_image(
    untrained: TiledYardstick, scene: list[Example]
) -> None:
    encoded = untrained.encode(scene[:2])
    selection = torch.arange(1, encoded.tokens.count, 4).expand(2, -1)
    rows = encoded.tokens.features[:, selection[0]]
    true = encoded.score_kept(selection, rows, selection)
    packed = encoded.score_kept(selection, rows, None)
    assert true.tokens == packed.tokens == len(selection[0])
    assert torch.allclose(true.logprob, packed.logprob) != untrained.has_one_axis
    everything = torch.arange(encoded.tokens.count).expand(2, -1)
    unpruned = encoded.score_kept(everything, encoded.tokens.features, everything)
    in_order = encoded.score_kept(everything, encoded.tokens.features, None)
    assert torch.allclose(unpruned.logprob, in_order.logprob, atol=1e-3)
    pooled = encoded.score(
        Case("resized", Budget("K = N/4", untrained.budgets[1].share))
    )
    assert pooled.tokens == encoded.tokens.count // 4


@torch.no_grad()
@pytest.mark.parametrize("trainer", ["minigemma"], indirect=True)
def test_kept_tokens_of_gemma_see_each_other_and_text_what_is_before_it(
    untrained: TiledYardstick, scene: list[Example]
) -> None:
    """As transformers masks a prompt from which the other tokens of the image are missing."""
    network = untrained.network.float()
    example = scene[0]
    encoded = untrained.encode([example])
    selection = torch.tensor([[*range(1, 40, 3), 80]])
    rows = encoded.tokens.features[:, selection[0]]
    score = encoded.score_kept(selection, rows, selection)
    answer = f" {example.answer}{untrained.tokenizer.eos_token}"
    before, behind = split_prompt(untrained.key)
    lead = untrained.token_ids(before)
    tail = untrained.token_ids(behind.format(question=example.question) + answer)
    image = [network.config.image_token_id] * len(rows[0])
    ids = torch.tensor([[*lead, *image, *tail]])
    embeds = network.get_input_embeddings()(ids)
    embeds[:, len(lead) : -len(tail)] = rows
    is_image = (ids == network.config.image_token_id).long()
    length = len(untrained.token_ids(answer))
    logprobs = []
    for types in (is_image, torch.zeros_like(ids)):
        logits = network(inputs_embeds=embeds, token_type_ids=types).logits
        predicted = logits[0, -length - 1 : -1].log_softmax(-1)
        logprobs.append(predicted.gather(1, ids[0, -length:, None]).sum())
    assert torch.allclose(score.logprob, logprobs[0], atol=1e-3)
    assert not torch.allclose(score.logprob, logprobs[1], atol=1e-2)


@torch.no_grad()
def test_a_token_has_the_signals_of_its_patches(
    untrained: TiledYardstick, scene: list[Example]
) -> None:
    network = untrained.network
    image = untrained.encode_image(scene[0].image)
    inputs = untrained.processor.image_processor(
        as_picture(scene[0].image), return_tensors="pt"
    )
    pixels = inputs["pixel_values"].to(network.dtype)
    output = network.model.get_image_features(pixels, output_attentions=True)
    assert torch.allclose(image.rows, output.pooler_output.flatten(0, 1), atol=1e-2)
    start = untrained.before_patches
    side = image.grid.height * MERGE
    received = output.attentions[-1].float().mean((1, 2))[:, start:]
    received = received.view(-1, side, side)
    expected = functional.avg_pool2d(received, MERGE).flatten()
    assert torch.allclose(image.attention, expected, atol=1e-4)
    states = (
        output.last_hidden_state[:, start:]
        .float()
        .transpose(1, 2)
        .unflatten(2, (side, side))
    )
    means = functional.avg_pool2d(states, MERGE).flatten(2).transpose(1, 2)
    assert torch.allclose(image.encoder, means.flatten(0, 1), atol=1e-2)
    assert image.merger_norms.shape == (untrained.usual_tokens, 2)
