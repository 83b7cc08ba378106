"""``python -m benchmarks.accuracy.tower``: answers lost with cells that leave the vision tower.

mini-Qwen3-VL, run by transformers, answers the test split with the same number of tokens K of every
picture: after the whole tower, after one that a share of the cells leaves at a depth, and of the
picture resized so that the whole tower costs as much. Cells are chosen by the plugin's function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import product

import numpy as np
from torch import Tensor

from benchmarks.common.command import run_command
from benchmarks.common.report import log_progress
from benchmarks.cost.turns import Table
from benchmarks.yardsticks.examples import Example, draw_examples
from benchmarks.yardsticks.miniqwen import MiniQwen
from benchmarks.yardsticks.questions import CATEGORIES
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.statistics import ClusterBootstrap, Estimate
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.refine import refine
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tower import Tower

_WHOLE = "whole tower"
_PARTS = (4, 8, 16)
"""K of a picture of N tokens, as parts of N."""
_RULES = ("2/3@2/5", "1/2@2/5", "2/3@3/5", "1/2@3/5")


def count_cost(rule: str) -> Fraction:
    """Cost of a tower under a rule, as a part of the whole one's, by cells and layers.

    Attention within layers, which grows with the square of the cells, is left out.
    """
    share, _, depth = rule.partition("@")
    return Fraction(depth) + Fraction(share) * (1 - Fraction(depth))


def name_rival(rule: str) -> str:
    """The picture that is resized to the cost of a rule."""
    return f"resized to {float(count_cost(rule)):.0%}"


@dataclass
class Answers:
    """Whether each question was answered right, by way of encoding and part of N that is kept."""

    kinds: list[str] = field(default_factory=list)
    pictures: list[int] = field(default_factory=list)
    rights: dict[tuple[str, int], list[bool]] = field(default_factory=dict)

    def add(self, batch: Sequence[Example]) -> None:
        """Add questions, whose answers follow."""
        self.kinds += [example.kind for example in batch]
        self.pictures += [example.image_id for example in batch]

    def write(self, table: Table, state: str) -> None:
        """Add rows for all questions and for each category, with intervals over pictures."""
        categories = CATEGORIES["miniqwen"]
        kinds = np.array(self.kinds)
        pictures = np.array(self.pictures)
        for category in ("all", *categories):
            members = np.isin(kinds, categories.get(category, self.kinds))
            bootstrap = ClusterBootstrap(pictures[members].tolist())
            for (title, part), answers in self.rights.items():
                correct = 100 * np.array(answers, float)[members]
                setting = f"{state}, K = N/{part}; {title}; {category}"
                right = Estimate.of(bootstrap.mean(correct))
                table.add("right", setting, right, "%")
                rivals = (_WHOLE, name_rival(title)) if "@" in title else ()
                for rival in rivals:
                    other = 100 * np.array(self.rights[rival, part], float)[members]
                    less = Estimate.of(bootstrap.mean(correct - other))
                    table.add(f"right less {rival}", setting, less, "points")


def _answer(
    model: MiniQwen, state: PruningState, batch: Sequence[Example], rules: Sequence[str]
) -> Iterator[tuple[str, int, Tensor]]:
    """Way of encoding, part of N, and whether each question about one picture is answered right."""
    picture = batch[0].image
    ways = {_WHOLE: model.encode_image(picture)}
    count = ways[_WHOLE].grid.tokens
    for rule in rules:
        tower = Tower.parse(rule, "--rules")
        ways[rule] = model.encode_image(picture, tower=tower)
        rival = name_rival(rule)
        if rival not in ways:
            smaller = int(count_cost(rule) * count)
            ways[rival] = model.encode_image(picture, smaller)
    for (title, image), part in product(ways.items(), _PARTS):
        places = image.places.expand(len(batch), -1)
        tokens = replace(model.describe_image(batch, image), places=places)
        policy = materialize(state, max(1, count // part))
        refined = refine(policy, tokens)
        scores = model.score_image(batch, image, refined.indices, refined.features)
        yield title, part, scores.correct


def main() -> int:
    """Ask, and print rows of ``docs/data``; returns the exit status, 1 after an error."""
    parser = CommandParser(
        prog="python -m benchmarks.accuracy.tower", description=__doc__
    )
    add = parser.add_argument
    add("--images", type=int, default=100, help="of the test split")
    add("--state", default="norm", help="state that keeps the tokens: a file or a name")
    text = "which share of the cells stays, and after which share of the layers"
    add("--rules", nargs="+", default=_RULES, metavar="SHARE@DEPTH", help=text)
    return run_command("tower", lambda: _measure(**vars(parser.parse_args())))


def _measure(images: int, state: str, rules: Sequence[str]) -> int:
    model = MiniQwen()
    scored = Answers()
    drawn = draw_examples("test", images, "miniqwen")
    for number, batch in enumerate(model.batches(drawn), 1):
        scored.add(batch)
        for title, part, correct in _answer(model, load_state(state), batch, rules):
            scored.rights.setdefault((title, part), []).extend(correct.tolist())
        if number % 10 == 0:
            log_progress(f"{number} of {images} pictures")
    scored.write(Table(), state)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
