"""Records of an evaluation: its set-up, cases, questions, answers and totals, one line each.

All tables are computed from a journal of these records.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, TypeAdapter

from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.record_file import FrozenModel

MME = "MME"
"""The benchmark of yes/no pairs by category, which is scored in points."""

RESIZED = "resize control"
"""Name in tables of the case that resizes images."""

Arm = Literal["full", "random", "resized", "base", "autoprune", "found", "quota"]
"""How tokens are selected: all, at random, those of a resized image, by a base policy alone, with
the shipped residual, or with the residual of a search on this model; and two kinds of ablation of
the shipped residual."""


class EvaluationError(AutopruneError):
    """An evaluation cannot start or continue; the message says why and how to fix it.

    Everything recorded until then is kept. A single failed request is recorded, not raised.
    """


class Setup(FrozenModel):
    """The first record: what is measured. Only runs with the same set-up may share a journal."""

    kind: Literal["setup"] = "setup"
    suite: str
    model: str = Field(description="the served model, with a digest where there is one")
    data: str = Field(description="the questions, with a digest where there is one")
    scorer: str = Field(description="the scorer of answers, with its version")
    backbone: str = Field(default="", description="the backbone whose published rows are compared")
    mme_divisor: float = Field(description="divides points of MME to give per cent, in Acc.")

    @property
    def key(self) -> str:
        """There is one in a journal."""
        return "setup"


class Case(FrozenModel):
    """One way to serve the questions; ``name`` is unique within an evaluation."""

    kind: Literal["case"] = "case"
    name: str
    arm: Arm
    label: str = Field(description="its name in tables")
    budget: int = Field(default=0, description="K; 0 means all tokens")
    base: str = Field(default="", description="the case it is compared with, besides full")
    quota: int | None = Field(default=None, description="q_e, if the case prunes")
    digest: str = Field(default="", description="digest of the served state")
    pruning: dict[str, JsonValue] = Field(
        default_factory=dict, description="the plugin's field in every request"
    )
    refused: str = Field(default="", description="why the case cannot be served, if it cannot")

    @property
    def key(self) -> str:
        """Key in the journal, by the case's name."""
        return f"case/{self.name}"


class Question(FrozenModel):
    """One question; ``category`` and ``pair`` are MME's, a pair has one "yes" and one "no"."""

    kind: Literal["question"] = "question"
    id: str
    benchmark: str
    image: str = Field(description="questions about one image are resampled together")
    category: str = ""
    pair: str = ""

    @property
    def key(self) -> str:
        """Key in the journal, by the question's id."""
        return f"question/{self.id}"


def kind_of(question: Question) -> str:
    """The kind of a question as the data calls it; those of MME are its categories."""
    return question.category or question.benchmark


class Answer(FrozenModel):
    """The answer to one question in one case; a failed request has neither score nor text."""

    kind: Literal["answer"] = "answer"
    case: str
    question: str
    score: float | None = Field(default=None, description="0 to 1, if answers are scored singly")
    logprob: float | None = Field(default=None, description="ln p of the reference answer")
    prompt_tokens: int | None = None
    text: str | None = None
    failure: str | None = None

    @property
    def key(self) -> str:
        """Key in the journal, by case and question."""
        return f"answer/{self.case}/{self.question}"


class Total(FrozenModel):
    """The score that a benchmark's own scorer gives to a case, in the benchmark's unit."""

    kind: Literal["total"] = "total"
    case: str
    benchmark: str
    metric: str
    value: float
    count: int = Field(description="number of answers scored")

    @property
    def key(self) -> str:
        """Key in the journal, by case and benchmark."""
        return f"total/{self.case}/{self.benchmark}"


Record = Annotated[Setup | Case | Question | Answer | Total, Field(discriminator="kind")]

RECORD: TypeAdapter[Record] = TypeAdapter(Record)
