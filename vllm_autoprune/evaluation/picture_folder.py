"""Folders of pictures with questions in text files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

from vllm_autoprune.errors import Problem
from vllm_autoprune.evaluation.asked_question import AskedQuestion, ask
from vllm_autoprune.evaluation.data_sets.registry import DataFile
from vllm_autoprune.evaluation.pictures import (
    PictureSource,
    is_picture,
)
from vllm_autoprune.evaluation.records import read_lines
from vllm_autoprune.stream import one_line

_SHARED = "questions.txt"
"""Name of a file with questions about every picture of its folder, or of all folders."""
_MME_TEXTS = "questions_answers_YN"
_MME_IMAGES = "images"


def read_folder(
    path: Path, data: DataFile, problems: list[Problem], fix: str
) -> Iterator[AskedQuestion]:
    """Questions in text files: one named like a picture, else ``questions.txt`` for every picture.

    A line is a question, which may be followed by a tab and its answer. Sub-folders are
    categories, as in MME; in them, a "yes" and a "no" about one picture form a pair.
    """
    pairs = count()
    without_text = 0
    with_text = 0
    subfolders = [folder for folder in _list_visible(path) if folder.is_dir()]
    for folder in (path, *subfolders):
        category = "all" if folder == path else one_line(folder.name, 80)
        texts, pictures = _list_section(folder, problems)
        _note_others(path, folder, data)
        for picture in pictures:
            shared = folder / _SHARED
            if not shared.exists():
                shared = path / _SHARED
            text = texts.get(picture.stem, shared)
            if not text.exists():
                without_text += 1
                continue
            with_text += 1
            questions = list(_read_text(path, text, picture, category, fix))
            rules = [question.rule for question in questions]
            pair = None
            if picture.stem in texts and rules == ["yes_no", "yes_no"]:
                pair = next(pairs)
            yield from (replace(question, pair=pair) for question in questions)
    if without_text or not with_text:
        problems.append(_explain_missing(path, without_text))


def _read_text(
    path: Path, text: Path, picture: Path, category: str, fix: str
) -> Iterator[AskedQuestion]:
    """The questions of one text file about a picture."""
    name = one_line(picture.relative_to(path), 200)
    source = PictureSource(str(picture), name, str(picture))
    for number, line in read_lines(text, fix):
        question, _, answer = (part.strip() for part in line.strip().partition("\t"))
        if question:
            yield AskedQuestion(
                f"{text}:{number}",
                ask(question, source),
                (answer,) if answer else (),
                "yes_no" if answer.lower() in ("yes", "no") else "text",
                category,
            )


def _explain_missing(path: Path, without_text: int) -> Problem:
    """The problem of a folder that has no picture, or whose pictures have no question."""
    what = "has no picture"
    fix = "name a folder with PNG or JPEG files"
    if without_text:
        shared = path / _SHARED
        what = f"has pictures without a question ({without_text})"
        fix = f"write {shared}, one question a line: each is asked about every picture"
    kinds = (".jsonl", ".json", ".tsv", ".csv", ".parquet", ".arrow")
    for file in _list_visible(path):
        if file.suffix in kinds and "annotations" not in file.name:
            fix = f"name its file of questions, {file}"
    return Problem(str(path), what, fix)


def _list_section(
    folder: Path, problems: list[Problem]
) -> tuple[dict[str, Path], list[Path]]:
    """Text files by the name of their picture, and pictures, in ``folder``.

    Both may be in MME's two sub-folders. A text file without its picture is added to ``problems``.
    """
    texts = folder / _MME_TEXTS
    images = folder / _MME_IMAGES
    if not texts.is_dir():
        texts = folder
        images = folder
    by_name = {
        path.stem: path
        for path in _list_visible(texts)
        if path.suffix == ".txt" and path.name != _SHARED
    }
    pictures = [path for path in _list_visible(images) if is_picture(path)]
    for stem in by_name.keys() - {path.stem for path in pictures}:
        what = f"has questions about no picture: {images} has none of its name"
        fix = f"rename it {_SHARED} if they are about every picture, or remove it"
        problems.append(Problem(str(by_name[stem]), what, fix))
    return by_name, pictures


def _list_visible(folder: Path) -> list[Path]:
    """The entries of ``folder`` without hidden ones, such as macOS's ``._1.txt``."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name[0] not in "._")


def _note_others(root: Path, folder: Path, data: DataFile) -> None:
    """Note the sub-folders of ``folder``, and its files that are neither picture nor text."""
    sections = [folder]
    if (folder / _MME_TEXTS).is_dir():
        sections += [folder / _MME_TEXTS, folder / _MME_IMAGES]
    for section in sections:
        for path in _list_visible(section):
            if path.is_dir():
                is_read = folder == root or path in sections
            else:
                is_read = path.suffix == ".txt" or is_picture(path)
            if not is_read:
                data.unread.append(one_line(path.relative_to(root), 80))
