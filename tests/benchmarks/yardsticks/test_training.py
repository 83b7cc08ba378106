"""Training of the small models."""

from __future__ import annotations

import hashlib
import random
import re
from pathlib import Path

import pytest
import torch

from benchmarks.yardsticks import (
    naming,
    pictures,
    train_clips,
    train_minigemma,
    train_miniintern,
    train_minillava,
    train_miniqwen,
    training,
)
from benchmarks.yardsticks.clips import SIZE, Clip
from benchmarks.yardsticks.pages import MERGE, Page
from benchmarks.yardsticks.questions import Model

STEPS: dict[Model, dict[str, float]] = {
    "minillava": {
        "reading": 3.170,
        "towers": 27.419,
        "phrases": 6.596,
        "questions": 4.854,
    },
    "miniqwen": {
        "reading": 27.243,
        "tower": 28.957,
        "naming": 7.507,
        "phrases": 9.976,
        "questions": 9.111,
    },
    "miniintern": {
        "reading": 29.342,
        "tower": 32.181,
        "naming": 7.593,
        "phrases": 9.014,
        "questions": 8.282,
    },
    "minigemma": {
        "reading": 57.431,
        "tower": 64.622,
        "naming": 11.214,
        "phrases": 10.532,
        "questions": 9.652,
    },
    "clips": {"phrases": 9.781, "questions": 9.280, "thinned": 9.267},
}
"""Loss of the first step of every stage, as with the optimiser that trained what is committed."""


