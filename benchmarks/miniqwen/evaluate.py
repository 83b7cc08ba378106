"""``python -m benchmarks.miniqwen.evaluate``: accuracy with all tokens, resized, and with some.

Computed with transformers, so these figures check the model, not the plugin.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common.report import Table
from benchmarks.minillava.split import Example
from benchmarks.miniqwen.reader import EncodedImage, Reader
from benchmarks.miniqwen.split import CHECKPOINT, aggregate, draw_examples, image_size
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.statistics import ClusterBootstrap, estimate

DIVISORS = (2, 4, 8, 16)
FULL, RESIZED, RANDOM, ORACLE = "full", "resized", "random", "oracle"


@dataclass
class Result:
    """Scores of all questions in order, and the image tokens of each."""

    right: list[bool] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def shuffle_tokens(example: Example, count: int) -> list[int]:
    """All raster tokens in an order that is random but fixed for each question."""
    return random.Random(f"{example.image_id} {example.question}").sample(range(count), count)


def keep_random(examples: Sequence[Example], count: int, budget: int) -> Tensor:
    """Random tokens (M, K), ascending, of an image of `count` tokens."""
    return torch.tensor([sorted(shuffle_tokens(one, count)[:budget]) for one in examples])


def keep_evidence(examples: Sequence[Example], count: int, budget: int) -> Tensor:
    """The question's evidence and then random tokens (M, K), ascending: the oracle."""
    rows = [
        list(dict.fromkeys((*one.evidence, *shuffle_tokens(one, count))))[:budget]
        for one in examples
    ]
    return torch.tensor([sorted(row) for row in rows])


def evaluate(
    reader: Reader, examples: Sequence[Example], divisors: Sequence[int] = DIVISORS
) -> dict[str, Result]:
    """Results by case, such as "resized 4" for at most a fourth of the tokens."""
    results: dict[str, Result] = {}

    def score(
        label: str, batch: Sequence[Example], image: EncodedImage, kept: Tensor | None = None
    ) -> None:
        scores = reader.score_answers(batch, image, kept)
        result = results.setdefault(label, Result())
        result.right += scores.right.tolist()
        result.logprob += scores.logprob.tolist()
        tokens = image.size.tokens if kept is None else kept.shape[1]
        result.tokens += [tokens] * len(batch)

    for _, group in groupby(examples, key=lambda example: example.image_id):
        batch = list(group)
        image = batch[0].image
        count = image_size(image).tokens
        whole = reader.encode(image)
        assert whole.size == image_size(image)
        score(FULL, batch, whole)
        for divisor in divisors:
            budget = count // divisor
            score(f"{RESIZED} {divisor}", batch, reader.encode(image, budget))
            score(f"{RANDOM} {divisor}", batch, whole, keep_random(batch, count, budget))
            score(f"{ORACLE} {divisor}", batch, whole, keep_evidence(batch, count, budget))
    return results


def accuracy_by_novelty(examples: Sequence[Example], result: Result) -> dict[str, float]:
    """Accuracy on wordings and sizes of training, and on unseen ones."""
    groups: dict[str, list[bool]] = {}
    for one, right in zip(examples, result.right, strict=True):
        name = "unseen wording" if one.unseen_wording else "as in training"
        groups.setdefault("unseen size" if one.unseen_style else name, []).append(right)
    return {name: sum(rights) / len(rights) for name, rights in groups.items()}


def build_report(examples: Sequence[Example], results: dict[str, Result]) -> dict[str, object]:
    """All figures of the model card, as JSON."""
    bootstrap = ClusterBootstrap([example.image_id for example in examples])
    cases: dict[str, object] = {}
    for label, result in results.items():
        scores = aggregate(examples, result.right)
        cases[label] = {
            "accuracy": asdict(estimate(bootstrap.mean([float(ok) for ok in result.right]))),
            "tokens": sum(result.tokens) / len(result.tokens),
            "log-probability": sum(result.logprob) / len(result.logprob),
            "by category": scores.by_category,
            "by kind": scores.by_kind,
        }
    return {
        "questions": len(examples),
        "images": len({example.image_id for example in examples}),
        "novelty": accuracy_by_novelty(examples, results[FULL]),
        "cases": cases,
    }


def format_report(report: dict[str, object]) -> str:
    """The report as Markdown: a row per case, a column per kind of question."""
    cases = report["cases"]
    assert isinstance(cases, dict)
    kinds = list(cases[FULL]["by kind"])
    categories = list(cases[FULL]["by category"])
    columns = ("case", "tokens", "accuracy % (95 %)", *categories, *kinds)
    rows = []
    for label, case in cases.items():
        value, low, high = (
            f"{100 * case['accuracy'][part]:.1f}" for part in ("value", "low", "high")
        )
        shares = [case["by category"][name] for name in categories]
        shares += [case["by kind"][name] for name in kinds]
        figures = [f"{100 * share:.1f}" for share in shares]
        rows.append((label, f"{case['tokens']:.1f}", f"{value} ({low} to {high})", *figures))
    novelty = report["novelty"]
    assert isinstance(novelty, dict)
    shares_of = ", ".join(f"{name} {100 * share:.1f} %" for name, share in novelty.items())
    return "\n\n".join(
        [
            f"{report['questions']} questions about {report['images']} images; {shares_of}",
            Table("", columns, rows, "-" + "r" * (len(columns) - 1)).markdown(),
        ]
    )


def main() -> None:
    """Parse the arguments, evaluate and print the report."""
    parser = CommandParser(description="Evaluate mini-Qwen3-VL with transformers.")
    parser.add_argument(
        "--checkpoint", type=Path, default=CHECKPOINT, help="folder of the checkpoint"
    )
    parser.add_argument(
        "--split", choices=("search", "validation", "test"), default="test", help="held-out split"
    )
    parser.add_argument("--images", type=int, default=200, help="pictures of it")
    parser.add_argument(
        "--divisors",
        type=int,
        nargs="*",
        default=list(DIVISORS),
        help="each K is N over one of them",
    )
    parser.add_argument("--json", type=Path, help="file for the whole report")
    arguments = parser.parse_args()
    examples = draw_examples(arguments.split, arguments.images)
    results = evaluate(Reader(arguments.checkpoint), examples, arguments.divisors)
    report = build_report(examples, results)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print(format_report(report))


if __name__ == "__main__":
    main()
