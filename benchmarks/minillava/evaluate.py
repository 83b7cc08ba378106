"""``python -m benchmarks.minillava.evaluate``: accuracy of a checkpoint by selection and budget.

Tokens are pruned between projector and language model with transformers, so these figures check the
model and the policies, not the plugin.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import compress, groupby
from pathlib import Path

import numpy as np
import torch

from benchmarks.common.report import Table
from benchmarks.minillava.reader import Reader
from benchmarks.minillava.selections import (
    ORACLE,
    RANDOM,
    RESIZED,
    Selection,
    keep_all,
    selections,
)
from benchmarks.minillava.split import CHECKPOINT, Example, aggregate, draw_examples
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.statistics import ClusterBootstrap, Estimate, estimate

BUDGETS = (64, 32, 16, 8)
FULL = "full"
_SCENES_PER_BATCH = 4


@dataclass(frozen=True)
class Case:
    """A selection at a budget."""

    name: str
    selection: Selection
    budget: int

    @property
    def label(self) -> str:
        """The key of its results, such as "cdpruner 16"."""
        return f"{self.name} {self.budget}"


@dataclass(frozen=True)
class Result:
    """Scores of all questions in order: whether right, and the answer's log-probability."""

    right: list[bool]
    logprob: list[float]


def _batches(examples: Sequence[Example]) -> Iterator[list[Example]]:
    """Questions about a few scenes at a time."""
    groups = groupby(examples, key=lambda example: example.image_id // _SCENES_PER_BATCH)
    return (list(group) for _, group in groups)


def evaluate(
    reader: Reader, examples: Sequence[Example], cases: Sequence[Case]
) -> tuple[dict[str, Result], list[bool]]:
    """Results by label; and of each question with evidence, whether relevance peaks inside it."""
    results = {case.label: Result([], []) for case in cases}
    hits: list[bool] = []
    for batch in _batches(examples):
        tokens = reader.encode(batch)
        instruction = tokens.require_instruction()
        peaks = (instruction.sign * instruction.cosines).mean(2).argmax(1).tolist()
        hits += [
            peak in one.evidence for peak, one in zip(peaks, batch, strict=True) if one.evidence
        ]
        for case in cases:
            with torch.no_grad():
                rows = case.selection(batch, tokens, case.budget)
            scores = reader.score_answers(batch, rows)
            results[case.label].right.extend(scores.right.tolist())
            results[case.label].logprob.extend(scores.logprob.tolist())
    return results, hits


def accuracy_by_novelty(examples: Sequence[Example], result: Result) -> dict[str, float]:
    """Accuracy on wordings and arrangements of training, and on unseen ones."""
    groups = {
        "as in training": [not (one.unseen_wording or one.unseen_style) for one in examples],
        "unseen wording": [one.unseen_wording for one in examples],
        "unseen layout": [one.unseen_style for one in examples],
    }
    return {
        name: sum(right) / len(right)
        for name, members in groups.items()
        if (right := list(compress(result.right, members)))
    }


@dataclass(frozen=True)
class Headroom:
    """Differences in accuracy between selections at one budget."""

    best: str
    worst: str
    spread: Estimate
    below_oracle: Estimate
    above_random: Estimate


def headroom(
    examples: Sequence[Example], results: dict[str, Result], policies: Sequence[str], budget: int
) -> Headroom:
    """Best over worst policy, oracle over best, and best over random; paired by scene."""
    bootstrap = ClusterBootstrap([example.image_id for example in examples])
    right = {
        name: np.asarray(results[f"{name} {budget}"].right, dtype=np.float64)
        for name in (*policies, RANDOM, ORACLE)
    }
    ranked = sorted(policies, key=lambda name: right[name].sum())
    worst, best = ranked[0], ranked[-1]
    return Headroom(
        best,
        worst,
        spread=estimate(bootstrap.mean(right[best] - right[worst])),
        below_oracle=estimate(bootstrap.mean(right[ORACLE] - right[best])),
        above_random=estimate(bootstrap.mean(right[best] - right[RANDOM])),
    )


def build_report(
    examples: Sequence[Example], results: dict[str, Result], hits: Sequence[bool]
) -> dict[str, object]:
    """All figures of the model card, as JSON."""
    scenes = [example.image_id for example in examples]
    bootstrap = ClusterBootstrap(scenes)
    labels = [label.split() for label in results if not label.startswith(FULL)]
    names = sorted({name for name, _ in labels} - {RANDOM, RESIZED, ORACLE})
    budgets = sorted({int(budget) for _, budget in labels})
    full = next(label for label in results if label.startswith(FULL))
    scores = {label: aggregate(examples, result.right) for label, result in results.items()}
    return {
        "questions": len(examples),
        "scenes": len(set(scenes)),
        "relevance peaks inside the evidence": sum(hits) / len(hits),
        "full tokens": {
            "category": scores[full].by_category,
            "kind": scores[full].by_kind,
            "novelty": accuracy_by_novelty(examples, results[full]),
        },
        "cases": {
            label: {
                "accuracy": asdict(estimate(bootstrap.mean([float(ok) for ok in result.right]))),
                "accuracy+": scores[label].accuracy_plus,
                "log-probability": asdict(estimate(bootstrap.mean(result.logprob))),
                "by category": scores[label].by_category,
            }
            for label, result in results.items()
        },
        "headroom": {
            str(budget): asdict(headroom(examples, results, names, budget)) for budget in budgets
        },
    }


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def format_report(report: dict[str, object]) -> str:
    """The report as Markdown."""
    cases, full = report["cases"], report["full tokens"]
    assert isinstance(cases, dict) and isinstance(full, dict)
    shares = [(name, _percent(share)) for part in full.values() for name, share in part.items()]
    rows = []
    for label, case in cases.items():
        value, low, high = (_percent(case["accuracy"][part]) for part in ("value", "low", "high"))
        logprob = f"{case['log-probability']['value']:.3f}"
        rows.append((label, f"{value} ({low} to {high})", _percent(case["accuracy+"]), logprob))
    columns = ("kept", "accuracy % (95 %)", "accuracy+ %", "log-probability")
    return "\n\n".join(
        [
            f"{report['questions']} questions on {report['scenes']} scenes",
            Table("", ("full tokens", "%"), shares, "-r").markdown(),
            Table("", columns, rows, "-rrr").markdown(),
        ]
    )


def main() -> None:
    """Parse the arguments, evaluate and print the report."""
    parser = CommandParser(description="Evaluate the mini-LLaVA with transformers.")
    parser.add_argument(
        "--checkpoint", type=Path, default=CHECKPOINT, help="folder of the checkpoint"
    )
    parser.add_argument(
        "--split", choices=("search", "validation", "test"), default="test", help="held-out split"
    )
    parser.add_argument("--scenes", type=int, default=200, help="scenes of it")
    parser.add_argument("--budgets", type=int, nargs="*", default=list(BUDGETS), help="each K")
    parser.add_argument("--json", type=Path, help="file for the whole report")
    arguments = parser.parse_args()
    reader = Reader(arguments.checkpoint)
    examples = draw_examples(arguments.split, arguments.scenes)
    cases = [Case(FULL, keep_all, reader.grid.tokens)]
    cases += [Case(name, keep, k) for k in arguments.budgets for name, keep in selections().items()]
    results, hits = evaluate(reader, examples, cases)
    report = build_report(examples, results, hits)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print(format_report(report))


if __name__ == "__main__":
    main()
