"""The records of a ledger: one typed, frozen line for every step of Algorithm 2.

Knows nothing about files. ``clock`` holds what differs between two runs of the same search (when,
how long); everything else is the record's content, and what is compared on replay.

Replies, what programs return, verdicts and evaluations are *effects*: they came from outside and
are never made twice.
All other records follow from the settings and the effects.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, TypeAdapter

from offline_search.settings import Frozen, Settings

FULL = "full"
"""In place of a digest: the model with all of its visual tokens."""

Split = Literal["search", "validation", "test"]


class Clock(Frozen):
    """When a record was made (seconds since 1970) and how long that took."""

    at: float = 0.0
    seconds: float = 0.0


class Cost(Frozen):
    """What a reply cost: tokens as the endpoint counts them, money in the price's currency."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    money: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            money=round(self.money + other.money, 9),
        )

    @property
    def tokens(self) -> int:
        """Of both kinds."""
        return self.prompt_tokens + self.completion_tokens


class _Record(Frozen):
    clock: Clock = Clock()


class Opened(_Record):
    """The first record: what is searched for."""

    kind: Literal["opened"] = "opened"
    settings: Settings

    @property
    def key(self) -> str:
        """One a ledger."""
        return "opened"


class Replied(_Record):
    """What the proposer answered to one request; no text where it failed for good."""

    kind: Literal["reply"] = "reply"
    round: int
    index: int
    attempt: Literal["first", "repair"] = "first"
    request: str = Field(description="SHA-256 of the messages")
    text: str | None = None
    failure: str = ""
    cost: Cost = Cost()

    @property
    def key(self) -> str:
        """By place in the search."""
        return f"reply/{self.round}/{self.index}/{self.attempt}"


class Ran(_Record):
    """What a program that the proposer wrote returned, or why it returned nothing."""

    kind: Literal["program"] = "program"
    round: int
    index: int
    code: str
    output: str = ""
    failure: str = ""

    @property
    def key(self) -> str:
        """By place in the search."""
        return f"program/{self.round}/{self.index}"


class Proposed(_Record):
    """A candidate alpha as it was proposed, or what is wrong with it."""

    kind: Literal["proposal"] = "proposal"
    round: int
    index: int
    origin: str = Field(description="who proposed it: llm, tpe, warm start, ...")
    parents: tuple[str, ...] = ()
    state: dict[str, JsonValue] | None = None
    digest: str = ""
    problems: tuple[str, ...] = ()
    program: str = Field(default="", description="the program that returned the candidate, if any")

    @property
    def name(self) -> str:
        """``round.index``, as reports and prompts call it."""
        return f"{self.round}.{self.index}"

    @property
    def key(self) -> str:
        """By place in the search."""
        return f"proposal/{self.round}/{self.index}"


class Judged(_Record):
    """Materialize and SafetyCheck of one state; behaviour is what it keeps of the probe set."""

    kind: Literal["verdict"] = "verdict"
    digest: str
    valid: bool
    quota: int = 0
    r_min: int = 0
    problems: tuple[str, ...] = ()
    behaviour: str = ""
    latency: float | None = Field(
        default=None, description="milliseconds of one selection, measured where that is aimed at"
    )

    @property
    def key(self) -> str:
        """By state."""
        return f"verdict/{self.digest}"


class Evaluated(_Record):
    """Answers of one state at one budget to examples ``start`` to ``stop`` of a split.

    logprob has a natural logarithm for each example; right is ``1`` where every token of the
    reference answer was the likeliest. With a failure there is neither: not a wrong answer.
    """

    kind: Literal["evaluation"] = "evaluation"
    split: Split
    digest: str
    budget: int
    start: int
    stop: int
    logprob: tuple[float, ...] = ()
    right: str = ""
    failure: str = ""

    @property
    def key(self) -> str:
        """By state, budget and examples."""
        return f"evaluation/{self.split}/{self.digest}/{self.budget}/{self.start}-{self.stop}"


Status = Literal["evaluated", "dropped", "same", "invalid", "unsafe", "unevaluated"]
"""What became of a candidate; ``dropped`` lost a race, ``same`` behaves as an earlier one."""


class Tried(_Record):
    """What the search learnt of one candidate: e, relative to the full-token model."""

    kind: Literal["trial"] = "trial"
    round: int
    index: int
    status: Status
    same_as: str = ""
    reason: str = ""
    examples: int = Field(default=0, description="answers that were paid for, over all budgets")
    objective: float | None = None
    accuracy: float | None = None
    accuracy_plus: float | None = None
    by_category: dict[str, float] = Field(default_factory=dict)
    axes: dict[str, float] = Field(
        default_factory=dict, description="its point, where there are several objectives"
    )

    @property
    def key(self) -> str:
        """By place in the search."""
        return f"trial/{self.round}/{self.index}"


class Summarized(_Record):
    """H_t: what the proposer is told of all rounds so far."""

    kind: Literal["summary"] = "summary"
    round: int
    text: str

    @property
    def key(self) -> str:
        """One a round."""
        return f"summary/{self.round}"


class Measured(Frozen):
    """A mean over examples with its 95 % interval, images resampled."""

    value: float
    low: float
    high: float


class Comparison(Frozen):
    """One state on a split that the search did not see, and against the base policy, paired."""

    split: Split
    examples: int
    accuracy: float
    accuracy_plus: float
    mme_total: float = Field(description="accuracy and accuracy+ of each category, summed")
    objective: Measured
    gain: Measured = Field(description="objective less the base policy's, on the same examples")
    accuracy_gain: Measured


class Member(Frozen):
    """A candidate of the Pareto front: its point where it was found, and where nobody chose."""

    digest: str
    search: dict[str, float]
    test: dict[str, float]


class Chosen(_Record):
    """The final argmax: the winner among those confirmed, measured where nothing was chosen."""

    kind: Literal["chosen"] = "chosen"
    winner: str
    digest: str
    state: dict[str, JsonValue]
    confirmed: dict[str, Comparison] = Field(description="by proposal, on the validation split")
    estimates: dict[str, float] = Field(
        default_factory=dict, description="by proposal: the objective that the winner has most of"
    )
    test: Comparison
    base: Comparison
    front: dict[str, Member] = Field(
        default_factory=dict, description="by proposal, and the base policy, of several objectives"
    )

    @property
    def key(self) -> str:
        """One a ledger."""
        return "chosen"


Record = Annotated[
    Opened | Replied | Ran | Proposed | Judged | Evaluated | Tried | Summarized | Chosen,
    Field(discriminator="kind"),
]

EFFECTS = (Replied, Ran, Judged, Evaluated)

RECORD: TypeAdapter[Record] = TypeAdapter(Record)


def content(record: Record) -> str:
    """A record as canonical JSON without its clock."""
    return RECORD.dump_json(record, exclude={"clock"}).decode()
