from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from offline_search.dataset import SPLITS, Dataset, convert_mme, read_dataset
from offline_search.evaluator import EvaluationJob
from offline_search.history import (
    Answers,
    accuracy,
    accuracy_plus,
    mme_total,
    relative_values,
)
from offline_search.ledger import TrialRecord
from offline_search.settings import Settings
from tests.offline_search.synthetic import SyntheticEvaluator, records_of_kind, run_search
from vllm_autoprune.cli.main import main
from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.questions import Example, read_lines


def test_splits_are_shuffled_by_image_and_cut_by_image(data: Dataset) -> None:
    read = read_dataset(data.folder, seed=1)
    assert read.examples("search") != data.examples("search")
    assert sorted(map(repr, read.examples("search"))) == sorted(map(repr, data.examples("search")))
    images = [example.image for example in read.examples("search")]
    assert images[::2] == images[1::2], "questions of an image stay together"
    few = read_dataset(data.folder, seed=1, limit=2)
    assert list(few.examples("search")) == list(read.examples("search"))[:4]
    assert few.digest != read.digest == read_dataset(data.folder, seed=1).digest


def test_questions_of_an_image_need_not_be_neighbours(data: Dataset) -> None:
    neighbours = read_dataset(data.folder, seed=1, limit=3).examples("search")
    path = data.folder / "search.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[::2], *lines[1::2]]))
    assert read_dataset(data.folder, seed=1, limit=3).examples("search") == neighbours


def test_an_image_in_two_splits_is_refused_under_any_name(data: Dataset) -> None:
    (data.folder / "test-0.png").write_bytes((data.folder / "search-3.png").read_bytes())
    with pytest.raises(ConfigError, match="the same image is in search and in test"):
        read_dataset(data.folder)


def test_all_problems_are_reported_together(data: Dataset) -> None:
    folder = data.folder
    with (folder / "search.jsonl").open("a") as file:
        file.write('{"image": "x.png", "question": "", "answer": "a"}\n')
        file.write("not json\n")
        file.write(json.dumps({"image": "x.png", "question": "q", "answer": "a", "k": 1}) + "\n")
    (folder / "validation.jsonl").unlink()
    (folder / "test-2.png").unlink()
    with pytest.raises(ConfigError) as caught:
        read_dataset(folder)
    where = {problem.where for problem in caught.value.problems}
    assert {"search.jsonl:25", "search.jsonl:26", "search.jsonl:27"} <= where
    assert {"validation.jsonl", "test-2.png"} <= where
    assert all(problem.fix for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("line", "what", "fix"),
    [
        ('{"image": "a.png" "question": "q"}', "Invalid JSON", "one object"),
        ('["a.png", "q", "a"]', "should be an object", "one object"),
        ('{"image": "a.png", "question": "q"}', '"answer": Field required', "answer"),
        ('{"image": "a.png", "question": "q", "answer": 7}', '"answer": ', '"answer": "..."'),
        ('{"image": "a.png", "question": "", "answer": "a"}', '"question": ', "one object"),
        ('{"image": "a.png", "question": "q", "answer": "a", "pair": "x"}', '"pair"', "a whole"),
        ('{"image": "a.png", "question": "q", "answer": "a", "zzz": 1}', '"zzz"', "remove it"),
        ('{"image": "a.png", "question": "q", "answer": "a", "pear": 1}', '"pear"', 'to "pair"'),
        ('{"image": "a.png", "question": "q", "answer": "\\ud800"}', "Invalid JSON", "one object"),
    ],
)
def test_each_problem_of_a_line_has_a_fix(data: Dataset, line: str, what: str, fix: str) -> None:
    path = data.folder / "mine.jsonl"
    path.write_text(f"\n{line}")
    problems: list[Problem] = []
    assert read_lines(path, problems, "") == []
    (problem,) = problems
    assert problem.where == "mine.jsonl:2" and what in problem.what and fix in problem.fix


def test_files_of_windows_editors_are_read(data: Dataset) -> None:
    path = data.folder / "mine.jsonl"
    line = '{"image": "a.png", "question": "q\u2028r", "answer": "a"}'
    path.write_bytes(f"\ufeff{line}\r\n\r\n{line}\r\n".encode())
    problems: list[Problem] = []
    assert [number for number, _ in read_lines(path, problems, "")] == [1, 3]
    assert problems == []


def test_an_empty_split_and_a_missing_folder_are_errors(data: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_dataset(tmp_path / "nowhere")
    (data.folder / "test.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="contains no example"):
        read_dataset(data.folder)


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


def total(given: Answers) -> float:
    """MME's total as MME defines it."""
    points = 0.0
    for name in ("c", "d"):
        rows = [row for row, example in enumerate(EXAMPLES) if example.category == name]
        part = answers([given.right[row] for row in rows])
        points += 100 * (accuracy(part) + accuracy_plus([EXAMPLES[row] for row in rows], part))
    return points


@pytest.mark.parametrize("seed", range(8))
def test_values_of_examples_have_mmes_total_as_their_mean(seed: int) -> None:
    rng, settings = np.random.default_rng(seed), Settings(objective="mme")
    own, full = (answers([bool(bit) for bit in rng.integers(0, 2, 15)]) for _ in range(2))
    values = relative_values(settings, EXAMPLES, own, full)
    assert mme_total(EXAMPLES, own) == pytest.approx(total(own))
    assert 1000 * values.mean() == pytest.approx(total(own) - total(full))
    # After a part of the examples, those of the other categories do not change.
    part = relative_values(settings, EXAMPLES, answers([*own.right[:8]]), full)
    assert part == pytest.approx(values[:8])


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
