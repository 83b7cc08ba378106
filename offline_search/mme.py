"""MME's files as a data folder of a search.

MME has a folder for each category, with a text file for each image: lines of a yes/no question and
its answer, separated by a tab. Images are beside the text files, or in ``images`` beside
``questions_answers_YN``.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from offline_search.dataset import SPLITS, Example, Split, write_split
from vllm_autoprune.errors import ConfigError, Problem

SHARES: dict[Split, float] = {"search": 0.5, "validation": 0.2, "test": 0.3}
"""Shares of the images of each category."""

_IMAGE_ENDINGS = (".png", ".jpg", ".jpeg")
_QUESTIONS = "questions_answers_YN"


def convert_mme(source: Path, target: Path, seed: int = 0) -> dict[Split, int]:
    """Write the three splits and the images; returns the number of questions of each split.

    The two questions about an image are a pair, as accuracy+ counts them. Raises
    :class:`ConfigError` with every problem.
    """
    problems: list[Problem] = []
    splits: dict[Split, list[Example]] = {split: [] for split in SPLITS}
    folders = sorted(path for path in source.iterdir() if path.is_dir()) if source.is_dir() else []
    pair = 0
    for folder in folders:
        images = list(_read_category(folder, problems))
        random.Random(f"{seed} {folder.name}").shuffle(images)
        for split, part in zip(SPLITS, _divide(images), strict=True):
            for image, lines in part:
                name = f"images/{folder.name}/{image.name}"
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(image, target / name)
                splits[split] += [
                    Example(image=name, question=question, answer=answer,
                            category=folder.name, pair=pair)
                    for question, answer in lines
                ]  # fmt: skip
                pair += 1
    if not pair and not problems:
        fix = "give MME's folder, which has a folder for each category"
        problems.append(Problem(str(source), "contains no question", fix))
    if problems:
        raise ConfigError(f"MME {source}", problems[:20])
    for split, examples in splits.items():
        write_split(target / f"{split}.jsonl", examples)
    return {split: len(examples) for split, examples in splits.items()}


Questions = tuple[Path, list[tuple[str, str]]]
"""An image, and its questions with their answers."""


def _read_category(folder: Path, problems: list[Problem]) -> Iterator[Questions]:
    separate = (folder / _QUESTIONS).is_dir()
    texts = folder / _QUESTIONS if separate else folder
    images = folder / "images" if separate else folder
    for path in sorted(texts.glob("*.txt")):
        where = str(path.relative_to(folder.parent))
        found = [images / f"{path.stem}{ending}" for ending in _IMAGE_ENDINGS]
        image = next((one for one in found if one.exists()), None)
        lines = [tuple(line.split("\t")) for line in path.read_text("utf-8").splitlines() if line]
        questions = [(line[0].strip(), line[1].strip()) for line in lines if len(line) == 2]
        if image is None:
            fix = f"put {path.stem}.png or .jpg beside it"
            problems.append(Problem(where, "has no image", fix))
        elif len(questions) != len(lines) or not questions:
            fix = "a line is a question, a tab and the answer"
            problems.append(Problem(where, "has a line that is no question", fix))
        else:
            yield image, questions


def _divide(images: Sequence[Questions]) -> Iterator[Sequence[Questions]]:
    """The images of each split, in the order of the splits."""
    begin, share = 0, 0.0
    for split in SPLITS:
        share += SHARES[split]
        end = round(share * len(images))
        yield images[begin:end]
        begin = end
