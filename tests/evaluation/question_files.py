"""Pictures and files of questions, written for a test, and how they are refused."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.answers import Rule
from vllm_autoprune.evaluation.questions import read_questions


def draw(mode: str = "RGB") -> Image.Image:
    """A picture in a mode of Pillow, whose columns, rows and transparency differ."""
    levels = (np.arange(24 * 16).reshape(16, 24) * 5 % 256).astype(np.uint8)
    if mode in ("I;16", "I", "F"):
        return Image.fromarray(
            levels.astype({"I;16": "u2", "I": "i4", "F": "f4"}[mode]) * 3
        )
    channels = [np.roll(levels, 3 * shift, axis=shift % 2) for shift in range(4)]
    return Image.fromarray(np.stack(channels, axis=-1)).convert(mode)


def save(kind: str = "PNG", mode: str = "RGB", **options: Any) -> bytes:
    buffer = io.BytesIO()
    draw(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def assert_told(error: ConfigError) -> list[str]:
    """Its problems, each in one line that says what to do."""
    texts = [str(problem) for problem in error.problems]
    assert all(problem.fix for problem in error.problems)
    assert all(len(text.encode().decode().splitlines()) == 1 for text in texts)
    return texts


def refuse_questions(path: Path, **options: Any) -> list[str]:
    """What is said of questions that cannot be read."""
    with pytest.raises(ConfigError) as caught:
        read_questions(path, **options)
    return assert_told(caught.value)


INLINE = base64.b64encode(save()).decode()


def write_file(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


RED = save()
BLUE = save("JPEG")
SHORT = "\nAnswer the question using a single word or phrase."


def jsonl(*records: object) -> str:
    return "".join(f"{json.dumps(record)}\n" for record in records)


Asked = tuple[str, tuple[str, ...], Rule, str, list[str]]


def write(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    for name, content in {"a.png": RED, "b.jpg": BLUE, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_file(folder / name, content)
    return folder


def list_asked(path: Path, frames: int = 0) -> list[Asked]:
    """The questions of a file, with or without answers, and the names of their pictures."""
    questions = read_questions(path, unlabelled=True, frames=frames)
    return [
        (
            question.text,
            question.answers,
            question.rule,
            question.record.benchmark,
            [picture.name for picture in question.pictures],
        )
        for question in questions
    ]
