"""What speaks against an evaluation: failed requests, unequal counts, nothing to compare with.

Knows nothing about figures. A case that is not complete has no row, whatever its answers say.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.accuracy.journal import Contents
from benchmarks.accuracy.records import Case


def complete(contents: Contents, case: Case) -> bool:
    """Whether every question has an answer of this case."""
    return bool(contents.questions) and all(
        contents.answered(case.name, question) for question in contents.questions
    )


def reasons(contents: Contents) -> Iterator[str]:
    """Everything that every suite holds against its answers; nothing where they may be believed."""
    if not contents.questions:
        yield "no question was asked"
        return
    cases = [case for case in contents.cases.values() if not case.refused]
    if not any(case.arm == "full" for case in cases):
        yield "the full model is not among the cases: nothing can be relative to it"
    whole = len(contents.questions)
    empty = [case.name for case in cases if not contents.answers.get(case.name)]
    if empty:
        yield f"{_few(empty)}: nothing was answered"
    for case in cases:
        answers = contents.answers.get(case.name, {})
        failed = [answer.failure for answer in answers.values() if answer.failure is not None]
        if failed:
            yield f"{case.name}: {len(failed)} of {whole:,} requests failed, such as: {failed[0]}"
        if 0 < len(answers) < whole:
            lacking = [q for name, q in contents.questions.items() if name not in answers]
            where = _few(list(dict.fromkeys(question.benchmark for question in lacking)))
            yield f"{case.name}: {len(answers):,} of {whole:,} answers; {where} is not whole"


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
