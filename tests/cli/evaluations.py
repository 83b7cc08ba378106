"""Runs of eval on four questions about two images."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from vllm_autoprune.cli.main import main

CASES = ("full", "random", "resized", "norm", "cdpruner", "autoprune")
"""What a server is asked for by default, by the arm of the fake server."""


class Call(NamedTuple):
    """Runs eval on the questions of a folder, into its folder ``out``; by default of autoprune."""

    folder: Path
    printed: Callable[[], Any]

    def __call__(self, url: str, *words: str) -> int:
        data = str(self.folder / "questions.jsonl")
        out = str(self.folder / "out")
        common = ["--data", data, "--server-url", url, "--budgets", "8", "-o", out]
        state = [] if "--state" in words else ["--state", "autoprune"]
        return main(["eval", *common, *state, *words])

    def own(self, url: str, *words: str) -> int:
        """Run eval of the server's own state."""
        data = str(self.folder / "questions.jsonl")
        out = str(self.folder / "out")
        return main(["eval", "--data", data, "--server-url", url, "-o", out, *words])

    def drop_answers(self) -> None:
        """Leave images and questions."""
        path = self.folder / "questions.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        bare = [
            {"image": line["image"], "question": line["question"]} for line in lines
        ]
        path.write_text("\n".join(map(json.dumps, bare)))
