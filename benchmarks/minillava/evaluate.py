"""Figures of a checkpoint: by kind at full tokens, and by selection and K, with intervals.

Knows nothing about serving: tokens are pruned between projector and language model by hand, so
that these figures check the model rather than the plugin.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import torch

from benchmarks.minillava.intervals import Interval, difference, mean
from benchmarks.minillava.reader import Reader
from benchmarks.minillava.selections import (
    ORACLE,
    RANDOM,
    Selection,
    keep_all,
    selections,
)
from benchmarks.minillava.split import CHECKPOINT, Example, held_out
from benchmarks.minillava.wordings import CATEGORIES, KINDS

BUDGETS = (64, 32, 16, 8)
FULL = "full"
SCENES_AT_ONCE = 4


@dataclass(frozen=True)
class Case:
    """A selection at a budget."""

    name: str
    selection: Selection
    budget: int

    @property
    def label(self) -> str:
        """How results name it."""
        return f"{self.name} {self.budget}"


@dataclass(frozen=True)
class Result:
    """Answers to all questions, in their order: right or not, and log-probabilities."""

    right: list[bool]
    logprob: list[float]


def _batches(examples: Sequence[Example]) -> Iterator[list[Example]]:
    """Questions about a few scenes at a time."""
    groups = groupby(examples, key=lambda example: example.image_id // SCENES_AT_ONCE)
    return (list(group) for _, group in groups)


def evaluate(
    reader: Reader, examples: Sequence[Example], cases: Sequence[Case]
) -> tuple[dict[str, Result], list[bool]]:
    """Results by label, and for questions with evidence whether relevance peaks inside it."""
    results = {case.label: Result([], []) for case in cases}
    hits: list[bool] = []
    for part in _batches(examples):
        tokens = reader.look(part)
        instruction = tokens.require_instruction()
        peaks = (instruction.sign * instruction.cosines).mean(2).argmax(1).tolist()
        hits += [
            peak in one.evidence for peak, one in zip(peaks, part, strict=True) if one.evidence
        ]
        for case in cases:
            with torch.no_grad():
                rows = case.selection(part, tokens, case.budget)
            answered = reader.answer(part, rows)
            results[case.label].right.extend(answered.right.tolist())
            results[case.label].logprob.extend(answered.logprob.tolist())
    return results, hits


def _share(result: Result, chosen: Sequence[bool]) -> float | None:
    kept = [right for right, take in zip(result.right, chosen, strict=True) if take]
    return sum(kept) / len(kept) if kept else None


def by_category(examples: Sequence[Example], result: Result) -> dict[str, float]:
    """Accuracy of each category that is asked."""
    groups = {name: [one.kind in kinds for one in examples] for name, kinds in CATEGORIES.items()}
    return _shares(result, groups)


def by_kind(examples: Sequence[Example], result: Result) -> dict[str, float]:
    """Accuracy of each kind that is asked."""
    return _shares(result, {kind: [one.kind == kind for one in examples] for kind in KINDS})


def by_novelty(examples: Sequence[Example], result: Result) -> dict[str, float]:
    """Accuracy on what is worded and arranged as in training, and on what is not."""
    groups = {
        "as in training": [not (one.unseen_wording or one.unseen_style) for one in examples],
        "unseen wording": [one.unseen_wording for one in examples],
        "unseen layout": [one.unseen_style for one in examples],
    }
    return _shares(result, groups)


def _shares(result: Result, groups: dict[str, list[bool]]) -> dict[str, float]:
    found = {name: _share(result, chosen) for name, chosen in groups.items()}
    return {name: share for name, share in found.items() if share is not None}


def accuracy_plus(examples: Sequence[Example], result: Result) -> float:
    """Share of yes/no pairs with both answers right."""
    pairs: dict[int, list[bool]] = {}
    for example, right in zip(examples, result.right, strict=True):
        if example.pair is not None:
            pairs.setdefault(example.pair, []).append(right)
    return sum(map(all, pairs.values())) / len(pairs) if pairs else 0.0


@dataclass(frozen=True)
class Headroom:
    """At one budget: how far apart selections lie, in shares of questions."""

    best: str
    worst: str
    spread: Interval
    below_oracle: Interval
    above_random: Interval


def headroom(
    examples: Sequence[Example], results: dict[str, Result], policies: Sequence[str], budget: int
) -> Headroom:
    """Best against worst policy, oracle against best, best against random; paired by scene."""
    scenes = [example.image_id for example in examples]
    right = {
        name: [float(ok) for ok in results[f"{name} {budget}"].right]
        for name in (*policies, RANDOM, ORACLE)
    }
    ranked = sorted(policies, key=lambda name: sum(right[name]))
    worst, best = ranked[0], ranked[-1]
    return Headroom(
        best,
        worst,
        difference(right[best], right[worst], scenes),
        difference(right[ORACLE], right[best], scenes),
        difference(right[best], right[RANDOM], scenes),
    )


def report(
    examples: Sequence[Example], results: dict[str, Result], hits: Sequence[bool]
) -> dict[str, object]:
    """Everything that the model card shows, as JSON."""
    scenes = [example.image_id for example in examples]
    labels = [label.split() for label in results if not label.startswith(FULL)]
    names = sorted({name for name, _ in labels} - {RANDOM, ORACLE})
    budgets = sorted({int(budget) for _, budget in labels})
    full = next(label for label in results if label.startswith(FULL))
    return {
        "questions": len(examples),
        "scenes": len(set(scenes)),
        "relevance peaks inside the evidence": sum(hits) / len(hits),
        "full tokens": {
            "category": by_category(examples, results[full]),
            "kind": by_kind(examples, results[full]),
            "novelty": by_novelty(examples, results[full]),
        },
        "cases": {
            label: {
                "accuracy": asdict(mean([float(ok) for ok in result.right], scenes)),
                "accuracy+": accuracy_plus(examples, result),
                "log-probability": asdict(mean(result.logprob, scenes)),
                "by category": by_category(examples, result),
            }
            for label, result in results.items()
        },
        "headroom": {
            str(budget): asdict(headroom(examples, results, names, budget)) for budget in budgets
        },
    }


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def table(found: dict[str, object]) -> str:
    """The report as Markdown."""
    cases, full = found["cases"], found["full tokens"]
    assert isinstance(cases, dict) and isinstance(full, dict)
    lines = [f"{found['questions']} questions on {found['scenes']} scenes", ""]
    lines += ["| full tokens | % |", "|---|--:|"]
    for shares in full.values():
        lines += [f"| {name} | {_percent(share)} |" for name, share in shares.items()]
    lines += [
        "",
        "| kept | accuracy % (95 %) | accuracy+ % | log-probability |",
        "|---|--:|--:|--:|",
    ]
    for label, case in cases.items():
        mid, low, high = (_percent(case["accuracy"][part]) for part in ("value", "low", "high"))
        plus, dense = _percent(case["accuracy+"]), case["log-probability"]["value"]
        lines.append(f"| {label} | {mid} ({low} to {high}) | {plus} | {dense:.3f} |")
    return "\n".join(lines)


def main() -> None:
    """Parse, evaluate, print."""
    parser = argparse.ArgumentParser(description="Evaluate the mini-LLaVA with transformers.")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--split", choices=("search", "validation", "test"), default="test")
    parser.add_argument("--scenes", type=int, default=200)
    parser.add_argument("--budgets", type=int, nargs="*", default=list(BUDGETS))
    parser.add_argument("--json", type=Path, help="write the whole report to this file as well")
    arguments = parser.parse_args()
    reader = Reader(arguments.checkpoint)
    examples = held_out(arguments.split, arguments.scenes)
    cases = [Case(FULL, keep_all, reader.grid.tokens)]
    cases += [Case(name, keep, k) for k in arguments.budgets for name, keep in selections().items()]
    results, hits = evaluate(reader, examples, cases)
    found = report(examples, results, hits)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
