"""The records of an evaluation: one typed, frozen line for each thing that was asked or answered.

Knows nothing about files. A journal of these is all that tables are made of.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, TypeAdapter

from offline_search.settings import FrozenModel

MME = "MME"
"""The benchmark whose questions come in pairs of a yes and a no, by category; scored in points."""

Arm = Literal["full", "random", "base", "autoprune", "found", "component", "quota"]
"""Who chooses tokens: nobody, chance, a base policy alone, with the shipped residual, or with one
that a search found on this model; and two kinds of ablation of the shipped one."""


class Opened(FrozenModel):
    """The first record: what is measured. Two runs with equal ones may share a journal."""

    kind: Literal["opened"] = "opened"
    suite: str
    model: str = Field(description="the served model, with a digest where there is one")
    data: str = Field(description="the questions, with a digest where there is one")
    scorer: str = Field(description="what tells right from wrong, with its version")
    backbone: str = Field(default="", description="whose published rows are shown beside ours")
    mme_divisor: float = Field(description="points of MME to per cent, in Acc.")

    @property
    def key(self) -> str:
        """One a journal."""
        return "opened"


class Case(FrozenModel):
    """One way to serve the same questions; ``name`` is unique within an evaluation."""

    kind: Literal["case"] = "case"
    name: str
    arm: Arm
    label: str = Field(description="as tables name it")
    budget: int = Field(default=0, description="K; 0: all tokens")
    base: str = Field(default="", description="the case that it is compared with, besides full")
    quota: int | None = Field(default=None, description="q_e, where a sweep sets it")
    digest: str = Field(default="", description="of the state that is served")
    asked: dict[str, JsonValue] = Field(
        default_factory=dict, description="what every request says about pruning"
    )
    refused: str = Field(default="", description="why this cannot be served; then nothing is asked")

    @property
    def key(self) -> str:
        """By name."""
        return f"case/{self.name}"


class Question(FrozenModel):
    """One sample. ``category`` and ``pair`` are MME's: of equal pairs one is a yes, one a no."""

    kind: Literal["question"] = "question"
    id: str
    benchmark: str
    image: str = Field(description="questions about one image share its luck")
    category: str = ""
    pair: str = ""

    @property
    def key(self) -> str:
        """By id."""
        return f"question/{self.id}"


class Answer(FrozenModel):
    """One answer of one case; with a failure there is neither score nor text."""

    kind: Literal["answer"] = "answer"
    case: str
    question: str
    score: float | None = Field(default=None, description="0 to 1; none where only totals are")
    logprob: float | None = Field(default=None, description="ln p of the reference answer")
    prompt_tokens: int | None = None
    said: str | None = None
    failure: str | None = None

    @property
    def key(self) -> str:
        """By case and question."""
        return f"answer/{self.case}/{self.question}"


class Total(FrozenModel):
    """What a benchmark's own scorer makes of all answers of a case, in the benchmark's unit."""

    kind: Literal["total"] = "total"
    case: str
    benchmark: str
    metric: str
    value: float
    count: int = Field(description="answers that went into it")

    @property
    def key(self) -> str:
        """By case and benchmark."""
        return f"total/{self.case}/{self.benchmark}"


Record = Annotated[Opened | Case | Question | Answer | Total, Field(discriminator="kind")]

RECORD: TypeAdapter[Record] = TypeAdapter(Record)