def test_products_in_float32_are_those_of_bfloat16() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix, factor = torch.randn(2, 24, 24, generator=generator).bfloat16().unbind()
    exact = matrix.double() @ factor.double()
    with training._Float32Products():
        products = (
            matrix @ factor,
            torch.addmm(matrix, matrix, factor, beta=2, alpha=-3),
        )
    assert products[0].dtype == products[1].dtype == torch.bfloat16
    expected = exact, 2 * matrix.double() - 3 * exact
    for product, reference in zip(products, expected, strict=True):
        torch.testing.assert_close(product.double(), reference, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("name", STEPS)
def test_one_seed_gives_one_checkpoint(
    name: Model,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    programs = {
        "minillava": train_minillava,
        "miniqwen": train_miniqwen,
        "miniintern": train_miniintern,
        "minigemma": train_minigemma,
        "clips": train_clips,
    }
    monkeypatch.setattr(train_clips, "_DROPOUT", 1.0)  # of tokens in the first step too
    recipe = training.Recipe.read(name)
    # Three images show every kind of label; more of them only take longer.
    small = {"images": 3, "steps": 1, "warmup": 1}
    stages = tuple(stage.model_copy(update=small) for stage in recipe.stages)
    recipe = recipe.model_copy(update={"stages": stages})
    digests = []
    for out in (tmp_path / "out", tmp_path / "again"):
        programs[name].train(training.Training(recipe, out))
        # Any change of what is drawn, labelled or asked shows in these figures.
        log = re.findall(
            r"^\[(\w+)\] 1/1 loss=(\S+)", capsys.readouterr().out, re.MULTILINE
        )
        assert {stage: float(loss) for stage, loss in log} == pytest.approx(
            STEPS[name], rel=0.02
        )
        files = sorted(out.rglob("*.safetensors"))
        digests.append(
            [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
        )
        assert files and list(out.rglob("tokenizer.json")), (
            "transformers and vLLM load the folder"
        )
    programs[name].train(training.Training(recipe, tmp_path / "out"))
    assert "loss=" not in capsys.readouterr().out, "all stages were trained"
    again = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    assert digests[0] == digests[1] == again


def test_clutter_has_letters_where_it_is_and_words_are_half_of_what_shows_them() -> (
    None
):
    drawn = train_miniqwen._draw_pictures(4, [1.0, 0, 0, 0, 0], 3, 3)
    kind, letter = (
        drawn.labels[[*pictures.FIELDS].index(f)] for f in ("kind", "letter")
    )
    for content, kinds, letters in zip(drawn.contents, kind, letter, strict=True):
        named = letters.view(-1, MERGE * MERGE).amax(1)
        assert set(kinds[letters >= 0].tolist()) == {4}
        if isinstance(content, Page):
            expected = {
                part.row * drawn.size.columns + part.column: ord(part.text[0])
                - ord("a")
                for part in content.nonsense
            }
            assert {t: n for t, n in enumerate(named.tolist()) if n >= 0} == expected
        else:
            assert sorted(letters[letters >= 0].tolist()) == sorted(
                mark.letter for mark in content.marks if mark.letter is not None
            )
    basis = naming.image_basis(192)
    words = torch.randn(8, 192)
    assert torch.allclose(basis @ basis.T, torch.eye(192), atol=1e-5)
    cosine = torch.nn.functional.cosine_similarity(words, words @ basis.T)
    assert torch.allclose(cosine, torch.tensor(0.5), atol=1e-4)


def test_a_token_of_a_clip_is_labelled_by_what_its_shape_did_since_the_first_frame() -> (
    None
):
    for seed in range(6):
        _, clip = Clip.draw(random.Random(seed), 8).render(seed)
        labels = train_clips._label_tokens(clip).view(3, 8, -1)
        starts = {
            thing.name: (thing.row, thing.column) for thing in clip.frames[0].things
        }
        guests = list[str]()
        for frame, scene in enumerate(clip.frames):
            expected = torch.full((3, SIZE.tokens), -1)
            for thing in scene.things:
                place = (thing.row, thing.column)
                start = starts.get(thing.name)
                event = [-1, -1, -1]
                if start is None:
                    guests += [thing.name] * (thing.name not in guests)
                    event = [2, -1, guests.index(thing.name)]
                elif place != start:
                    moved = (
                        (place[0] > start[0]) - (place[0] < start[0]),
                        place[1] > start[1],
                    )
                    event = [
                        1,
                        {(0, True): 0, (1, False): 1, (0, False): 2}.get(moved, 3),
                        -1,
                    ]
                elif frame and thing.name != clip.mover.name:
                    event = [0, -1, -1]
                expected[:, list(scene.patches[thing])] = torch.tensor(event)[:, None]
            assert torch.equal(labels[:, frame], expected)


def test_of_a_thinned_clip_stays_what_its_questions_are_about() -> None:
    recipe = training.Recipe.read("clips")
    thinned = 0
    for seed in range(0, 40, 2):
        both = [train_clips._Batch.draw(recipe, 2, seed + part) for part in range(2)]
        assert len({batch.selection.shape for batch in both}) == 1
        assert (
            len({int(count) for batch in both for count in batch.selection.sum(1)}) == 1
        )
        for texts, row in zip(both[0].texts, both[0].selection, strict=True):
            assert all(row[list(text.evidence)].all() for text in texts)
            assert row.all() <= (len(texts) == 36)
            thinned += not row.all()
    assert 16 <= thinned <= 32
    assert train_clips._Batch.draw(recipe, 1, 0).selection.all()


def test_the_rate_warms_up_stays_and_falls_to_two_per_cent_of_its_peak() -> None:
    stage = training.Recipe.read("miniqwen").stages[0]
    schedule = {"steps": 100, "warmup": 4, "fall": 0.5, "peak": 2.0}
    stage = stage.model_copy(update=schedule)
    rates = [stage.rate(step) for step in range(100)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0] and rates[49] == 2.0
    assert rates[75] == pytest.approx(2.0 * (0.02 + 0.98 / 2))
    assert rates[-1] == pytest.approx(2.0 * (0.02 + 0.98 * 0.02))


@pytest.mark.parametrize("factor", [1.0, float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_no_weight(factor: float) -> None:
    layer = torch.nn.Linear(3, 2)
    initial = {name: value.clone() for name, value in layer.state_dict().items()}
    optimiser = training._Optimiser({"layer": layer})
    (layer(torch.ones(1, 3)) * factor).sum().backward()
    optimiser.step(0.1)
    for name, value in layer.state_dict().items():
        assert value.equal(initial[name]) == (factor != 1.0)
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_a_stopped_training_goes_on_as_if_it_had_not_been_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_LOG_EVERY", 2)
    small = {"steps": 5, "warmup": 2, "fall": 0.5}
    stages = tuple(
        s.model_copy(update=small) for s in training.Recipe.read("miniqwen").stages[:2]
    )
    recipe = training.Recipe(stages=stages, questions={}, phrases={})

    def train(out: Path, stop: int) -> dict[str, torch.Tensor]:
        """What both stages leave of a layer whose first stage ends before a step."""
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 2)
        run = training.Training(recipe, out)

        def loss(seed: int, step: int) -> torch.Tensor:
            if step == stop:
                raise KeyboardInterrupt
            drawn = torch.rand(4, 3, generator=torch.Generator().manual_seed(seed))
            return (layer(drawn) - drawn[:, :2]).square().mean()

        for number in range(2):
            run.run_stage(number, {"layer": layer}, loss)
        return layer.state_dict()

    in_one_go = train(tmp_path / "one", -1)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "stopped", 3)
    said = capsys.readouterr().out
    resumed = train(tmp_path / "stopped", -1)
    assert in_one_go["weight"].equal(resumed["weight"])
    # The same figures, of steps before the stop too.
    assert capsys.readouterr().out.splitlines()[1:] == said.splitlines()[1:6]
