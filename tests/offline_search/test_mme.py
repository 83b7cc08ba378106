from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from offline_search.dataset import SPLITS, Dataset, convert_mme, read_dataset
from offline_search.evaluator import EvaluationJob
from offline_search.history import Answers, mme_total, relative_mme
from offline_search.ledger import TrialRecord
from offline_search.settings import Settings
from tests.offline_search.synthetic import SyntheticEvaluator, records_of_kind, run_search
from vllm_autoprune.cli.main import main
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.questions import Example


@pytest.fixture
def mme(tmp_path: Path) -> Path:
    """Two categories in the two layouts of MME, with ten images each."""
    for number in range(10):
        beside = tmp_path / "mme" / "color"
        beside.mkdir(parents=True, exist_ok=True)
        (beside / f"{number}.txt").write_text("Is it red?\tYes\nIs it blue?\tNo\n")
        (beside / f"{number}.jpg").write_text(f"color {number}")
        for folder, name, text in (
            ("questions_answers_YN", f"{number}.txt", "A cat?\tNo\nA dog?\tYes"),
            ("images", f"{number}.png", f"scene {number}"),
        ):
            (tmp_path / "mme" / "scene" / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / "mme" / "scene" / folder / name).write_text(text)
    return tmp_path / "mme"


def test_files_of_both_layouts_become_a_data_folder(
    mme: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "data"
    assert main(["search", "mme", "--mme", str(mme), "--data", str(target), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"search": 20, "validation": 8, "test": 12}
    data = read_dataset(target)
    examples = [example for split in SPLITS for example in data.examples(split)]
    assert {(one.category, one.question, one.answer) for one in examples} == {
        ("color", "Is it red?", "Yes"), ("color", "Is it blue?", "No"),
        ("scene", "A cat?", "No"), ("scene", "A dog?", "Yes"),
    }  # fmt: skip
    pairs = [example.pair for example in examples]
    assert Counter(pairs) == dict.fromkeys(range(20), 2)
    for one in examples:
        stem = Path(one.image).stem
        assert data.image_bytes(one).decode() == f"{one.category} {stem}"


def test_every_problem_of_the_files_is_listed(mme: Path, tmp_path: Path) -> None:
    (mme / "color" / "3.jpg").unlink()
    (mme / "scene" / "questions_answers_YN" / "4.txt").write_text("Is it red? Yes")
    with pytest.raises(ConfigError, match=r"(?s)3\.txt.*has no image.*4\.txt.*no question"):
        convert_mme(mme, tmp_path / "data")
    with pytest.raises(ConfigError, match="contains no question"):
        convert_mme(tmp_path / "nowhere", tmp_path / "data")


def test_an_image_of_two_categories_is_in_one_split(mme: Path, tmp_path: Path) -> None:
    """MME has ten images in two of existence, count, position and color, under one name each."""
    for number in range(10):
        category = mme / "position"
        category.mkdir(exist_ok=True)
        (category / f"{number}.txt").write_text("Left of it?\tYes\nRight of it?\tNo\n")
        (category / f"{number}.jpg").write_text(f"{'color' if number < 6 else 'position'} {number}")
    drawn = []
    for seed in range(4):
        target = tmp_path / f"data-{seed}"
        assert convert_mme(mme, target, seed) == {"search": 30, "validation": 12, "test": 18}
        data = read_dataset(target)  # raises for an image in two splits
        counts = Counter(
            (example.category, split) for split in SPLITS for example in data.examples(split)
        )
        for name in ("color", "position", "scene"):
            assert [counts[name, split] for split in SPLITS] == [10, 4, 6]
        drawn.append({example.image for example in data.examples("search")})
    assert len(list((tmp_path / "data-0").rglob("*.jpg"))) == 14, "an image is written once"
    assert len(set(map(frozenset, drawn))) > 1, "the draw depends on the seed"
    again = tmp_path / "again"
    convert_mme(mme, again, 3)
    assert {example.image for example in read_dataset(again).examples("search")} == drawn[3]


def test_unreadable_questions_are_problems(mme: Path, tmp_path: Path) -> None:
    (mme / "color" / "1.txt").write_text("Is it red?\tYes\nIs it blue?\t\n")
    (mme / "color" / "2.txt").write_bytes("Un caf\u00e9?\tYes\n".encode("latin-1"))
    (mme / "color" / "3.txt").write_text("\n")
    (mme / "color" / "4.jpg").unlink()
    (mme / "color" / "4.jpg").mkdir()
    with pytest.raises(ConfigError) as caught:
        convert_mme(mme, tmp_path / "data")
    assert {problem.where: problem.what for problem in caught.value.problems} == {
        "color/1.txt:2": "is no question with an answer",
        "color/2.txt": "is not UTF-8",
        "color/3.txt": "has no question",
        "color/4.txt": "cannot be read (4.jpg: Is a directory)",
    }
    assert all(problem.fix for problem in caught.value.problems)
    assert not (tmp_path / "data").exists(), "nothing is written"


def test_a_folder_that_a_search_would_refuse_is_not_written(mme: Path, tmp_path: Path) -> None:
    for path in mme.rglob("*.txt"):
        if path.stem != "0":
            path.unlink()
    with pytest.raises(ConfigError, match=r"too few images for three splits \(2\)"):
        convert_mme(mme, tmp_path / "data")


def test_a_target_that_is_a_file_is_a_problem(mme: Path, tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    with pytest.raises(ConfigError, match=r"data: cannot be written .* -> choose another folder"):
        convert_mme(mme, tmp_path / "data")


EXAMPLES = [
    *(Example(image=f"{n // 2}.png", question="q", answer="a", category="c", pair=n // 2)
      for n in range(8)),
    *(Example(image=f"i{n // 3}.png", question="q", answer="a", category="d") for n in range(6)),
    Example(image="9.png", question="q", answer="a", category="c"),
]  # fmt: skip


def answers(right: list[bool]) -> Answers:
    return Answers((0.0,) * len(right), tuple(right))


@pytest.mark.parametrize("seed", range(8))
def test_values_of_examples_have_mmes_total_as_their_mean(seed: int) -> None:
    rng = np.random.default_rng(seed)
    own, full = (answers([bool(bit) for bit in rng.integers(0, 2, 15)]) for _ in range(2))
    values = relative_mme(EXAMPLES, own, full)
    expected = mme_total(EXAMPLES, own) - mme_total(EXAMPLES, full)
    assert 1000 * values.mean() == pytest.approx(expected)
    # After a part of the examples, those of the other categories do not change.
    assert relative_mme(EXAMPLES, answers([*own.right[:8]]), full) == pytest.approx(values[:8])


async def test_a_search_for_mmes_total_finds_what_log_probability_hides(
    data: Dataset, tmp_path: Path
) -> None:
    class MoreRightLessLikely(SyntheticEvaluator):
        """An exchange of few tokens answers more questions, at lower probabilities."""

        async def evaluate(self, job: EvaluationJob) -> Answers:
            count = job.stop - job.start
            if job.candidate is None:
                return Answers((0.0,) * count, (True,) * count)
            few = '"q_e":1' in job.candidate.model_dump_json()  # type: ignore[union-attr]
            right = tuple(bool(few or number % 2) for number in range(count))
            return Answers((-2.0 if few else -1.0,) * count, right)

    found = {}
    for objective in ("mme", "quality"):
        settings = Settings(strategy="random", rounds=4, budgets=(8,), objective=objective)
        evaluator = MoreRightLessLikely(data, probes=False)
        winner = await run_search(tmp_path / objective, settings, evaluator)
        found[objective] = winner
        objectives = {t.objective for t in records_of_kind(tmp_path / objective, TrialRecord)}
        assert objectives == ({0.0, -0.3} if objective == "mme" else {-1.0, -2.0})
    assert found["mme"].test.mme_total == 400 and found["quality"].test.mme_total == 100
    assert found["mme"].test.objective.value == 0
    assert "thousand points" in json.dumps(found["mme"].state)
