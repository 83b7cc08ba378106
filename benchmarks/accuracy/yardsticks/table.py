"""Rows of the table with paired intervals: less the resize control, and less the base policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

from benchmarks.accuracy.yardsticks.measure import CaseResult, Results
from benchmarks.yardsticks.yardstick import RESIZED
from vllm_autoprune.statistics import ClusterBootstrap, Estimate, estimate

_DIGITS = 2


@dataclass(frozen=True)
class Row:
    """One case on all questions, or on those of one category or kind; in per cent right.

    ``less_resized`` is the case less the resize control at the same K, ``less_base`` a state less
    its base policy, ``less_default`` the case less the yardstick's default state; all are paired by
    question, with intervals over images.
    """

    yardstick: str
    budget: str
    name: str
    reads_question: bool | None
    digest: str
    category: str | None
    kind: str | None
    questions: int
    images: int
    tokens: float
    accuracy: Estimate
    logprob: float
    less_resized: Estimate | None
    less_base: Estimate | None
    less_default: Estimate | None


def build_rows(results: Results) -> Iterator[Row]:
    """Rows of every case: of all questions, of each category, and of each kind."""
    for category, kind, members in _parts(results):
        images = list(compress((one.image_id for one in results.examples), members))
        bootstrap = ClusterBootstrap(images)
        for result in results.cases:
            case = result.case
            right = list(compress(result.right, members))
            control = results.find(RESIZED, case.budget.label)
            base = results.find(case.base, case.budget.label) if case.base else None
            default = results.find(results.yardstick.default, case.budget.label)
            yield Row(
                yardstick=results.yardstick.name,
                budget=case.budget.label,
                name=case.name,
                reads_question=case.reads_question,
                digest="" if case.state is None else case.state.digest,
                category=category,
                kind=kind,
                questions=len(right),
                images=len(set(images)),
                tokens=round(result.tokens, 1),
                accuracy=_percent(bootstrap, [float(one) for one in right]),
                logprob=round(sum(compress(result.logprob, members)) / len(right), 3),
                less_resized=_difference(bootstrap, right, control, members, result),
                less_base=_difference(bootstrap, right, base, members, result),
                less_default=_difference(bootstrap, right, default, members, result),
            )


def _parts(results: Results) -> Iterator[tuple[str | None, str | None, list[bool]]]:
    """Category, kind and which questions belong to them; None where all do."""
    examples = results.examples
    yield None, None, [True] * len(examples)
    for category, kinds in results.yardstick.categories.items():
        inside = [one.kind in kinds for one in examples]
        if any(inside):
            yield category, None, inside
    for category, kinds in results.yardstick.categories.items():
        for kind in kinds:
            own = [one.kind == kind for one in examples]
            if any(own):
                yield category, kind, own


def _difference(
    bootstrap: ClusterBootstrap,
    right: Sequence[bool],
    other: CaseResult | None,
    members: Sequence[bool],
    own: CaseResult,
) -> Estimate | None:
    if other is None or other is own:
        return None
    pairs = zip(right, compress(other.right, members), strict=True)
    return _percent(bootstrap, [float(a) - float(b) for a, b in pairs])


def _percent(bootstrap: ClusterBootstrap, values: Sequence[float]) -> Estimate:
    return estimate(100 * bootstrap.mean(values)).rounded(_DIGITS)
