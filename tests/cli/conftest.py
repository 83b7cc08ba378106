"""Fixtures of the tests of commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.cli.evaluations import Call


@pytest.fixture
def call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """Asks four questions about two images."""
    for name, colour in (("a.png", "red"), ("b.png", "blue")):
        Image.new("RGB", (8, 8), colour).save(tmp_path / name)
    lines = [
        {
            "image": "a.png",
            "question": "Which colour?",
            "answer": "red",
            "category": "colour",
        },
        {"image": "b.png", "question": "Is it red?", "answer": "no", "pair": 1},
        {
            "image": "a.png",
            "question": "Which shape?",
            "answer": "square",
            "category": "shape",
        },
        {"image": "b.png", "question": "Is it blue?", "answer": "yes", "pair": 1},
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return Call(tmp_path, capsys.readouterr)
