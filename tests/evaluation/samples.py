"""Hand-written questions, cases and answers for the tests of scores and tables."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_autoprune.evaluation.journal import MME, Answer, Arm, Case, Contents, Question, Setup

SETUP = Setup(suite="s", model="m", data="d", scorer="by hand", mme_divisor=2.0)

QUESTIONS = (
    Question(id="0", benchmark="colour", image="a"),
    Question(id="1", benchmark="colour", image="b"),
    *(
        Question(id=str(n), benchmark=MME, image=image, category="existence", pair=image)
        for n, image in enumerate("aabb", 2)
    ),
)

FULL = Case(name="full", arm="full", label="full")


def case(name: str, arm: Arm = "base", base: str = "", **more: object) -> Case:
    """A case named LABEL@K."""
    label, _, budget = name.partition("@")
    fields = {"name": name, "arm": arm, "label": label, "budget": int(budget), "base": base}
    return Case.model_validate(fields | more)


def contents(
    *cases: tuple[Case, Sequence[float | None]],
    questions: Sequence[Question] = QUESTIONS,
    prompt_tokens: Sequence[int] = (),
) -> Contents:
    """The contents of a journal in which every case has one score per question."""
    answers = [
        Answer(case=case.name, question=question.id, score=score, logprob=-1.0, prompt_tokens=count)
        for number, (case, scores) in enumerate(cases)
        for count in [prompt_tokens[number] if prompt_tokens else 12 + (case.budget or 24)]
        for question, score in zip(questions, scores, strict=True)
    ]
    return Contents([SETUP, *(case for case, _ in cases), *questions, *answers])
