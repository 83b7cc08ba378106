"""Training: its batches give what each question has alone, and one seed gives one checkpoint."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from tokenizers import Tokenizer
from torch import nn
from transformers import Qwen3VLForConditionalGeneration

from benchmarks.yardsticks import train_minillava, train_miniqwen
from benchmarks.yardsticks.examples import CHECKPOINTS, LLAVA, SEEDS
from benchmarks.yardsticks.pages import MERGE, Page, Size
from benchmarks.yardsticks.questions import BRIEF, KINDS, SEEN, Question, SceneQuestions
from benchmarks.yardsticks.scenes import CELLS, NEIGHBOURS, PATCHES, Scene
from benchmarks.yardsticks.train_minillava import draw_scenes, label_patches
from benchmarks.yardsticks.train_miniqwen import (
    LanguageBatch,
    Pictures,
    View,
    build_model,
    draw_pictures,
    image_basis,
    language_loss,
    language_states,
    name_tokens,
    naming_loss,
)
from benchmarks.yardsticks.training import (
    HALF,
    NEIGHBOUR,
    RANKS,
    FlatMuon,
    Run,
    Stage,
    batch_seed,
    draw_texts,
    keep_evidence,
    orthogonalise,
    phrase_kind,
    schedule,
)

QWEN = CHECKPOINTS["miniqwen"]
SIZE = Size(6, 9)
FIELD = {name: place for place, name in enumerate(train_miniqwen.FIELDS)}
STEPS = dict(zip(("left of", "right of", "above", "below"), NEIGHBOURS, strict=True))


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return Tokenizer.from_file(str(QWEN / "tokenizer.json"))


@pytest.fixture(scope="module")
def llava_words() -> Tokenizer:
    return Tokenizer.from_file(str(LLAVA / "tokenizer.json"))


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    return draw_scenes(3, 24)[1]


# Optimiser


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
    return (model(inputs.bfloat16()).float() - inputs[:, :8].sin()).square().mean()


def train(steps: range, restored: FlatMuon | None = None) -> tuple[nn.Module, FlatMuon, float]:
    """A model after some steps, from the start or from the state of another optimiser."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8))
    optimiser, loss = FlatMuon({"model": model}, peak=0.01), torch.tensor(0.0)
    if restored is not None:
        optimiser.restore(restored.state())
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        optimiser.step(1.0)
    return model, optimiser, float(loss.detach())


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 48, 16), (2, 16, 48)])
def test_orthogonal_matrices_have_singular_values_of_about_one(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    result = orthogonalise(matrices)
    values = torch.linalg.svdvals(result.float())
    assert result.shape == shape
    assert values.min() > 0.3 and values.max() < 1.5
    assert not orthogonalise(torch.zeros(1, 8, 8, dtype=torch.bfloat16)).any()


def test_steps_lower_the_loss_and_a_restored_optimiser_continues_exactly() -> None:
    model, optimiser, _ = train(range(10))
    _, stopped, _ = train(range(4))
    resumed, _, _ = train(range(4, 10), stopped)
    for parameter, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(parameter, other)
    assert train(range(150))[2] < 0.3 * train(range(1))[2]
    # A gradient that is not finite changes nothing.
    before = [parameter.clone() for parameter in model.parameters()]
    (loss_of(model, 0) * float("inf")).backward()
    optimiser.step(1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_the_rate_rises_stays_and_falls() -> None:
    shares = [schedule(step, 1000, 100, 0.4) for step in range(1000)]
    assert shares[0] == pytest.approx(0.01)
    assert set(shares[100:600]) == {1.0}
    assert shares[600:] == sorted(shares[600:], reverse=True)
    assert shares[-1] == pytest.approx(0.02, abs=0.01)
    assert schedule(999, 1000, 100, fall=0.0) == 1.0


# Texts and labels


def test_batches_differ_by_seed_stage_step_and_rank() -> None:
    drawn = [
        batch_seed(seed, stage, step, rank)
        for seed in (0, 7, 127)
        for stage in range(8)
        for step in (0, 1, 2**17 - 1)
        for rank in range(2)
    ]
    assert len(set(drawn)) == len(drawn)
    assert all(seed in SEEDS["train"] for seed in drawn)


def test_every_kind_is_asked_and_phrases_have_one_answer(scenes: list[Scene]) -> None:
    kinds: set[str] = set()
    for number, scene in enumerate(scenes):
        source = SceneQuestions(random.Random(number), scene, (CELLS, CELLS), BRIEF)
        phrases = draw_texts(source, train_minillava._PHRASE_WEIGHTS, 60, True)
        source = replace(source, wordings=SEEN)
        asked = draw_texts(source, train_minillava._QUESTION_WEIGHTS, 20, False)
        kinds |= {question.kind for question in (*phrases, *asked)}
        meanings: dict[str, set[tuple[str, str]]] = {}
        for phrase in phrases:
            meanings.setdefault(phrase.text, set()).add((phrase.kind, phrase.answer))
        assert all(len(answers) == 1 for answers in meanings.values())
        # No phrase extends another one by its answer.
        assert not meanings.keys() & {f"{phrase.text} {phrase.answer}" for phrase in phrases}
        columns = {f"half {thing.name}": thing.column for thing in scene.layout.things}
        for phrase in phrases:
            if phrase.kind == phrase_kind(HALF):
                assert phrase.answer == ("left", "right")[columns[phrase.text] // 2]
            if phrase.kind == phrase_kind(NEIGHBOUR):
                relation, name = phrase.text.removeprefix("shape ").split(" the ")
                (anchor,) = [thing for thing in scene.layout.things if thing.name == name]
                target = scene.layout.neighbour(anchor, *STEPS[relation])
                assert target is not None and phrase.answer == f"{target.name} {target.digit}"
                assert phrase.evidence[0] == scene.patches(target)[0]
    assert kinds == {*KINDS, *map(phrase_kind, (*KINDS, NEIGHBOUR, HALF))}


def test_easier_scenes_have_few_shapes_and_names_that_differ_in_one_word() -> None:
    unified = 0
    for scene in draw_scenes(5, 32, 3)[1]:
        things = scene.layout.things
        assert len(things) <= 3
        sizes = sorted((len({t.shape for t in things}), len({t.colour for t in things})))
        unified += sizes == [1, len(things)]
    assert unified >= 8


def test_labels_repeat_the_layout(scenes: list[Scene]) -> None:
    labels = dict(zip(train_minillava.FIELDS, label_patches(scenes), strict=True))
    for index, scene in enumerate(scenes):
        for thing, patches in zip(scene.layout.things, scene.thing_patches, strict=True):
            for patch in patches:
                place = {name: int(part[index, patch]) for name, part in labels.items()}
                middle = patch == patches[0]
                assert (place["kind"], place["centre"]) == (1, int(middle))
                assert (place["colour"], place["shape"]) == (thing.colour, thing.shape)
                assert place["digit"] == (thing.digit if middle else -1)
                for number, step in enumerate(NEIGHBOURS):
                    other = scene.layout.neighbour(thing, *step)
                    assert other is None or place[f"near{number} colour"] == other.colour
        for sign, patches in zip(scene.layout.signs, scene.sign_patches, strict=True):
            assert labels["digit"][index, list(patches)].tolist() == list(sign.number)
            assert labels["slot"][index, list(patches)].tolist() == list(range(len(sign.number)))
    background = labels["kind"] == 0
    assert (labels["colour"][background] == -1).all()
    assert 0.3 < background.float().mean() < 0.95


def test_dropping_tokens_keeps_the_evidence_of_a_question_whole() -> None:
    questions = [
        Question("digit", "", "1", (3, 4, 5)),
        Question("count", "", "2", tuple(range(40, 52))),
        Question("existence", "", "no", ()),
        Question("digit", "", "7", (4, 90)),
    ]
    texts = [(question.text, question) for question in questions]
    kept, answerable = keep_evidence(random.Random(0), texts, 8, PATCHES)
    assert kept == sorted(set(kept)) and len(kept) == 8
    assert {3, 4, 5, 90} <= set(kept)
    assert [question for _, question in answerable] == [questions[0], *questions[2:]]


# Batches


def test_only_answers_and_their_ends_are_labelled(llava_words: Tokenizer) -> None:
    _, kept, batch = train_minillava.draw_batch(5, 2, llava_words)
    assert torch.equal(kept, torch.arange(PATCHES).expand(2, -1))
    labelled = batch.labels[0] >= 0
    (end,) = llava_words.encode("</s>").ids
    assert int((batch.labels[0] == end).sum()) == 26
    text = llava_words.decode(batch.labels[0][labelled].tolist(), skip_special_tokens=False)
    answers = [answer.strip() for answer in text.split("</s>") if answer.strip()]
    assert len(answers) == 26
    assert not any("ASSISTANT" in answer or "?" in answer for answer in answers)
    assert (batch.kinds[0][labelled] >= 0).sum() == labelled.sum() - 26
    places = labelled.nonzero()[:, 0]
    assert torch.equal(batch.labels[0][places], batch.texts[0][places + 1])
    start = len(llava_words.encode("USER: ").ids) + PATCHES
    for block in range(26):
        positions = batch.positions[0][batch.blocks[0] == block]
        assert positions.tolist() == list(range(start, start + len(positions)))


def test_easier_batches_are_phrases_about_tokens_that_show_something(
    llava_words: Tokenizer,
) -> None:
    _, kept, batch = train_minillava.draw_batch(5, 2, llava_words, 3, 12)
    assert kept.shape == (2, 12)
    for scene, tokens in zip(draw_scenes(5, 2, 3)[1], kept.tolist(), strict=True):
        assert {patches[0] for patches in scene.thing_patches} <= set(tokens)
        assert {patch for patches in scene.sign_patches for patch in patches} <= set(tokens)
    ids = batch.texts[0][batch.blocks[0] == 0].tolist()
    alone = llava_words.decode(ids, skip_special_tokens=False)
    assert "ASSISTANT" not in alone and alone.endswith("</s>")


def test_a_question_sees_the_image_but_no_other_question(llava_words: Tokenizer) -> None:
    torch.manual_seed(0)
    *_, projector, model = train_minillava.build_models()
    model, projector = model.bfloat16(), projector.bfloat16()
    _, kept, batch = train_minillava.draw_batch(5, 2, llava_words)
    before = torch.tensor(llava_words.encode("USER: ").ids)
    patches = torch.randn(2, PATCHES, projector.linear_1.in_features).bfloat16()
    block = batch.blocks == 0
    alone = replace(batch, labels=batch.labels.where(block, -1))
    others = replace(alone, texts=batch.texts.where(block, batch.texts.flip(1)))
    loss = train_minillava.language_loss
    with torch.no_grad():
        value, _ = loss(model, projector, patches, kept, before, alone)
        beside, _ = loss(model, projector, patches, kept, before, others)
        other_image, _ = loss(model, projector, patches.flip(1), kept, before, alone)
    assert torch.equal(value, beside)
    assert not torch.equal(value, other_image)


def qwen_batch(
    words: Tokenizer, seed: int, seen: Size, budget: int, questions: int, phrases: int
) -> tuple[LanguageBatch, Pictures, View]:
    view = View(SIZE, seen)
    pictures = draw_pictures(seed, 1, 1, view)
    batch = train_miniqwen.draw_batch(seed, words, pictures, view, budget, questions, phrases)
    return batch, pictures, view


@torch.no_grad()
@pytest.mark.parametrize("seen", [SIZE, Size(4, 6)])
def test_a_block_has_the_logits_of_the_models_own_forward_pass(
    words: Tokenizer, seen: Size
) -> None:
    model = Qwen3VLForConditionalGeneration.from_pretrained(
        QWEN, dtype=torch.float32, attn_implementation="eager"
    )
    batch, pictures, _ = qwen_batch(words, 5, seen, seen.tokens, 3, 2)
    hidden, _ = language_states(model, batch, pictures, seen)
    logits = model.lm_head(hidden)
    frames = pictures.patches.float().flatten(1, 2).unflatten(2, (3, 1, -1))
    frames = frames.expand(-1, -1, -1, 2, -1).flatten(2)
    grid = torch.tensor([[1, seen.rows * MERGE, seen.columns * MERGE]])
    (image_token,) = words.encode("<|image_pad|>").ids
    for picture in range(2):
        for block in range(5):
            part = batch.texts.blocks[picture] == block
            text = batch.texts.texts[picture, part]
            image = torch.full((seen.tokens,), image_token)
            ids = torch.cat((batch.before, image, batch.after, text))[None]
            expected = model(
                input_ids=ids,
                pixel_values=frames[picture],
                image_grid_thw=grid,
                mm_token_type_ids=(ids == image_token).int(),
            ).logits[0, -len(text) :]
            torch.testing.assert_close(logits[picture, part], expected, atol=2e-2, rtol=1e-2)


def test_dropped_tokens_keep_their_places(words: Tokenizer) -> None:
    batch, *_ = qwen_batch(words, 6, SIZE, 6, 6, 0)
    assert batch.kept.shape == (2, 6)
    assert (batch.kept.diff(dim=1) > 0).all()
    rows, columns = batch.kept // SIZE.columns, batch.kept % SIZE.columns
    start = len(batch.before)
    image = batch.positions[:, :, start : start + 6] - start
    assert torch.equal(image, torch.stack((torch.zeros_like(rows), rows, columns)))
    # Text goes on behind the whole image.
    assert int(batch.positions[0, 0, start + 6]) == start + max(SIZE.rows, SIZE.columns)


def test_training_on_one_batch_lowers_its_loss(words: Tokenizer) -> None:
    torch.manual_seed(0)
    model = build_model()
    batch, pictures, view = qwen_batch(words, 7, SIZE, SIZE.tokens, 4, 4)
    optimiser, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(4):
        loss, parts = language_loss(model, words, batch, pictures, view)
        losses.append(parts["loss"])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[-1] < losses[0]


# mini-Qwen3-VL's labels and names


def test_a_word_labels_two_patches_of_its_token_and_one_at_half_size() -> None:
    size = Size(6, 6)
    for seen, expected in ((size, 2), (Size(3, 3), 1)):
        pictures = draw_pictures(2, 0, 4, View(size, seen), most=4)
        for index, page in enumerate(pictures.contents):
            assert isinstance(page, Page)
            word = page.words[0]
            labelled = pictures.labels[FIELD["word"], index] == word.word
            place = labelled & (pictures.labels[FIELD["kind"], index] == 1)
            assert place.sum() == expected
            scale = size.rows // seen.rows
            tokens = place.nonzero()[:, 0] // MERGE**2
            assert set(tokens.tolist()) == {word.row // scale * seen.columns + word.column // scale}
    plain = draw_pictures(2, 0, 4, View(size, Size(2, 2)), plain=True).labels
    assert (plain[FIELD["kind"]] > 0).float().mean() > 0.9
    assert (plain[FIELD["word"]] >= 0).float().mean() < 0.2, "patches of several words have none"


def test_numbers_are_labelled_and_named_by_digits_and_words(words: Tokenizer) -> None:
    pictures = draw_pictures(3, 1, 3, View(SIZE, SIZE))
    names = name_tokens(words, pictures.labels)
    assert names.shape[:2] == (4, SIZE.tokens)
    for index, page in enumerate(pictures.contents):
        if not isinstance(page, Page):
            digits = pictures.labels[FIELD["digit"], index] >= 0
            assert digits.sum() == len(page.layout.things), "one patch of a shape has its digit"
            continue
        labels = pictures.labels[:, index].view(len(FIELD), SIZE.tokens, -1)
        for number in page.numbers:
            place = number.row * SIZE.columns + number.column
            token = labels[:, place]
            shown = token[:, token[FIELD["kind"]] == 2]
            values = shown[FIELD["tens"]] * 10 + shown[FIELD["units"]]
            assert set(values.tolist()) == {number.value}
            tens, units = divmod(number.value, 10)
            texts = {f"\u0120{tens}", str(units)}
            texts |= {f"\u0120{word.text}" for word in (number.label, number.head) if word}
            share = names[index, place]
            ids = set(share.nonzero().flatten().tolist())
            assert ids == {words.token_to_id(text) for text in texts}
            torch.testing.assert_close(share.sum(), torch.tensor(1.0))


def test_rows_in_the_image_basis_have_the_least_loss_and_are_found_untrained() -> None:
    torch.manual_seed(0)
    width = len(image_basis())
    table = torch.nn.functional.normalize(torch.randn(768, width), dim=-1)
    names = torch.zeros(1, 4, 768)
    names[0, torch.arange(3), torch.tensor([5, 9, 700])] = 1.0
    rows = torch.zeros(1, 4, width)
    rows[0, :3] = table[[5, 9, 700]] @ image_basis()
    assert naming_loss(rows, table, names) < 0.1
    # Not in the basis of words, in which a word would find itself.
    rows[0, :3] = table[[5, 9, 700]]
    assert naming_loss(rows, table, names) > 3.0
    attention = build_model().model.language_model.layers[0].self_attn
    words = torch.randn(50, width)
    query = attention.q_norm(attention.q_proj(words).unflatten(-1, (6, 32)))
    for image, expected in ((words @ image_basis(), True), (words, False)):
        key = attention.k_norm(attention.k_proj(image).unflatten(-1, (6, 32)))
        nearest = torch.einsum("ahd,bhd->hab", query, key)[:4].sum(0).argmax(-1)
        assert bool((nearest == torch.arange(50)).all()) == expected


# Whole trainings


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["minillava", "miniqwen"])
def test_one_seed_gives_one_checkpoint_in_one_pass_or_resumed(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = train_minillava if name == "minillava" else train_miniqwen
    # Three images show every kind of label; more of them only take longer.
    stages: tuple[Stage, ...] = tuple(replace(stage, images=3) for stage in program.STAGES)
    run = Run(tmp_path / "out", tmp_path / "work", stages, steps_scale=0.0005)
    run.work.mkdir()

    def digests(run: Run) -> dict[str, str]:
        """Train in forked ranks, which need not import torch again; digests of the weights."""
        (run.work / "meet").unlink(missing_ok=True)
        mp.start_processes(program.train_rank, (run,), RANKS, start_method="fork")
        return {
            str(path.relative_to(run.out)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in run.out.rglob("*.safetensors")
        }

    whole = digests(run)
    (run.work / "questions.pt").unlink()  # as if the run had stopped after the phrases
    resumed = digests(replace(run, out=tmp_path / "again", resume=True))
    assert capfd.readouterr().out.count("[phrases] resumed at step 1") == 1
    assert whole and resumed == whole
    assert list(run.out.rglob("tokenizer.json")), "a folder that transformers and vLLM load"
