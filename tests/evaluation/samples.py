"""Hand-written questions, cases and answers for the tests of scores and tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vllm_autoprune.evaluation.journal import (
    MME,
    Answer,
    Arm,
    Case,
    Contents,
    Journal,
    Question,
    Setup,
)

SETUP = Setup(suite="s", model="m", data="d", scorer="by hand", mme_divisor=2.0)

QUESTIONS = (
    Question(id="0", benchmark="colour", image="a"),
    Question(id="1", benchmark="colour", image="b"),
    Question(id="2", benchmark=MME, image="a", category="existence", pair="x"),
    Question(id="3", benchmark=MME, image="a", category="existence", pair="x"),
    Question(id="4", benchmark=MME, image="b", category="existence", pair="y"),
    Question(id="5", benchmark=MME, image="b", category="existence", pair="y"),
)

FULL = Case(name="full", arm="full", label="full")


def case(name: str, arm: Arm = "base", budget: int = 8, base: str = "") -> Case:
    return Case(name=name, arm=arm, label=name.split("@")[0], budget=budget, base=base)


def answers(name: str, scores: Sequence[float], logprob: float = -1.0) -> list[Answer]:
    return [
        Answer(case=name, question=question.id, score=score, logprob=logprob, prompt_tokens=20)
        for question, score in zip(QUESTIONS, scores, strict=True)
    ]


def contents(*cases: tuple[Case, Sequence[float]]) -> Contents:
    """The contents of a journal in which every case has one score per question."""
    records = [answer for one, values in cases for answer in answers(one.name, values)]
    return Contents([SETUP, *(one for one, _ in cases), *QUESTIONS, *records])


def read_journal(path: Path) -> Contents:
    """The contents of a journal that no process writes."""
    with Journal(path) as journal:
        return journal.contents
